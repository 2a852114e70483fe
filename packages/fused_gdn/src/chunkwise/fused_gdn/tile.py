"""Tile mathematics of the kernels: arrays in, arrays out.

It has the heads of a grid step, the gates of a chunk, the decays by which rows read and write the state, the scores,
and the products with the state. Tiles are [heads, C, width]; the [C, C] matrices of p heads lie side by side in the
lanes ("packed", see shared.kernels.packed): n = heads / p packs [n, C, p C]. Values per token, [C, heads], become
packed columns and rows. States are [K, V], as the user has them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from chunkwise.shared import compat
from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.kernels.spans import layout

# 2 to the power of this is zero, and sums with it do not overflow.
NEVER = np.float32(-1e30)


def split_gate(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (coarse, fine) with g = coarse + fine exactly and coarse a multiple of 1/16 nat.

    Cumulative sums of the coarse part are exact up to a million nats and sums of the fine part stay small, so
    (coarse_i - coarse_j) + (fine_i - fine_j) keeps the difference of two large cumulative gates to 1e-7 nats. The
    difference of two plain sums has the rounding of both: 3e-5 nats beyond a sum of 256, which gates of -30 at every
    few tokens reach soon.
    """
    coarse = jnp.round(g * 16.0) / 16.0
    return coarse, g - coarse


class Heads(NamedTuple):
    """Value heads that a grid step, or a stage of one, works on together, and the sizes of their tiles; all static.

    Attributes:
      C, K, V: chunk size, and head dimensions.
      heads: how many value heads.
      group: value heads that share a key head.
      p: heads that lie side by side in the lanes.
      first, first_key: the first value and key head, counted inside the grid step.
    """

    C: int
    K: int
    V: int
    heads: int
    group: int
    p: int
    first: int = 0
    first_key: int = 0

    @property
    def keys(self) -> int:
        """Key heads of a pack: 1 if all its heads share one."""
        return max(1, self.p // self.group)

    @property
    def map_lane(self) -> int:
        """The lane where the channels of a map begin, which lie behind those of the values in whole registers."""
        return packed.pad_lanes(self.V)

    @property
    def values_at(self) -> slice:
        """Which value heads of the grid step."""
        return slice(self.first, self.first + self.heads)

    @property
    def packs_at(self) -> slice:
        """Which packs of the grid step."""
        return slice(self.first // self.p, (self.first + self.heads) // self.p)

    @property
    def keys_at(self) -> slice:
        """Which key heads of the grid step."""
        return slice(self.first_key, self.first_key + self.heads // self.group)

    def split(self, most: int) -> "list[Heads]":
        """Return equal parts of at most `most` heads, if packs and key heads allow: whole groups, or parts of one."""
        sizes = [n for n in range(self.p, self.heads + 1, self.p) if self.heads % n == 0]
        sizes = [n for n in sizes if n % self.group == 0 or self.group % n == 0]
        n = max([n for n in sizes if n <= most], default=sizes[0])
        part = self._replace(heads=n, group=min(n, self.group))
        firsts = ((self.first + i, self.first_key + i // self.group) for i in range(0, self.heads, n))
        return [part._replace(first=first, first_key=key) for first, key in firsts]

    def over(self, chunks: int) -> "Heads":
        """Return the heads of some chunks of a grid step, which lie behind one another."""
        return self._replace(heads=self.heads * chunks)

    def in_chunk(self, index: int, chunk: "Heads") -> "Heads":
        """Return the same heads of a chunk, counted through the chunks of a grid step, each with the heads `chunk`."""
        first_key = self.first_key + index * (chunk.heads // chunk.group)
        return self._replace(first=self.first + index * chunk.heads, first_key=first_key)

    def wide(self) -> "Heads":
        """Return the same heads with two packs side by side, if their keys fill the 256 rows of a matrix unit."""
        double = self._replace(p=2 * self.p)
        fits = self.heads % double.p == 0 and double.keys * max(self.K, self.p * self.C) <= 256
        # A pack holds whole groups, or a part of one.
        return double if fits and (double.p % self.group == 0 or self.group % double.p == 0) else self


def key_packs(x: jax.Array, s: Heads) -> list[jax.Array]:
    """Return the key heads of every pack: `s.keys` tiles [n, C, K] of x [key heads, C, K]."""
    n = s.heads // s.p
    return [jnp.stack([x[(i * s.p + j * (s.p // s.keys)) // s.group] for i in range(n)]) for j in range(s.keys)]


def placed_keys(tiles: list[jax.Array], s: Heads) -> jax.Array:
    """Return the tiles of `key_packs` below one another, one for every head of a pack, in the lanes of its key head."""
    each, zero = s.p // s.keys, jnp.zeros_like(tiles[0])
    return packed.concat_rows(
        [packed.beside([tiles[j] if i // each == j else zero for j in range(s.keys)]) for i in range(s.p)]
    )


def indicator(condition: jax.Array) -> jax.Array:
    """Return 1 and 0 in float32."""
    # Under jax_enable_x64 two Python numbers would give float64.
    return jnp.where(condition, jnp.float32(1.0), jnp.float32(0.0))


def selecting(x: jax.Array, selection: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return operands of an exact product of float32 x and a matrix of zeros and ones, part by part.

    It moves values by products, because the matrix unit has time, and the unit that moves lanes has none.
    """
    ones = indicator(selection).astype(jnp.bfloat16)[None]
    return [part[None] for part in matmul.bf16_parts(x)], [ones] * 3


def select(x: jax.Array, selection: jax.Array) -> jax.Array:
    """Return x @ selection for x [m, k] and a matrix of zeros and ones [k, n]: exact."""
    x_parts, ones = selecting(x, selection)
    return matmul.dot(packed.concat_lanes(x_parts), packed.concat_rows(ones))[0]


def select_from(selection: jax.Array, x: jax.Array) -> jax.Array:
    """Return selection @ x for x [k, m] and a matrix of zeros and ones [n, k]: exact."""
    x_parts, ones = selecting(x, selection)
    return matmul.dot(packed.concat_lanes(ones), packed.concat_rows(x_parts))[0]


def select_rows(x: jax.Array, selection: jax.Array) -> jax.Array:
    """Return x^T @ selection for x [k, m] and a matrix of zeros and ones [k, n]: exact."""
    x_parts, ones = selecting(x, selection)
    return matmul.dot_tn(packed.concat_rows(x_parts), packed.concat_rows(ones))[0]


def over_lanes(x: jax.Array, w: int, heads: slice) -> jax.Array:
    """Return values [m, any] of `heads` with each repeated over w lanes, [m, heads * w]."""
    shape = (x.shape[1], (heads.stop - heads.start) * w)
    head = packed.block_of(lax.broadcasted_iota(jnp.int32, shape, 1), w) + jnp.int32(heads.start)
    return select(x, head == lax.broadcasted_iota(jnp.int32, shape, 0))


def packed_columns(xs: list[jax.Array], s: Heads) -> list[jax.Array]:
    """Return values [C, any] of some heads as packed columns, each over the lanes of its head: [n, C, p C] float32."""
    wide, w = over_lanes(jnp.concatenate(xs), s.C, s.values_at), s.p * s.C
    packs = jnp.stack([wide[:, i : i + w] for i in range(0, wide.shape[1], w)])
    return [packs[:, i * s.C : (i + 1) * s.C] for i in range(len(xs))]


def head_columns(x: jax.Array, s: Heads, width: int) -> jax.Array:
    """Return packed columns [n, C, p C] as tiles of heads, each value repeated in all lanes: [heads, C, width]."""
    tiles, period = [x], s.p * s.C
    while period > s.C:
        # Every tile becomes two tiles, each with one half of its heads repeated over the lanes of the other half.
        period //= 2
        low = (packed.lane_index(x.shape[2]) & jnp.int32(period)) == 0
        rotated = [packed.rotate(tile, period) for tile in tiles]
        pairs = zip(tiles, rotated, strict=True)
        tiles = [jnp.where(low, *pair) for tile, other in pairs for pair in ((tile, other), (other, tile))]
    heads = jnp.stack([tile[i] for i in range(x.shape[0]) for tile in tiles])
    return packed.concat_lanes([heads] * -(-width // x.shape[2]))[..., :width]


def packed_rows(x: jax.Array, s: Heads) -> jax.Array:
    """Return rows [heads, p C], each repeated p times along the lanes, as packed rows [n, 1, p C]."""
    head = packed.block_of(packed.lane_index(s.p * s.C)[0], s.C)
    packs = []
    for first in range(0, s.heads, s.p):
        row = x[first : first + 1]
        for i in range(1, s.p):
            row = jnp.where(head == i, x[first + i : first + i + 1], row)
        packs.append(row)
    return jnp.stack(packs)


def packed_index(s: Heads) -> tuple[jax.Array, jax.Array]:
    """Return the row and the column inside of each of the packed matrices: both int32 [1, C, p C]."""
    shape = (1, s.C, s.p * s.C)
    i, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
    return i, lane & jnp.int32(s.C - 1)


class Gates(NamedTuple):
    """Cumulative gates, to base 2 because the machine's exponential is 2^x, and step sizes of a chunk.

    `gate_sums` makes columns [C, heads] and rows [heads, p C], repeated p times along the lanes, of all heads of a grid
    step; `pack_gates` makes packed columns [n, C, p C] and packed rows [n, 1, p C] for some of these heads.

    Attributes:
      G: parts of the cumulative gate, as columns, which add up to it. Two parts keep differences of large sums exact.
      G_rows: the same as rows.
      beta, beta_rows: the step sizes as columns and as rows.
    """

    G: list[jax.Array]
    G_rows: list[jax.Array]
    beta: jax.Array
    beta_rows: jax.Array


def gate_sums(g: jax.Array, beta: jax.Array, s: Heads, exact: bool, masks: layout.SequenceMasks | None) -> Gates:
    """Sum up the gates g [C, heads], in nats, of a chunk, within the sequences of `masks`.

    So no sequence changes the rounding of another.
    """
    i, j = (x[0] for x in packed_index(s))  # [C, p C]
    earlier, later = (i >= j, i <= j) if masks is None else (masks.same[0] & (i >= j), masks.same[0] & (i <= j))
    g = g * tiles.LOG2_E
    terms = split_gate(g) if exact else (g,)
    G = [select_from(earlier[:, : s.C], x) for x in terms]
    # One product turns gates and step sizes into rows. Masks cannot be concatenated in a kernel, but numbers can.
    selection = jnp.concatenate([indicator(later), indicator(i == j)], axis=1) > 0.0
    rows = select_rows(jnp.concatenate([*terms, beta], axis=1), selection)  # [(terms + 1) heads, 2 p C]
    *G_rows, beta_rows = [rows[n : n + s.heads] for n in range(0, rows.shape[0], s.heads)]
    return Gates(G, [x[:, : s.p * s.C] for x in G_rows], beta, beta_rows[:, s.p * s.C :])


def gate_sums_of(g: jax.Array, beta: jax.Array, s: Heads, exact: bool, masks: list) -> Gates:
    """Return `gate_sums` of the chunks with these masks, whose heads lie side by side in g and beta [C, chunks heads].

    Without masks, one product serves them all. With masks, one product turns the sums of all chunks into rows.
    """
    if masks[0] is None:
        return gate_sums(g, beta, s.over(len(masks)), exact, None)
    i, j = (x[0] for x in packed_index(s))  # [C, p C]
    earlier = [x.same[0, :, : s.C] & (i >= j)[:, : s.C] for x in masks]
    g = g * tiles.LOG2_E
    each = [
        [x[:, n * s.heads : (n + 1) * s.heads] for n in range(len(masks))] for x in (split_gate(g) if exact else (g,))
    ]
    G = [jnp.concatenate([select_from(y, z) for y, z in zip(earlier, x, strict=True)], axis=1) for x in each]
    rows = select_rows(jnp.concatenate([*G, beta], axis=1), i == j)  # [(terms + 1) chunks heads, p C]
    *G_rows, beta_rows = [rows[n : n + g.shape[1]] for n in range(0, rows.shape[0], g.shape[1])]
    return Gates(G, G_rows, beta, beta_rows)


def select_chunk(x: Gates, s: Heads) -> Gates:
    """Return the sums of `gate_sums_of` with zeros in place of other heads than s.

    The next product reads all heads, and other chunks may hold NaN of other sequences.
    """
    head = lax.broadcasted_iota(jnp.int32, x.beta.shape, 1)
    chosen = (head >= jnp.int32(s.first)) & (head < jnp.int32(s.first + s.heads))
    return x._replace(G=[jnp.where(chosen, y, 0.0) for y in x.G], beta=jnp.where(chosen, x.beta, 0.0))


def pack_gates(x: Gates, s: Heads) -> Gates:
    """Return the gates of some heads, packed."""
    *G, beta = packed_columns([*x.G, x.beta], s)
    *G_rows, beta_rows = [packed_rows(row[s.values_at], s) for row in (*x.G_rows, x.beta_rows)]
    return Gates(G, G_rows, beta, beta_rows)


def gap(later, earlier):
    """Return the sum of later - earlier over their parts."""
    return functools.reduce(jnp.add, [a - b for a, b in zip(later, earlier, strict=True)])


def boundary_decays(g: Gates, s: Heads, masks: layout.SequenceMasks | None):
    """Return which pairs of rows interact, and the decays by which rows read and write the state.

    Args:
      g: packed gates.
      s: their heads.
      masks: None for a chunk that lies inside one sequence. Padding follows all sequences; its keys, values and gates
        must be zero.

    Returns:
      Pairs i >= j that may interact, bool [1, C, p C]; and as packed columns [n, C, p C] the decay from the start of
      the chunk to each row, whose last row is the decay of the state over the chunk, and the decay from each row to the
      end; both are zero for rows of other sequences.
    """
    start, end = jnp.exp2(sum(g.G)), jnp.exp2(gap([x[:, -1:] for x in g.G], g.G))  # both [n, C, p C]
    i, j = packed_index(s)
    if masks is None:
        return i >= j, start, end
    return masks.same & (i >= j), jnp.where(masks.carried, start, 0.0), jnp.where(masks.ending, end, 0.0)


def scores(left: list[jax.Array], k, g: Gates, pairs, s: Heads):
    """Return x k^T for every x of `left`, and the decays (zero outside of `pairs`): packed [n, C, p C].

    All x and k are [key heads, C, K]; one product serves them all.
    """
    w = s.wide()
    above = packed.concat_rows(
        [packed.beside(key_packs(x, w)) for x in left]
    )  # [packs of w, len(left) C, lanes of its keys]
    products = packed.split_lanes(
        matmul.dot_nt(above, placed_keys(key_packs(k, w), w)), w.p // s.p
    )  # [n, len(left) C, p C]
    each = [products[:, i * s.C : (i + 1) * s.C] for i in range(len(left))]
    return *each, jnp.exp2(jnp.where(pairs, gap(g.G, g.G_rows), NEVER))


def read_state(k, q, S, s: Heads):
    """Return K S and Q S as [heads, C, V] float32 (None without q), one product for all value heads of a key head."""
    left = k if q is None else packed.concat_rows([k, q])  # [key heads, C or 2 C, K]
    parts = [packed.side_registers(part, s.group) for part in packed.split_bf16(S, k.dtype)]
    if len(parts) > 1:
        parts = [packed.whole(part, 1) for part in parts]
    right = packed.concat_rows(parts)
    products = matmul.dot(packed.beside([left] * len(parts)), right)
    read = packed.split_lanes(products, s.group, S.shape[2])
    return read[:, : s.C], None if q is None else read[:, s.C :]


def write_state(k, x, s: Heads):
    """Return K^T x, [heads, K, V] float32, for x [heads, C, V] at 16 bits, one product for all heads of a key head."""
    parts = packed.split_bf16(x, k.dtype)
    right = packed.concat_rows([packed.side_registers(part, s.group) for part in parts])
    return packed.split_lanes(matmul.dot_tn(packed.concat_rows([k] * len(parts)), right), s.group, x.shape[2])


def multiply_parts(A, x, s: Heads, dtype):
    """Return A x of every head, [heads, C, V] float32, for packed A as `packed.split_bf16` gives it, at 16 bits.

    Two parts of A stand below one another, each beside itself, so that each part of x enters the matrix unit once.
    `packed.multiply_packed` has fewer rows, which is faster where the unit is narrow, or where few heads wait for it.
    """
    if A.shape[2] == s.p * s.C or compat.matrix_columns() <= 128:
        return packed.multiply_packed(A, x, s.p, dtype)
    parts = [A[:, :, i : i + s.p * s.C] for i in range(0, A.shape[2], s.p * s.C)]
    left = packed.concat_rows([packed.concat_lanes([part, part]) for part in parts])
    right = [packed.place_tiles(packed.pack_members(part, s.p)) for part in packed.split_bf16(x, dtype)]
    products = matmul.dot(left, packed.concat_rows(right))  # [n, 2 C, p V]
    return packed.split_lanes(products[:, : s.C] + products[:, s.C :], s.p, x.shape[2])


def write_packed(k, x, s: Heads):
    """Return K^T x of every head, packed [n, K, p C] float32, for packed x [n, C, p C] at 16 bits."""
    keys, parts = key_packs(k, s), packed.split_bf16(x, k.dtype)
    if len(keys) > 1:  # the columns of a head take the keys of this head alone
        owner = packed.block_of(packed.lane_index(s.p * s.C), s.p * s.C // len(keys))
        parts = [jnp.where(owner == i, x, jnp.zeros_like(x)) for x in parts for i in range(len(keys))]
    keys = packed.concat_rows(keys * (len(parts) // len(keys)))
    return matmul.dot_tn(keys, packed.concat_rows(parts))
