"""Ours in the place of deltanet-tpu's operators and decodes, for its tests.

Its functions check the arguments, traced without a computation; ours compute. What is deltanet-tpu's alone
stands here: the shapes of its gates, its clamps, and a cap of the state.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from chunkwise import pipeline
from tests_e2e.hosts.suite import compiled

# By the names of deltanet-tpu: our operator, and the gates.
OPERATORS = {
    "gdn2": ("gdn2", ("g", "b", "w")),
    "gdn": ("gated_delta_rule", ("g", "beta")),
    "kda": ("kda", ("g", "beta")),
    "gla": ("gla", ("g",)),
    "delta_rule": ("delta_rule", ("beta",)),
}


def install(count: Callable[[], None]) -> None:
    """Replace its functions where tests import them, and count the calls."""
    import deltanet_tpu
    from deltanet_tpu import gdn2, variants

    for name in OPERATORS:
        for kind, wrap in ((f"chunk_{name}", _chunk), (f"{name}_decode_step", _decode)):
            theirs = getattr(deltanet_tpu, kind)
            ours = functools.wraps(theirs)(functools.partial(wrap, name, theirs, count))
            for module in (deltanet_tpu, gdn2 if name == "gdn2" else variants):
                setattr(module, kind, ours)


def _heads(x: jax.Array, HV: int, channels: int | None) -> jax.Array:
    """Return a gate [B, T, HV], or [B, T, HV, channels], of one of any number of heads, with channels or without."""
    x = x[..., None] if x.ndim == 3 else x
    x = jnp.repeat(x, HV // x.shape[2], axis=2)
    return x[..., 0] if channels is None else jnp.broadcast_to(x, (*x.shape[:3], channels))


def _gates(name: str, gates: dict, k: jax.Array, v: jax.Array, o: dict) -> tuple[list, dict]:
    """Return what ours takes after q, k and v, and its options."""
    from deltanet_tpu.gdn2 import _nonpositive_gate

    HV, V, K = *v.shape[2:], k.shape[-1]
    g = gates.get("g")
    if g is None:
        g = jnp.zeros(v.shape[:3], jnp.float32)
    # With `fuse_prologue` gates are raw: decays of -exp(min(g, 5)), and sigmoids.
    raw = o.get("fuse_prologue", False)
    g = -jnp.exp(jnp.minimum(g, 5.0)) if raw else _nonpositive_gate(g)
    if o.get("stability_guard"):
        g = jnp.minimum(g, -1e-6)
        gates = gates if raw else gates | {"b": jnp.maximum(gates["b"], 0)}
    found = [] if name == "delta_rule" else [_heads(g, HV, None if name == "gdn" else K)]
    if name == "gdn2":
        found += [_heads(gates["b"], HV, K), _heads(gates["w"], HV, V)]
        return found, dict.fromkeys(("use_erase_sigmoid_in_kernel", "use_write_sigmoid_in_kernel"), True) if raw else {}
    if "beta" in gates:
        found.append(_heads(gates["beta"], HV, None))
    return found, {"use_beta_sigmoid_in_kernel": True} if raw else {}


def _segments(o: dict, B: int, T: int) -> jax.Array | None:
    """Return the segment of every token, which may have any number."""
    ids, ends = o.get("segment_ids"), o.get("cu_seqlens")
    if ends is not None:
        ids = jnp.searchsorted(jnp.asarray(ends)[1:], jnp.arange(T), side="right").astype(jnp.int32)
    return None if ids is None else jnp.broadcast_to(ids, (B, T))


def _capped(state: jax.Array, o: dict) -> jax.Array:
    """Return states whose norm is at most `stability_tau`, if that is asked for."""
    if not o.get("stability_guard"):
        return state
    norm = jnp.sqrt(jnp.sum(state**2, axis=(-2, -1), keepdims=True) + 1e-6)
    return state * jnp.minimum(1.0, o.get("stability_tau", 1000.0) / norm)


def _own(
    operator: str, x: list, gates: list, state: jax.Array | None, ids: jax.Array | None = None, **options
) -> tuple:
    """Return outputs and final states of ours."""
    if "gla" in operator:
        options.pop("use_qk_l2norm_in_kernel")
    run = compiled(getattr(pipeline, operator), output_final_state=True, **options)
    return run(*x, *gates, initial_state=state, **{} if ids is None else {"segment_ids": ids})


def _unit(x: jax.Array) -> jax.Array:
    """Return x of unit length; GLA of ours has no option for it."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _chunk(name: str, theirs: Callable, count: Callable, q, k, v, *gates, **o):
    """Return what a function of deltanet-tpu over whole sequences returns."""
    operator, names = OPERATORS[name]
    gates = dict(zip(names, gates, strict=False)) | {x: o[x] for x in names if x in o}
    rest = {x: y for x, y in o.items() if x not in gates}
    jax.eval_shape(lambda q, k, v, gates: theirs(q, k, v, **gates, **rest), q, k, v, gates)
    count()
    B, T = q.shape[:2]
    ids, state = _segments(rest, B, T), rest.get("initial_state")
    of = rest.get("initial_state_segment_id")
    if state is not None and of is not None and ids is not None:
        goes_on = jnp.broadcast_to(ids[:, 0] == of, (B,))
        state = jnp.where(goes_on[:, None, None, None], state, 0)
    if ids is not None:
        # Ids below 0 are padding in ours.
        ids = jnp.cumsum(jnp.pad(jnp.diff(ids, axis=1) != 0, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
    unit = rest.get("qk_l2norm", False)
    q, k = (_unit(x) for x in (q, k)) if unit and name == "gla" else (q, k)
    arrays, options = _gates(name, gates, k, v, rest)
    scale = rest.get("scale")
    output, final = _own(
        f"chunk_{operator}", [q, k, v], arrays, state, ids, use_qk_l2norm_in_kernel=unit,
        scale=None if scale is None else float(scale), **options,
    )  # fmt: skip
    final = _capped(final, rest) if rest.get("is_inference") else final
    output = output.astype(v.dtype)
    return (output, final) if rest.get("output_final_state") else output


def _decode(name: str, theirs: Callable, count: Callable, q, k, v, *more, **o):
    """Return what a function of deltanet-tpu for one token returns."""
    *values, state = more if "state" not in o else (*more, o.pop("state"))
    operator, names = OPERATORS[name]
    gates = dict(zip(names, values, strict=True))
    jax.eval_shape(lambda q, k, v, gates, state: theirs(q, k, v, **gates, state=state, **o), q, k, v, gates, state)
    count()
    flat = q.ndim == 3
    x = [y[:, None] if y.ndim == 3 else y for y in (q, k, v)]
    B, HV = x[0].shape[0], x[2].shape[2]

    def with_time(y):
        """Return a gate [B, 1, heads, channels]."""
        heads = (1, x[0].shape[2], HV)
        if y.ndim == 2:
            return y[:, None, :, None]
        if y.ndim == 3:
            return y[..., None] if y.shape[1] == 1 and y.shape[2] in heads else y[:, None]
        return y

    if o.get("reset") is not None:
        reset = jnp.broadcast_to(jnp.asarray(o["reset"]).reshape(-1), (B,))
        state = jnp.where(reset[:, None, None, None], 0, state)
    arrays, _ = _gates(name, {n: with_time(y) for n, y in gates.items()}, x[1], x[2], o)
    unit = o.get("qk_l2norm", False)
    x[:2] = (_unit(y) for y in x[:2]) if unit and name == "gla" else x[:2]
    scale = o.get("scale") or 1 / math.sqrt(x[0].shape[-1])
    x = [y.astype(jnp.float32) for y in x]
    output, final = _own(
        f"recurrent_{operator}", x, [y.astype(jnp.float32) for y in arrays], state.astype(jnp.float32),
        scale=scale, use_qk_l2norm_in_kernel=unit,
    )  # fmt: skip
    final = _capped(final, o).astype(o.get("state_dtype") or jnp.float32)
    output = output.astype(v.dtype)
    return (output[:, 0] if flat else output), final
