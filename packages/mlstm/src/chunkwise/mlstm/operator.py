"""mLSTM as simple gated linear attention twice: of the weights of tokens for the divisor, and of the values.

The stabilisers make decays and weights of the gates, which are at most 1.
"""

import dataclasses
import functools
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
from chunkwise.shared.call import arguments, checks, signature
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.implementation import implementations
from chunkwise.shared.kernels import chunking, matmul, packed
from chunkwise.shared.mesh import partition

# It has the implementations of simple gated linear attention, and its own name in errors.
OPERATOR = dataclasses.replace(gla.SIMPLE_GLA, name="mlstm")
# The divisor is a sum of terms that cancel, and its rounding is that of the whole output.
_OF_WEIGHTS = dataclasses.replace(gla.PRECISE_SIMPLE_GLA, name="mlstm", warns=False)

# The largest power of 2 of float32 and bfloat16.
_LARGEST = 2.0**127


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
    x, options = check(named)
    how = implementations.choose(OPERATOR.implementations, named["implementation"], x, options).name
    by = lambda operator: lambda x, options: operator.chunk(x, options, how)
    # The kernels take whole registers of values.
    return _run(by(_OF_WEIGHTS), by(OPERATOR), x, options, named, packed.LANES if how == "fused" else 1)


def recurrent(named: dict[str, Any]) -> Results:
    """Run `recurrent_mlstm` with these arguments by name."""
    x, options = check(named)
    by = lambda implementation: lambda x, options: OPERATOR.recurrent(x, options, implementation)
    # Weighted keys and divided queries are few: they are not rounded. The normaliser has too few numbers for a kernel.
    x = x._replace(q=jnp.asarray(x.q, jnp.float32), k=jnp.asarray(x.k, jnp.float32), slots=Slots())
    return _run(by("xla"), by(named["implementation"]), x, options, named, 1)


def check(named: dict[str, Any]) -> tuple[Arguments, Options]:
    """Return the checked arguments without the state and the gates, and the options."""
    x, options, _ = signature.to_records(named | dict(initial_state=None))
    x = x.with_int32()
    OPERATOR.check(x, options)
    checks.check_sharding(options.sharding)
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


def _run(of_weights: Callable, of_values: Callable, x: Arguments, options: Options, named: dict, lanes: int) -> Results:
    """Return the output and the final states, by simple linear attention of weights in so many lanes, and of v."""
    C, n, before = _start(named["initial_state"], (x.num_states, x.v.shape[2]), lanes)
    i, f, axes = _whole_rows(named["i"]), _whole_rows(named["f"]), checks.check_context_axis(options.context_axis)
    gates = stabiliser.stabilise(i, f, before, x.cu_seqlens, x.segment_ids, axes)
    # Weights and divisors are of value heads. Padding may hold anything, and a product with 0 does not stop NaN.
    heads = lambda y: y if y.shape[2] == x.v.shape[2] else jnp.repeat(y, x.v.shape[2] // y.shape[2], axis=2)
    q, k = (chunking.select_tokens(gates.valid, heads(jnp.asarray(y))) for y in (x.q, x.k))
    # Over a mesh, heads are split, and a product over them would add up over devices.
    flat = lanes > 1 and options.sharding is None and not any(jax.typeof(x.v).sharding.spec)
    dtype, kind = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype), jax.typeof(x.v).sharding
    weights = _in_lanes(gates.weight, lanes, flat, dtype if lanes > 1 else jnp.dtype(jnp.float32), low=1)
    weights = partition.place(weights, _unsplit_channels(kind.spec), kind.mesh)
    ones = x._replace(q=q, k=k, v=weights, g=gates.decay, initial_state=n)
    y, n = of_weights(ones, options._replace(sharding=_unsplit_channels(options.sharding)))
    y = _lane_sum(y, flat) if lanes > 1 else y[..., 0].astype(jnp.float32)
    divisor = jnp.maximum(jnp.abs(y), gates.least) + named["eps"]
    times = _times_flat if flat else functools.partial(_times, flat=False)
    q, k = times(q, 1.0 / divisor), times(k, gates.weight)
    o, C = of_values(x._replace(q=q, k=k, g=gates.decay, initial_state=C), options)
    return o, MlstmState(C, jnp.sum(n[..., :2], axis=-1), gates.last) if options.output_final_state else None


def _times(y: jax.Array, factor: jax.Array, flat: bool) -> jax.Array:
    """Return y [B, T, HV, K] times a factor [B, T, HV]; a float16 has too few powers of two for it."""
    dtype = jnp.bfloat16 if y.dtype == jnp.bfloat16 else jnp.float32
    precision = lax.Precision.DEFAULT if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    use = lambda wide: (wide * y.reshape(wide.shape).astype(wide.dtype)).astype(dtype)
    return _spread(factor, y.shape[3], flat, precision, use)


_times_flat = jax.custom_vjp(functools.partial(_times, flat=True))
# Without the barrier XLA keeps a float32 number of the spread factor for each channel, and reads them in the backward.
_times_flat.defvjp(
    lambda y, factor: (_times_flat(y, factor), (y, factor)),
    lambda x, d: jax.vjp(functools.partial(_times, flat=True), x[0], lax.optimization_barrier(x[1]))[1](d),
)


def _in_lanes(y: jax.Array, lanes: int, flat: bool, dtype, low: int) -> jax.Array:
    """Return y [B, T, HV] in lanes of a type: two of the first three have its high part, and `low` has the rest."""
    bfloat16, lane = dtype == jnp.bfloat16, jnp.arange(lanes, dtype=jnp.int32)
    wide = _spread(y, lanes, flat, lax.Precision.HIGH if bfloat16 else lax.Precision.HIGHEST, jnp.asarray)
    high = matmul.rounded_by_xla(wide) if bfloat16 else wide
    # Lanes 0 and 1 of weights add up. Both have the gradient of the sum, whose low part is in lane 2, so one is enough.
    rest = jnp.where(lane == low, lax.stop_gradient(wide - high), 0.0)
    return jnp.where((lane < 3) & (lane != low), high, rest).astype(dtype)


def _spread(factor: jax.Array, channels: int, flat: bool, precision: lax.Precision, use: Callable) -> jax.Array:
    """Return what a function makes of a factor [B, T, HV] in all of so many channels, float32."""
    shape = *factor.shape, channels
    if not flat:
        return use(jnp.broadcast_to(factor[..., None], shape))
    # A TPU spreads it fastest by a product with ones, in the flat layout of the kernels: with `DEFAULT` to 8 bits, with
    # `HIGH` to 16.
    ones = jnp.repeat(jnp.eye(factor.shape[2], dtype=jnp.float32), channels, axis=1)
    return use(_product(factor, ones, precision)).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(y: jax.Array, ones: jax.Array, precision: lax.Precision) -> jax.Array:
    """Return a product with ones among zeros, float32; what is not finite in a head is inf in its columns alone."""
    # No zero stops a NaN, but a finite number, which overflows where it meets no zero.
    y = jnp.where(jnp.isfinite(y), 0.5 * y, _LARGEST)
    return jnp.matmul(y, 2.0 * ones, precision=precision, preferred_element_type=jnp.float32)


# The gradient of a sum spreads it, and the other way round.
_product.defvjp(
    lambda y, ones, precision: (_product(y, ones, precision), ones),
    lambda precision, ones, d: (_product(d, ones.T, precision), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _lane_sum(y: jax.Array, flat: bool) -> jax.Array:
    """Return the sums of the first two lanes [B, T, HV, lanes] in float32; their gradient reaches y in two parts."""
    if not flat:
        return jnp.sum(y[..., :2].astype(jnp.float32), axis=3)
    first = jnp.tile(jnp.arange(y.shape[3], dtype=jnp.int32) < 2, y.shape[2]).astype(y.dtype)
    pick = jnp.repeat(jnp.eye(y.shape[2], dtype=y.dtype), y.shape[3], axis=0) * first[:, None]
    wide = y.reshape(*y.shape[:2], -1)
    sums = _product(wide, pick, lax.Precision.HIGHEST)
    return jnp.where(jnp.isinf(sums), jnp.nan, sums)


# The backward reads the number and the type of lanes alone.
_lane_sum.defvjp(
    lambda y, flat: (_lane_sum(y, flat), y[:, :0]),
    lambda flat, y, d: (_in_lanes(d, y.shape[3], flat, y.dtype, low=2),),
)


def _start(state: MlstmState | None, heads: tuple[int, int], lanes: int) -> tuple[Any, Any, jax.Array]:
    """Return the initial C, and n in the lanes of high parts or None; and m [N, HV], -inf where it is no number."""
    if state is None:
        return None, None, jnp.full(heads, -jnp.inf, jnp.float32)
    C, n, m = (jnp.asarray(y, jnp.float32) for y in state)
    wrong, none = jnp.isnan(m) | jnp.isposinf(m), jnp.isneginf(m)
    # The state is C e^m: the gradient of m is that of the size of C and n. A fault of m becomes one of C and n.
    size = jnp.exp(jnp.where(none, 0.0, m - lax.stop_gradient(m)))
    C, n = (y * jnp.expand_dims(jnp.where(wrong, jnp.nan, size), range(2, y.ndim)) for y in (C, n))
    lane = jnp.arange(lanes, dtype=jnp.int32)
    n = jnp.where((lane == 0) | (lane == 2), n[..., None], 0.0)
    return C, n, jnp.where(wrong, -jnp.inf, lax.stop_gradient(m))


def _unsplit_channels(sharding: checks.Sharding | None) -> Any:
    """Return the sharding of v, or None, for ones, which have no value channels to split."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, _unsplit_channels(sharding.spec))
    return None if sharding is None else PartitionSpec(*sharding[:3])


def _whole_rows(gate: jax.Array) -> jax.Array:
    """Return gates [B, T, HV] whose tokens no explicit axis of a mesh splits, because a scan goes along them."""
    kind = jax.typeof(gate).sharding
    return partition.place(jnp.asarray(gate), PartitionSpec(*kind.spec[:1], None, *kind.spec[2:]), kind.mesh)
