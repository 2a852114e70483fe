"""JAXBench's task 16p_Mamba2_SSD: `python -m JAXBench evaluate --workload 16p_Mamba2_SSD --kernel THIS`.

The scores of a query are divided by their sum. The operator computes the sum as the output for a further column of ones
in the values.
"""

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import chunk_simple_gla


def workload(query: jax.Array, key: jax.Array, value: jax.Array, A_log: jax.Array) -> jax.Array:
    """Return the outputs [B, H, S, D] of Mamba-2's state space layer with divided scores.

    Args:
      query, key, value: [B, H, S, D].
      A_log: [B, H, S]; its sigmoid is the decay.
    """
    S, D = value.shape[2:]
    # Every head becomes a row of the batch with one head, so that the tensors need not be transposed.
    q, k, v = (x.reshape(-1, S, 1, D) for x in (query, key, value))
    g = jnp.log(jax.nn.sigmoid(A_log) + 1e-8).reshape(-1, S, 1)
    # Ones fill the lanes of a TPU. The values are float32, because outputs have the type of the values: if they were
    # rounded to bfloat16 before the division, 7 in a million would differ from the reference by more than its check
    # allows.
    values = jnp.concatenate([v, jnp.ones_like(v)], axis=-1).astype(jnp.float32)
    o, _ = chunk_simple_gla(q, k, values, g, scale=1.0, chunk_size=128)
    o = o[..., :D] / jnp.maximum(jnp.abs(o[..., D:]), 1.0)
    return o.astype(query.dtype).reshape(query.shape)
