"""Reads of keys and queries from the states and rings of a grid step of `decode.kernel`.

`n` sequences have their slots in buffer b. Their tokens are m rows, a multiple of n. A factor [m, K] for each value
head multiplies the keys and queries that read a state: the decays of channels over the ring, and the scales of a state
in 8 bits.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared.kernels import packed
from chunkwise.shared.kernels.spans.operands import ABSENT
from chunkwise.shared.serving.decode import ring, tile
from chunkwise.shared.serving.decode.records import DecodeStatic
from chunkwise.shared.serving.decode.refs import DecodeRefs


def read_states(refs: DecodeRefs, s: DecodeStatic, b, counts, rows, decays) -> list[list[jax.Array]]:
    """Return the values that erase keys and queries read from decayed states and rings, [m, V], for every value head.

    Args:
      refs: the Refs of the kernel.
      s: the static description of the launch.
      b: the buffer of the grid step.
      counts: how many tokens of its ring each sequence reads; None without rings.
      rows: the erase key and the query of every value head, [m, K].
      decays: the decays of the states that they read, [m, 1] or [m, K].
    """
    m, alone = refs.tokens.rows.shape[0], s.side_by_side == 1 or s.paired
    per_channel = alone and decays[0][1].shape[1] > 1
    # A float32 state takes the vector unit as long for one token as its parts take the matrix unit for several. Of a
    # transposed one the sums of the vector unit would come out as columns.
    by_parts = (refs.buffers.before.dtype != jnp.float32 or s.decode_tokens > 1) and not s.loops
    on_matrix_unit = by_parts or s.transposed
    if per_channel:
        rows = [[x * decay for x, decay in zip(*pairs, strict=True)] for pairs in zip(rows, decays, strict=True)]
    scores: list[jax.Array] = ABSENT
    start: jax.Array = ABSENT
    of_ring: list[list[jax.Array]] = ABSENT
    weights: list[jax.Array] = ABSENT
    if refs.has_rings:
        parts = refs.work.parts if refs.work.ring_parts is None else refs.work.ring_parts
        _split_rows(parts, s, rows)
        scores = _score_rings(refs, parts, s, b, counts)
    if factors := _factors(refs, s, b):
        rows = [[x * factor for x in pair] for pair, factor in zip(rows, factors, strict=True)]
    if on_matrix_unit and (factors or not refs.has_rings):
        _split_rows(refs.work.parts, s, rows)
    # How many value heads have the same rows. The matrix unit takes products in the order of the program: those with
    # states fill the time of those of rings that wait for others.
    alike = not (per_channel or factors or s.transposed or refs.tokens.p is not None)
    together = s.group if alike and s.V % packed.LANES == 0 else 1
    for h in range(0, s.HV, together):
        if refs.has_rings and h == s.HV // 2 // together * together:
            start, weights = _weigh_rings(refs, s, b, counts, scores)
        heads = range(h, h + together)
        if on_matrix_unit:
            _read_together(refs, s, b, heads)
        else:
            for head in heads:
                _read_alone(refs, b, head, {j: rows[head][j] for j in range(refs.first_row, 2)})
    if refs.has_rings:
        of_ring = _read_rings(refs, s, b, counts, weights)
    reads = []
    for h in range(s.HV):
        first, row = 8 * m * h, tile.row_of(h, s)
        found: list[Any]
        if on_matrix_unit and not s.transposed:
            of_part = [load_spaced(refs.work.products, first + j, m, 8) for j in range(2 * tile.PARTS)]
            found = [sum(of_part[0::2]), sum(of_part[1::2])]
        else:
            found = [refs.work.products[first + j * m : first + (j + 1) * m, :] for j in range(2)]
        if refs.has_rings:
            found = found if per_channel else [_each(start[:, row : row + 1], s) * x for x in found]
            found = [x + y for x, y in zip(found, of_ring[row], strict=True)]
        reads.append(found if per_channel else [decay * x for decay, x in zip(decays[h], found, strict=True)])
    return reads


def load_spaced(ref: jax.Ref, first: Any, count: int, stride: int) -> jax.Array:
    """Return `count` rows of a Ref [rows, lanes], `stride` rows apart."""
    # A load with a stride takes one register of lanes.
    if ref.shape[1] > packed.LANES:
        return jnp.concatenate([ref[pl.ds(first + i * stride, 1), :] for i in range(count)])
    return ref[pl.ds(first, count, stride=stride), :]


def _factors(refs: DecodeRefs, s: DecodeStatic, b) -> list[jax.Array]:
    """Return the factor of every value head; an empty list if there is none."""
    n, factors = refs.buffers.before.shape[1], []
    if refs.work.starts is not None:
        factors.append([load_spaced(refs.work.starts, tile.row_of(h, s), n, s.HV) for h in range(s.HV)])
    if refs.buffers.scale_in is not None and not s.loops:
        factors.append([refs.buffers.scale_in[b, :, h] for h in range(s.HV)])
    return [_each(functools.reduce(operator.mul, of_head), s) for of_head in zip(*factors, strict=True)]


def _each(x: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return the rows of sequences [n, lanes] for all of their tokens, [m, lanes]."""
    return jnp.concatenate([x] * s.decode_tokens)


def _read_alone(refs: DecodeRefs, b, head: int, rows: dict[int, jax.Array]) -> None:
    """Store the products of keys (0) and queries (1) with the states of a value head, by the vector unit."""
    n, m = refs.buffers.before.shape[1], refs.tokens.rows.shape[0]
    for place in range(n):
        S = refs.state(b, place, head)
        for row in range(place, m, n):
            for j, x in rows.items():
                at = 8 * m * head + j * m + row
                refs.work.products[at : at + 1, :] = tile.read_on_vector_unit(S, x[row : row + 1])


def _read_together(refs: DecodeRefs, s: DecodeStatic, b, heads) -> None:
    """Store the products of parts of keys and queries with the states of the value heads that share these parts.

    The states lie side by side, because the matrix unit of most chips has 256 columns.
    """
    n, m = refs.buffers.before.shape[1], refs.tokens.rows.shape[0]
    for place in range(n):
        # The rows of a sequence.
        first = tile.row_of(heads[0], s) * m
        some = [load_spaced(refs.work.parts, first + row, 8, m * s.HV) for row in range(place, m, n)]
        S = jnp.concatenate([refs.state(b, place, h) for h in heads], axis=1)
        y = tile.read_on_matrix_unit(S, jnp.concatenate(some), s)
        for j, h in enumerate(heads):
            for t, row in enumerate(range(place, m, n)):
                of_token = y[8 * t : 8 * t + 8, j * s.V : (j + 1) * s.V]
                if s.transposed:
                    # A load with a stride takes one register of lanes, and these rows may have more.
                    for i in range(refs.first_row, 2):
                        at = 8 * m * h + i * m + row
                        parts = [of_token[k : k + 1] for k in range(i, 2 * tile.PARTS, 2)]
                        refs.work.products[at : at + 1, :] = functools.reduce(jnp.add, parts)
                    continue
                first = 8 * (m * h + row)
                refs.work.products[first : first + 8, :] = of_token


def _split_rows(parts: jax.Ref, s: DecodeStatic, rows) -> None:
    """Store parts of keys and queries of every value head, so that a load with a stride has the rows of a sequence.

    Row (j HV + r H + h) m + i is part j of row i of head h R + r: parts of keys and queries in turn, then two of
    zeros.
    """
    m = len(rows[0][0])
    for h, some in enumerate(rows):
        pairs = zip(*map(tile.exact_parts, some), strict=True)
        found = [part for pair in pairs for part in pair]
        for j in range(8):
            at = (j * s.HV + tile.row_of(h, s)) * m
            parts[at : at + m, :] = found[j] if j < len(found) else jnp.zeros_like(found[0])


def _score_rings(refs: DecodeRefs, parts: jax.Ref, s: DecodeStatic, b, counts) -> list[jax.Array]:
    """Return the products of keys and queries with the keys of rings for every block, [m 2 B, keys], by sequences.

    With gates per channel the keys are decayed, and the decays of states over rings are stored.
    """
    n, m, dtype = refs.buffers.before.shape[1], refs.tokens.rows.shape[0], refs.buffers.ring_key.dtype
    some = ring.parts_of(dtype) * 2 * s.HV
    rows = [[load_spaced(parts, row, some, m) for row in range(place, m, n)] for place in range(n)]
    keys = []
    for place, count in enumerate(counts):
        if refs.work.starts is None:
            keys.append(refs.ring("key", b, place))
            continue
        left, start = ring.decayed_keys(refs.ring("key", b, place), refs.ring("gate", b, place), count, s.HV)
        refs.work.starts[place * s.HV : (place + 1) * s.HV, :] = start
        keys.append(left)
    scores, found = [], {}
    H = s.H if refs.work.starts is None else s.HV
    for block in ring.blocks(H, s.HV):
        # The value heads of a key head have the same scores, unless they have erase keys or gates of their own.
        same = (block[0] % H, len(block)) if refs.tokens.p is None and len(block) <= H else block
        if same not in found:
            found[same] = ring.score(rows, keys, counts, block, H, s.HV, dtype)
        scores.append(found[same])
    return scores


def _weigh_rings(refs: DecodeRefs, s: DecodeStatic, b, counts, scores) -> tuple[Any, list[Any]]:
    """Return the decays of states over rings [n, HV], None with gates per channel, and for blocks the weights."""
    n, dtype = refs.buffers.before.shape[1], refs.buffers.ring_write.dtype
    if refs.work.starts is not None:
        blocks = ring.blocks(s.HV, s.HV)
        return None, [ring.ring_weights(x, None, n, len(block), dtype) for x, block in zip(scores, blocks, strict=True)]
    blocks = ring.blocks(s.H, s.HV)
    gates = [ring.existing(refs.ring("gate", b, place), count, 1) for place, count in enumerate(counts)]
    left, start = ring.remaining(gates, len(blocks[0]))
    weights = []
    for x, block in zip(scores, blocks, strict=True):
        # Once for keys and once for queries of each token.
        starts = [at + block[0] for at in range(0, n * s.HV, s.HV) for _ in range(2 * s.decode_tokens)]
        decays = jnp.concatenate([left[at : at + len(block)] for at in starts])
        weights.append(ring.ring_weights(x, decays, n, len(block), dtype))
    return start, weights


def _read_rings(refs: DecodeRefs, s: DecodeStatic, b, counts, weights) -> list[list[jax.Array]]:
    """Return the values that keys and queries read from rings, [m, V] each, for every row of the order [R, H]."""
    n, rows = refs.buffers.before.shape[1], 2 * s.HV * s.decode_tokens
    blocks = ring.blocks(s.H if refs.work.starts is None else s.HV, s.HV)
    size = len(blocks[0])
    for of_block, block in zip(weights, blocks, strict=True):
        for place, (x, count) in enumerate(zip(of_block, counts, strict=True)):
            values = ring.read(x, refs.ring("write", b, place), count, block, s.HV)
            first = place * rows + block[0] * 2 * s.decode_tokens
            refs.work.ring_reads[first : first + len(values), :] = values
    load = lambda first: jnp.concatenate(
        [load_spaced(refs.work.ring_reads, first + t * 2 * size, n, rows) for t in range(s.decode_tokens)]
    )
    # A block has the keys and queries of its rows for every token.
    firsts = [row // size * size * 2 * s.decode_tokens + row % size for row in range(s.HV)]
    return [[load(first), load(first + size)] for first in firsts]
