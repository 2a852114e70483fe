"""The map that the tokens of an operator apply to a state: from S to M S + N.

N is the state that they make from zeros. M is a matrix [K, K] for every value head of a delta rule, and a decay
otherwise.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.shared.call.arguments import Arguments
from chunkwise.shared.plain.affine_scan import AffineMap

# The most rows, and the most columns, of a state that kernels can hold whole in fast memory.
MOST_CHANNELS = 256


# The map that the tokens of one device apply to a state, without M if it was not asked for and where it is a decay,
# which the caller finds from the sum of the gates; and results that a run of the operator after this, and the gradient
# of its initial states, need not compute again. N begins from the initial states.
Found = tuple[AffineMap, Any]


def augment_with_identity(
    states_after: Callable[[Arguments], tuple[jax.Array, Any]],
    x: Arguments,
    most_channels: int | None = None,
    with_M: bool = True,
) -> Found:
    """Return the map of a delta rule, whose M is the state that the tokens make of the identity.

    Args:
      states_after: from arguments to the states after the tokens, and `precomputed`. Initial states may have more
        channels than v, whose missing values are zeros.
      x: the arguments.
      most_channels: the most channels of one run, None for any number. If V + K is more, there are two runs.
      with_M: whether to find M, too.
    """
    (HV, V), K, n = x.v.shape[2:], x.q.shape[3], x.num_states
    start = jnp.zeros((n, HV, K, V), jnp.float32) if x.initial_state is None else x.initial_state
    if not with_M:
        states, precomputed = states_after(x._replace(initial_state=start))
        return AffineMap(None, states), precomputed
    identity = jnp.broadcast_to(jnp.eye(K, dtype=jnp.float32), (n, HV, K, K))
    if most_channels is None or most_channels >= V + K:
        both, precomputed = states_after(x._replace(initial_state=jnp.concatenate([start, identity], axis=3)))
        states, M = both[..., :V], both[..., V:]
        return AffineMap(M, states), precomputed
    nothing = jnp.zeros((*x.v.shape[:3], K), x.v.dtype)
    M, _ = states_after(x._replace(v=nothing, w=None, initial_state=identity))
    states, precomputed = states_after(x._replace(initial_state=start))
    return AffineMap(M, states), precomputed


def map_by_running(run: Callable[[Arguments], tuple[jax.Array, Any]], x: Arguments, with_M: bool = True) -> Found:
    """Return the map by a run of the operator itself, with the identity beside the states.

    Args:
      run: from arguments to the output and the states after the tokens.
      x: the arguments.
      with_M: whether to find M, too.
    """

    def states_after(x: Arguments) -> tuple[jax.Array, None]:
        missing = 0 if x.initial_state is None else x.initial_state.shape[3] - x.v.shape[3]
        widen = lambda y: jnp.pad(y, [(0, 0)] * 3 + [(0, missing)])
        return run(x._replace(v=widen(x.v), w=None if x.w is None else widen(x.w)))[1], None

    delta = x.beta is not None or x.erases
    if delta:
        return augment_with_identity(states_after, x, MOST_CHANNELS, with_M)
    return AffineMap(None, states_after(x)[0]), None
