"""The kernels of jax-linear-attention for Hopper GPUs, as an implementation "jla" of the operators."""

import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.fused_gdn.operator import OPERATOR as GATED_DELTA_RULE
from chunkwise.fused_gla.operator import GLA, SIMPLE_GLA
from chunkwise.kda.operator import OPERATOR as KDA
from chunkwise.shared import operator
from chunkwise.shared.call import arguments, checks, gates
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation.implementations import Implementation, with_chunk_size
from chunkwise.shared.kernels import chunking, tiles
from chunkwise.two_keys.operator import GDN2

__all__ = ["install"]

NAME = "jla"
# What this module is written for: the release pins its JAX.
_RELEASE, _JAX = "0.1.0", "0.11.2"
# The operators by their kinds there, and the arguments of a kind behind q, k and v.
_KINDS = {
    "gated_deltanet": (GATED_DELTA_RULE, ("g", "beta")), "kda": (KDA, ("g", "beta")), "gla": (GLA, ("g",)),
    "simple_gla": (SIMPLE_GLA, ("g",)), "gdn2": (GDN2, ("g", "b", "w")),
}  # fmt: skip


def install() -> Callable[[], None]:
    """Register the implementation "jla" of five operators; return a function that takes it out again.

    These are the gated delta rule, Kimi delta attention, GLA, simple GLA and GDN-2 over whole sequences, forward and
    backward. On a Hopper GPU `implementation=None` then takes "jla" for calls that its kernels take, and "xla" for the
    rest. Elsewhere "jla", by its name, is the plain form of jax-linear-attention.

    Raises:
      ValueError: another release of jax-linear-attention or of JAX is installed.
    """
    for name, wanted in (("jax-linear-attention", _RELEASE), ("jax", _JAX)):
        have = metadata.version(name)
        checks.check(have == wanted, f"{name} must be {wanted} for the implementation {NAME!r}; got {have}.")
    for kind, (record, names) in _KINDS.items():
        if NAME not in record.implementations:
            operator.register(record, _implementation(kind, names))
    return _put_back


def _put_back() -> None:
    for record, _ in _KINDS.values():
        record.implementations.pop(NAME, None)


def _on_hopper() -> bool:
    """Return whether the default backend is a Hopper GPU, for which the kernels are."""
    from jla.ops.mosaic_gpu import _common

    return _common.is_hopper()


def _implementation(kind: str, names: tuple[str, ...]) -> Implementation:
    options = ("min_gate",) if "beta" not in names and "b" not in names else ("min_gate", "use_qk_l2norm_in_kernel")
    return Implementation(
        NAME, functools.partial(_run, kind, names), options=frozenset(options),
        # The kernels read no sizes of the options.
        sizes=lambda x, options, states: _limit(kind, names, x, options) or with_chunk_size(NAME, x, options),
        raw_gates=True, knows_segments=True, best_here=_on_hopper,
    )  # fmt: skip


def _limit(kind: str, names: tuple[str, ...], x: Arguments, options: Options) -> str | None:
    """Return why the kernels do not take a call, None if they do; on another machine the plain form takes all sizes."""
    if x.slots is not None:
        return f'"{NAME}" has no serving step.'
    packed = x.cu_seqlens is not None or x.segment_ids is not None
    if packed and (x.with_state or options.output_final_state):
        return f'"{NAME}" must have no states beside `cu_seqlens` or `segment_ids`.'
    if x.initial_state is not None and not hasattr(x.initial_state, "dtype"):
        return f'"{NAME}" must have an array of states; got {type(x.initial_state).__name__}.'
    if not _on_hopper():
        return None
    from jla import ops

    ops.available(kind)  # loads the kernels
    takes = ops._REGISTRY["mosaic_gpu"][kind][1]
    arrays, more = jax.eval_shape(lambda x: _operands(names, x, options), x._replace(scale=None))
    if takes(*arrays, **more):
        return None
    sizes = f"q {x.q.shape}, v {x.v.shape} of {x.q.dtype}"
    return f'"{NAME}" must have sizes and types that the kernels of jax-linear-attention take; got {sizes}.'


def _run(
    kind: str, names: tuple[str, ...], x: Arguments, options: Options, precomputed: object
) -> tuple[jax.Array, Any]:
    """Return the output and the final states of prepared arguments."""
    from jla import ops

    arrays, more = _operands(names, x, options)
    q, k, v, *found = arrays
    named = dict(zip(names, found, strict=True)) | more
    o, state = ops.linear_attention(
        kind, q, k, v, **named, scale=options.scale, output_final_state=options.output_final_state,
        impl="mosaic_gpu" if _on_hopper() else "chunked",
        **{"use_qk_l2norm": options.use_qk_l2norm_in_kernel} if names != ("g",) else {},
    )  # fmt: skip
    o = o if x.scale is None else (o.astype(jnp.float32) * x.scale)
    return chunking.select_tokens(_valid(x), o.astype(x.v.dtype)), state


def _valid(x: Arguments) -> jax.Array | None:
    """Return which tokens are not padding; None for all."""
    return chunking.valid_tokens(x.cu_seqlens, x.segment_ids, x.q.shape[1])


def _operands(names: tuple[str, ...], x: Arguments, options: Options) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Return q, k, v and gates of every value head, without what padding holds, and the arrays by name beside them."""
    valid, law, HV = _valid(x), options.activation.law, x.v.shape[2]
    if law is not None:
        x = x._replace(g=gates.decays(x.g, x.A_log, x.dt_bias, law, valid))
    named = x._asdict() | {"g": arguments.total_gate(x)}
    named = {name: chunking.select_tokens(valid, named[name]) for name in ("q", "k", "v", *names)}
    named |= {name: tiles.repeat_heads(named[name], HV, axis=2) for name in ("q", "k")}
    more = {} if x.initial_state is None else {"initial_state": x.initial_state.astype(jnp.float32)}
    ids = x.segment_ids
    if x.cu_seqlens is not None:
        t = jnp.arange(x.q.shape[1], dtype=jnp.int32)
        ids = jnp.searchsorted(x.cu_seqlens[1:], t, side="right").astype(jnp.int32)[None]
    return [*named.values()], more if ids is None else more | {"segment_ids": ids}
