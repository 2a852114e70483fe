"""mLSTM as simple gated linear attention twice: of ones for the divisor, and of the values for what is divided.

The stabilisers make all gates decays of at most 1, and multiply keys by weights of at most 1.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise.fused_gla import operator as gla
from chunkwise.mlstm import stabiliser
from chunkwise.shared import compat, tuning
from chunkwise.shared.call import arguments, checks, signature
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.implementation import implementations
from chunkwise.shared.kernels import chunking, packed

# It has the implementations of simple gated linear attention, and its own name in errors.
OPERATOR = dataclasses.replace(gla.SIMPLE_GLA, name="mlstm")


class MlstmState(NamedTuple):
    """The state of N sequences, divided by e^m.

    Attributes:
      C: [N, HV, K, V] float32, the memory.
      n: [N, HV, K] float32, the normaliser.
      m: [N, HV] float32, the stabiliser; -inf where there is no token yet.
    """

    C: jax.Array
    n: jax.Array
    m: jax.Array


Results = tuple[jax.Array, MlstmState | None]


def chunk(named: dict[str, Any]) -> Results:
    """Run `chunk_mlstm` with these arguments by name."""
    x, options = _checked(named)
    # Without a delta rule, whose inverse grows with it, the largest size that any implementation prefers is the best.
    if options.chunk_size is None:
        options = options._replace(chunk_size=tuning.best_chunk_size("xla", x.q.shape[1], delta=False))
    how = implementations.choose(OPERATOR.implementations, named["implementation"], x, options).name
    attend = lambda x, options: OPERATOR.chunk(x, options, how)
    # The kernels take whole registers of values: then all lanes of a register have the divisor.
    return _run(attend, attend, x, options, named, packed.LANES if how == "fused" else 1)


def recurrent(named: dict[str, Any]) -> Results:
    """Run `recurrent_mlstm` with these arguments by name."""
    x, options = _checked(named)
    by = lambda implementation: lambda x, options: OPERATOR.recurrent(x, options, implementation)
    # The normaliser has too few numbers for a kernel.
    return _run(by("xla"), by(named["implementation"]), x._replace(slots=Slots()), options, named, 1)


def _checked(named: dict[str, Any]) -> tuple[Arguments, Options]:
    """Return the checked arguments without the state and the gates, and the options."""
    x, options, _ = signature.to_records(named | dict(initial_state=None))
    x = x.with_int32()
    OPERATOR.check(x, options)
    (B, T, HV, V), K, state, eps = x.v.shape, x.q.shape[3], named["initial_state"], named["eps"]
    for name in ("i", "f"):
        checks.check_array(name, named[name], "B T HV", (B, T, HV))
    parts = state is None or (isinstance(state, tuple) and len(state) == 3)
    checks.check(parts, f"`initial_state` must be None or an MlstmState (C, n, m); got {checks.shown(state)}.")
    for y, (name, *tail) in zip(state or (), (("C", K, V), ("n", K), ("m",)), strict=False):
        dims = ["N", "HV", "K", "V"][: 2 + len(tail)]
        checks.check_array(f"initial_state.{name}", y, " ".join(dims), (x.num_states, HV, *tail))
    number = isinstance(eps, numbers.Real) and not isinstance(eps, bool) and 0 <= float(eps) < math.inf
    rule = f"`eps` must be a finite number of at least 0{checks.when_built(eps)}; got {checks.shown(eps)}."
    checks.check(number, rule)
    return arguments.check_shared(x, options), options


def _run(of_ones: Callable, of_values: Callable, x: Arguments, options: Options, named: dict, lanes: int) -> Results:
    """Return the output and the final states, by simple gated linear attention of so many lanes of ones, and of v."""
    C, n, before = _start(named["initial_state"], (x.num_states, x.v.shape[2]), lanes)
    i, f, axes = _whole_rows(named["i"]), _whole_rows(named["f"]), checks.check_context_axis(options.context_axis)
    gates = stabiliser.stabilise(i, f, before, x.cu_seqlens, x.segment_ids, axes)
    # Weights and divisors are of value heads. Padding may hold anything, and a product with 0 does not stop NaN.
    heads = lambda y: y if y.shape[2] == x.v.shape[2] else jnp.repeat(y, x.v.shape[2] // y.shape[2], axis=2)
    q, k = (chunking.select_tokens(gates.valid, heads(jnp.asarray(y))) for y in (x.q, x.k))
    x = x._replace(k=_times(k, gates.weight[..., None]), g=gates.decay)
    ones = x._replace(q=q, v=_ones(x.v, lanes), initial_state=n)
    y, n = of_ones(ones, options._replace(sharding=_unsplit_channels(options.sharding)))
    divisor = jnp.maximum(jnp.abs(y.astype(jnp.float32)), gates.least[..., None]) + named["eps"]
    o, C = of_values(x._replace(q=_times(q, 1.0 / divisor), initial_state=C), options)
    return o, MlstmState(C, n[..., 0], gates.last) if options.output_final_state else None


def _times(y: jax.Array, factor: jax.Array) -> jax.Array:
    """Return y [B, T, HV, K] times a factor [B, T, HV, lanes] that is the same in all lanes."""
    # A float16 has too few powers of two for it.
    dtype = jnp.bfloat16 if y.dtype == jnp.bfloat16 else jnp.float32
    if y.shape[3] % factor.shape[3]:
        factor = factor[..., :1]
    registers = y.astype(jnp.float32).reshape(*y.shape[:3], -1, factor.shape[3])
    return (registers * factor[..., None, :]).reshape(y.shape).astype(dtype)


def _start(state: MlstmState | None, heads: tuple[int, int], lanes: int) -> tuple[Any, Any, jax.Array]:
    """Return the initial C and n, n for ones in so many lanes, or None; and m [N, HV], -inf where it is no number."""
    if state is None:
        return None, None, jnp.full(heads, -jnp.inf, jnp.float32)
    C, n, m = (jnp.asarray(y, jnp.float32) for y in state)
    wrong, none = jnp.isnan(m) | jnp.isposinf(m), jnp.isneginf(m)
    # The state is C e^m: the gradient of m is that of the size of C and n. A fault of m becomes one of C and n.
    size = jnp.exp(jnp.where(none, 0.0, m - lax.stop_gradient(m)))
    C, n = (y * jnp.expand_dims(jnp.where(wrong, jnp.nan, size), range(2, y.ndim)) for y in (C, n))
    return C, jnp.broadcast_to(n[..., None], (*n.shape, lanes)), jnp.where(wrong, -jnp.inf, lax.stop_gradient(m))


def _ones(v: jax.Array, lanes: int) -> jax.Array:
    """Return values of ones, which lie on a mesh as v does."""
    ones, kind = compat.varying_zeros((*v.shape[:3], lanes), v) + 1.0, jax.typeof(v).sharding
    # A float32 among the operands of a kernel would make all products float32.
    ones = ones if lanes == 1 else ones.astype(v.dtype)
    return ones if kind.mesh.empty else jax.sharding.reshard(ones, _unsplit_channels(kind))


def _unsplit_channels(sharding: Any) -> Any:
    """Return the sharding of v, or None, for ones, which have no value channels to split."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, _unsplit_channels(sharding.spec))
    return None if sharding is None else PartitionSpec(*sharding[:3])


def _whole_rows(gate: jax.Array) -> jax.Array:
    """Return gates [B, T, HV] whose tokens no explicit axis of a mesh splits, because a scan goes along them."""
    kind = jax.typeof(gate).sharding
    if not (*kind.spec, None, None)[1]:
        return jnp.asarray(gate)
    return jax.sharding.reshard(gate, NamedSharding(kind.mesh, PartitionSpec(kind.spec[0], None, *kind.spec[2:])))
