"""The loads and stores of both kernels: a chunk of a block, the decays of its gates, and its valid rows.

A block of a grid step holds the tokens of several chunks; `StageChunk.index` is the chunk's number among them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.fused_gla import channels, packs, tile
from chunkwise.fused_gla.operands import GlaRefs, GlaStatic
from chunkwise.shared.kernels import matmul, tiles
from chunkwise.shared.kernels.spans import layout, nonfinite
from chunkwise.shared.kernels.spans.stage_chunks import StageChunk


def _rows_at(s: GlaStatic, chunk: StageChunk):
    """Return the place of a chunk's rows in a block of tokens."""
    return pl.ds(pl.multiple_of(chunk.index * jnp.int32(s.C), s.C), s.C)


def _valid_row(refs: GlaRefs, s: GlaStatic, chunk: StageChunk) -> jax.Array | None:
    """Return `chunk.valid` as a row, bool [1, 1, C]."""
    if chunk.masks is not None:
        return (refs.owner[chunk.index][None] >= 0) & (tiles.to_row(chunk.nonfinite_rows) == 0.0)
    return None if chunk.valid is None else chunk.span.columns(s.C)[None]


def _select(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0.0)


def load(ref, D: int, s: GlaStatic, chunk: StageChunk, heads: slice = slice(None)) -> jax.Array:
    """Return tokens as tiles [heads, C, D]; rows that are not valid become zeros."""
    return layout.load_heads(ref, D, heads, chunk.valid, _rows_at(s, chunk))


def group_of(refs: GlaRefs, s: GlaStatic) -> int:
    """Return how many value heads of the block share a key head."""
    return refs.v.shape[1] // s.V // (refs.k.shape[1] // s.K)


def key_heads(refs: GlaRefs, s: GlaStatic, heads: slice) -> slice:
    """Return the key heads of some value heads of the block."""
    group = group_of(refs, s)
    return slice(heads.start // group, -(-heads.stop // group))


def runs_of(refs: GlaRefs, s: GlaStatic, most: int) -> list[slice]:
    """Return the heads of the block in runs of whole groups that share a key head, of `most` heads or fewer."""
    every, group = refs.v.shape[1] // s.V, group_of(refs, s)
    run = max((n for n in range(group, most + 1, group) if every % n == 0), default=group)
    return [slice(first, first + run) for first in range(0, every, run)]


def load_packs(ref, refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice) -> jax.Array:
    """Return values, or what lies as they do, of some heads as packs [m, C, p V] in the type of products."""
    at = slice(heads.start // s.p, heads.stop // s.p)
    return load(ref, s.p * s.V, s, chunk, at).astype(product_dtype(refs))


def load_skip(refs: GlaRefs, s: GlaStatic, heads: slice) -> jax.Array:
    """Return the factors of values in the output for some heads, as packs of one row [m, 1, p V]."""
    return layout.load_heads(refs.skip, s.p * s.V, slice(heads.start // s.p, heads.stop // s.p))


def load_keys(ref, refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice) -> jax.Array:
    """Return queries or keys of some value heads, [key heads, C, K] in the type of products."""
    return load(ref, s.K, s, chunk, key_heads(refs, s, heads)).astype(product_dtype(refs))


def product_dtype(refs: GlaRefs) -> jnp.dtype:
    """Return the type of products of the tensors that a launch has."""
    return matmul.operand_dtype(*(x.dtype for x in (refs.q, refs.unread, refs.k, refs.v) if x is not None))


def load_tensors(refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice) -> tuple[Any, Any, jax.Array]:
    """Return q, k [key heads, C, K] and v [heads, C, V] in the type of products; None for a q that is not read."""
    keys, dtype = key_heads(refs, s, heads), product_dtype(refs)
    q, k = (None if ref is None else load(ref, s.K, s, chunk, keys).astype(dtype) for ref in (refs.q, refs.k))
    return q, k, load(refs.v, s.V, s, chunk, heads).astype(dtype)


def pairs_of(refs: GlaRefs, s: GlaStatic) -> channels.Pairs:
    """Return how the decays of pairs are made; gates per head have a decay for every pair."""
    if not s.per_channel:
        return channels.Pairs.NONE
    return channels.Pairs.PRODUCT if product_dtype(refs) == jnp.bfloat16 else channels.Pairs.LEVELS


def load_gates(refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice) -> jax.Array:
    """Return all gates added up, [heads, 1, C] or [heads, C, K], with zeros in rows that are not valid."""
    if s.per_channel:
        return tiles.clip_gate(load(refs.g, s.K, s, chunk, heads))  # [heads, C, K]
    g = jnp.zeros((heads.stop - heads.start, 1, s.C), jnp.float32)
    g = g if refs.g is None else g + refs.g[chunk.index, heads]
    g = g if refs.g_gamma is None else g + refs.g_gamma[heads]
    return _select(_valid_row(refs, s, chunk), g)


def load_row(ref, refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice, otherwise: float) -> jax.Array:
    """Return a value per token, [heads, 1, C], with another one in rows that are not valid."""
    x, valid = ref[chunk.index, heads], _valid_row(refs, s, chunk)
    return x if valid is None else jnp.where(valid, x, otherwise)


def load_sums(refs: GlaRefs, s: GlaStatic, chunk: StageChunk, start: bool = True, end: bool = True) -> packs.GateSums:
    """Return the gates per head of a chunk, of all heads, with the sums of both kinds or of one."""
    every = slice(0, refs.v.shape[1] // s.V)
    to_base_2 = jnp.float32(tiles.LOG2_E)
    g, weight = load_gates(refs, s, chunk, every) * to_base_2, None  # [h, 1, C]
    sums = packs.sum_spans(g[:, 0], packs.spans_of(s.C, start, end))
    if refs.log_weight is not None:
        weight = load_row(refs.log_weight, refs, s, chunk, every, tiles.FORGET) * to_base_2
        if end:
            sums[-1] += weight[:, 0]
    # A product with zeros and ones would carry what is not finite to other heads: it goes through the decays of pairs
    # and of the chunk alone.
    sums = [jnp.where(jnp.abs(x) < jnp.inf, x, 0.0) for x in sums]
    faults = 0.0 if weight is None else weight * 0.0
    through = jnp.exp2(jnp.sum(g + faults, axis=2, keepdims=True))
    if chunk.masks is not None:
        rows = [chunk.carried] * start + [chunk.ending] * end
        rows = [tiles.to_row(x.astype(jnp.float32))[0] > 0.0 for x in rows]  # [1, C]
        sums = [jnp.where(row, x, packs.NEVER) for row, x in zip(rows, sums, strict=True)]
        through = jnp.where(chunk.masks.through, through, 0.0)
    return packs.GateSums(g, weight, jnp.stack(sums), through)


def sum_parts(refs: GlaRefs) -> int:
    """Return how many bfloat16 parts of gates exponents keep; 16 bits are enough for decays of bfloat16 tensors."""
    return 2 if product_dtype(refs) == jnp.bfloat16 else 3


def _load_parts(
    refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return gates per channel, and bfloat16 tiles to add up in their place, whose sum is the gates.

    For products of bfloat16 tensors, which have 8 bits, the sum has 16 bits of the gates: a decay e^G is wrong by at
    most 2^-18 |G| e^G, which is less than 2^-19.
    """
    g = load_gates(refs, s, chunk, heads)
    # For bfloat16 gates, clipped or not, one tile is enough.
    count = 1 if refs.g.dtype == jnp.bfloat16 else 2 if product_dtype(refs) == jnp.bfloat16 else 3
    return g, matmul.bf16_parts(g, count)


def load_levels(refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice) -> tuple[jax.Array, ...]:
    """Return `channels.level_decays` of a chunk."""
    return channels.level_decays(_load_parts(refs, s, chunk, heads)[1])


def load_decays(
    refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice, constant: tile.GlaDecays | None = None,
    pairs: channels.Pairs = channels.Pairs.NONE,
) -> tile.GlaDecays:  # fmt: skip
    """Return the decays of a chunk, zero between sequences; or some heads of `constant` decays, if these are given.

    `pairs` are the decays of pairs that the caller reads where gates are per channel.
    """
    decays = constant
    if decays is None:
        g, parts = _load_parts(refs, s, chunk, heads)
        decays = channels.decays(g, s.scale, chunk.same, pairs, parts)
    if chunk.masks is None:
        return decays
    return decays._replace(
        from_start=jnp.where(chunk.carried, decays.from_start, 0.0),
        to_end=jnp.where(chunk.ending, decays.to_end, 0.0),
        through=jnp.where(chunk.masks.through, decays.through, 0.0),
    )


def constant_decays(refs: GlaRefs, s: GlaStatic, heads: int) -> tile.GlaDecays | None:
    """Return the decays of every chunk if all chunks have the same ones, else None."""
    if not s.constant:
        return None
    # The maximum over equal lanes, because a reduction leaves its result in every lane; a slice would be broadcast at
    # every use.
    gamma = jnp.zeros((heads, 1, s.C), jnp.float32) if refs.g_gamma is None else refs.g_gamma[...]
    gamma = jnp.max(gamma, axis=2, keepdims=True)  # [heads, 1, 1]
    return tile.constant_decays(gamma, s.scale, s.C)


def isolate(refs: GlaRefs, s: GlaStatic, chunk: StageChunk, names: Sequence[str], *states: tuple) -> StageChunk:
    """Isolate the sequences of a chunk that are not finite in gates, in these Refs of tokens or in the states."""
    return chunk.isolate(functools.partial(_not_finite, refs, s, chunk, names), *states)


def _not_finite(refs: GlaRefs, s: GlaStatic, chunk: StageChunk, names: Sequence[str]) -> jax.Array:
    """Return which rows are not finite in gates or in Refs of tokens, which may be None: float32 [1, C, 1]."""
    tokens = [(getattr(refs, name), s.K if name in ("q", "k") else s.V) for name in names]
    heads = [layout.load_heads(ref, D, at=_rows_at(s, chunk)) for ref, D in tokens if ref is not None]
    if refs.g is not None and s.per_channel:
        heads.append(tiles.clip_gate(layout.load_heads(refs.g, s.K, at=_rows_at(s, chunk))))  # [heads, C, K]
    rows = nonfinite.rows_not_finite(*heads)  # [1, C, 1]
    for ref in (None if s.per_channel else refs.g, refs.log_weight):
        if ref is not None:
            # Zero times a gate is zero if the gate is finite, and otherwise NaN, for which every comparison is false.
            zero = jnp.sum(ref[chunk.index] * 0.0, axis=0, keepdims=True)  # [1, 1, C]
            rows = jnp.maximum(rows, tiles.to_column(1.0 - (zero == 0.0).astype(jnp.float32)))
    return rows


def store(ref, x: jax.Array, s: GlaStatic, chunk: StageChunk, heads: slice) -> None:
    """Write tiles [heads, C, D] to the rows of a chunk, or only to the rows of a piece."""
    layout.store_heads(ref, x, chunk.valid if s.varlen else None, first=heads.start, at=_rows_at(s, chunk))


def store_gates(refs: GlaRefs, ref, x: jax.Array, s: GlaStatic, chunk: StageChunk, heads: slice) -> None:
    """Write the gradient of gates to the rows of a chunk, or only to the rows of a piece; zeros for padding."""
    valid = _valid_row(refs, s, chunk)
    if s.per_channel:
        store(ref, _select(chunk.valid, x), s, chunk, heads)
    elif s.varlen and valid is not None:
        ref[chunk.index, heads] = jnp.where(valid, x, ref[chunk.index, heads])
    else:
        ref[chunk.index, heads] = _select(valid, x)


def poison(s: GlaStatic, chunk: StageChunk, results: Sequence, *states: tuple) -> None:
    """Store NaN in results of sequences that are not finite: Refs of tokens, or of rows per head, and states."""
    refs = [ref for ref in results if ref is not None]
    tokens = [ref.at[_rows_at(s, chunk)] for ref in refs if len(ref.shape) == 2]
    chunk.poison(tokens, *states, in_lanes=[ref.at[chunk.index] for ref in refs if len(ref.shape) == 4])
