"""Forward in one launch: loading and storing, kernel body, launcher; tile mathematics is in tile.py.

With K, Q, V the rows of a chunk, S the state before it, B = diag(beta), G the cumulative gate and
D_ij = exp(G_i - G_j),

    X  = (I + tril(K K^T * D, -1) B)^-1           P = scale tril(Q K^T * D) B     no state in them
    R  = V - e^G K S                              what the keys do not recall yet
    W  = X R                                      the same token by token, B W is v_new
    o  = scale e^G Q S + P W                      S' = e^G_last S + K^T e^(G_last - G) B W

P of a chunk, and X as far as it takes no products, are made in the step before the one that takes the state through it.
With bfloat16 tensors S enters its products as bfloat16: what rounding misses of S stays in S. X, P, R and W must not be
rounded so: where keys repeat they oscillate, and the sums over them cancel. They keep 16 bits, as two bfloat16 parts.

The matrices of p heads lie side by side in the lanes ("packed", see shared.kernels.packed): n = heads / p packs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn.config import Config
from chunkwise.fused_gdn.tile import (
    Part,
    Shape,
    Sums,
    flow_of,
    gate_sums,
    gates,
    head_columns,
    read_state,
    scores,
    write_state,
)
from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import (
    begin_inverse,
    clip_gate,
    l2norm,
    ladder,
    lanes,
    multiply_packed,
    named,
    pallas_call,
    parts,
    strip_rows,
)

# Heads that take the state through a chunk together: the products of one stage of theirs hide the latency of another.
STAGE = 8
# Rows of the table of steps: what a chunk is in its sequence; with an owner, the sequences of the token before it and
# of its last token, and how many of its rows are not padding; what a piece is.
SEQUENCE, FIRST, LAST = range(3)
BEFORE, FINAL, FILLED = range(3, 6)
CHUNK, BEGIN, END, OPENS, CLOSES = range(3, 8)


class Options(NamedTuple):
    """What the kernels are asked for; all static.

    Attributes:
      T: tokens; the last chunk may hold fewer than C.
      pieces: a step is a piece of a chunk instead of a chunk (`chunkwise.shared.operators.Pieces`).
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
    if refs.owner is not None:
        return row < refs.table[FILLED, step]
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


def load_chunk(refs, own, s: Shape, opt: Options):
    """Load q, k tiles and g, beta [C, heads] float32 of a chunk of a row of the batch."""
    q, k = (load_tokens(ref, own, s.K) for ref in (refs.q, refs.k))
    g, beta = clip_gate(refs.g[...]), refs.beta[...].astype(jnp.float32)
    if own is not None:
        g, beta = (jnp.where(own, x, 0.0) for x in (g, beta))
    if opt.normalise:
        q, k = (l2norm(x.astype(jnp.float32)).astype(x.dtype) for x in (q, k))
    return q, k, g, beta


def load_owner(refs, chunk):
    """Return the owner of `flow_of`, None where chunks lie inside one sequence."""
    if refs.owner is None:
        return None
    return refs.owner[...], refs.table[BEFORE, chunk], refs.table[FINAL, chunk]


def _fwd_kernel(refs, *, s, opt, NT):
    """Take the state through chunk c - 1 and prepare chunk c.

    Neither waits for the other: the products with the state fill the matrix unit while rows are eliminated in the
    inverse, which does not use it.
    """
    c, first = pl.program_id(2), pl.program_id(0) * NT
    prepared, passed = first + jnp.minimum(c, NT - 1), first + jnp.maximum(c - 1, 0)

    # What begins a sequence replaces the state that step 0 makes of nothing. Pieces before it have no rows: what such a
    # state makes of them is never stored.
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
