"""The forward of Kimi delta attention in one launch: tile mathematics, kernel body, launcher.

With K, Q, V the rows of a chunk, S the state before it, B = diag(beta), D_ij = e^(G_i - G_j) per channel, and <.>_D the
products of `tile.interaction_tile`,

    X  = (I + tril(<K, K>_D, -1) B)^-1            P = scale tril(<Q, K>_D) B      no state in them
    R  = V - (K e^G) S                            what the keys do not recall yet
    W  = X R                                      B W is v_new
    o  = scale (Q e^G) S + P W                    S' = e^G_last S + (K e^(G_last - G))^T B W

P of a chunk, and X as far as it takes no products, are made in the step before the one that takes the state through it:
the two halves of a step do not wait for one another. With bfloat16 tensors S and the rows of decayed queries and keys
enter their products as bfloat16. X, P, R, W and the decayed keys as columns must not be rounded so: where keys repeat,
W oscillates and the sums over it cancel. They keep 16 bits, as two bfloat16 parts.

The [C, C] matrices of p heads lie side by side in the lanes ("packed", see shared.kernels.packed).
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.kda import tile
from chunkwise.kda.config import Config
from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import (
    LANES,
    LOG2_E,
    begin_inverse,
    dot_nt,
    dot_tn,
    l2norm,
    ladder,
    lanes,
    multiply_packed,
    named,
    operand_dtype,
    pack_members,
    packing,
    pallas_call,
    part_pairs,
    parts,
    place_tiles,
    rows,
    side_lanes,
    split_lanes,
    strip_rows,
    to_column,
)

# Heads that take the state through a chunk together.
STAGE = 4
# What a step of 8 packs does one after the other before it begins the inverse: "m" makes the tiles of a pack, "p" takes
# the chunk before through its next products, which wait for one another. The matrix unit takes products in this order,
# and where one waits, all wait. Found by search: see the README.
ORDER = "pmmpmpmmppmpmpmp"


class Operands(NamedTuple):
    """What the kernels read: tokens padded to whole chunks, head dimensions to whole lanes, a head a slice of lanes.

    Attributes:
      first: int32 [NC], 1 where a chunk starts a sequence.
      sequence: int32 [NC], nondecreasing: the sequence of every chunk.
      last: int32 [NC], 1 where a chunk ends a sequence.
      opening: int32 [NC], the sequence that is open where the chunk begins; read with `owner` only.
      q, k: [NC C, H K], bfloat16 or float32, in which products take them.
      v: [NC C, HV V], of the same type.
      g: [NC C, HV K] float32.
      beta: [NC, HV, C] float32.
      owner: int32 [NC, 1, C], the sequence of every row of chunks that hold several; None where a chunk holds one.
      initial_state: [N, HV, V, K] float32, transposed, or None for zeros.
    """

    first: jax.Array
    sequence: jax.Array
    last: jax.Array
    opening: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    owner: jax.Array | None
    initial_state: jax.Array | None


class Static(NamedTuple):
    """What is known when the kernel is built.

    Attributes:
      H, HV, C, K, V: heads, chunk size, dimensions padded to lanes.
      N: states in and out.
      sequences: how many sequences the owners number, 0 without owners.
      scale: multiplies the queries.
      normalise: whether queries and keys are scaled to unit length first.
      base: rows of the diagonal blocks that one product covers, in the forward.
      backward_base: in the backward, where gradients of strong gates are as small as the decays.
      config: tile sizes.
    """

    H: int
    HV: int
    C: int
    K: int
    V: int
    N: int
    sequences: int
    scale: float
    normalise: bool
    base: int
    backward_base: int
    config: Config

    @property
    def p(self) -> int:
        """Heads that lie side by side in the lanes: a power of two that divides the heads of a grid step."""
        return packing(self.C, self.config.heads, self.config.heads_bwd)


def take_heads(x, heads):
    """Return [C, heads D] as [heads, C, D]; a slice of whole lanes costs nothing."""
    return split_lanes(x[None], heads)


def put_heads(x):
    """Return [heads, C, D] as [C, heads D]."""
    return jnp.concatenate(list(x), axis=1)


def load_keys(x, own, normalise):
    """Return queries or keys [C, own K] as float32 [own, C, K], rounded as the tensors are."""
    heads = take_heads(x.astype(jnp.float32), own)
    return l2norm(heads).astype(x.dtype).astype(jnp.float32) if normalise else heads


def decays_scratch(heads: int, C: int, K: int, base: int):
    """Return the scratch of `store_block_decays`."""
    return pltpu.VMEM((5 if base == 1 else 4, heads * K // LANES, C, LANES), jnp.float32)


def store_block_decays(ref, g, base: int, first: int = 0) -> None:
    """Store the `tile.block_decays` of the gates g [C, heads K] of heads from tile `first` on.

    Inside of blocks of 8 rows whole registers of first, of second rows and so on are needed: loads with a stride from
    ref [n, heads K / 128, C, 128] bring them, stores with a stride take them back.
    """
    C = g.shape[0]
    by_row = [pl.ds(r, C // tile.SUBLANES, stride=tile.SUBLANES) for r in range(tile.SUBLANES)]
    for n in range(g.shape[1] // LANES):
        ref[0, first + n] = g[:, n * LANES : (n + 1) * LANES] * LOG2_E
        decays = tile.block_decays([ref.at[0, first + n][row, :] for row in by_row], base)
        for i, x in enumerate(decays):
            for row, y in zip(by_row, x, strict=True):
                ref.at[i, first + n][row, :] = y


def load_decays(ref, heads: range, K: int, base: int) -> tile.Decays:
    """Return the decays of some heads from what `store_block_decays` left."""
    each = K // LANES

    def load(i):
        return jnp.stack([jnp.concatenate([ref[i, n * each + m] for m in range(each)], axis=1) for n in heads])

    return tile.chunk_decays([load(i) for i in range(ref.shape[0])], base)


def transposed(x):
    """Return the matrices [p, C, R] of a pack transposed and side by side, [1, R, p C]."""
    p, C, R = x.shape
    return jnp.swapaxes(x.reshape(p * C, R), 0, 1)[None]


class Prepared(NamedTuple):
    """What the state needs of a chunk, of some heads.

    Attributes:
      decayed: the queries above the keys, decayed from the start of the chunk [h, 2 C, K].
      ends: the keys times beta, decayed to its end [h, C, K].
      through: the decay over all of it [h, 1, K].
      both: packed scores of queries above those of keys, [n, 2 C, p C].
    """

    decayed: jax.Array
    ends: jax.Array
    through: jax.Array
    both: jax.Array


def prepare_pack(q, k, beta, decays: tile.Decays, table, masks, static: Static, dtype) -> Prepared:
    """Return what the state needs of a pack of heads.

    Args:
      q, k: [p, C, K] float32, q scaled.
      beta: [p, C, 1].
      decays: between the rows of the chunk.
      table: `tile.level_table`.
      masks: of a chunk that holds several sequences, or None.
      static, dtype: of the kernel and of the operands of its products.
    """
    both = transposed(tile.interaction_tile(q, k, decays, table[None], dtype, pairs=len(q) % 2 == 0))
    if masks is not None:
        both = jnp.where(tile.packed_pairs(masks.same, len(q)), both, 0.0)
    from_start, to_end, through = tile.boundary_tile(decays, masks)
    return Prepared(rows([q, k]) * tile.twice(from_start), (k * beta) * to_end, through, both)


def _fwd_kernel(refs, *, static: Static, NC: int):
    """Take the state through chunk c - 1 and prepare chunk c."""
    step, heads, C = pl.program_id(1), static.config.heads, static.C
    prepared, passed = jnp.minimum(step, NC - 1), jnp.maximum(step - 1, 0)
    own, p, dtype = own_heads(heads, static), static.p, refs.v.dtype

    q, k, g, beta, masks = load_chunk(refs, prepared, static, own)
    q = q * static.scale
    beta_rows = side_lanes(beta[:, None], p)

    def make(n):
        """Return what the state needs of the heads from n on."""
        pack = range(n, n + p)
        q_pack, k_pack = (jnp.stack([x[i * own // heads] for i in pack]) for x in (q, k))
        store_block_decays(refs.decays, g[:, n * static.K : (n + p) * static.K], static.base, n * static.K // LANES)
        decays, beta_pack = load_decays(refs.decays, pack, static.K, static.base), to_column(beta[n : n + p, None])
        return prepare_pack(q_pack, k_pack, beta_pack, decays, refs.table[...], masks, static, dtype)

    made, passing = [], pass_chunk(refs, static, dtype, refs.first[passed] == 1)
    for what in order(heads // p):
        if what == "p":
            next(passing, None)
        else:
            made.append(make(len(made) * p))
    decayed, ends, through, both = (jnp.concatenate(x) for x in zip(*made, strict=True))
    P, M = both[:, :C] * beta_rows, both[:, C:] * beta_rows
    strip = begin_inverse(M)
    for _ in passing:
        pass
    refs.strip[...], refs.M[...] = strip, M
    refs.decayed[...] = decayed.astype(refs.decayed.dtype)
    refs.ends[...], refs.through[...] = rows(parts(ends, dtype)), through
    refs.scores[...] = lanes(parts(P, dtype))
    if refs.both is not None:
        refs.both[...] = both
    if refs.ht is not None:

        @pl.when((step > 0) & (refs.last[passed] == 1))
        def _():
            refs.ht[...] = refs.state[...]


def order(packs: int) -> str:
    """Return what a step does with so many packs, see `ORDER`."""
    return ORDER if ORDER.count("m") == packs else "pm" * packs


def load_chunk(refs, chunk, static: Static, own: int):
    """Return q, k [own, C, K] float32, g [C, heads K], beta [heads, C] and the masks, None inside one sequence."""
    q, k, g, beta, masks = refs.q[...], refs.k[...], refs.g[...], refs.beta[...], None
    if refs.owner is not None:
        masks = tile.stream_tile(refs.owner[...][None], refs.opening[chunk], static.sequences)
        valid = masks.valid[0]
        q, k, g = (jnp.where(valid, x, jnp.zeros_like(x)) for x in (q, k, g))
        beta = jnp.where(refs.owner[...] < static.sequences, beta, 0.0)
    return load_keys(q, own, static.normalise), load_keys(k, own, static.normalise), g, beta, masks


def read_state(decayed, S):
    """Return the product of decayed [heads, R, K] and the transposed S [heads, V, K], [heads, R, V] float32."""
    heads, _, K = decayed.shape
    p = 2 if heads % 2 == 0 and 2 * K <= 256 else 1
    S = place_tiles(pack_members(S.astype(decayed.dtype), p), p)
    return split_lanes(dot_nt(side_lanes(decayed, p), S), p)


def write_state(W, ends):
    """Return W^T ends, [heads, V, K] float32, for `parts` of W and of ends [heads, C, K]."""
    left, right = part_pairs(W, ends)
    return dot_tn(rows(left), rows(right))


def pass_chunk(refs, static: Static, dtype, begins) -> Iterator[None]:
    """Finish the inverse of the chunk in scratch and take the state through it; yield where products may stand."""
    heads, p = static.config.heads, static.p
    X = None
    for step in ladder(refs.strip[...], refs.M[...], 3 if operand_dtype(dtype) == jnp.float32 else 2):
        X = step
        yield
    if refs.X is not None:
        refs.X[...] = X
    size = max(n for n in range(p, max(p, STAGE) + 1, p) if heads % n == 0)
    stages = [slice(n, n + size) for n in range(0, heads, size)]
    running = []
    while stages or running:
        if stages:
            running.insert(0, pass_state(refs, X, stages.pop(0), static, dtype, begins))
        # The latest first, each a product behind the one before.
        running = [stage for stage in running if next(stage, running) is not running]
        yield


def pass_state(refs, X, own: slice, static: Static, dtype, begins) -> Iterator[None]:
    """Write the output of some heads of the chunk in scratch, take their state through it; yield between products.

    Where a sequence `begins` with the chunk, what the state held is not looked at.
    """
    C, V, p = static.C, static.V, static.p
    packs, at = slice(own.start // p, own.stop // p), slice(own.start * V, own.stop * V)
    S = jnp.where(begins, 0.0 if refs.h0 is None else refs.h0[own], refs.state[own])
    if refs.h is not None:
        refs.h[own] = S.astype(refs.h.dtype)
    seen = read_state(refs.decayed[own], S)
    yield
    v = refs.v[:, at].astype(jnp.float32)
    if refs.v_owner is not None:
        row = refs.v_owner[...][None].astype(jnp.float32)
        v = jnp.where(to_column(row)[0] < static.sequences, v, 0.0)
    W = multiply_packed(lanes(parts(X[packs], dtype)), take_heads(v, own.stop - own.start) - seen[:, C:], p, dtype)
    if refs.W is not None:
        refs.W[:, at] = put_heads(W)
    yield
    o = seen[:, :C] + multiply_packed(refs.scores[packs], W, p, dtype)
    refs.o[:, at] = put_heads(o).astype(refs.o.dtype)
    ends = refs.ends[own]
    ends = [ends[:, i : i + C] for i in range(0, ends.shape[1], C)]
    refs.state[own] = refs.through[own] * S + write_state(parts(W, dtype), ends)


def own_heads(heads: int, static: Static) -> int:
    """Return how many key heads serve a block of `heads` value heads."""
    return max(heads * static.H // static.HV, 1)


def specs(static: Static, heads: int, chunk):
    """Return the specs of what a grid step (block of heads, n) works on; `chunk` maps n to its chunk."""
    C, K, V, p = static.C, static.K, static.V, static.p
    per_key_block = max(static.HV // static.H // heads, 1)

    def block(*shape, index):
        return pl.BlockSpec(shape, lambda h, n, first, sequence, last, opening: index(h, chunk(n), sequence))

    return dict(
        key=block(C, own_heads(heads, static) * K, index=lambda h, n, s: (n, lax.div(h, jnp.int32(per_key_block)))),
        value=block(C, heads * V, index=lambda h, n, s: (n, h)),
        gate=block(C, heads * K, index=lambda h, n, s: (n, h)),
        beta=block(None, None, heads, C, index=lambda h, n, s: (n, h, 0, 0)),
        owner=block(None, 1, C, index=lambda h, n, s: (n, 0, 0)),
        state=block(None, heads, V, K, index=lambda h, n, s: (s[n], h, 0, 0)),
        boundary=block(None, heads, V, K, index=lambda h, n, s: (n, h, 0, 0)),
        packed=block(None, heads // p, C, p * C, index=lambda h, n, s: (n, h, 0, 0)),
        both=block(None, heads // p, 2 * C, p * C, index=lambda h, n, s: (n, h, 0, 0)),
    )


def launch(x: Operands, static: Static, final_state: bool = True, keep: bool = False):
    """Run the forward.

    Returns:
      o [NC C, HV V], the final states [N, HV, V, K] or None, and with `keep` what the backward needs: h, the states
      before every chunk [NC, HV, V, K] in the type of v, and in float32 W like v, packed X [NC, HV / p, C, p C] and
      packed scores of queries above those of keys [NC, HV / p, 2 C, p C].
    """
    NC, HV, C = x.beta.shape
    K, V, heads = static.K, static.V, static.config.heads
    p, dtype = static.p, x.v.dtype
    operand = operand_dtype(dtype)
    count = 2 if operand == jnp.bfloat16 else 1
    now, passed = (
        specs(static, heads, at) for at in (lambda n: jnp.minimum(n, NC - 1), lambda n: jnp.maximum(n - 1, 0))
    )
    matrices = out_struct((NC, HV // p, C, p * C), jnp.float32, *x)
    outputs = {
        "o": (passed["value"], out_struct(x.v.shape, dtype, *x)),
        "ht": (passed["state"], out_struct((static.N, HV, V, K), jnp.float32, *x)),
        "h": (passed["boundary"], out_struct((NC, HV, V, K), operand, *x)),
        "W": (passed["value"], out_struct(x.v.shape, jnp.float32, *x)),
        "X": (passed["packed"], matrices),
        "both": (now["both"], out_struct((NC, HV // p, 2 * C, p * C), jnp.float32, *x)),
    }
    wanted = ["o", *["ht"] * final_state, *["h", "W", "X", "both"] * keep]
    # The state, and what a step makes of its chunk for the next step to use; last, decays.
    scratch = {
        "state": pltpu.VMEM((heads, V, K), jnp.float32),
        "decayed": pltpu.VMEM((heads, 2 * C, K), operand),
        "ends": pltpu.VMEM((heads, count * C, K), operand),
        "through": pltpu.VMEM((heads, 1, K), jnp.float32),
        "strip": pltpu.VMEM((heads // p, strip_rows(C), p * C), jnp.float32),
        "M": pltpu.VMEM((heads // p, C, p * C), jnp.float32),
        "scores": pltpu.VMEM((heads // p, C, count * p * C), operand),
        "decays": decays_scratch(heads, C, K, static.base),
    }
    operands = {
        "table": (jnp.asarray(tile.level_table(C, static.base)), pl.BlockSpec((C, 2 * C), lambda *_: (0, 0))),
        "q": (x.q, now["key"]),
        "k": (x.k, now["key"]),
        "v": (x.v, passed["value"]),
        "g": (x.g, now["gate"]),
        "beta": (x.beta.reshape(NC, HV // heads, heads, C), now["beta"]),
        "owner": (x.owner, now["owner"]),
        "v_owner": (x.owner, passed["owner"]),
        "h0": (x.initial_state, passed["state"]),
    }
    names = ["first", "sequence", "last", "opening", *operands]
    results = pallas_call(
        named(_fwd_kernel, names, [(name, name in wanted) for name in outputs], list(scratch), static=static, NC=NC),
        *x[:4],
        *(value for value, _ in operands.values()),
        name=f"fused_chunk_kda_fwd_c{C}",
        num_scalar_prefetch=4,
        # Blocks of heads are independent; chunks pass the state on in scratch, so they run in order. One more step,
        # because the state passes a chunk in the step after the one that prepares it.
        grid=(HV // heads, NC + 1),
        dimension_semantics=("parallel", "arbitrary"),
        in_specs=[None if value is None else spec for value, spec in operands.values()],
        out_specs=[outputs[name][0] for name in wanted],
        out_shape=[outputs[name][1] for name in wanted],
        scratch_shapes=list(scratch.values()),
        cost_estimate=pl.CostEstimate(
            flops=2 * NC * HV * C * (2 * C * K * C.bit_length() + 4 * C * C + 3 * K * V + 2 * C * V),
            transcendentals=NC * HV * C * K * (C.bit_length() + 2),
            bytes_accessed=sum(a.nbytes for a in x if a is not None) + x.v.nbytes,
        ),
    )
    return dict(zip(wanted, results, strict=True))
