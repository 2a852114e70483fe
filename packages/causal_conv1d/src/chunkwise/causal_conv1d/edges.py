"""The states of the convolution: what they add to the first tokens of sequences, and the states at their ends."""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels.spans.row_sequences import RowSequences


def state_rows(weight: jax.Array, states: jax.Array) -> jax.Array:
    """Return the terms that initial states add to the first W - 1 tokens of their sequences.

    Args:
      weight: float32 [W, D], the oldest token first.
      states: [N, W - 1, D], the tokens before each sequence.

    Returns:
      float32 [N, W - 1, D]: row a is for the token of age a, which reads only the rows of the state from a on.
    """
    states = states.astype(jnp.float32)
    S = states.shape[1]
    reach = lambda a: sum(weight[i - a : i - a + 1] * states[:, i] for i in range(a, S))
    return jnp.stack([reach(a) for a in range(S)], axis=1)


def final_states(x: jax.Array, states: jax.Array | None, W: int, s: RowSequences, dtype) -> jax.Array:
    """Return the last W - 1 inputs of every sequence [N, W - 1, D]; short ones begin with their state.

    Args:
      x: [B, T, D].
      states: the initial states [N, W - 1, D], or None for zeros.
      W: width.
      s: the sequences.
      dtype: the type of the result.
    """
    index = s.end[:, None] - jnp.int32(W - 1) + jnp.arange(W - 1, dtype=jnp.int32)[None]  # [N, W - 1]
    rows = x.at[s.row[:, None], jnp.maximum(index, 0)].get(mode="clip").astype(dtype)
    before = jnp.zeros((), dtype)
    if states is not None:
        # A last sequence that is not the first one of its row does not start from the initial state.
        opening, tokens = s.start == s.last_start, s.end - s.last_start
        # The state moves up by as many rows as there are tokens.
        for count in range(W - 1):
            moved = jnp.pad(states[:, count:], ((0, 0), (0, count), (0, 0))).astype(dtype)
            before = jnp.where((opening & (tokens == count))[:, None, None], moved, before)
    return jnp.where((index >= s.last_start[:, None])[:, :, None], rows, before)
