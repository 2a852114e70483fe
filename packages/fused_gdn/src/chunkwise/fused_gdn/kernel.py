"""Forward in one launch: tile mathematics, kernel body, launcher.

With K, Q, V the rows of a chunk, S the state before it, B = diag(beta), G the cumulative gate and
D_ij = exp(G_i - G_j),

    X  = (I + tril(K K^T * D, -1) B)^-1           P = scale tril(Q K^T * D) B     no state in them
    R  = V - e^G K S                              what the keys do not recall yet
    W  = X R                                      the same token by token, B W is v_new
    o  = scale e^G Q S + P W                      S' = e^G_last S + K^T e^(G_last - G) B W

P of a chunk, and X as far as it takes no products, are made in the step before the one that takes the state through it.
With bfloat16 tensors S enters its products as bfloat16: what rounding misses of S stays in S. X, P, R and W must not be
rounded so: where keys repeat they oscillate, and the sums over them cancel. They keep 16 bits, as two bfloat16 parts.

The matrices of p heads lie side by side in the lanes ("packed", see chunkwise.shared.packed): n = heads / p packs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn.config import Config
from chunkwise.shared import (
    LOG2_E,
    bf16_parts,
    dot,
    dot_nt,
    dot_tn,
    l2norm,
    named,
    out_struct,
    pallas_call,
    split_gate,
    to_column,
)
from chunkwise.shared.inverse import begin_inverse, ladder, strip_rows
from chunkwise.shared.packed import (
    block_of,
    lane_index,
    lanes,
    multiply_packed,
    parts,
    rotate,
    rows,
    side_lanes,
    split_lanes,
)

# 2 to its power is zero, and it can be added to without overflow.
NEVER = -1e30
# Heads that take the state through a chunk together: the products of one stage of theirs hide the latency of another.
STAGE = 8


class Shape(NamedTuple):
    """What a grid step works on; all static.

    Attributes:
      C, K, V: chunk size and padded dimensions.
      heads: value heads.
      group: value heads that share a key head.
      p: heads that lie side by side in the lanes.
    """

    C: int
    K: int
    V: int
    heads: int
    group: int
    p: int

    @property
    def keys(self) -> int:
        """Key heads of a pack: 1 where all its heads share one."""
        return max(1, self.p // self.group)

    def wide(self) -> "Shape":
        """Return the shape with two packs side by side where their keys fill the 256 rows of a matrix unit."""
        both = self._replace(p=2 * self.p)
        fits = self.heads % both.p == 0 and both.keys * max(self.K, self.p * self.C) <= 256
        return both if fits and both.p % min(both.p, self.group) == 0 else self


class Part(NamedTuple):
    """Some of the heads of a grid step, what products are issued for together.

    Attributes:
      shape: that of these heads alone.
      first, first_key: the first value and key head among all.
    """

    shape: Shape
    first: int = 0
    first_key: int = 0

    @property
    def heads(self) -> slice:
        """Its value heads."""
        return slice(self.first, self.first + self.shape.heads)

    @property
    def packs(self) -> slice:
        """Its packs."""
        return slice(self.first // self.shape.p, (self.first + self.shape.heads) // self.shape.p)

    @property
    def keys(self) -> slice:
        """Its key heads."""
        return slice(self.first_key, self.first_key + self.shape.heads // self.shape.group)

    def cut(self, most: int) -> "list[Part]":
        """Return equal parts of at most `most` heads, if packs and key heads let it: whole groups, or parts of one."""
        s = self.shape
        sizes = [n for n in range(s.p, s.heads + 1, s.p) if s.heads % n == 0 and (n % s.group == 0 or s.group % n == 0)]
        n = max([n for n in sizes if n <= most], default=sizes[0])
        shape = s._replace(heads=n, group=min(n, s.group))
        return [Part(shape, self.first + i, self.first_key + i // s.group) for i in range(0, s.heads, n)]


def key_packs(x: jax.Array, s: Shape) -> list[jax.Array]:
    """Return the key heads of every pack: `s.keys` tiles [n, C, K] of x [key heads, C, K]."""
    n = s.heads // s.p
    return [jnp.stack([x[(i * s.p + j * (s.p // s.keys)) // s.group] for i in range(n)]) for j in range(s.keys)]


def placed_keys(own: list[jax.Array], s: Shape) -> jax.Array:
    """Return the keys of `key_packs` below one another for all heads of a pack, each in the lanes of its key head."""
    each, zero = s.p // s.keys, jnp.zeros_like(own[0])
    return rows([lanes([own[j] if i // each == j else zero for j in range(s.keys)]) for i in range(s.p)])


def selecting(x: jax.Array, selection: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return operands of an exact product of float32 x and a matrix of zeros and ones, part by part.

    The matrix unit has time for such products, and the unit that moves lanes has not.
    """
    ones = jnp.where(selection, 1.0, 0.0).astype(jnp.bfloat16)[None]
    return [part[None] for part in bf16_parts(x)], [ones] * 3


def select(x: jax.Array, selection: jax.Array) -> jax.Array:
    """Return x @ selection for x [m, k] and a matrix of zeros and ones [k, n]: exact."""
    x_parts, ones = selecting(x, selection)
    return dot(lanes(x_parts), rows(ones))[0]


def select_from(selection: jax.Array, x: jax.Array) -> jax.Array:
    """Return selection @ x for x [k, m] and a matrix of zeros and ones [n, k]: exact."""
    x_parts, ones = selecting(x, selection)
    return dot(lanes(ones), rows(x_parts))[0]


def select_rows(x: jax.Array, selection: jax.Array) -> jax.Array:
    """Return x^T @ selection for x [k, m] and a matrix of zeros and ones [k, n]: exact."""
    x_parts, ones = selecting(x, selection)
    return dot_tn(rows(x_parts), rows(ones))[0]


def spread(x: jax.Array, w: int, heads: slice) -> jax.Array:
    """Return values [m, any] of `heads` with each repeated over w lanes, [m, heads * w]."""
    shape = (x.shape[1], (heads.stop - heads.start) * w)
    head = block_of(lax.broadcasted_iota(jnp.int32, shape, 1), w) + heads.start
    return select(x, head == lax.broadcasted_iota(jnp.int32, shape, 0))


def packed_columns(xs: list[jax.Array], heads: slice, s: Shape) -> list[jax.Array]:
    """Return values [C, any] of `heads` as packed columns, each over the C lanes of its head: [n, C, p C] float32."""
    wide, w = spread(jnp.concatenate(xs), s.C, heads), s.p * s.C
    packs = jnp.stack([wide[:, i : i + w] for i in range(0, wide.shape[1], w)])
    return [packs[:, i * s.C : (i + 1) * s.C] for i in range(len(xs))]


def head_columns(x: jax.Array, s: Shape, width: int) -> jax.Array:
    """Return packed columns [n, C, p C] head by head, each value over all lanes: [heads, C, width]."""
    tiles, period = [x], s.p * s.C
    while period > s.C:
        period //= 2
        low = (lane_index(x.shape[2]) & period) == 0
        turned = [rotate(tile, period) for tile in tiles]
        pairs = zip(tiles, turned, strict=True)
        tiles = [jnp.where(low, *both) for tile, turn in pairs for both in ((tile, turn), (turn, tile))]
    heads = jnp.stack([tile[i] for i in range(x.shape[0]) for tile in tiles])
    return lanes([heads] * (width // x.shape[2]))


def packed_rows(x: jax.Array, s: Shape) -> jax.Array:
    """Return rows [heads, p C], each repeated p times along the lanes, as packed rows [n, 1, p C]."""
    owner = block_of(lane_index(s.p * s.C)[0], s.C)
    packs = []
    for first in range(0, s.heads, s.p):
        row = x[first : first + 1]
        for i in range(1, s.p):
            row = jnp.where(owner == i, x[first + i : first + i + 1], row)
        packs.append(row)
    return jnp.stack(packs)


class Sums(NamedTuple):
    """Cumulative gates and step sizes of a chunk, to base 2, which is what the machine's exponential takes.

    Attributes:
      G: parts of the cumulative gate [C, heads]; their sum is the gate. Two parts keep differences of large sums exact.
      G_rows: the same as rows [heads, p C], repeated p times along the lanes.
      beta, beta_rows: likewise.
    """

    G: list[jax.Array]
    G_rows: list[jax.Array]
    beta: jax.Array
    beta_rows: jax.Array


def gate_sums(g: jax.Array, beta: jax.Array, s: Shape, exact: bool) -> Sums:
    """Sum up the gates g [C, heads], in nats, of a chunk."""
    i = lax.broadcasted_iota(jnp.int32, (s.C, s.p * s.C), 0)
    j = lax.broadcasted_iota(jnp.int32, (s.C, s.p * s.C), 1) & (s.C - 1)
    g = g * LOG2_E
    terms = split_gate(g) if exact else (g,)
    G = [select_from(i[:, : s.C] >= j[:, : s.C], x) for x in terms]
    # One product turns all of them into rows; masks cannot be joined, numbers can.
    both = jnp.concatenate([jnp.where(i <= j, 1, 0), jnp.where(i == j, 1, 0)], axis=1) == 1
    turned = select_rows(jnp.concatenate([*terms, beta], axis=1), both)
    *G_rows, beta_rows = [turned[n : n + s.heads] for n in range(0, turned.shape[0], s.heads)]
    return Sums(G, [x[:, : s.p * s.C] for x in G_rows], beta, beta_rows[:, s.p * s.C :])


class Gates(NamedTuple):
    """`Sums` of some heads, packed: columns [n, C, p C] and rows [n, 1, p C]."""

    G: list[jax.Array]
    G_rows: list[jax.Array]
    beta: jax.Array
    beta_rows: jax.Array


def gates(x: Sums, heads: slice, s: Shape) -> Gates:
    """Return the gates of `heads`, whose shape is `s`."""
    *G, beta = packed_columns([*x.G, x.beta], heads, s)
    *G_rows, beta_rows = [packed_rows(row[heads], s) for row in (*x.G_rows, x.beta_rows)]
    return Gates(G, G_rows, beta, beta_rows)


def gap(later, earlier):
    """Return the sum over parts of later - earlier."""
    return functools.reduce(jnp.add, [a - b for a, b in zip(later, earlier, strict=True)])


def scores(q, k, g: Gates, mask, s: Shape):
    """Return K K^T, Q K^T and the decays D (zero outside of `mask`), packed [n, C, p C]; q, k [key heads, C, K]."""
    w = s.wide()
    own_k, own_q = key_packs(k, w), key_packs(q, w)
    left = rows([lanes(own_k), lanes(own_q)])
    products = split_lanes(dot_nt(left, placed_keys(own_k, w)), w.p // s.p)
    return products[:, : s.C], products[:, s.C :], jnp.exp2(jnp.where(mask, gap(g.G, g.G_rows), NEVER))


def read_state(k, q, S, s: Shape):
    """Return K S and Q S as [heads, C, V] float32 (None without q), one product for all value heads of a key head."""
    left = k if q is None else rows([k, q])
    read = split_lanes(dot(left, side_lanes(S, s.group)), s.group)
    return read[:, : s.C], None if q is None else read[:, s.C :]


def write_state(k, W, s: Shape):
    """Return K^T W, [heads, K, V] float32, for W [heads, C, V] at 16 bits, one product for all heads of a key head."""
    W = parts(W, k.dtype)
    return split_lanes(dot_tn(rows([k] * len(W)), rows([side_lanes(x, s.group) for x in W])), s.group)


class Options(NamedTuple):
    """What the kernels are asked for; all static.

    Attributes:
      T: tokens; the last chunk may hold fewer than C.
      pieces: a step is a piece of a chunk instead of a chunk (`chunkwise.shared.Pieces`).
      normalise: apply the l2 norm to q and k.
      scale: multiplies q.
    """

    T: int
    pieces: bool
    normalise: bool
    scale: float


def own_rows(refs, step, c, s: Shape, opt: Options) -> jax.Array | None:
    """Return which rows of chunk c belong to a step, bool [C, 1]; None for all. Others may hold anything."""
    row = lax.broadcasted_iota(jnp.int32, (s.C, 1), 0)
    if opt.pieces:
        return (row >= refs.table[BEGIN, step]) & (row < refs.table[END, step])
    return row < opt.T - c * s.C if opt.T % s.C else None


def load_tokens(ref, own, width: int, heads: slice = slice(None)) -> jax.Array:
    """Load the heads of a flat block, or some of them, as tiles [heads, C, width]; rows that are not own are zero."""
    each = range(ref.shape[1] // width)[heads]
    tiles = jnp.stack([ref[:, i * width : (i + 1) * width] for i in each])
    return tiles if own is None else jnp.where(own, tiles, jnp.zeros_like(tiles))


def store_own(ref, at, x, own) -> None:
    """Store x in the lanes `at`, the own rows only; None for all."""
    x = x.astype(ref.dtype)
    ref[:, at] = x if own is None else jnp.where(own, x, ref[:, at])


def store_tiles(ref, tiles: jax.Array, own=None, first: int = 0) -> None:
    """Store tiles [heads, C, width] as the heads from `first` on of a flat block [C, heads * width]."""
    width = tiles.shape[2]
    for i in range(tiles.shape[0]):
        store_own(ref, slice((first + i) * width, (first + i + 1) * width), tiles[i], own)


def clear(outputs) -> None:
    """Store zeros."""
    for ref in outputs:
        if ref is not None:
            ref[...] = jnp.zeros_like(ref)


def lower_mask(s: Shape):
    """Return i >= j of shape [1, C, p C]."""
    i = lax.broadcasted_iota(jnp.int32, (1, s.C, s.p * s.C), 1)
    return i >= (lane_index(s.p * s.C) & (s.C - 1))


class Flow(NamedTuple):
    """How the state enters and leaves the rows of a chunk: factors exp(.) <= 1, zero for rows of other sequences.

    Attributes:
      mask: [1, C, p C], pairs i >= j that may interact.
      start: packed columns [n, C, p C], of the state before the chunk, at each row; the last row passes it through.
      end: likewise, of each row, at the end.
    """

    mask: jax.Array
    start: jax.Array
    end: jax.Array


def flow_of(g: Gates, s: Shape, owner=None) -> Flow:
    """Return the flow of a chunk.

    Args:
      g: its gates.
      s: its shape.
      owner: None for a chunk that lies inside one sequence; else (row [1, p C], before, last, count): the sequence of
        every token, of the token before the chunk, of the last token, and the number of sequences. Tokens from there
        on belong to none.
    """
    start, end = jnp.exp2(sum(g.G)), jnp.exp2(gap([x[:, -1:] for x in g.G], g.G))
    mask = lower_mask(s)
    if owner is None:
        return Flow(mask, start, end)
    row, before, final, count = owner
    column = to_column(row[None, :, : s.C].astype(jnp.float32)).astype(jnp.int32)
    return Flow(
        mask & (column == row[None]) & (column < count),
        jnp.where((column == before) & (column < count), start, 0.0),
        jnp.where((column == final) & (column < count), end, 0.0),
    )


def _fwd_kernel(refs, *, s, opt, NT):
    """Take the state through chunk c - 1 and prepare chunk c.

    Neither waits for the other: the products with the state fill the matrix unit while rows are eliminated in the
    inverse, which does not use it.
    """
    c, first = pl.program_id(2), pl.program_id(0) * NT
    prepared, passed = first + jnp.minimum(c, NT - 1), first + jnp.maximum(c - 1, 0)

    # Chunk 0 begins a sequence, so the state that step 0 makes of nothing is gone before step 1 uses it.
    @pl.when(refs.table[FIRST, passed] == 1)
    def _():
        refs.state[...] = jnp.zeros_like(refs.state) if refs.h0 is None else refs.h0[...]

    if opt.pieces:  # rows that no piece owns stay zero

        @pl.when(refs.table[OPENS, passed] == 1)
        def _():
            clear([refs.o, refs.W])

    q, k, g, beta = load_chunk(refs, own_rows(refs, prepared, prepared - first, s, opt), s, opt)
    owner, bf16 = load_owner(refs, prepared), k.dtype == jnp.bfloat16
    X, steps = None, iter(())
    if refs.o is None:
        X = refs.kept[...]
    else:
        steps = ladder(refs.strip[...], refs.M[...], 2 if bf16 else 3)

    # The matrix unit takes products in the order in which they stand here, and where one waits, all wait. Between those
    # of the inverse, of which each waits for the one before, some heads are prepared and others meet the state.
    sums = gate_sums(g, beta, s, exact=not bf16)
    stages, made, seen = Part(s).cut(STAGE), [], []
    for n, stage in enumerate(stages):
        X = next(steps, X)
        made += [(part, prepare(refs, q, k, sums, part, owner, opt)) for part in stage.cut(STAGE // 2)]
        if n:
            seen.append(see_state(refs, stages[n - 1], s))
    *_, X = X, *steps
    own = own_rows(refs, passed, passed - first, s, opt)
    seen.append(see_state(refs, stages[-1], s))
    W = []
    for n, stage in enumerate(stages):
        W.append(renew(refs, own, X, stage, seen[n], opt, s))
        if n:
            pass_state(refs, own, stages[n - 1], seen[n - 1], W[n - 1], opt, s)
    pass_state(refs, own, stages[-1], seen[-1], W[-1], opt, s)

    if refs.X is not None:
        refs.X[...] = X
    refs.k_passed[...] = k
    if refs.o is not None:
        refs.q_passed[...] = q
    for part, values in made:
        for name, x in values.items():
            getattr(refs, name)[part.packs] = x
    if refs.ht is not None:

        @pl.when((c > 0) & (refs.table[LAST, passed] == 1))
        def _():
            refs.ht[...] = refs.state[...]


def prepare(refs, q, k, sums: Sums, part: Part, owner, opt: Options) -> dict[str, jax.Array]:
    """Return what the next step needs of some heads of a chunk, by the names of the scratch."""
    s = part.shape
    g = gates(sums, part.heads, s)
    flow = flow_of(g, s, owner)
    made = {"start": flow.start, "end": flow.end * g.beta}
    if refs.o is None:
        return made
    KK, QK, D = scores(q[part.keys], k[part.keys], g, flow.mask, s)
    weight = D * g.beta_rows
    M, P = KK * weight, QK * (weight * opt.scale)
    return made | {"M": M, "strip": begin_inverse(M), "scores": lanes(parts(P, k.dtype))}


class Seen(NamedTuple):
    """What the rows of a chunk see of the state before it.

    Attributes:
      start: `Flow.start`, head by head [heads, C, V].
      KS, QS: as `read_state` returns them.
    """

    start: jax.Array
    KS: jax.Array
    QS: jax.Array | None


def see_state(refs, part: Part, s: Shape) -> Seen:
    """Multiply keys and queries of the chunk in scratch by the state."""
    S, k, q = refs.state[part.heads], refs.k_passed[part.keys], None
    if refs.h is not None:
        refs.h[part.heads] = S.astype(refs.h.dtype)
    if refs.o is not None:
        q = refs.q_passed[part.keys]
    return Seen(head_columns(refs.start[part.packs], s, s.V), *read_state(k, q, S.astype(k.dtype), part.shape))


def renew(refs, own, X, part: Part, seen: Seen, opt: Options, s: Shape) -> jax.Array:
    """Return W [heads, C, V] of the chunk in scratch, whose rows are `own`."""
    v = load_tokens(refs.v, own, s.V, part.heads).astype(jnp.float32)
    W = multiply_packed(lanes(parts(X[part.packs], refs.k.dtype)), v - seen.start * seen.KS, s.p, refs.k.dtype)
    if refs.W is not None:
        store_tiles(refs.W, W, own if opt.pieces else None, part.first)
    return W


def pass_state(refs, own, part: Part, seen: Seen, W, opt: Options, s: Shape) -> None:
    """Write the output of the chunk in scratch and take the state through it."""
    k, end = refs.k_passed[part.keys], head_columns(refs.end[part.packs], s, s.V)
    if seen.QS is not None:
        o = (opt.scale * seen.start) * seen.QS + multiply_packed(refs.scores[part.packs], W, s.p, k.dtype)
        store_tiles(refs.o, o, own if opt.pieces else None, part.first)
    S = refs.state[part.heads]
    refs.state[part.heads] = seen.start[:, -1:] * S + write_state(k, end * W, part.shape)


# Rows of the table of steps: what a chunk is in its sequence; with an owner, the sequences around it; what a piece is.
SEQUENCE, FIRST, LAST = range(3)
BEFORE, FINAL, COUNT = range(3, 6)
CHUNK, BEGIN, END, OPENS, CLOSES = range(3, 8)


def load_chunk(refs, own, s: Shape, opt: Options):
    """Load q, k tiles and g, beta [C, heads] float32 of a chunk of a row of the batch."""
    q, k = (load_tokens(ref, own, s.K) for ref in (refs.q, refs.k))
    g, beta = (ref[...].astype(jnp.float32) for ref in (refs.g, refs.beta))
    if own is not None:
        g, beta = (jnp.where(own, x, 0.0) for x in (g, beta))
    if opt.normalise:
        q, k = (l2norm(x.astype(jnp.float32)).astype(x.dtype) for x in (q, k))
    return q, k, g, beta


def load_owner(refs, chunk):
    """Return the owner of `flow_of`, None where chunks lie inside one sequence."""
    if refs.owner is None:
        return None
    return refs.owner[...], refs.table[BEFORE, chunk], refs.table[FINAL, chunk], refs.table[COUNT, chunk]


class Blocks(NamedTuple):
    """BlockSpecs of the grid (batch, block of heads, chunk), by what they cut.

    Attributes:
      q, v: flat views [B, T, H * K] and [B, T, HV * V].
      gate: [B, blocks, T, heads].
      owner: [NT, 1, p C].
      state: one state per sequence [N, HV, K, V].
      h, X: per chunk, [B, NT, HV, K, V] and [B, NT, HV / p, C, p C].
    """

    q: pl.BlockSpec
    v: pl.BlockSpec
    gate: pl.BlockSpec
    owner: pl.BlockSpec
    state: pl.BlockSpec
    h: pl.BlockSpec
    X: pl.BlockSpec


def blocks(s: Shape, NT: int, at, pieces: bool) -> Blocks:
    """Return the BlockSpecs for the chunk or piece `at(c)` of NT in step c."""

    def chunk(b, c, table):
        return table[CHUNK, b * NT + at(c)] if pieces else at(c)

    def tokens(width):
        return pl.BlockSpec((None, s.C, width), lambda b, h, c, table, *_: (b, chunk(b, c, table), h))

    def per_chunk(*tail):
        return pl.BlockSpec((None, None, *tail), lambda b, h, c, *_: (b, at(c), h, 0, 0))

    return Blocks(
        q=tokens(s.heads // s.group * s.K),
        v=tokens(s.heads * s.V),
        gate=pl.BlockSpec((None, None, s.C, s.heads), lambda b, h, c, table, *_: (b, h, chunk(b, c, table), 0)),
        owner=pl.BlockSpec((None, 1, s.p * s.C), lambda b, h, c, *_: (at(c), 0, 0)),
        state=pl.BlockSpec(
            (None, s.heads, s.K, s.V), lambda b, h, c, table, *_: (table[SEQUENCE, b * NT + at(c)], h, 0, 0)
        ),
        h=per_chunk(s.heads, s.K, s.V),
        X=per_chunk(s.heads // s.p, s.C, s.p * s.C),
    )


def launch(
    q, k, v, g, beta, initial_state, table, owner, kept, N: int, want: tuple[str, ...], config: Config, opt, s: Shape
):  # fmt: skip
    """Run the forward kernel on the flat views.

    Args:
      q, k: [B, T, H * K].
      v: [B, T, HV * V].
      g, beta: [B, blocks, T, heads].
      initial_state: [N, HV, K, V] float32 or None.
      table: int32 [rows, B * NT], what every chunk or piece is; rows as named above.
      owner: int32 [NT, 1, p C] where chunks hold several sequences, else None.
      kept: X of an earlier launch, which is then not computed again, or None. "o" is wanted without it, and only then.
      N: number of states.
      want: which outputs of "o", "ht", "h", "W", "X".
      config, opt, s: static.

    Returns:
      A dict of the outputs wanted: o like v, ht [N, HV, K, V] float32, h [B, NT, HV, K, V] the state before every
      chunk in the type of k, W float32 like v, X [B, NT, HV / p, C, p C] float32.
    """
    B, T, _ = q.shape
    HV, NT = v.shape[2] // s.V, table.shape[1] // B
    cut, passed = (
        blocks(s, NT, at, opt.pieces) for at in (lambda c: jnp.minimum(c, NT - 1), lambda c: jnp.maximum(c - 1, 0))
    )
    kinds = {
        "o": (passed.v, v.shape, v.dtype),
        "ht": (passed.state, (N, HV, s.K, s.V), jnp.float32),
        "h": (passed.h, (B, NT, HV, s.K, s.V), k.dtype),
        "W": (passed.v, v.shape, jnp.float32),
        "X": (passed.X, (B, NT, HV // s.p, s.C, s.p * s.C), jnp.float32),
    }
    names = ("table", "q", "k", "v", "g", "beta", "h0", "owner", "kept")
    n, keys = s.heads // s.p, s.heads // s.group
    packed, wide = (n, s.C, s.p * s.C), (n, s.C, s.p * s.C * len(parts(jnp.zeros(()), k.dtype)))
    # The state, and what a step makes of its chunk for the next step to use.
    scratch = {
        "state": pltpu.VMEM((s.heads, s.K, s.V), jnp.float32),
        "start": pltpu.VMEM(packed, jnp.float32),
        "end": pltpu.VMEM(packed, jnp.float32),
        "k_passed": pltpu.VMEM((keys, s.C, s.K), k.dtype),
    }
    if kept is None:
        scratch |= {
            "q_passed": pltpu.VMEM((keys, s.C, s.K), k.dtype),
            "scores": pltpu.VMEM(wide, k.dtype),
            "M": pltpu.VMEM(packed, jnp.float32),
            "strip": pltpu.VMEM((n, strip_rows(s.C), s.p * s.C), jnp.float32),
        }
    out = pallas_call(
        named(_fwd_kernel, names, [(n, n in want) for n in kinds], list(scratch), s=s, opt=opt, NT=NT),
        table, q, k, v, g, beta, initial_state, owner, kept,
        name=f"fused_chunk_gated_delta_rule_{'fwd' if 'o' in want else 'states'}_c{s.C}",
        num_scalar_prefetch=1,
        # Batch and head blocks are independent; time is sequential, the state stays in VMEM. One more step, because
        # the state passes a chunk in the step after the one that prepares it.
        grid=(B, HV // s.heads, NT + 1),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=[cut.q, cut.q, passed.v, cut.gate, cut.gate, None if initial_state is None else passed.state,
                  None if owner is None else cut.owner, None if kept is None else passed.X],
        out_specs=[kinds[n][0] for n in kinds if n in want],
        out_shape=[out_struct(*kinds[n][1:], q, k, v, g, beta, initial_state) for n in kinds if n in want],
        scratch_shapes=list(scratch.values()),
        cost_estimate=pl.CostEstimate(
            flops=2 * B * NT * HV * (s.C + s.K) * (2 * s.C * s.K + s.K * s.V + s.C * s.V),
            transcendentals=B * NT * HV * s.C * s.C,
            bytes_accessed=q.nbytes + k.nbytes + 2 * v.nbytes,
        ),
        vmem_limit_bytes=config.vmem_bytes,
    )  # fmt: skip
    return dict(zip([n for n in kinds if n in want], out, strict=True))
