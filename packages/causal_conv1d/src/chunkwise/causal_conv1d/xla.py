"""The convolution in plain JAX: a sum of shifted inputs."""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import activations
from chunkwise.shared.kernels.spans import row_sequences


def convolve(x, weight, bias, rows, s: row_sequences.RowSequences, activation: str | None) -> jax.Array:
    """Return y [B, T, D] in the type of x.

    Args:
      x: [B, T, D].
      weight, bias: float32 [W, D] and [1, D].
      rows: `edges.state_rows` [N, W - 1, D], or None.
      s: the sequences.
      activation: one of `activations.ACTIVATIONS`.
    """
    T, W = x.shape[1], weight.shape[0]
    padded = jnp.pad(x, ((0, 0), (W - 1, 0), (0, 0)))
    y = bias[None]
    for j in range(W):
        tap = padded[:, W - 1 - j : W - 1 - j + T]  # the inputs j tokens earlier
        if s.age is not None:
            tap = jnp.where((s.age >= j)[:, :, None], tap, jnp.zeros((), x.dtype))
        y = y + tap.astype(jnp.float32) * weight[W - 1 - j][None, None]
    if rows is not None:
        age = jnp.arange(W - 1, dtype=jnp.int32)[None]
        # A sequence of fewer than W - 1 tokens has no token for its last rows.
        token = jnp.where(age < s.length[:, None], s.start[:, None] + age, jnp.int32(T))
        y = y.at[s.row[:, None], token].add(rows, mode="drop")
    y = activations.activate(y, activation)
    if s.age is not None:
        y = jnp.where((s.age >= 0)[:, :, None], y, 0.0)
    return y.astype(x.dtype)
