"""What the tokens of an operator do to a state: they take a state S to M S + N.

N is the state after them from zeros. M is a matrix [K, K] for every value head of a delta rule, and a decay otherwise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.shared.call.arguments import Arguments

# Of a state that kernels hold whole in fast memory, rows and columns.
MOST_CHANNELS = 256


class StateMap(NamedTuple):
    """What the tokens of one device do to a state.

    Attributes:
      states: after the tokens, from the initial states, float32 [N, HV, K, V].
      M: what multiplies a state from before the tokens: a matrix [N, HV, K, K] or a decay [N, HV, K, 1], float32; None
        for a decay that is the sum of the gates.
      precomputed: what the operator behind it, and the gradient of its initial states, need not make again.
    """

    states: Any
    M: Any = None
    precomputed: Any = None


def augment_with_identity(
    states_after: Callable[[Arguments], tuple[jax.Array, Any]], x: Arguments, most_channels: int | None = None
) -> StateMap:
    """Return the map of a delta rule, whose M is the state that the tokens make of the identity.

    Args:
      states_after: from arguments to the states after the tokens, and what is precomputed. Initial states may have more
        channels than v, whose values are zeros.
      x: the arguments.
      most_channels: of one run, None for any number. Where V and K are more it takes two.
    """
    (HV, V), K, n = x.v.shape[2:], x.q.shape[3], x.num_states
    start = jnp.zeros((n, HV, K, V), jnp.float32) if x.initial_state is None else x.initial_state
    identity = jnp.broadcast_to(jnp.eye(K, dtype=jnp.float32), (n, HV, K, K))
    if most_channels is None or most_channels >= V + K:
        both, precomputed = states_after(x._replace(initial_state=jnp.concatenate([start, identity], axis=3)))
        return StateMap(both[..., :V], both[..., V:], precomputed)
    nothing = jnp.zeros((*x.v.shape[:3], K), x.v.dtype)
    M, _ = states_after(x._replace(v=nothing, w=None, initial_state=identity))
    states, precomputed = states_after(x._replace(initial_state=start))
    return StateMap(states, M, precomputed)


def map_by_running(run: Callable[[Arguments], tuple[jax.Array, Any]], x: Arguments) -> StateMap:
    """Return the map by an operator that has nothing else for it: it runs once more, beside the identity.

    Args:
      run: from arguments to the output and the states after the tokens.
      x: the arguments.
    """

    def states_after(x: Arguments) -> tuple[jax.Array, None]:
        missing = 0 if x.initial_state is None else x.initial_state.shape[3] - x.v.shape[3]
        widen = lambda y: jnp.pad(y, [(0, 0)] * 3 + [(0, missing)])
        return run(x._replace(v=widen(x.v), w=None if x.w is None else widen(x.w)))[1], None

    delta = x.beta is not None or x.b is not None
    return augment_with_identity(states_after, x, MOST_CHANNELS) if delta else StateMap(states_after(x)[0])
