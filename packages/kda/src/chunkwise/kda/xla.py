"""Kimi delta attention in plain JAX: the mathematics of its chunks, for `chunkwise.shared.plain.chunks`."""

import jax
import jax.numpy as jnp

from chunkwise.kda import tile
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import matmul, tiles
from chunkwise.shared.plain import chunks

# In blocks of so many rows, every level is a masked product of all rows. Products of larger levels have only the pairs
# of the level.
_BASE = 16


def interactions(
    readers: list[jax.Array], k, g, base: int, continuing, erase_before_decay: bool, apart: bool
) -> tuple[list[jax.Array], tuple[list[jax.Array], jax.Array, jax.Array]]:
    """Return the scores of readers with keys, and readers, keys and decays of chunks, by which states are read.

    Blocks of `_BASE` rows are computed as in the kernels; then neighbouring blocks are joined, with one product for the
    corner.

    Args:
      readers: [q, e] or, where there is no output, [e].
      k, g: keys and gates.
      base: the rows of base blocks of the kernels.
      continuing: `tile.continuing` [M, C, 1], or None.
      erase_before_decay: as in `Options`.
      apart: whether no product serves both readers, so that a program which needs the scores of one makes these alone.

    Returns:
      The scores [M, C, C] of each reader; and the readers [M, C, K], with the decay from the start of the chunk to the
      row, whose gate is included, keys [M, C, K], with the decay from the row to the end of the chunk, and [M, 1, K],
      the decay over the whole chunk.
    """
    M, C = k.shape[:2]
    b = _BASE

    def blocks(x, size):
        return x.reshape(M * C // size, size, x.shape[-1])

    readers, k, g = [blocks(y, b) for y in readers], blocks(k, b), blocks(g * tiles.LOG2_E, b)
    *queries, e = readers

    def by_row(x):
        """Return the first, the second rows and so on of all blocks of 8."""
        return [x[:, r :: tile.SUBLANES] for r in range(tile.SUBLANES)]

    continuing = None if continuing is None else by_row(blocks(continuing, b))
    in_blocks = tile.block_decays(by_row(g), base, continuing, erase_before_decay)
    in_blocks = [jnp.stack(x, axis=2).reshape(g.shape) for x in in_blocks]
    decays, table = tile.chunk_decays(in_blocks, base), jnp.asarray(tile.level_table(b, base))[None]

    def base_scores(q, e):
        of = table[..., b if q is None else 0 : b if e is None else 2 * b]
        return jnp.swapaxes(tile.interaction_tile(q, e, k, decays, of, jnp.float32), 1, 2)

    if apart or not queries:
        scores = [*(base_scores(q, None) for q in queries), base_scores(None, e)]
    else:
        scores = jnp.split(base_scores(*readers), 2, axis=1)
    # A pair of a row with itself has no decay, nor has a pair of neighbours if erase keys read before the decay. In the
    # product of a base block, the gate would get its gradient once as a row and once, negative, as a column, with a
    # rounding error far above the gradients of strong gates.
    product = lambda x, y: jnp.sum(x * y, axis=-1, keepdims=True)
    if queries:
        scores[0] = jnp.where(jnp.eye(b, dtype=bool)[None], product(queries[0], k), scores[0])
    if erase_before_decay:
        before = jnp.pad(k[:, :-1], ((0, 0), (1, 0), (0, 0)))
        scores[-1] = jnp.where(jnp.eye(b, k=-1, dtype=bool)[None], product(e, before), scores[-1])
    starts = [y.start for y in decays.readers[-len(readers) :]]
    readers = [y * start for y, start in zip(readers, starts, strict=True)]
    k_end, through = k * decays.end, decays.start[:, -1:]

    def pairs(x):
        return [x.reshape(x.shape[0] // 2, 2, *x.shape[1:])[:, n] for n in range(2)]

    while b < C:
        (k_left, k_right), (t_left, t_right) = pairs(k_end), pairs(through)
        lefts, rights = zip(*map(pairs, readers), strict=True)
        if apart:
            corners = [matmul.dot_nt(y, k_left) for y in rights]
        else:
            corners = jnp.split(matmul.dot_nt(jnp.concatenate(rights, axis=1), k_left), len(rights), axis=1)

        def joined(x, lower_left):
            left, right = pairs(x)
            top = jnp.concatenate([left, jnp.zeros_like(left)], axis=2)
            return jnp.concatenate([top, jnp.concatenate([lower_left, right], axis=2)], axis=1)

        scores = [joined(*each) for each in zip(scores, corners, strict=True)]
        readers = [jnp.concatenate([left, right * t_left], axis=1) for left, right in zip(lefts, rights, strict=True)]
        k_end, through = jnp.concatenate([k_left * t_right, k_right], axis=1), t_left * t_right
        b *= 2
    return scores, (readers, k_end, through)


def make_form(x: chunks.Tokens, options: arguments.Options, passes: int | None) -> chunks.Form:
    """Return the chunk form; gates per head are repeated for every channel."""
    n, HV, C, _ = x.v.shape
    K, masks = x.k.shape[3], x.masks
    g = jnp.broadcast_to(jnp.swapaxes(x.g, 2, 3), (n, HV, C, K)) if x.g.shape[2] != C else x.g

    def unit(y: jax.Array) -> jax.Array:
        y = y.astype(jnp.float32)
        return tiles.l2norm(y) if options.use_qk_l2norm_in_kernel else y

    k, continuing = x.of_value_heads(unit(x.k)), None
    e = k if x.e is None else x.of_value_heads(x.e.astype(jnp.float32))
    readers = [e] if x.q is None else [x.of_value_heads(unit(x.q)), e]
    if masks is not None:
        continuing = x.flat(jnp.broadcast_to(tile.continuing(masks.same)[:, None], (n, HV, C, 1)))
    base = tile.base_block(options.min_gate, jnp.float32)
    # If the inverses are known, only gradients need the scores of erase keys.
    found = interactions(
        [x.flat(y) for y in readers], x.flat(k), x.flat(g), base, continuing, options.erase_before_decay, x.solved
    )
    scores, decayed = jax.tree.map(x.by_head, found)
    if masks is not None:
        scores = [jnp.where(masks.same[:, None], y, 0.0) for y in scores]
    (*q_start, e_start), k_end, through = x.within_sequence(*decayed)
    return chunks.Form(
        through=jnp.swapaxes(through, 2, 3),
        k=k_end,
        q=q_start[0] if q_start else None,
        scores=scores[0] if q_start else None,
        A=jnp.where(tiles.strictly_lower(C), scores[-1] * x.beta, 0.0),
        e=e_start,
        beta=jnp.swapaxes(x.beta, 2, 3),
    )


RULE = chunks.Rule(make_form)
