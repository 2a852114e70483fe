"""The loads and stores of all kernels of the gated delta rule."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gdn import tile
from chunkwise.fused_gdn.operands import GdnRefs
from chunkwise.shared.kernels import inverse, tiles
from chunkwise.shared.kernels.spans import layout, nonfinite
from chunkwise.shared.kernels.spans.operands import FusedStatic


def heads_of(static: FusedStatic, heads: int) -> tile.Heads:
    """Return the `Heads` of `heads` value heads of a grid step."""
    return tile.Heads(static.C, static.K, static.V, heads, static.group, static.p)


def of_chunks(refs: GdnRefs, s: tile.Heads, chunks: int) -> list[GdnRefs]:
    """Return the Refs of every chunk of a grid step of several chunks."""
    tokens = "q", "k", "v", "g", "beta", "o", "v_new_over_beta"
    packs = "start", "end", "scores", "A", "blocks", "last", "last_prev"

    def of_chunk(i: int) -> GdnRefs:
        each = lambda count: slice(i * count, (i + 1) * count)
        at: dict[str, Any] = dict.fromkeys(tokens, each(s.C)) | dict.fromkeys(packs, each(s.heads // s.p))
        at |= dict.fromkeys(("keys", "queries", "keys_prev"), each(s.heads // s.group))
        at |= dict.fromkeys(("u", "w"), each(s.heads)) | dict.fromkeys(("A_inv", "A_inv_out", "h"), i)
        return layout.slice_refs(refs, at)

    return [of_chunk(i) for i in range(chunks)]


def store(refs: GdnRefs, values: dict[str, Any], at: object = ...) -> None:
    """Store arrays in the Refs of their names that the launch has."""
    for name, x in values.items():
        if getattr(refs, name) is not None:
            getattr(refs, name)[at] = x


def invert(refs: GdnRefs, packs: Any, dtype, found: list) -> Iterator[None]:
    """Append A_inv of some packs of heads to a list, unfinished ones before it; yield between products."""
    for A_inv in inverse.block_doubling(refs.blocks[packs], refs.A[packs], 2 if dtype == jnp.bfloat16 else 3):
        found.append(A_inv)
        yield


def load_chunk(refs, valid, s: tile.Heads, static: FusedStatic, at: slice = slice(None)) -> Any:
    """Load q, k tiles [key heads, C, K] and g, beta [C, heads] float32 of a chunk; rows that are not valid are zero.

    The chunk has the rows `at` of the blocks.
    The last result is the factor [C, heads] that is in beta already, to make up for the rounding of keys of unit
    length, or None.
    """
    q = None if refs.q is None else layout.load_heads(refs.q, s.K, valid=valid, at=at)
    k = layout.load_heads(refs.k, s.K, valid=valid, at=at)
    g, beta = None if refs.g is None else tiles.clip_gate(refs.g[at]), refs.beta[at].astype(jnp.float32)
    g = jnp.zeros_like(beta) if g is None else g
    if valid is not None:
        g, beta = (jnp.where(valid, x, 0.0) for x in (g, beta))
    if not static.normalise:
        return q, k, g, beta, None
    q = None if q is None else tiles.l2norm(q.astype(jnp.float32)).astype(q.dtype)
    k, factor = tiles.unit_keys(k.astype(jnp.float32), k.dtype)  # factor [key heads, C, 1]
    if factor is None or not static.compensate:
        return q, k, g, beta, None
    head, by_head = lax.broadcasted_iota(jnp.int32, beta.shape, 1), jnp.broadcast_to(factor[0], beta.shape)
    for i in range(1, len(factor)):
        by_head = jnp.where(head >= jnp.int32(i * s.group), factor[i], by_head)
    return q, k, g, beta * by_head, by_head


def tokens_not_finite(refs, s: tile.Heads, *keys, at: slice = slice(None)) -> jax.Array:
    """Return which rows of g, beta and of Refs of keys or queries are not finite, float32 [1, C, 1].

    The chunk has the rows `at` of the blocks.
    """
    gates = () if refs.g is None else (tiles.clip_gate(refs.g[at]),)
    gates = (x.astype(jnp.float32)[None] for x in (*gates, refs.beta[at]))
    return nonfinite.rows_not_finite(*(layout.load_heads(ref, s.K, at=at) for ref in keys), *gates)


def values_not_finite(refs, s: tile.Heads, at: slice = slice(None)) -> jax.Array:
    """Return which rows of v are not finite, float32 [1, C, 1]; the chunk has the rows `at` of the block."""
    return nonfinite.rows_not_finite(layout.load_heads(refs.v, s.V, at=at))
