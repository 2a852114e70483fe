"""The forward of Kimi delta attention in one launch: loading and storing, kernel body, launcher.

With K, Q, V the rows of a chunk, S the state before it, B = diag(beta), D_ij = e^(G_i - G_j) per channel, and <.>_D the
products of `tile.interaction_tile`,

    X  = (I + tril(<K, K>_D, -1) B)^-1            P = scale tril(<Q, K>_D) B      no state in them
    R  = V - (K e^G) S                            what the keys do not recall yet
    W  = X R                                      B W is v_new
    o  = scale (Q e^G) S + P W                    S' = e^G_last S + (K e^(G_last - G))^T B W

The kernels hold every state transposed, [V, K]: a decay per channel then multiplies its lanes. P of a chunk, and X as
far as it takes no products, are made in the turn before the one that takes the state through it: the two halves of a
turn do not wait for one another. With bfloat16 tensors S and the rows of decayed queries and keys enter their products
as bfloat16. X, P, R, W and the decayed keys as columns must not be rounded so: where keys repeat, W oscillates and the
sums over it cancel. They keep 16 bits, as two bfloat16 parts.

Chunks of a packed batch without states, or of rows of segments, may hold several sequences or padding. Only the turns
that meet such a chunk compute with masks. Rows that hold something not finite are zeroed there before any product, as
in shared.kernels.nonfinite, and all results of their sequence in that chunk become NaN, in all heads of the block.

Where tokens are split over devices, the same kernel runs without output first: it takes a state of more channels than
there are values through the tokens, and keeps X and the scores. Given these, the operator has only the decays from the
start and to the end of its chunks to make, and no product before the state comes.

The [C, C] matrices of p heads lie side by side in the lanes ("packed", see shared.kernels.packed).
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.kda import config, cost, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import inverse, launcher, laws, layout, matmul, nonfinite, packed, pools, schedule, tiles
from chunkwise.shared.kernels.operands import Operands

# Heads that take the state through a chunk together; in launches that make the inverse or the output, and not both.
STAGE, HALF_STAGE = 4, 8
# What a turn of 8 packs does one after the other before it begins the inverse: "m" makes the tiles of a pack, "p" takes
# the chunk before through its next products, which wait for one another. The matrix unit takes products in this order,
# and where one waits, all wait. Found by search: see the README.
ORDER = "pmpmmpmpmppmmpmp"
# The same for a launch that makes states and no output.
STATES_ORDER = "pmmpmmmpmmpmpppp"


class Static(NamedTuple):
    """What is known when the kernel is built.

    Attributes:
      B, T: rows of the batch and their tokens, at least C; the last chunk may hold fewer rows than C.
      selects: rows past the last token are not zeros, or zeros that a law makes a decay of, so they must be left out.
      H, HV: key and value heads.
      K, V: head dimensions, padded to whole lanes.
      C: chunk size.
      N: states in and out.
      steps: of a row of the batch: chunks, or pieces of chunks.
      scale: the number that multiplies the queries.
      normalise: whether queries and keys are scaled to unit length first.
      pieces: a step is a piece of a chunk instead of a chunk.
      config: tile sizes.
      base: rows of the diagonal blocks that one product covers, in the forward.
      backward_base: in the backward, where gradients of strong gates are as small as the decays.
      lower_bound: of the law of raw gates, or None.
    """

    B: int
    T: int
    selects: bool
    H: int
    HV: int
    K: int
    V: int
    C: int
    N: int
    steps: int
    scale: float
    normalise: bool
    pieces: bool
    config: config.Config
    base: int
    backward_base: int
    lower_bound: float | None

    @property
    def p(self) -> int:
        """Heads that lie side by side in the lanes: a power of two that divides the heads of a grid step."""
        return packed.packing(self.C, self.config.heads, self.config.heads_bwd)

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.HV // self.H

    def key_heads(self, heads: int) -> int:
        """Return how many key heads serve a block of `heads` value heads."""
        return max(heads // self.group, 1)


def decays_scratch(heads: int, C: int, K: int, base: int):
    """Return the scratch of `store_block_decays`."""
    return pltpu.VMEM((tile.count_decays(base), heads * K // packed.LANES, C, packed.LANES), jnp.float32)


def store_block_decays(ref, g, base: int, goes_on=None, first: int = 0, in_nats: bool = True) -> None:
    """Store the `tile.block_decays` of the gates g [C, heads K] of heads from tile `first` on, to base 2 or in nats.

    `goes_on` is a Ref [C, 128] of `tile.continuing`, or None.

    Inside of blocks of 8 rows whole registers of first, of second rows and so on are needed: loads with a stride from
    ref [n, heads K / 128, C, 128] bring them, stores with a stride take them back.
    """
    C = g.shape[0]
    by_row = [pl.ds(r, C // tile.SUBLANES, stride=tile.SUBLANES) for r in range(tile.SUBLANES)]
    goes_on = None if goes_on is None else [goes_on[row, :] for row in by_row]  # each [C / 8, 128]
    for n in range(g.shape[1] // packed.LANES):
        each = g[:, n * packed.LANES : (n + 1) * packed.LANES]  # [C, 128]
        ref[0, first + n] = each * tiles.LOG2_E if in_nats else each
        decays = tile.block_decays(
            [ref.at[0, first + n][row, :] for row in by_row], base, goes_on
        )  # 8 times [C / 8, 128] each
        for i, x in enumerate(decays):
            for row, y in zip(by_row, x, strict=True):
                ref.at[i, first + n][row, :] = y


def load_decays(ref, heads: range, K: int, base: int) -> tile.Decays:
    """Return the decays of some heads from what `store_block_decays` left."""
    each = K // packed.LANES

    def load(i):
        return jnp.stack([jnp.concatenate([ref[i, n * each + m] for m in range(each)], axis=1) for n in heads])

    return tile.chunk_decays([load(i) for i in range(ref.shape[0])], base)


def transposed(x):
    """Return the matrices [p, C, R] of a pack transposed and side by side, [1, R, p C]."""
    p, C, R = x.shape
    return jnp.swapaxes(x.reshape(p * C, R), 0, 1)[None]


def pack_scores(q, k, decays: tile.Decays, levels, masks: layout.SequenceMasks | None, dtype) -> jax.Array:
    """Return the packed scores of queries above those of keys, [1, 2 C, p C], of a pack of heads.

    Args:
      q, k: [p, C, K] float32, q scaled.
      decays: between the rows of the chunk.
      levels: `tile.level_table`.
      masks: of a chunk that holds several sequences, or None.
      dtype: of the operands of the products.
    """
    interaction = tile.interaction_tile(q, k, decays, levels[None], dtype, pairs=len(q) % 2 == 0)  # [p, C, 2 C]
    scores = transposed(interaction)  # [1, 2 C, p C]
    return scores if masks is None else jnp.where(tile.packed_pairs(masks.same, len(q)), scores, 0.0)


class Boundary(NamedTuple):
    """What the state needs of the rows of a chunk, of some heads.

    Attributes:
      decayed: what reads the state before the chunk, decayed from its start: the queries, if any, above the keys
        [h, 2 C or C, K].
      ends: the keys times beta, decayed to its end [h, C, K].
      through: the decay over all of it [h, 1, K].
    """

    decayed: jax.Array
    ends: jax.Array
    through: jax.Array


def pack_boundary(readers, beta, decays: tile.Decays, masks: layout.SequenceMasks | None) -> Boundary:
    """Return what the state needs of a pack of heads.

    Args:
      readers: [q, k] or [k], each [p, C, K] float32, q scaled.
      beta: [p, C, 1].
      decays, masks: as in `pack_scores`.
    """
    from_start, to_end, through = tile.boundary_tile(decays, masks)  # [p, C, K], [p, C, K], [p, 1, K]
    return Boundary(
        packed.rows(readers) * packed.rows([from_start] * len(readers)), (readers[-1] * beta) * to_end, through
    )


class Chunk(NamedTuple):
    """What a step reads of its chunk; rows that are not its own are zero.

    Attributes:
      q, k: [key heads, C, K] float32, rounded as the tensors are; q is not scaled.
      g: [C, heads K] float32; with a law raw gates as they are, also in rows that are not own: see `decays_of`.
      beta: [heads, C] float32.
    """

    q: jax.Array
    k: jax.Array
    g: jax.Array
    beta: jax.Array


def own_rows(step: layout.Step, static: Static) -> jax.Array | None:
    """Return which rows of the chunk belong to a step, bool [C, 1]; None for all. Others may hold anything."""
    return step.rows(static.C) if static.pieces or static.selects else None


def load_keys(ref, own, static: Static, which: slice = slice(None)) -> jax.Array:
    """Return queries or keys as float32 [key heads, C, K], rounded as the tensors are."""
    heads = layout.load_heads(ref, static.K, which, own).astype(jnp.float32)  # [key heads, C, K]
    return tiles.l2norm(heads).astype(ref.dtype).astype(jnp.float32) if static.normalise else heads


def load_chunk(refs, own, static: Static) -> Chunk:
    """Load what a step reads of its chunk, rows that are not own as zeros."""
    return Chunk(load_keys(refs.q, own, static), load_keys(refs.k, own, static), *load_gates(refs, own))


def load_gates(refs, own) -> tuple[jax.Array, jax.Array]:
    """Return g and beta of `Chunk`."""
    g, beta = refs.g[...], refs.beta[...]  # [C, heads K], [heads, C]
    if own is not None:
        own_row = tiles.to_row(own.astype(jnp.float32)[None])[0] > 0.0  # [1, C]
        # A law comes first: see `decays_of`.
        g = jnp.where(own, g, 0.0) if refs.law is None else g
        beta = jnp.where(own_row, beta, 0.0)
    return g, beta


def whole_block(*shape: int) -> pl.BlockSpec:
    """Return how a launch takes an array whole."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def law_block(lanes: int) -> pl.BlockSpec:
    """Return how a launch cuts `Operands.law`: all of it in these lanes of a block of heads."""
    return pl.BlockSpec((2, lanes), lambda b, h, *_: (0, h))


def decays_of(g, refs, own, static: Static, first: int = 0, unit: float = 1.0, exact: bool = True):
    """Return the decays of raw gates g [C, n] in the lanes from `first` on, zero in rows that are not own.

    `unit` and `exact` as in `chunkwise.shared.kernels.decay`.
    """
    A_log, dt_bias = (refs.law[i : i + 1, first : first + g.shape[1]] for i in range(2))  # [1, n]
    g = laws.decay(g.astype(jnp.float32), A_log, dt_bias, static.lower_bound, unit, exact)  # [C, n]
    # What raw gates hold there may be anything, and of zeros the law makes decays.
    return g if own is None else jnp.where(own, g, 0.0)


def load_masks(owner_ref, step: layout.Step, C: int) -> layout.SequenceMasks:
    """Return how the sequences of a step's chunk lie in it."""
    return layout.sequence_masks(owner_ref[...], C, step.before, step.final)


def store_continuing(ref, masks: layout.SequenceMasks) -> None:
    """Store `tile.continuing` in a Ref [C, 128], if there is one."""
    if ref is not None:
        ref[...] = jnp.broadcast_to(tile.continuing(masks.same)[0], ref.shape)


def keys_not_finite(refs, own, masks: layout.SequenceMasks, static: Static) -> jax.Array:
    """Return the rows of sequences that hold something not finite in q, k, g or beta, float32 [1, C, 1]."""
    g = jnp.where(own, refs.g[...], 0.0) if refs.law is None else decays_of(refs.g[...], refs, own, static)
    # A gate of -inf only forgets everything.
    g = jnp.where(g == -jnp.inf, 0.0, g)[None]  # [1, C, heads K]
    beta = jnp.where(own[None], tiles.to_column(refs.beta[...][:, None]), 0.0)  # [heads, C, 1]
    q, k = (layout.load_heads(ref, static.K, own=own) for ref in (refs.q, refs.k))  # [key heads, C, K]
    return nonfinite.whole_sequences(nonfinite.rows_not_finite(q, k, g, beta), masks.same)


def quarantine_passed(refs, own, step: layout.Step, static: Static) -> jax.Array:
    """Clear a state that is not finite; return the rows of sequences that are not finite, float32 [1, C, 1].

    The rows of q, k, g and beta were looked at when the chunk was prepared. Padding counts to the sequence before it.
    """
    masks = load_masks(refs.owner_passed, step, static.C)
    state = nonfinite.not_finite(refs.state[...])  # [1, 1, 1]
    if refs.h0 is None:  # nothing reads the state before the first step
        state = jnp.where(step.first == 1, 0.0, state)

    @pl.when(jnp.max(state) > 0.0)
    def _():
        layout.clear(refs.state)

    found = jnp.maximum(
        refs.found[...], nonfinite.rows_not_finite(layout.load_heads(refs.v, static.V, own=own))
    )  # [1, C, 1]
    return nonfinite.whole_sequences(jnp.maximum(found, jnp.where(masks.carried, state, 0.0)), masks.same)


def spoil_passed(refs, spoilt, own) -> None:
    """Store NaN in the results of rows [1, C, 1] that are spoilt and own, and as the state of a spoilt sequence."""

    @pl.when(jnp.max(spoilt) > 0.0)
    def _():
        for ref in (refs.o, refs.W):
            if ref is not None:
                nonfinite.spoil(ref, spoilt * own)

        # The last row of a chunk belongs to the sequence of the state after it.
        @pl.when(jnp.max(spoilt[:, -1:]) > 0.0)
        def _():
            refs.state[...] = jnp.full(refs.state.shape, jnp.nan, jnp.float32)


def _fwd_kernel(refs, *, static: Static):
    """Take the state through the step of the turn before and prepare the next.

    The first turn has no step before it, and the last none to prepare: they repeat the step they have. What the first
    turn makes of uninitialised scratch, the second replaces.

    A final state that is wanted is the state itself: its block stays where it is until another sequence begins.
    """
    if refs.ht is not None:
        refs.state = refs.ht
    turn, first, last = pl.program_id(2), pl.program_id(0) * static.steps, static.steps - 1
    ahead = layout.Step(refs.table, first + jnp.minimum(turn, last))
    step = layout.Step(refs.table, first + jnp.maximum(turn - 1, 0))

    def clear_others() -> None:
        """Make the rows zero that no piece owns."""
        pl.when((step.opens & step.mixed) == 1)(lambda: layout.clear(refs.o, refs.W))

    def pass_empty() -> None:
        """Take a state through an empty sequence, which no turn does."""

        @pl.when((step.first == 1) & step.empty)
        def _():
            refs.state[...] = jnp.zeros_like(refs.state) if refs.h0 is None else refs.h0[...]

    if refs.owner is not None and refs.h0 is not None:  # what a quarantine looks at

        @pl.when(step.first == 1)
        def _():
            refs.state[...] = refs.h0[...]

    if refs.pool is not None:

        @pl.when(step.first == 1)
        def _():
            pools.fetch_states(refs.pool, refs.state, step.continues, transposed=True)

        @pl.when((turn == 0) & (step.sequence == step.target))
        def _():
            pools.keep_block(refs.pool, refs.pool_out)

    turns = functools.partial(_turn, refs, ahead, step, static)
    if static.pieces:
        layout.whole_or_cut(
            (ahead, step), static.C, turns, clear_others, pass_empty if refs.pool is None else lambda: None
        )
    else:
        nonfinite.masked_or_not(None if refs.owner is None else (ahead.mixed + step.mixed) > 0, turns)
    if refs.pool is not None:

        @pl.when((turn > 0) & (step.last == 1))
        def _():
            pools.put_states(refs.state, refs.pool_out, transposed=True)


def _turn(refs, ahead: layout.Step, step: layout.Step, static: Static, masked: bool | None) -> None:
    """Do as `_fwd_kernel`.

    `masked` says whether one of the two chunks is mixed. False says also that all their rows belong to the two steps,
    and None that no chunk is ever mixed, but that some rows may not belong to them.
    """
    heads, C, p, dtype = static.config.heads, static.C, static.p, refs.v.dtype
    # With the scores at hand no decay between two rows of the chunk is needed.
    base = static.base if refs.X is None else 0
    masks, spoilt, found, strip, M = None, None, None, None, None
    own = own_rows(ahead, static) if masked is None else None
    own_passed = own_rows(step, static) if masked is None else None
    goes_on = getattr(refs, "goes_on", None) if masked else None
    if masked:
        # The selection that padding needs anyway makes zeros of what is not finite, before any product reads it.
        valid_passed = refs.valid[0] > 0.0
        spoilt = nonfinite.only_if(step.mixed == 1, lambda: quarantine_passed(refs, valid_passed, step, static), C)
        own_passed = valid_passed & (spoilt[0] == 0.0)
        masks = load_masks(refs.owner, ahead, C)
        store_continuing(goes_on, masks)
        valid = masks.code[0] >= 0
        found = nonfinite.only_if(ahead.mixed == 1, lambda: keys_not_finite(refs, valid, masks, static), C)
        own = valid & (found[0] == 0.0)
    gates, betas = load_gates(refs, own)  # [C, heads K], [heads, C]
    beta_rows = packed.side_lanes(betas[:, None], p)  # [heads / p, 1, p C]

    @functools.cache
    def load(name, i):
        """Return a query or key head [1, C, K]: all of them at once would not stay in registers."""
        return load_keys(getattr(refs, name), own, static, slice(i, i + 1))

    def make(n):
        """Return what the state needs of the pack of heads from n on, and its scores, if there are none yet."""
        pack, K = range(n, n + p), static.K
        q_pack, k_pack = (jnp.concatenate([load(name, i // static.group) for i in pack]) for name in ("q", "k"))
        q_pack = q_pack * static.scale
        g, in_nats = gates[:, n * K : (n + p) * K], refs.law is None
        if refs.law is not None:
            # Pack by pack, because all decays at once would not stay in registers.
            g = decays_of(g, refs, own, static, n * K, tiles.LOG2_E, exact=matmul.operand_dtype(dtype) == jnp.float32)
        store_block_decays(refs.decays, g, base, goes_on, n * K // packed.LANES, in_nats)
        decays, beta = load_decays(refs.decays, pack, K, base), tiles.to_column(betas[n : n + p, None])  # [p, C, 1]
        scores = pack_scores(q_pack, k_pack, decays, refs.levels[...], masks, dtype) if refs.X is None else None
        boundary = pack_boundary([q_pack, k_pack] if refs.o is not None else [k_pack], beta, decays, masks)
        return n, boundary, scores

    def store(n, boundary: Boundary, scores) -> None:
        """Store what `make` returned for the next turn."""
        pack, packs = slice(n, n + p), slice(n // p, n // p + 1)
        refs.decayed[pack] = boundary.decayed.astype(refs.decayed.dtype)
        refs.ends[pack], refs.through[pack] = packed.rows(packed.parts(boundary.ends, dtype)), boundary.through
        scores = refs.scores[packs] if scores is None else scores  # [1, 2 C, p C]
        if refs.o is not None:
            refs.P[packs] = packed.lanes(packed.parts(scores[:, :C] * beta_rows[packs], dtype))
        if refs.scores_out is not None:
            refs.scores_out[packs] = scores

    # The products of a pack do not wait for those of the chunk before, so the two alternate.
    made, passing = [], pass_chunk(refs, own_passed, step, static, dtype)
    schedule.take_turns(
        order(heads // p, refs.o is not None), p=passing, m=(made.append(make(n)) for n in range(0, heads, p))
    )
    if refs.X is None:
        M = jnp.concatenate([scores[:, C:] for *_, scores in made]) * beta_rows  # [heads / p, C, p C]
        strip = inverse.begin_inverse(M)  # [heads / p, 16, p C]
    for _ in passing:
        pass
    # Only now, because the chunk before is read until its state has passed.
    if refs.X is None:
        refs.strip[...], refs.M[...] = strip, M
    for each in made:
        store(*each)
    if masked:

        @pl.when(step.mixed == 1)
        def _():
            spoil_passed(refs, spoilt, refs.valid[...])

        refs.found[...], refs.owner_passed[...] = found, refs.owner[...]
    if refs.owner is not None:
        all_rows = jnp.ones((1, C, 1), jnp.float32)
        refs.valid[...] = all_rows if masks is None else jnp.where(masks.code >= 0, all_rows, 0.0)


def order(packs: int, with_output: bool) -> str:
    """Return what a turn does with so many packs, see `ORDER`."""
    found = ORDER if with_output else STATES_ORDER
    return found if found.count("m") == packs else "pm" * packs


def stages_of(static: Static, most: int) -> list[slice]:
    """Return the heads that take the state through a chunk together, at most so many."""
    heads, p = static.config.heads, static.p
    size = max(n for n in range(p, max(p, most) + 1, p) if heads % n == 0)
    return [slice(n, n + size) for n in range(0, heads, size)]


def read_state(decayed, S):
    """Return the product of decayed [heads, R, K] and the transposed S [heads, V, K], [heads, R, V] float32."""
    heads, V, K = S.shape
    # Two heads fill the 256 x 256 weights of a matrix unit.
    p = 2 if heads % 2 == 0 and 2 * K <= 256 and 2 * V <= 256 else 1
    S = packed.place_tiles(packed.pack_members(S.astype(decayed.dtype), p), p)  # [heads / p, p V, p K]
    return packed.split_lanes(matmul.dot_nt(packed.side_lanes(decayed, p), S), p)


def write_state(W, ends):
    """Return W^T ends, [heads, V, K] float32, for `parts` of W and of ends [heads, C, K]."""
    left, right = packed.part_pairs(W, ends)
    return matmul.dot_tn(packed.rows(left), packed.rows(right))


def pass_chunk(refs, own, step: layout.Step, static: Static, dtype) -> Iterator[None]:
    """Finish the inverse of the chunk in scratch and take the state through it; yield where products may stand."""
    X = None if refs.X is None else refs.X[...]  # [heads / p, C, p C]
    if refs.X is None:
        for product in inverse.ladder(
            refs.strip[...], refs.M[...], 3 if matmul.operand_dtype(dtype) == jnp.float32 else 2
        ):
            X = product  # the last is the inverse
            yield
    if refs.X_out is not None:
        refs.X_out[...] = X
    stages = stages_of(static, STAGE if refs.o is not None and refs.X is None else HALF_STAGE)
    yield from schedule.stagger(pass_state(refs, own, X, stage, step, static, dtype) for stage in stages)


def pass_state(refs, own, X, heads: slice, step: layout.Step, static: Static, dtype) -> Iterator[None]:
    """Write the output of some heads of the chunk in scratch, take their state through it; yield between products."""
    C, p, packs = static.C, static.p, slice(heads.start // static.p, heads.stop // static.p)
    # What the state held before a sequence begins is not looked at: selecting costs less than clearing.
    begins, S = step.first == 1, refs.state[heads]  # [h, V, K]
    if refs.pool is None and (refs.owner is None or refs.h0 is None):
        S = jnp.where(begins, 0.0 if refs.h0 is None else refs.h0[heads], S)
    if refs.h is not None:
        refs.h[heads] = S.astype(refs.h.dtype)
    seen = read_state(refs.decayed[heads], S)  # [h, 2 C or C, V]
    yield
    v = layout.load_heads(refs.v, static.V, heads, own).astype(jnp.float32)  # [h, C, V]
    if S.shape[1] > static.V:  # channels without values
        v = packed.lanes([v, jnp.zeros((*v.shape[:2], S.shape[1] - static.V), jnp.float32)])
    W = packed.multiply_packed(packed.lanes(packed.parts(X[packs], dtype)), v - seen[:, -C:], p, dtype)  # [h, C, V]
    # Pieces share the rows of a chunk; what a chunk stores past the last token is never read.
    stored = own if static.pieces else None
    if refs.W is not None:
        layout.store_heads(refs.W, W, stored, heads.start)
    yield
    if refs.o is not None:
        o = seen[:, :C] + packed.multiply_packed(refs.P[packs], W, p, dtype)  # [h, C, V]
        layout.store_heads(refs.o, o, stored, heads.start)
    ends = refs.ends[heads]  # [h, parts C, K]
    ends = [ends[:, i : i + C] for i in range(0, ends.shape[1], C)]
    refs.state[heads] = refs.through[heads] * S + write_state(packed.parts(W, dtype), ends)  # [h, V, K]


def launch(x: Operands, static: Static, want: tuple[str, ...]) -> dict[str, jax.Array]:
    """Run the forward, or the part of it that makes what is wanted.

    Without o no query reads the state, and the initial states may have more channels than v: the values of those are
    zeros that nobody stores or reads.

    Args:
      x: what the kernel reads. With X and scores, of an earlier launch, they are not made again.
      static: what is known when it is built.
      want: names of outputs.

    Returns:
      A dict of what is wanted: o [B, T, HV V] in the type of v; ht, the final states [N, HV, V, K] float32; h, the
      states before every step [B, steps, HV, V, K] in the type of products; in float32 W like v, packed X
      [B, steps, HV / p, C, p C] and packed scores of queries above those of keys [B, steps, HV / p, 2 C, p C]; if
      there is a pool, pool_out: the same, updated in place.
    """
    B, HV, C, K, V, steps, heads = static.B, static.HV, static.C, static.K, static.V, static.steps, static.config.heads
    p, dtype, last, made = static.p, x.v.dtype, steps - 1, x.X is None
    channels = V if x.initial_state is None else x.initial_state.shape[2]
    operand = matmul.operand_dtype(dtype)
    count = 2 if operand == jnp.bfloat16 else 1
    ahead, passed = (
        layout.Blocks(C, steps, at, static.pieces)
        for at in (lambda turn: jnp.minimum(turn, last), lambda turn: jnp.maximum(turn - 1, 0))
    )
    key_lanes, share = static.key_heads(heads) * K, max(static.group // heads, 1)
    packed_shape, both = (heads // p, C, p * C), (heads // p, 2 * C, p * C)
    state, before = passed.state(heads, channels, K), passed.per_step(heads, channels, K)
    outputs = {
        "o": (passed.tokens(heads * V), x.v.shape, dtype),
        "ht": (state, (static.N, HV, channels, K), jnp.float32),
        "h": (before, (B, steps, HV, channels, K), operand),
        "W": (passed.tokens(heads * V), x.v.shape, jnp.float32),
        "X": (passed.per_step(*packed_shape), (B, steps, HV // p, C, p * C), jnp.float32),
        "scores": (ahead.per_step(*both), (B, steps, HV // p, 2 * C, p * C), jnp.float32),
    }
    if x.pool is not None:
        outputs["pool_out"] = passed.target(heads, *x.pool.shape[2:]), x.pool.shape, x.pool.dtype
    wanted = [name for name in outputs if name in want]
    readers, base = 2 if "o" in wanted else 1, static.base if made else 0
    # What a turn makes of its chunk for the next turn to use; the state, unless the output holds it; decays, and what
    # keeps the sequences of the chunk of the turn before apart.
    scratch = {
        "decayed": pltpu.VMEM((heads, readers * C, K), operand),
        "ends": pltpu.VMEM((heads, count * C, K), operand),
        "through": pltpu.VMEM((heads, 1, K), jnp.float32),
        "decays": decays_scratch(heads, C, K, base),
    }
    if made:
        scratch["strip"] = pltpu.VMEM((heads // p, inverse.strip_rows(C), p * C), jnp.float32)
        scratch["M"] = pltpu.VMEM(packed_shape, jnp.float32)
    if "o" in wanted:
        scratch["P"] = pltpu.VMEM((heads // p, C, count * p * C), operand)
    if "ht" not in wanted:
        scratch["state"] = pltpu.VMEM((heads, channels, K), jnp.float32)
    if x.owner is not None:
        scratch |= {name: pltpu.VMEM((1, C, 1), jnp.float32) for name in ("found", "valid")}
        scratch["owner_passed"] = pltpu.VMEM((1, C), jnp.int32)
    if x.owner is not None and base > 1:
        scratch["goes_on"] = pltpu.VMEM((C, packed.LANES), jnp.float32)
    operands = {
        "levels": (jnp.asarray(tile.level_table(C, base)) if made else None, whole_block(C, 2 * C)),
        "q": (x.q, ahead.tokens(key_lanes, share)),
        "k": (x.k, ahead.tokens(key_lanes, share)),
        "v": (x.v, passed.tokens(heads * V)),
        "g": (x.g, ahead.tokens(heads * K)),
        "beta": (x.beta.reshape(B, -1, HV // heads, heads, C), ahead.rows(heads)),
        "owner": (x.owner, ahead.owner(C)),
        "h0": (x.initial_state, state),
        "law": (x.law, law_block(heads * K)),
        "pool": (x.pool, None if x.pool is None else passed.state(heads, *x.pool.shape[2:])),
        "X": (x.X, passed.per_step(*packed_shape)),
        "scores": (x.scores, ahead.per_step(*both)),
    }
    # An operand and an output of one name are two Refs: those of outputs have a name of their own in the kernel.
    present = [(f"{name}_out" if name in operands else name, name in wanted) for name in outputs]
    kind = "fwd" if "o" in wanted else "summary"
    inputs = ["table", *(name for name, (value, _) in operands.items() if value is not None)]
    results = launcher.pallas_call(
        launcher.named(_fwd_kernel, ["table", *operands], present, list(scratch), static=static),
        x.table,
        *(value for value, _ in operands.values()),
        name=f"chunk_kda_{kind}_c{C}",
        num_scalar_prefetch=1,
        # Rows of the batch and blocks of heads are independent; steps pass the state on in scratch, so they run in
        # order. One more turn, because the state passes a step in the turn after the one that prepares it.
        grid=(B, HV // heads, steps + 1),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=[None if value is None else spec for value, spec in operands.values()],
        out_specs=[outputs[name][0] for name in wanted],
        out_shape=[compat.out_struct(*outputs[name][1:], *x) for name in wanted],
        scratch_shapes=list(scratch.values()),
        cost_estimate=cost.cost(B=B, T=static.T, H=static.H, HV=HV, K=K, V=V, C=C, itemsize=dtype.itemsize),
        input_output_aliases={} if x.pool is None else {inputs.index("pool"): wanted.index("pool_out")},
        in_bounds=x.pool is None,  # nothing else comes from the caller's numbers
    )  # fmt: skip
    return dict(zip(wanted, results, strict=True))
