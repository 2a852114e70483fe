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
    weights = _in_lanes(gates.weight, lanes, flat, matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype))
    kind = jax.typeof(x.v).sharding
    weights = partition.place(weights, _unsplit_channels(kind.spec), kind.mesh)
    ones = x._replace(q=q, k=k, v=weights, g=gates.decay, initial_state=n)
    y, n = of_weights(ones, options._replace(sharding=_unsplit_channels(options.sharding)))
    y = _lane_sum(y, flat) if lanes > 1 else y[..., 0].astype(jnp.float32)
    divisor = jnp.maximum(jnp.abs(y), gates.least) + named["eps"]
    q, k = _times(q, 1.0 / divisor, flat), _times(k, gates.weight, flat)
    o, C = of_values(x._replace(q=q, k=k, g=gates.decay, initial_state=C), options)
    return o, MlstmState(C, jnp.sum(n[..., :2], axis=-1), gates.last) if options.output_final_state else None


def _times(y: jax.Array, factor: jax.Array, flat: bool) -> jax.Array:
    """Return y [B, T, HV, K] times a factor [B, T, HV]; a float16 has too few powers of two for it."""
    if flat:
        return _times_flat(y.reshape(*y.shape[:2], -1), factor).reshape(y.shape)
    return (factor[..., None] * y.astype(jnp.float32)).astype(_factored(y))


def _factored(y: jax.Array) -> Any:
    return jnp.bfloat16 if y.dtype == jnp.bfloat16 else jnp.float32


@jax.custom_vjp
def _times_flat(y: jax.Array, factor: jax.Array) -> jax.Array:
    """Return y [B, T, HV K] times a factor [B, T, HV]; the backward spreads it again."""
    wide = _product(factor, _ones(y, factor), _PRECISIONS[_factored(y)])
    return (wide * y.astype(jnp.float32)).astype(_factored(y))


def _times_backward(residuals: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, factor = residuals
    terms = d.astype(jnp.float32) * y.astype(jnp.float32)
    return _times_flat(d, factor).astype(y.dtype), _product(terms, _ones(y, factor).T, _PRECISIONS[_factored(y)])


_PRECISIONS = {jnp.bfloat16: lax.Precision.DEFAULT, jnp.float32: lax.Precision.HIGHEST}
_times_flat.defvjp(lambda y, factor: (_times_flat(y, factor), (y, factor)), _times_backward)


def _ones(y: jax.Array, factor: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.eye(factor.shape[2], dtype=jnp.float32), y.shape[2] // factor.shape[2], axis=1)


def _of_high(lanes: int) -> jax.Array:
    """Return which lanes have the high part of a number: 0, and 2, whose gradient is the low part of that of 0."""
    lane = jnp.arange(lanes, dtype=jnp.int32)
    return (lane == 0) | (lane == 2)


def _in_lanes(y: jax.Array, lanes: int, flat: bool, dtype) -> jax.Array:
    """Return lanes [B, T, HV, lanes] of a type, of which the first two add up to y: to 16 bits in bfloat16."""
    bfloat16 = lanes > 1 and dtype == jnp.bfloat16
    wide = _spread(y, lanes, flat, lax.Precision.HIGH if bfloat16 else lax.Precision.HIGHEST)
    high = matmul.rounded_by_xla(wide) if bfloat16 else wide
    # Both lanes of a sum have the gradient of the sum, so one is enough.
    rest = jnp.where(jnp.arange(lanes, dtype=jnp.int32) == 1, lax.stop_gradient(wide - high), 0.0)
    return jnp.where(_of_high(lanes), high, rest).astype(jnp.bfloat16 if bfloat16 else jnp.float32)


def _spread(
    factor: jax.Array, channels: int, flat: bool, precision: lax.Precision, use: Callable = lambda wide: wide
) -> jax.Array:
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


def _lane_sum_backward(flat: bool, y: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    lane = jnp.arange(y.shape[3], dtype=jnp.int32)
    wide = _spread(d, y.shape[3], flat, lax.Precision.HIGHEST)
    high = matmul.rounded_by_xla(wide) if y.dtype == jnp.bfloat16 else wide
    return (jnp.where(lane < 2, high, jnp.where(lane == 2, wide - high, 0.0)).astype(y.dtype),)


# The backward reads the number and the type of lanes alone.
_lane_sum.defvjp(lambda y, flat: (_lane_sum(y, flat), y[:, :0]), _lane_sum_backward)


def _start(state: MlstmState | None, heads: tuple[int, int], lanes: int) -> tuple[Any, Any, jax.Array]:
    """Return the initial C, and n in the lanes of high parts, or None; and m [N, HV], -inf where it is no number."""
    if state is None:
        return None, None, jnp.full(heads, -jnp.inf, jnp.float32)
    C, n, m = (jnp.asarray(y, jnp.float32) for y in state)
    wrong, none = jnp.isnan(m) | jnp.isposinf(m), jnp.isneginf(m)
    # The state is C e^m: the gradient of m is that of the size of C and n. A fault of m becomes one of C and n.
    size = jnp.exp(jnp.where(none, 0.0, m - lax.stop_gradient(m)))
    C, n = (y * jnp.expand_dims(jnp.where(wrong, jnp.nan, size), range(2, y.ndim)) for y in (C, n))
    n = jnp.where(_of_high(lanes), n[..., None], 0.0)
    return C, n, jnp.where(wrong, -jnp.inf, lax.stop_gradient(m))


def _unsplit_channels(sharding: Any) -> Any:
    """Return the sharding of v, or None, for ones, which have no value channels to split."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, _unsplit_channels(sharding.spec))
    return None if sharding is None else PartitionSpec(*sharding[:3])


def _whole_rows(gate: jax.Array) -> jax.Array:
    """Return gates [B, T, HV] whose tokens no explicit axis of a mesh splits, because a scan goes along them."""
    kind = jax.typeof(gate).sharding
    return partition.place(jnp.asarray(gate), PartitionSpec(*kind.spec[:1], None, *kind.spec[2:]), kind.mesh)
