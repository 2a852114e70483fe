"""Forward in one launch: tile mathematics, kernel body, launcher.

A chunk is affine in the state S before it. With K, Q, V the rows of the chunk, B = diag(beta), G the cumulative gate
and D_ij = exp(G_i - G_j),

    X  = (I + tril(K K^T * D, -1) B)^-1                      unit lower triangular, no state in it
    Y  = scale tril(Q K^T * D) B X                           [C, C]
    Z  = K^T diag(exp(G_last - G)) B X                       [K, C]
    o  = (scale e^G Q - Y e^G K) S            + Y V
    S' = (e^G_last - Z e^G K) S               + Z V

which is the delta rule regrouped: Y V - Y e^G K S is P v_new. Only one product depends on the state, so the chain from
chunk to chunk is short, and no large terms cancel: v_new oscillates where keys repeat, Y and Z do not. That is why a
single bfloat16 pass is enough for the products with S and V. What leads up to Y, Z and Y K is kept to 16 bits, X to 24.

The matrices of p heads lie side by side in the lanes ("packed", see inverse.py): n = heads / p packs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn.config import Config
from chunkwise.fused_gdn.inverse import block_of, lane_index, place, unit_lower_inverse
from chunkwise.shared import (
    bf16_parts,
    dot,
    dot_nt,
    dot_tn,
    l2norm,
    out_struct,
    pallas_call,
    split_gate,
    to_column,
)

# exp of it is zero, and it can be added to without overflow.
NEVER = -1e30


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


def parts(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return float32 x as operands: two bfloat16 parts (16 bits), or itself where the tensors are not bfloat16."""
    return bf16_parts(x, 2) if dtype == jnp.bfloat16 else (x,)


def lanes(tiles) -> jax.Array:
    """Return [n, m, w] tiles side by side."""
    return jnp.concatenate(tiles, axis=2)


def rows(tiles) -> jax.Array:
    """Return [n, m, w] tiles below one another."""
    return jnp.concatenate(tiles, axis=1)


def key_packs(x: jax.Array, s: Shape) -> list[jax.Array]:
    """Return the key heads of every pack: `s.keys` tiles [n, C, K] of x [key heads, C, K]."""
    n = s.heads // s.p
    return [jnp.stack([x[(i * s.p + j * (s.p // s.keys)) // s.group] for i in range(n)]) for j in range(s.keys)]


def place_tiles(tiles: list[jax.Array], p: int) -> jax.Array:
    """Return p tiles [n, C, w] block-diagonally, [n, p C, p w]; fewer tiles than p are repeated in order."""
    each = p // len(tiles)
    zero = jnp.zeros_like(tiles[0])
    if p == 1:
        return tiles[0]
    return rows([lanes([tiles[i // each] if i == j else zero for j in range(p)]) for i in range(p)])


def columns(x: jax.Array) -> jax.Array:
    """Return values [C, heads] as columns [heads, C, 1]."""
    return jnp.stack([x[:, i : i + 1] for i in range(x.shape[1])])


def packed_columns(x: jax.Array, s: Shape) -> jax.Array:
    """Return values [C, heads] as packed columns, each value over the C lanes of its head: [n, C, p C]."""
    owner = block_of(lane_index(s.p * s.C)[0], s.C)
    packs = []
    for first in range(0, s.heads, s.p):
        column = jnp.broadcast_to(x[:, first : first + 1], (s.C, s.p * s.C))
        for i in range(1, s.p):
            column = jnp.where(owner == i, x[:, first + i : first + i + 1], column)
        packs.append(column)
    return jnp.stack(packs)


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


class Gates(NamedTuple):
    """Cumulative gates and step sizes of a chunk.

    Attributes:
      G: parts of the cumulative gate [C, heads]; their sum is the gate. Two parts keep differences of large sums exact.
      G_rows: the same as packed rows [n, 1, p C].
      beta: [C, heads] float32.
      beta_rows: [n, 1, p C].
    """

    G: tuple[jax.Array, ...]
    G_rows: tuple[jax.Array, ...]
    beta: jax.Array
    beta_rows: jax.Array


def gates(g: jax.Array, beta: jax.Array, s: Shape, exact: bool) -> Gates:
    """Sum up the gates g [C, heads] of a chunk, as columns and as rows."""
    i = lax.broadcasted_iota(jnp.int32, (s.C, s.p * s.C), 0)
    j = lax.broadcasted_iota(jnp.int32, (s.C, s.p * s.C), 1) & (s.C - 1)
    before, diagonal = jnp.where(i <= j, 1.0, 0.0)[None], jnp.where(i == j, 1.0, 0.0)[None]
    terms = [x[None] for x in (split_gate(g) if exact else (g,))]
    return Gates(
        G=tuple(dot_tn(before[:, :, : s.C], x)[0] for x in terms),
        G_rows=tuple(packed_rows(dot_tn(x, before)[0], s) for x in terms),
        beta=beta,
        beta_rows=packed_rows(dot_tn(beta[None], diagonal)[0], s),
    )


def gap(later, earlier):
    """Return the sum over parts of later - earlier."""
    return functools.reduce(jnp.add, [a - b for a, b in zip(later, earlier, strict=True)])


def scores(q, k, g: Gates, mask, s: Shape):
    """Return K K^T, Q K^T and the decays D (zero outside of `mask`), packed [n, C, p C]; q, k [key heads, C, K]."""
    own_k, own_q, each = key_packs(k, s), key_packs(q, s), s.p // s.keys
    zero = jnp.zeros_like(own_k[0])
    left = rows([lanes(own_k), lanes(own_q)])
    right = rows([lanes([own_k[j] if i // each == j else zero for j in range(s.keys)]) for i in range(s.p)])
    products = dot_nt(left, right)
    difference = gap([packed_columns(x, s) for x in g.G], g.G_rows)
    return products[:, : s.C], products[:, s.C :], jnp.exp(jnp.where(mask, difference, NEVER))


def summary_out(P, X, dtype, p):
    """Return Y = P X, packed [n, C, p C] float32."""
    # The four products of the two parts at once: side by side in the contraction and in the columns.
    P_parts, X_parts = parts(P, dtype), parts(X, dtype)
    right = lanes([place(x, p) for x in X_parts])
    wide = dot(lanes(P_parts), rows([right] * len(P_parts)))
    width = P.shape[2]
    return functools.reduce(jnp.add, [wide[:, :, i * width : (i + 1) * width] for i in range(len(X_parts))])


def summary_state(k, X, decay, s: Shape):
    """Return Z = K^T diag(decay) X, packed [n, K, p C] float32, for decay [C, heads]."""
    X_parts = parts(packed_columns(decay, s) * X, k.dtype)
    own = key_packs(k, s)
    return dot_tn(rows(own * len(X_parts)), rows([place(x, s.keys) for x in X_parts]))


def summary_in(YZ, q, k, flow, scale, s: Shape):
    """Return what multiplies the state, scale e^G Q - Y e^G K above -Z e^G K: [heads, C + K, K] float32.

    Without q, YZ is Z alone and so is the result.
    """
    YZ_parts = parts(YZ * -flow.start_rows, k.dtype)
    right = place_tiles(key_packs(k, s), s.p)
    removed = split_lanes(dot(lanes(YZ_parts), rows([right] * len(YZ_parts))), s.p)
    if q is None:
        return removed
    q = jnp.stack([q[i // s.group] for i in range(s.heads)]).astype(jnp.float32)
    return rows([q * columns(flow.start * scale) + removed[:, : s.C], removed[:, s.C :]])


def split_lanes(x: jax.Array, p: int) -> jax.Array:
    """Return [n, m, p w] as [n p, m, w]."""
    w = x.shape[2] // p
    return jnp.stack([x[i, :, j * w : (j + 1) * w] for i in range(x.shape[0]) for j in range(p)])


def apply_summary(QF, YZ, S, v, p):
    """Return [Q' S + Y V; F S + Z V], [heads, C + K, V] float32, as one product a head.

    Args:
      QF: [heads, C + K, K] operands that multiply the state.
      YZ: packed [n, C + K, p C].
      S: [heads, K, V], operand type.
      v: [heads, C, V].
    """
    heads, C = v.shape[:2]
    zero = jnp.zeros_like(v[:1])
    v_placed = [jnp.concatenate([v[i : i + 1] if i % p == j else zero for j in range(p)], axis=1) for i in range(heads)]
    left = jnp.concatenate([lanes([QF[i : i + 1], YZ[i // p][None]]) for i in range(heads)])
    return dot(left, rows([S, jnp.concatenate(v_placed)]))


class Options(NamedTuple):
    """What the kernels are asked for; all static.

    Attributes:
      T: tokens; the last chunk may hold fewer than C.
      normalise: apply the l2 norm to q and k.
      scale: multiplies q.
    """

    T: int
    normalise: bool
    scale: float


def load_tiles(ref, width: int) -> jax.Array:
    """Return the heads of a flat block [C, heads * width] as tiles [heads, C, width]."""
    return jnp.stack([ref[:, i : i + width] for i in range(0, ref.shape[1], width)])


def store_tiles(ref, tiles: jax.Array) -> None:
    """Store tiles [heads, C, width] as a flat block [C, heads * width]."""
    width = tiles.shape[2]
    for i in range(tiles.shape[0]):
        ref[:, i * width : (i + 1) * width] = tiles[i].astype(ref.dtype)


def zero_tail(x: jax.Array, c, s: Shape, T: int) -> jax.Array:
    """Return x [..., C, width] of chunk c with the rows past the end of T tokens zero; they may hold anything."""
    if T % s.C == 0:
        return x
    return jnp.where(lax.broadcasted_iota(jnp.int32, (s.C, 1), 0) < T - c * s.C, x, jnp.zeros_like(x))


def lower_mask(s: Shape):
    """Return i >= j of shape [1, C, p C]."""
    i = lax.broadcasted_iota(jnp.int32, (1, s.C, s.p * s.C), 1)
    return i >= (lane_index(s.p * s.C) & (s.C - 1))


class Flow(NamedTuple):
    """How the state enters and leaves the rows of a chunk: factors exp(.) <= 1, zero for rows of other sequences.

    Attributes:
      mask: [1, C, p C], pairs i >= j that may interact.
      start: [C, heads], of the state before the chunk, at each row.
      start_rows: the same as packed rows [n, 1, p C].
      end: [C, heads], of each row, at the end.
      through: [1, heads], of the state before the chunk, at the end.
    """

    mask: jax.Array
    start: jax.Array
    start_rows: jax.Array
    end: jax.Array
    through: jax.Array


def flow_of(g: Gates, s: Shape, owner=None) -> Flow:
    """Return the flow of a chunk.

    Args:
      g: its gates.
      s: its shape.
      owner: None for a chunk that lies inside one sequence; else (row [1, p C], before, last, count): the sequence of
        every token, of the token before the chunk, of the last token, and the number of sequences. Tokens from there
        on belong to none.
    """
    last = [x[-1:] for x in g.G]
    start, start_rows = jnp.exp(sum(g.G)), jnp.exp(sum(g.G_rows))
    end, through = jnp.exp(gap(last, g.G)), jnp.exp(sum(last))
    mask = lower_mask(s)
    if owner is None:
        return Flow(mask, start, start_rows, end, through)
    row, before, final, count = owner
    column = to_column(row[None, :, : s.C].astype(jnp.float32))[0].astype(jnp.int32)
    return Flow(
        mask & (column[None] == row[None]) & (column[None] < count),
        jnp.where((column == before) & (column < count), start, 0.0),
        jnp.where((row[None] == before) & (row[None] < count), start_rows, 0.0),
        jnp.where((column == final) & (column < count), end, 0.0),
        jnp.where(before == final, through, 0.0),
    )


def _fwd_kernel(refs, *, s, opt):
    c = pl.program_id(2)
    chunk = pl.program_id(0) * pl.num_programs(2) + c
    state_ref = refs.state

    @pl.when(refs.table[FIRST, chunk] == 1)
    def _():
        state_ref[...] = jnp.zeros_like(state_ref) if refs.h0 is None else refs.h0[...]

    q, k, v, g, beta = load_chunk(refs, c, s, opt)
    gate = gates(g, beta, s, exact=k.dtype != jnp.bfloat16)
    flow = flow_of(gate, s, load_owner(refs, chunk))
    QK: Any = None
    weight: Any = None
    if refs.kept is None:
        KK, QK, D = scores(q, k, gate, flow.mask, s)
        weight = D * gate.beta_rows
        X = unit_lower_inverse(KK * weight)
    else:
        X = refs.kept[...]
    YZ = summary_state(k, X, flow.end * gate.beta, s)
    if refs.o is not None:
        YZ = rows([summary_out(QK * (weight * opt.scale), X, k.dtype, s.p), YZ])
    QF = summary_in(YZ, None if refs.o is None else q, k, flow, opt.scale, s)
    S = state_ref[...]
    if refs.h is not None:
        refs.h[...] = S.astype(refs.h.dtype)
    if refs.X is not None:
        refs.X[...] = X
    after = apply_summary(QF.astype(k.dtype), YZ.astype(k.dtype), S.astype(k.dtype), v, s.p)
    if refs.o is not None:
        store_tiles(refs.o, after[:, : s.C])
    state_ref[...] = columns(flow.through) * S + after[:, -s.K :]
    if refs.ht is not None:

        @pl.when(refs.table[LAST, chunk] == 1)
        def _():
            refs.ht[...] = state_ref[...]


# Rows of the table of chunks: what a chunk is in its sequence, and with an owner, the sequences around it.
SEQUENCE, FIRST, LAST, BEFORE, FINAL, COUNT = range(6)


def load_chunk(refs, c, s: Shape, opt: Options):
    """Load q, k, v tiles and g, beta [C, heads] float32 of chunk c of a row of the batch."""
    tiles = load_tiles(refs.q, s.K), load_tiles(refs.k, s.K), load_tiles(refs.v, s.V)
    scalars = refs.g[...].astype(jnp.float32), refs.beta[...].astype(jnp.float32)
    q, k, v, g, beta = (zero_tail(x, c, s, opt.T) for x in (*tiles, *scalars))
    if opt.normalise:
        q, k = (l2norm(x.astype(jnp.float32)).astype(x.dtype) for x in (q, k))
    return q, k, v, g, beta


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


def blocks(s: Shape, NT: int, reverse: bool = False) -> Blocks:
    """Return the BlockSpecs; `reverse` walks the chunks backwards."""
    at = (lambda c: NT - 1 - c) if reverse else (lambda c: c)

    def tokens(width):
        return pl.BlockSpec((None, s.C, width), lambda b, h, c, *_: (b, at(c), h))

    def per_chunk(*tail):
        return pl.BlockSpec((None, None, *tail), lambda b, h, c, *_: (b, at(c), h, 0, 0))

    return Blocks(
        q=tokens(s.heads // s.group * s.K),
        v=tokens(s.heads * s.V),
        gate=pl.BlockSpec((None, None, s.C, s.heads), lambda b, h, c, *_: (b, h, at(c), 0)),
        owner=pl.BlockSpec((None, 1, s.p * s.C), lambda b, h, c, *_: (at(c), 0, 0)),
        state=pl.BlockSpec(
            (None, s.heads, s.K, s.V), lambda b, h, c, table, *_: (table[SEQUENCE, b * NT + at(c)], h, 0, 0)
        ),
        h=per_chunk(s.heads, s.K, s.V),
        X=per_chunk(s.heads // s.p, s.C, s.p * s.C),
    )


class Refs:
    """The Refs of a kernel by name; None where an operand or output is absent."""

    def __init__(self, names, values):
        self.__dict__.update(zip(names, values, strict=True))


def named(body, operands, outputs, scratch, **static):
    """Return `body` of a `Refs` as the positional kernel of `pallas_call`; absent outputs are None."""
    present = [name for name, wanted in outputs if wanted]

    def kernel(*values):
        refs = Refs([*operands, *present, *scratch], values)
        for name, _ in outputs:
            refs.__dict__.setdefault(name, None)
        body(refs, **static)

    return kernel


def launch(
    q, k, v, g, beta, initial_state, table, owner, kept, N: int, want: tuple[str, ...], config: Config, opt, s: Shape
):  # fmt: skip
    """Run the forward kernel on the flat views.

    Args:
      q, k: [B, T, H * K].
      v: [B, T, HV * V].
      g, beta: [B, blocks, T, heads].
      initial_state: [N, HV, K, V] float32 or None.
      table: int32 [6, B * NT], what every chunk is; rows as named above.
      owner: int32 [NT, 1, p C] where chunks hold several sequences, else None.
      kept: X of an earlier launch, which is then not computed again, or None; "o" must not be wanted with it.
      N: number of states.
      want: which outputs of "o", "ht", "h", "X".
      config, opt, s: static.

    Returns:
      A dict of the outputs wanted: o like v, ht [N, HV, K, V] float32, h [B, NT, HV, K, V] the state before every
      chunk in the type of k, X [B, NT, HV / p, C, p C] float32.
    """
    B, T, _ = q.shape
    HV, NT = v.shape[2] // s.V, pl.cdiv(T, s.C)
    cut = blocks(s, NT)
    kinds = {
        "o": (cut.v, v.shape, v.dtype),
        "ht": (cut.state, (N, HV, s.K, s.V), jnp.float32),
        "h": (cut.h, (B, NT, HV, s.K, s.V), k.dtype),
        "X": (cut.X, (B, NT, HV // s.p, s.C, s.p * s.C), jnp.float32),
    }
    names = ("table", "q", "k", "v", "g", "beta", "h0", "owner", "kept")
    out = pallas_call(
        named(_fwd_kernel, names, [(n, n in want) for n in kinds], ["state"], s=s, opt=opt),
        table, q, k, v, g, beta, initial_state, owner, kept,
        name=f"fused_chunk_gated_delta_rule_{'fwd' if 'o' in want else 'states'}_c{s.C}",
        num_scalar_prefetch=1,
        # Batch and head blocks are independent; time is sequential, the state stays in VMEM.
        grid=(B, HV // s.heads, NT),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=[cut.q, cut.q, cut.v, cut.gate, cut.gate, None if initial_state is None else cut.state,
                  None if owner is None else cut.owner, None if kept is None else cut.X],
        out_specs=[kinds[n][0] for n in kinds if n in want],
        out_shape=[out_struct(*kinds[n][1:], q, k, v, g, beta, initial_state) for n in kinds if n in want],
        scratch_shapes=[pltpu.VMEM((s.heads, s.K, s.V), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=2 * B * NT * HV * (s.C + s.K) * (2 * s.C * s.K + s.K * s.V + s.C * s.V),
            transcendentals=B * NT * HV * s.C * s.C,
            bytes_accessed=q.nbytes + k.nbytes + 2 * v.nbytes,
        ),
        vmem_limit_bytes=config.vmem_bytes,
    )  # fmt: skip
    return dict(zip([n for n in kinds if n in want], out, strict=True))
