"""The mixer of a delta layer, between its projections: convolutions, operator and gated norm.

They run one after the other. If every sequence has one token, which follows a cache or the state in a slot, one launch
does all of them. Over a mesh whose devices share heads or rows, every device has such a launch, and sends nothing.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.layers import caches, config
from chunkwise.layers.mixer import norm, running
from chunkwise.shared import compat
from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.kernels import launcher
from chunkwise.shared.mesh import partition
from chunkwise.shared.serving import state_pool, step_table
from chunkwise.shared.serving.decode import choose, launch
from chunkwise.shared.serving.decode.records import Decodes, static_of
from chunkwise.shared.serving.state_pool import StatePool

_VALUES = partition.Layout(
    "v", dict(b="rows", t="tokens", n="value heads", d="value channels"), dict(v="btnd"), results=()
)
# How the arguments of a mixer are split, in letters of `_VALUES`: the cache, the arrays of a step, the arrays of
# `one_after_the_other`, A_log and dt_bias. Then the results.
_CACHE: Any = "b.n", "bn"
_LETTERS = (caches.Cache(*_CACHE), "", ("btn", "n", "btn", "btn", "btn", ""), "n", "n")
_RESULTS = ("btn", caches.Cache(*_CACHE))

# The output of a step [T, HV V], the pools of its convolutions and the pool of its states.
Step = tuple[jax.Array, tuple[jax.Array, ...], StatePool]


def delta_rule(run: running.Run, x: jax.Array) -> Callable[..., running.Mixed]:
    """Return the function that mixes the tokens x [B, T, D]; it has the arguments of `one_after_the_other`."""
    if isinstance(run, running.Serving):
        return over_step
    return over_token if run.continues_by_one(x) else one_after_the_other


def one_after_the_other(
    run: running.Run, config: config.LayerConfig, operators: running.Operators, projected, conv, g, beta, z, weight,
    *, A_log, dt_bias, activation: str, eps: float, **gates,
) -> running.Mixed:  # fmt: skip
    """Return the normed output of a delta rule [B, T, HV, V], and the cache after its tokens.

    Args:
      run: says over which tokens to run.
      config: sizes of the layer.
      operators: the rule in its three forms.
      projected: queries, keys and values before the convolution, [B, T, channels].
      conv: the weights of the convolutions.
      g, beta, z: raw gates [B, T, HV] or [B, T, HV K], raw step sizes, and gates of the output [B, T, HV V].
      weight: the weight of the norm.
      A_log, dt_bias: the arguments of the gates' law.
      activation, eps: the arguments of the norm.
      **gates: further arguments of the operator about its gates.
    """
    pairs = list(map(run.convolve, range(3), projected, conv, (None,) * 3, config.heads))
    q, k, v = (running.by_head(y, count) for (y, _), count in zip(pairs, config.heads, strict=True))
    o, state = run.operate(
        operators, q, k, v, running.by_head(g, config.HV) if config.per_channel else g, beta,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True, **gates,
    )  # fmt: skip
    kept = tuple(after for _, after in pairs)
    return norm.norm_heads(run, o, z, weight, activation=activation, eps=eps), caches.Cache(kept, state)


def over_step(
    run: running.Serving, config: config.LayerConfig, operators: running.Operators, *arrays, A_log, dt_bias,
    **options: Any,
) -> running.Mixed:  # fmt: skip
    """Do the same as `one_after_the_other` for a serving step."""
    law: dict[str, Any] = dict(A_log=A_log, dt_bias=dt_bias)
    if (division := _find_division(run, config, arrays)) is not None:
        named = {name: checks.as_int32(y) for name, y in run.slots.items() if hasattr(y, "shape")}
        tree = run.pool, named, arrays, A_log, dt_bias
        if not _divides(division, run, config, tree):
            return one_after_the_other(run, config, operators, *arrays, **law, **options)
        return _on_devices(over_step, division, run, config, operators, options, *tree)
    mixer, pool = _mixer(config, *arrays, **law, **options), state_pool.as_pool(run.pool.state)
    mixer = mixer._replace(static=mixer.static._replace(W=run.decode_tokens or 1))
    slots = Slots(**{name: run.slots[name] for name in Slots._fields if name != "block_state_indices"})

    def others() -> Step:
        y, cache = one_after_the_other(run, config, operators, *arrays, **law, **options)
        return y.reshape(-1, config.HV * config.V), cache.conv, state_pool.as_pool(cache.state)

    o, conv, after = in_one_launch(
        mixer, run.pool.conv, pool, run.step.cu_seqlens, slots, run.implementation, others
    )  # fmt: skip
    # A pool is returned as it came.
    state = after if pool is run.pool.state else after.states
    return o.reshape(1, -1, config.HV, config.V), caches.Cache(conv, state)


def over_token(
    run: running.Sequences, config: config.LayerConfig, operators: running.Operators, *arrays, A_log, dt_bias,
    **options: Any,
) -> running.Mixed:  # fmt: skip
    """Do the same as `one_after_the_other` for one token of each row, which follows a cache."""
    cache = run.cache
    # Only with a cache there is a token before.
    assert cache is not None
    tree = cache, {}, arrays, A_log, dt_bias

    def others(cache, _, arrays, A_log, dt_bias):
        after = dataclasses.replace(run, cache=cache)
        return one_after_the_other(after, config, operators, *arrays, A_log=A_log, dt_bias=dt_bias, **options)

    def together(cache, _, arrays, A_log, dt_bias):
        mixer, slots = _mixer(config, *arrays, A_log=A_log, dt_bias=dt_bias, **options), _rows_as_slots(arrays)
        boundaries = jnp.arange(slots.num_decodes + 1, dtype=jnp.int32)
        o, conv, pool = launch.launch(mixer, cache.conv, StatePool(cache.state), boundaries, slots)
        return o.reshape(-1, 1, config.HV, config.V), caches.Cache(conv, pool.states)

    if (division := _find_division(run, config, arrays)) is None:
        mixer, slots = _mixer(config, *arrays, A_log=A_log, dt_bias=dt_bias, **options), _rows_as_slots(arrays)
        one_launch = choose.by_kernel(run.implementation, mixer, StatePool(cache.state), slots, conv=cache.conv)
    else:
        one_launch = _divides(division, run, config, tree)
        together = functools.partial(_on_devices, over_token, division, run, config, operators, options)
    if not one_launch:
        return others(*tree)
    # The gradient is taken from the other form, because one token is not worth a backward kernel.
    leaves, structure = jax.tree.flatten(tree)
    differentiable = launcher.with_gradient_of(others, together, "of one token after a cache")
    return differentiable(*structure.unflatten(compat.vary_alike(*leaves)))


def _rows_as_slots(arrays) -> Slots:
    """Return the slots of a batch of single tokens, whose rows are the slots of their cache."""
    B = arrays[0][0].shape[0]
    return Slots(jnp.arange(B, dtype=jnp.int32), num_decodes=B)


def _find_division(run: running.Run, config: config.LayerConfig, arrays) -> partition.Division | None:
    """Return how the values of a layer are divided over a mesh; None on one device."""
    return partition.find_division({"v": running.by_head(arrays[0][2], config.HV)}, _VALUES, run.sharding)


def _divides(division: partition.Division, run: running.Run, config: config.LayerConfig, tree) -> bool:
    """Return whether every device can have one launch for its heads, and for its rows of a batch.

    Devices that share a key head, a token or channels of a value, or the slots of a pool, cannot. A pool must be an
    array.
    """
    whole = division.axes["t"] + division.axes["d"] + (division.axes["b"] if tree[1] else ())
    even = not whole and config.H % partition.size_of(division.mesh, division.axes["n"]) == 0
    placed = even and hasattr(tree[0].state, "dtype") and partition.can_place(division, tree, _LETTERS)
    return placed and choose.runs_kernels(run.implementation, whole=True)


def _on_devices(
    mix: Callable[..., running.Mixed], division: partition.Division, run: running.Run, config: config.LayerConfig,
    operators: running.Operators, options: dict[str, Any], *tree,
) -> running.Mixed:  # fmt: skip
    """Call `over_step` or `over_token` on all devices of a mesh, each with its rows and heads."""
    devices = partition.size_of(division.mesh, division.axes["n"])
    config = dataclasses.replace(config, H=config.H // devices, HV=config.HV // devices)

    def on_device(cache, step, arrays, A_log, dt_bias):
        changed: dict[str, Any] = {run.own_cache[0]: cache}
        if isinstance(run, running.Serving):
            changed["step"] = run.step._replace(**step)
        here = dataclasses.replace(run, sharding=None, **changed)
        return mix(here, config, operators, *arrays, A_log=A_log, dt_bias=dt_bias, **options)

    return partition.on_devices(on_device, division, tree, _LETTERS, _RESULTS)


def _mixer(
    config: config.LayerConfig, projected, conv, g, beta, z, weight, *, A_log, dt_bias, activation: str, eps: float,
    **gates: Any,
) -> Decodes:  # fmt: skip
    """Return the mixer of all tokens, one row after the other."""
    rows = lambda x: x.reshape(-1, x.shape[2])
    activations = GateActivation(True, use_beta_sigmoid_in_kernel=True, **gates)
    static = static_of(config.H, config.HV, config.K, config.V, activations)
    static = static._replace(norm_gate=activation, eps=eps)
    tokens = tuple(map(rows, projected)), rows(g), rows(beta), rows(z)
    return Decodes(static, *tokens, tuple(conv), (), A_log, dt_bias, weight)


def in_one_launch(
    x: Decodes, conv: tuple[jax.Array, ...], pool: StatePool, cu_seqlens: jax.Array, slots: Slots,
    implementation: str | None, otherwise: Callable[[], Step],
) -> Step:  # fmt: skip
    """Return the result of a serving step: by one launch if all of its sequences decode, else otherwise().

    Where a count of the step is traced, the program has both branches.

    Args:
      x: the tokens of the step.
      conv, pool: the pools of the convolutions, and the pool of states, of any kind.
      cu_seqlens, slots: the boundaries and the slots of the step.
      implementation: the user's name of the operator's implementation, or None.
      otherwise: returns the result of the step, by one operation after the other.
    """
    given, slots = slots, step_table.with_counts(Slots(*map(checks.as_int32, slots)))
    if not pool.replay:
        # A decode has a slot for each of its tokens.
        x = x._replace(static=x.static._replace(W=choose.columns(slots)))
    if slots.num_decodes is None or not choose.by_kernel(implementation, x, pool, slots, conv=conv):
        return otherwise()
    together = functools.partial(launch.launch, x, conv, pool, checks.as_int32(cu_seqlens), slots)
    N = slots.state_indices.shape[0]
    sequences = N if given.num_sequences is None else given.num_sequences
    if all(isinstance(count, numbers.Integral) for count in (given.num_decodes, sequences)):
        if given.num_decodes < min(sequences, N):
            return otherwise()
        # The other way has all checks of arguments.
        jax.eval_shape(otherwise)
        return together()
    return lax.cond(slots.num_decodes >= jnp.minimum(sequences, N), together, otherwise)
