"""Decode: a few tokens of many sequences in one launch, the states updated in place; kernel body and launcher.

A grid step takes the states of some heads of one sequence: it reads them once, runs the sequence's tokens, and writes
them back over themselves. A token is bound by memory, so its products are sums on the vector unit, in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared import l2norm, out_struct, pallas_call

# Two buffers each of the states read and written.
STATE_BYTES = 32 * 2**20
TOKEN_BYTES = 24 * 2**20


def state_heads(H: int, HV: int, K: int, V: int) -> int:
    """Return how many value heads, in whole groups, a grid step takes."""
    group = HV // H
    return max([n * group for n in range(1, H + 1) if H % n == 0 and 16 * n * group * K * V <= STATE_BYTES] or [group])


def rows_to_columns(x: jax.Array) -> jax.Array:
    """Return [heads, K] as columns [heads, K, 1]: the diagonal of every row, summed over lanes."""
    K = x.shape[1]
    diagonal = lax.broadcasted_iota(jnp.int32, (1, K, K), 1) == lax.broadcasted_iota(jnp.int32, (1, K, K), 2)
    return jnp.sum(jnp.where(diagonal, as_rows(x), 0.0), axis=2, keepdims=True)


def as_rows(x: jax.Array) -> jax.Array:
    """Return [heads, D] as [heads, 1, D]."""
    return jnp.stack([x[i : i + 1] for i in range(x.shape[0])])


def as_scalars(row: jax.Array) -> jax.Array:
    """Return a row [1, heads] as [heads, 1, 1]."""
    return jnp.stack([row[:, i : i + 1] for i in range(row.shape[1])])


def _decode_kernel(
    slot_ref, start_ref, count_ref, kept_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, pool_ref, o_ref, after_ref,
    *, scale, normalise,
):  # fmt: skip
    n = pl.program_id(1)
    heads, group = v_ref.shape[1], v_ref.shape[1] // q_ref.shape[1]
    start = start_ref[n]

    # Tokens of no sequence are zero.
    @pl.when(n == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    def token(i, S):
        t = start + i
        q, k, v = (ref[t].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref))
        if normalise:
            q, k = l2norm(q), l2norm(k)
        q, k = rows_to_columns(q), rows_to_columns(k)
        q, k = (jnp.stack([x[head // group] for head in range(heads)]) for x in (q, k))
        g, beta = as_scalars(g_ref[pl.ds(t, 1)]), as_scalars(beta_ref[pl.ds(t, 1)])
        S = jnp.exp(g) * S
        S = S + k * (beta * (as_rows(v) - jnp.sum(S * k, axis=1, keepdims=True)))
        o = scale * jnp.sum(S * q, axis=1, keepdims=True)
        o_ref[t] = jnp.concatenate(list(o)).astype(o_ref.dtype)
        return S

    S = jnp.where(kept_ref[n] == 1, pool_ref[...], 0.0)
    after_ref[...] = lax.fori_loop(0, count_ref[n], token, S)


def launch(q, k, v, g, beta, pool, slot, start, count, kept, scale: float, normalise: bool):
    """Run the kernel.

    Args:
      q, k: tokens [T, H, K] of all sequences, one after the other.
      v: [T, HV, V].
      g, beta: [T, HV] float32.
      pool: states [slots, HV, K, V] float32; updated in place where its buffer is donated.
      slot: int32 [N], the slot of every sequence; distinct.
      start, count: int32 [N], its first token and how many.
      kept: int32 [N], 1 where it continues the state in its slot, 0 where it starts from zero.
      scale, normalise: static.

    Returns:
      o [T, HV, V] in the type of v and the pool after.

    Raises:
      NotImplementedError: the tokens do not fit into VMEM.
    """
    T, H, K = q.shape
    HV, V = v.shape[1:]
    heads = state_heads(H, HV, K, V)
    size = q.dtype.itemsize * T * heads * 2 * (max(K, 128) + max(V, 128)) * 2
    if size > TOKEN_BYTES:
        raise NotImplementedError(
            f'"pallas" takes a few tokens per sequence; {T} tokens need {size >> 20} MiB of VMEM: '
            f'use `fused_chunk_gated_delta_rule` or implementation="xla".'
        )
    blocks, own = HV // heads, heads * H // HV

    def cut(x, width):
        return jnp.moveaxis(x.reshape(T, blocks, width, *x.shape[2:]), 1, 0)

    tokens = cut(q, own), cut(k, own), cut(v, heads), cut(g, heads), cut(beta, heads)
    per_block = [
        pl.BlockSpec((None, *x.shape[1:]), lambda h, n, *_, rank=x.ndim: (h, *[0] * (rank - 1))) for x in tokens
    ]
    state = pl.BlockSpec((None, heads, K, V), lambda h, n, slot, *_: (slot[n], h, 0, 0))
    o, pool = pallas_call(
        functools.partial(_decode_kernel, scale=scale, normalise=normalise),
        slot, start, count, kept, *tokens, pool,
        name="recurrent_gated_delta_rule_fwd",
        num_scalar_prefetch=4,
        # Blocks of heads are independent; sequences share the block of outputs, so they come one after the other.
        grid=(blocks, slot.shape[0]),
        dimension_semantics=("parallel", "arbitrary"),
        in_specs=[*per_block, state],
        out_specs=[per_block[2], state],
        out_shape=[out_struct(tokens[2].shape, v.dtype, q, k, v, g, beta, pool),
                   out_struct(pool.shape, jnp.float32, q, k, v, g, beta, pool)],
        # Counted with the scalar tables.
        input_output_aliases={9: 1},
        cost_estimate=pl.CostEstimate(
            flops=7 * T * HV * K * V,
            transcendentals=T * HV,
            bytes_accessed=8 * slot.shape[0] * HV * K * V + q.nbytes + k.nbytes + 2 * v.nbytes,
        ),
        vmem_limit_bytes=100 * 2**20 if 16 * heads * K * V + size > 40 * 2**20 else 48 * 2**20,
    )  # fmt: skip
    return jnp.moveaxis(o, 0, 1).reshape(v.shape), pool
