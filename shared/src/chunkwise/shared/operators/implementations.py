"""One way to compute an operator over whole sequences, and how the arguments of a user become those that it takes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from chunkwise.shared.operators import arguments, checks, segments
from chunkwise.shared.operators.arguments import Arguments, Options
from chunkwise.shared.operators.state_map import StateMap, augment_with_identity, map_by_running


class Implementation(NamedTuple):
    """One way to compute an operator. Its functions take prepared arguments, see `prepare`.

    Attributes:
      name: how a user asks for it.
      run: from arguments, options and what a state map precomputed, or None, to the output [B, T, HV, V] and the final
        states [N, HV, K, V], None unless asked for.
      state_map: from arguments and options to what the tokens do to a state; None where `run` finds it beside the
        identity.
      state_gradient: from arguments, options, what the map precomputed and the cotangents of `run` to the gradient of
        the initial states alone; None where JAX takes it from `run`.
      at_once: whether kernels make all gradients of `run` at once, so that for the gradient of the initial states JAX
        would launch them, and those that make what they read, once more. It is then taken from all gradients of `run`.
      pooled: from arguments, options and routes to the output and the pool, whose slots it reads and writes itself;
        None where the states are gathered, and scattered after `run`.
      chunk_states: from arguments and options to the states before all chunks, which restart at every sequence:
        [1, NT, HV, K, V].
      fits: whether it takes arguments of these sizes.
      raw_gates: whether it takes raw gates and their law; the others get decays.
      knows_segments: whether it takes segment ids; the others get gates that forget everything where a segment begins.
    """

    name: str
    run: Callable[[Arguments, Options, Any], tuple[jax.Array, Any]]
    state_map: Callable[[Arguments, Options], StateMap] | None = None
    state_gradient: Callable[[Arguments, Options, Any, jax.Array, jax.Array], jax.Array] | None = None
    at_once: bool = False
    pooled: Callable[[Arguments, Options, Any], tuple[jax.Array, jax.Array]] | None = None
    chunk_states: Callable[[Arguments, Options], jax.Array] | None = None
    fits: Callable[[Arguments, Options], bool] = lambda x, options: True
    raw_gates: bool = False
    knows_segments: bool = False


def in_plain_jax(function: Callable) -> Callable:
    """Return a function of prepared arguments and options, compiled, by one that takes the whole scale as an array."""
    compiled = jax.jit(function, static_argnums=1)

    @functools.wraps(function)
    def run(x: Arguments, options: Options, *more: Any) -> Any:
        scale = arguments.whole_scale(x, options)
        return compiled(x._replace(scale=scale), options._replace(scale=None), *more)

    return run


def delta_rule_in_plain_jax(run: Callable, states_after: Callable) -> Implementation:
    """Return the implementation "xla" of a delta rule; the inverses of all chunks are precomputed.

    Args:
      run: from prepared arguments, options, and inverses or None to the output and the final states.
      states_after: from prepared arguments and options to the states after the tokens, and the inverses.
    """

    def state_map(x: Arguments, options: Options) -> StateMap:
        return augment_with_identity(lambda y: states_after(y, options), x)

    return Implementation("xla", in_plain_jax(run), in_plain_jax(state_map))


def prepare(implementation: Implementation, x: Arguments, options: Options) -> tuple[Arguments, Options]:
    """Return the arguments and options that an implementation takes: with a scale, a chunk size, and final gates."""
    chunk_size = checks.choose_chunk_size(
        options.chunk_size, implementation.name, x.q.shape[1],
        per_channel=x.g is not None and x.g.ndim == 4, delta=x.beta is not None,
    )  # fmt: skip
    x, options = arguments.choose_scale(x, options._replace(chunk_size=chunk_size))
    return arguments.with_final_gates(x, options, implementation.raw_gates)


def run(implementation: Implementation, x: Arguments, options: Options, precomputed: Any = None):
    """Run an implementation on the arguments of a user: the output and the final states, None unless asked for."""
    x, options = prepare(implementation, x, options)
    if x.segment_ids is None or implementation.knows_segments:
        return implementation.run(x, options, precomputed)
    # A gate that forgets everything keeps no promise.
    options = options._replace(gate_lower_bound=None)
    return segments.run_segments(lambda x: implementation.run(x, options, precomputed), x)


def map_states(implementation: Implementation, x: Arguments, options: Options) -> StateMap:
    """Return what the tokens of the arguments of a user do to a state."""
    if implementation.state_map is None:
        return map_by_running(lambda x: run(implementation, x, options), x)
    x, options = prepare(implementation, x, options)
    if x.segment_ids is None or implementation.knows_segments:
        return implementation.state_map(x, options)
    options = options._replace(gate_lower_bound=None)
    find: Any = implementation.state_map
    return segments.map_segments(lambda x: find(x, options), x)


def state_gradient(
    implementation: Implementation, x: Arguments, options: Options, precomputed: Any, do: jax.Array, dstates: jax.Array
) -> jax.Array:
    """Return the gradient of the initial states alone, from the cotangents of `run`."""
    if implementation.state_gradient is not None:
        return implementation.state_gradient(*prepare(implementation, x, options), precomputed, do, dstates)
    of_state = lambda S: run(implementation, x._replace(initial_state=S), options, precomputed)
    return jax.vjp(of_state, x.initial_state)[1]((do, dstates))[0]
