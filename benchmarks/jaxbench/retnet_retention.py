"""JAXBench's task 15p_RetNet_Retention: `python -m JAXBench evaluate --workload 15p_RetNet_Retention --kernel THIS`.

The scores of a query are divided by the sum of their absolute values. No recurrence has that sum, because of the
absolute values of all pairs, so another kernel computes it, block by block. The outputs before the division are a
recurrence.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gla import chunk_simple_gla

# The rows of a block of queries, and of a block of keys.
BLOCK = 512
LANES = 128


def workload(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return the outputs [B, H, S, D] of retention with divided scores, of query, key and value [B, H, S, D]."""
    H, S, D = query.shape[1:]
    log_gamma = jnp.log(1.0 - jnp.exp2(-5.0 - jnp.arange(H, dtype=jnp.float32)))
    # Every head becomes a row of the batch with one head, so that the tensors need not be transposed.
    q, k, v = (x.reshape(-1, S, 1, D) for x in (query, key, value))
    g = jnp.broadcast_to(log_gamma[:, None], query.shape[:3]).reshape(-1, S, 1)
    o, _ = chunk_simple_gla(q, k, v, g, scale=1.0, chunk_size=128)
    total = jnp.maximum(sums_of_scores(query, key, log_gamma), 1.0)
    return (o.reshape(query.shape).astype(jnp.float32) / total).astype(query.dtype)


def sums_of_scores(query: jax.Array, key: jax.Array, log_gamma: jax.Array) -> jax.Array:
    """Return sum_j |q_i . k_j| gamma^(i - j) over j <= i, [B, H, S, 1]; S is a multiple of BLOCK."""
    B, H, S, D = query.shape
    blocks = S // BLOCK
    by_row = lambda b, h, i, j, *_: (b, h, i, 0)
    # Blocks past the diagonal are not computed, and not fetched either, because the index stays at the diagonal's
    # block.
    by_column = lambda b, h, i, j, *_: (b, h, jnp.minimum(i, j), 0)
    spec = lambda width, place: pl.BlockSpec((1, 1, BLOCK, width), place)
    sums = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, H, blocks, blocks),
            in_specs=[spec(D, by_row), spec(D, by_column)],
            out_specs=spec(LANES, by_row),
        ),
        out_shape=jax.ShapeDtypeStruct((B, H, S, LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        interpret=jax.default_backend() != "tpu",
        name="sums_of_scores",
    )(log_gamma, query, key)
    return jnp.sum(sums, axis=-1, keepdims=True)


def _kernel(log_gamma_ref, q_ref, k_ref, sums_ref) -> None:
    """Add the absolute scores of a block of queries with a block of keys; every lane has a part of the sum."""
    h, i, j = (pl.program_id(n) for n in (1, 2, 3))
    log_gamma = log_gamma_ref[h]

    @pl.when(j == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    def add(decays):
        scores = jax.lax.dot_general(
            q_ref[0, 0], k_ref[0, 0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scores = jnp.abs(scores) * decays
        sums_ref[0, 0] += sum(scores[:, n : n + LANES] for n in range(0, BLOCK, LANES))

    @pl.when(j < i)
    def _():
        # The decay from a key to the first query of the block. The decay from there to a query, the same for all keys,
        # is applied at the end.
        column = jax.lax.broadcasted_iota(jnp.int32, (1, BLOCK), 1)
        add(jnp.exp(log_gamma * ((i - j) * BLOCK - column).astype(jnp.float32)))

    @pl.when(j == i)
    def _():
        row = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0)
        sums_ref[0, 0] *= jnp.exp(log_gamma * row.astype(jnp.float32))
        column = jax.lax.broadcasted_iota(jnp.int32, (1, BLOCK), 1)
        distance = (row - column).astype(jnp.float32)
        add(jnp.where(distance >= 0, jnp.exp(log_gamma * jnp.maximum(distance, 0.0)), 0.0))
