"""The gated delta rule in plain JAX: the mathematics of its chunks, for `chunkwise.shared.plain.chunks`."""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gdn import tile
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import chunking, matmul, tiles
from chunkwise.shared.plain import chunks, state_scan


def make_form(x: chunks.Tokens, options: arguments.Options, passes: int | None) -> chunks.Form:
    """Return the chunk form of tokens whose gates are `find_decays`."""
    C, repeat = x.v.shape[2], x.of_value_heads
    q, k, beta = x.q, x.k, x.beta
    if options.use_qk_l2norm_in_kernel:
        q = None if q is None else tiles.l2norm(q.astype(jnp.float32)).astype(q.dtype)
        k, factor = tiles.unit_keys(k.astype(jnp.float32), k.dtype)
        beta = beta if factor is None else beta * repeat(_swap(factor))
    coarse, fine, from_start, to_end, through = x.g
    below = tiles.strictly_lower(C) if x.masks is None else tiles.strictly_lower(C) & x.masks.same[:, None]
    # Without the diagonal, whose 1 does not depend on gates: its terms in the gradients of gates would cancel only up
    # to rounding, and so swamp decays of 1e-13.
    decay = tiles.masked_exp((_swap(coarse) - coarse) + (_swap(fine) - fine), below)
    readers = [k] if q is None else [k, q]
    # One product serves keys and queries. If the inverse is known, only gradients need the product of the keys.
    if x.solved:
        kk, *qk = (repeat(state_scan.dot_nt(y, k, passes)) for y in readers)
    else:
        kk, *qk = jnp.split(
            repeat(state_scan.dot_nt(jnp.concatenate(readers, axis=2), k, passes)), len(readers), axis=2
        )
    # A token reads its value without a decay.
    scores = [jnp.where(tiles.row_index(C) == tiles.column_index(C), y, decay * y) for y in qk]
    k = repeat(k).astype(jnp.float32)
    return chunks.Form(
        through=through,
        k=_swap(to_end) * k,
        q=None if q is None else _swap(from_start) * repeat(q).astype(jnp.float32),
        scores=scores[0] if scores else None,
        A=decay * kk * beta,
        e=_swap(from_start) * k,
        beta=_swap(beta),
    )


def _swap(rows: jax.Array) -> jax.Array:
    return jnp.swapaxes(rows, 2, 3)


def find_decays(g: jax.Array, masks: chunking.StreamMasks | None) -> tuple[jax.Array, ...]:
    """Return the decays of chunks from their gates g, rows [NT, HV, 1, C], within the sequences of `masks`.

    Returns:
      Two parts of the cumulative gates, in nats, see `split_gate`; the decays from the start of the chunk to each
      token, 0 for tokens of later sequences, and from each token to the end of the chunk, 0 for tokens of sequences
      that ended; all are rows. The decays over whole chunks [NT, HV, 1, 1], 0 if another sequence begins in it.
    """
    if masks is None:
        coarse, fine = (lax.cumsum(part, axis=3) for part in tile.split_gate(g))
        # These are sums from the end. As a difference to the last row, the decay 1 of the last row would get gradients
        # of gates that cancel only up to rounding.
        after = lax.cumsum(g, axis=3, reverse=True)[..., 1:]
        to_end = jnp.exp(jnp.pad(after, [(0, 0), (0, 0), (0, 0), (0, 1)]))
        from_start = jnp.exp(coarse + fine)
        return coarse, fine, from_start, to_end, from_start[..., -1:]
    # Sums go over one sequence only, so that no sequence changes the rounding of another.
    C, same = g.shape[3], masks.same
    coarse, fine = (_sums(part, same & tiles.lower(C)) for part in tile.split_gate(g))
    from_start = jnp.where(masks.carried[:, None, None], jnp.exp(coarse + fine), 0.0)
    to_end = jnp.where(masks.ending[:, None, None], jnp.exp(_sums(g, same & ~tiles.lower(C))), 0.0)
    through = jnp.where(masks.through[:, None, None, None], from_start[..., -1:], 0.0)
    return coarse, fine, from_start, to_end, through


def _sums(g, selected):
    """Return the sums of gates g, rows [NT, HV, 1, C], over the columns j selected for every i, bool [NT, C, C]."""
    return matmul.dot_nt(g[:, :, 0], selected.astype(jnp.float32))[:, :, None]


# With C rows in a chunk, the cost per token of products inside a chunk grows as C, and the cost of the scan's steps and
# of states kept for the backward falls as 1 / C: see docs/data/lessons.csv.
RULE = chunks.Rule(make_form, find_decays, at_once=False, most_rows=32)
