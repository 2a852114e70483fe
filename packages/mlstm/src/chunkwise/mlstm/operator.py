"""mLSTM as simple gated linear attention: its kernels divide their output, and other implementations run twice.

These run once over the weights of tokens for the divisor, and once over the values.

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
from chunkwise.shared.call import arguments, checks, shapes, signature
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.implementation import implementations
from chunkwise.shared.kernels import chunking
from chunkwise.shared.mesh import partition

# It has the implementations of simple gated linear attention, and its own name in errors.
OPERATOR = dataclasses.replace(gla.SIMPLE_GLA, name="mlstm")
_OF_WEIGHTS = dataclasses.replace(OPERATOR, warns=False)
_DIVIDED = dataclasses.replace(gla.DIVIDED_SIMPLE_GLA, name="mlstm")


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
    if how == "fused" and not _channels_are_split(x.v, options.sharding):
        return _run_divided(functools.partial(_DIVIDED.chunk, implementation=how), x, options, named)
    of_weights = functools.partial(_OF_WEIGHTS.chunk, implementation="xla")
    return _run(of_weights, functools.partial(OPERATOR.chunk, implementation=how), x, options, named)


def recurrent(named: dict[str, Any]) -> Results:
    """Run `recurrent_mlstm` with these arguments by name."""
    x, options = check(named)
    # Weighted keys and divided queries are few: they are not rounded. The normaliser has too few numbers for a kernel.
    x = x._replace(q=jnp.asarray(x.q, jnp.float32), k=jnp.asarray(x.k, jnp.float32), slots=Slots())
    of_weights = functools.partial(_OF_WEIGHTS.recurrent, implementation="xla")
    of_values = functools.partial(OPERATOR.recurrent, implementation=named["implementation"])
    return _run(of_weights, of_values, x, options, named)


def check(named: dict[str, Any]) -> tuple[Arguments, Options]:
    """Return the checked arguments without the state and the gates, and the options."""
    x, options, _ = signature.to_records(named | dict(initial_state=None, eps=0.0))
    x = x.with_int32()
    OPERATOR.check(x, options)
    checks.check_sharding(options.sharding)
    (B, T, HV, V), K, state, eps = x.v.shape, x.q.shape[3], named["initial_state"], named["eps"]
    for name in ("i", "f"):
        checks.check_array(name, named[name], "B T HV", (B, T, HV))
    sizes = dict(N=x.num_states, HV=HV, K=K, V=V)
    shapes.check_parts(state, MlstmState, sizes, C="N HV K V", n="N HV K", m="N HV")
    number = isinstance(eps, numbers.Real) and not isinstance(eps, bool) and 0 <= float(eps) < math.inf
    rule = f"`eps` must be a finite number of at least 0{checks.when_built(eps)}; got {checks.shown(eps)}."
    checks.check(number, rule)
    return arguments.check_shared(x, options), options


def _run_divided(divided: Callable, x: Arguments, options: Options, named: dict[str, Any]) -> Results:
    """Return the output and the final states, by a simple linear attention that divides its output itself."""
    C, n, gates = _start(x, options, named)
    state = None if C is None else jnp.concatenate([C, n[..., None]], axis=3)
    q, scale = x.q, x.scale
    if isinstance(scale, jax.Array):
        # An array multiplies outputs, and these are divided.
        q, scale = _times(q, scale), 1.0
    x = x._replace(q=q, g=gates.decay, log_weight=gates.log_weight, least=gates.least, initial_state=state, scale=scale)
    o, state = divided(x, options._replace(eps=float(named["eps"])))
    return o, None if state is None else MlstmState(state[..., :-1], state[..., -1], gates.last)


def _run(of_weights: Callable, of_values: Callable, x: Arguments, options: Options, named: dict[str, Any]) -> Results:
    """Return the output and the final states, by simple linear attention of weights, and of the values."""
    C, n, gates = _start(x, options, named)
    # Weights and divisors are of value heads. Padding may hold anything, and a product with 0 does not stop NaN.
    heads = lambda y: y if y.shape[2] == x.v.shape[2] else jnp.repeat(y, x.v.shape[2] // y.shape[2], axis=2)
    q, k = (chunking.select_tokens(gates.valid, heads(jnp.asarray(y))) for y in (x.q, x.k))
    weight, kind = jnp.exp(gates.log_weight), jax.typeof(x.v).sharding
    weights = partition.place(weight[..., None], _unsplit_channels(kind.spec), kind.mesh)
    ones = x._replace(q=q, k=k, v=weights, g=gates.decay, initial_state=None if n is None else n[..., None])
    y, n = of_weights(ones, options._replace(sharding=_unsplit_channels(options.sharding)))
    divisor = jnp.maximum(jnp.abs(y[..., 0]), gates.least) + named["eps"]
    q, k = _times(q, 1.0 / divisor[..., None]), _times(k, weight[..., None])
    o, C = of_values(x._replace(q=q, k=k, g=gates.decay, initial_state=C), options)
    return o, MlstmState(C, n[..., 0], gates.last) if options.output_final_state else None


def _times(y: jax.Array, factor: jax.Array) -> jax.Array:
    """Return y [B, T, HV, K] times a factor; a float16 has too few powers of two for it."""
    dtype = jnp.bfloat16 if y.dtype == jnp.bfloat16 else jnp.float32
    return (factor * y.astype(jnp.float32)).astype(dtype)


def _channels_are_split(v: jax.Array, sharding: Any) -> bool:
    """Return whether a mesh splits value channels, of which the sums of keys then are no further one."""
    specs = jax.typeof(v).sharding.spec, getattr(sharding, "spec", sharding) or ()
    return any(len(spec) > 3 and spec[3] is not None for spec in specs)


def _start(x: Arguments, options: Options, named: dict[str, Any]) -> tuple[Any, Any, stabiliser.Stabilised]:
    """Return the initial C and n, None for no state, and what the gates become."""
    state, heads = named["initial_state"], (x.num_states, x.v.shape[2])
    C, n, before = (None, None, jnp.full(heads, -jnp.inf, jnp.float32)) if state is None else _scaled(state)
    i, f = (partition.whole_rows(named[name]) for name in "if")
    axes = checks.check_context_axis(options.context_axis)
    return C, n, stabiliser.stabilise(i, f, before, x.cu_seqlens, x.segment_ids, axes)


def _scaled(state: MlstmState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the initial C and n, and m [N, HV], -inf where it is no number."""
    C, n, m = (jnp.asarray(y, jnp.float32) for y in state)
    wrong, none = jnp.isnan(m) | jnp.isposinf(m), jnp.isneginf(m)
    # The state is C e^m: the gradient of m is that of the size of C and n. A fault of m becomes one of C and n.
    size = jnp.exp(jnp.where(none, 0.0, m - lax.stop_gradient(m)))
    C, n = (y * jnp.expand_dims(jnp.where(wrong, jnp.nan, size), range(2, y.ndim)) for y in (C, n))
    return C, n, jnp.where(wrong, -jnp.inf, lax.stop_gradient(m))


def _unsplit_channels(sharding: checks.Sharding | None) -> Any:
    """Return the sharding of v, or None, for ones, which have no value channels to split."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, _unsplit_channels(sharding.spec))
    return None if sharding is None else PartitionSpec(*sharding[:3])
