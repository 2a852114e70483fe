"""Kimi delta attention in plain JAX: the mathematics of its chunks, for `chunkwise.shared.plain.chunks`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.kda import tile
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import matmul, tiles
from chunkwise.shared.plain import chunks, state_scan

# In blocks of so many rows, every level is a masked product of all rows. Products of larger levels have only the pairs
# of the level.
_BASE = 16


class Decayed(NamedTuple):
    """Queries and keys times the decay between their row and a boundary of their block, all [n, b, K].

    Attributes:
      q_start, e_start: queries and erase keys, with the decay from the start of the block to the row, whose gate is
        included.
      k_end: keys, with the decay from the row to the end of the block.
      through: [n, 1, K], the decay over the whole block.
    """

    q_start: jax.Array
    e_start: jax.Array
    k_end: jax.Array
    through: jax.Array


def interactions(q, e, k, g, base, continuing, erase_before_decay) -> tuple[jax.Array, jax.Array, Decayed]:
    """Return scores of queries with keys, scores of erase keys with keys, and the `Decayed` of chunks [M, C, K].

    Blocks of `_BASE` rows are computed as in the kernels; then neighbouring blocks are joined, with one product for the
    corner. `continuing` is `tile.continuing` [M, C, 1], or None. `erase_before_decay` as in `Options`.
    """
    M, C = k.shape[:2]
    b = _BASE

    def blocks(x, size):
        return x.reshape(M * C // size, size, x.shape[-1])

    q, e, k, g = blocks(q, b), blocks(e, b), blocks(k, b), blocks(g * tiles.LOG2_E, b)

    def by_row(x):
        """Return the first, the second rows and so on of all blocks of 8."""
        return [x[:, r :: tile.SUBLANES] for r in range(tile.SUBLANES)]

    continuing = None if continuing is None else by_row(blocks(continuing, b))
    in_blocks = tile.block_decays(by_row(g), base, continuing, erase_before_decay)
    in_blocks = [jnp.stack(x, axis=2).reshape(g.shape) for x in in_blocks]
    decays, table = tile.chunk_decays(in_blocks, base), jnp.asarray(tile.level_table(b, base))[None]
    scores = jnp.swapaxes(tile.interaction_tile(q, e, k, decays, table, jnp.float32), 1, 2)
    # A pair of a row with itself has no decay, nor has a pair of neighbours if erase keys read before the decay. In the
    # product of a base block, the gate would get its gradient once as a row and once, negative, as a column, with a
    # rounding error far above the gradients of strong gates.
    product = lambda x, y: jnp.sum(x * y, axis=-1, keepdims=True)
    start_q, start_e = decays.rows(lambda x: x.start)
    x = Decayed(q * start_q, e * start_e, k * decays.end, decays.start[:, -1:])
    scores_q, scores_e = jnp.where(jnp.eye(b, dtype=bool)[None], product(q, k), scores[:, :b]), scores[:, b:]
    if erase_before_decay:
        before = jnp.pad(k[:, :-1], ((0, 0), (1, 0), (0, 0)))
        scores_e = jnp.where(jnp.eye(b, k=-1, dtype=bool)[None], product(e, before), scores_e)

    def pairs(x):
        return [x.reshape(x.shape[0] // 2, 2, *x.shape[1:])[:, n] for n in range(2)]

    while b < C:
        (_, q_right), (e_left, e_right), (k_left, k_right), (t_left, t_right) = map(pairs, x)
        corner = matmul.dot_nt(jnp.concatenate([q_right, e_right], axis=1), k_left)

        def joined(x, lower_left):
            left, right = pairs(x)
            top = jnp.concatenate([left, jnp.zeros_like(left)], axis=2)
            return jnp.concatenate([top, jnp.concatenate([lower_left, right], axis=2)], axis=1)

        scores_q, scores_e = joined(scores_q, corner[:, :b]), joined(scores_e, corner[:, b:])
        x = Decayed(
            q_start=jnp.concatenate([pairs(x.q_start)[0], q_right * t_left], axis=1),
            e_start=jnp.concatenate([e_left, e_right * t_left], axis=1),
            k_end=jnp.concatenate([k_left * t_right, k_right], axis=1),
            through=t_left * t_right,
        )
        b *= 2
    return scores_q, scores_e, x


def make_form(x: chunks.Tokens, options: arguments.Options, products: state_scan.Products) -> chunks.Form:
    """Return the chunk form; gates per head are repeated for every channel."""
    n, HV, C, _ = x.v.shape
    K, masks = x.k.shape[3], x.masks
    g = jnp.broadcast_to(jnp.swapaxes(x.g, 2, 3), (n, HV, C, K)) if x.g.shape[2] != C else x.g
    wide = lambda y: tiles.repeat_heads(y.astype(jnp.float32), HV, axis=1)
    flat = lambda y: y.reshape(n * HV, *y.shape[2:])
    q, k = x.k if x.q is None else x.q, x.k
    q, k = (wide(tiles.l2norm(y.astype(jnp.float32)) if options.use_qk_l2norm_in_kernel else y) for y in (q, k))
    e, continuing = k if x.e is None else wide(x.e), None
    if masks is not None:
        continuing = flat(jnp.broadcast_to(tile.continuing(masks.same)[:, None], (n, HV, C, 1)))
    base = tile.base_block(options.min_gate, jnp.float32)
    found = interactions(*map(flat, (q, e, k, g)), base, continuing, options.erase_before_decay)
    scores, M, decayed = jax.tree.map(lambda y: y.reshape(n, HV, *y.shape[1:]), found)
    if masks is not None:
        scores, M = (jnp.where(masks.same[:, None], y, 0.0) for y in (scores, M))
    (q_start, e_start), k_end, through = x.within_sequence(decayed[:2], decayed[2], decayed.through)
    return chunks.Form(
        through=jnp.swapaxes(through, 2, 3),
        k=k_end,
        q=None if x.q is None else q_start,
        scores=None if x.q is None else scores,
        A=jnp.where(tiles.strictly_lower(C), M * x.beta, 0.0),
        e=e_start,
        beta=jnp.swapaxes(x.beta, 2, 3),
    )


RULE = chunks.Rule(make_form)
