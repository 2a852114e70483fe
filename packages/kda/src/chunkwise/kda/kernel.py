"""The forward of Kimi delta attention in one launch: kernel body and launcher."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.kda import tile
from chunkwise.kda.config import Config
from chunkwise.shared import dot, l2norm, out_struct, pallas_call, repeat_heads, strictly_lower, to_column

LANES = 128


class Operands(NamedTuple):
    """What the kernels read: tokens padded to whole chunks, head dimensions to whole lanes, a head a slice of lanes.

    Attributes:
      first: int32 [NC], 1 where a chunk starts a sequence.
      sequence: int32 [NC], nondecreasing: the sequence of every chunk.
      last: int32 [NC], 1 where a chunk ends a sequence.
      opening: int32 [NC], the sequence that is open where the chunk begins; read with `owner` only.
      q, k: [NC C, H K].
      v: [NC C, HV V].
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
      H, HV, C: heads and chunk size.
      N: states in and out.
      sequences: how many sequences the owners number.
      scale: multiplies the queries.
      normalise: whether queries and keys are scaled to unit length first.
      base: rows of the diagonal blocks that one product covers.
      config: tile sizes.
    """

    H: int
    HV: int
    C: int
    N: int
    sequences: int | None
    scale: float
    normalise: bool
    base: int
    config: Config


def take_heads(x, heads):
    """Return [C, heads D] as [heads, C, D]; a slice of whole lanes costs nothing."""
    D = x.shape[1] // heads
    return jnp.stack([x[:, n * D : (n + 1) * D] for n in range(heads)])


def put_heads(x):
    """Return [heads, C, D] as [C, heads D]."""
    return jnp.concatenate(list(x), axis=1)


def load_keys(x, heads, own, normalise):
    """Return queries or keys [C, own K] as float32 [heads, C, K] of the value heads."""
    x = take_heads(x.astype(jnp.float32), own)
    return repeat_heads(l2norm(x) if normalise else x, heads)


def gate_sums(g, matrix, heads):
    """Return the sums of the gate [C, heads K]; `matrix` is [4 C, 3 C], the level matrix three times in a row."""
    C = g.shape[0]
    g = g * tile.LOG2_E
    parts = jnp.concatenate(tile.split3(g), axis=0)
    small = take_heads(dot(matrix[None], parts[None], jnp.bfloat16)[0], heads)
    g = take_heads(g, heads)
    odd = (lax.broadcasted_iota(jnp.int32, g.shape, 1) & 1) != 0
    two, four, prefix, suffix = (small[:, n * C : (n + 1) * C] for n in range(4))
    return tile.widen(prefix, suffix, [jnp.where(odd, g, 0.0), two, four], tile.SUBLANES)


class Chunk(NamedTuple):
    """What both directions compute from the inputs of a chunk alone; float32 tiles of the value heads.

    Attributes:
      q, k: [h, C, K], normalised if asked for; q scaled.
      v: [h, C, V].
      beta: [h, C, 1].
      sums: of the gate.
      scores: [h, C, C], queries with keys, lower triangular.
      N: [h, C, C], keys with keys, strictly lower triangular.
      X: [h, C, C], the inverse (I + beta N)^-1.
      boundary: decays to the boundaries of the chunk.
      masks: of a chunk that holds several sequences, or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    sums: tile.Sums
    scores: jax.Array
    N: jax.Array
    X: jax.Array
    boundary: tuple
    masks: tile.Masks | None


def load_chunk(matrix, q, k, v, g, beta, owner, opening, static: Static, heads: int) -> Chunk:
    """Return the chunk of the loaded blocks q, k [C, own K], v [C, h V], g [C, h K], beta [h, C], owner [1, C]."""
    own, dtype, masks = own_heads(heads, static), v.dtype, None
    if owner is not None:
        masks = tile.stream_tile(owner[None], opening, static.sequences)
        valid = masks.valid[0]
        q, k, v, g = (jnp.where(valid, x.astype(jnp.float32), 0.0) for x in (q, k, v, g))
        beta = jnp.where(owner < static.sequences, beta, 0.0)
    q = load_keys(q, heads, own, static.normalise) * static.scale
    k = load_keys(k, heads, own, static.normalise)
    sums = gate_sums(g, matrix, heads)
    beta = to_column(beta[:, None])
    scores = tile.interaction_tile(jnp.concatenate([q, k], axis=1), k, sums.levels, static.base, dtype)
    if masks is not None:
        scores = jnp.where(tile.twice(masks.same), scores, 0.0)
    N = jnp.where(strictly_lower(static.C), scores[:, static.C :], 0.0)
    X, boundary = tile.inverse_tile(beta * N, dtype), tile.boundary_tile(sums, masks)
    v = take_heads(v.astype(jnp.float32), heads)
    return Chunk(q, k, v, beta, sums, scores[:, : static.C], N, X, boundary, masks)


def _kda_kernel(first_ref, sequence_ref, last_ref, opening_ref, matrix_ref, q_ref, k_ref, v_ref, g_ref, beta_ref,
                owner_ref, h0_ref, o_ref, ht_ref, h_ref, S_ref, *, static):  # fmt: skip
    del sequence_ref, last_ref  # read by the index maps, and by the backward
    step = pl.program_id(1)

    @pl.when(first_ref[step] == 1)
    def _():
        S_ref[...] = jnp.zeros_like(S_ref) if h0_ref is None else h0_ref[...]

    blocks: list[Any] = [None if ref is None else ref[...] for ref in (q_ref, k_ref, v_ref, g_ref, beta_ref, owner_ref)]
    x = load_chunk(matrix_ref[...], *blocks, opening_ref[step], static, static.config.heads)
    S = S_ref[...]
    if h_ref is not None:
        h_ref[...] = S
    rows = jnp.concatenate([x.q, x.k], axis=1)
    o, S = tile.output_tile(S, rows, x.k, x.v, x.beta, x.scores, x.X, x.boundary, v_ref.dtype)
    o_ref[...] = put_heads(o).astype(o_ref.dtype)
    S_ref[...] = S
    if ht_ref is not None:
        ht_ref[...] = S


def own_heads(heads: int, static: Static) -> int:
    """Return how many key heads serve a block of `heads` value heads."""
    return max(heads * static.H // static.HV, 1)


def specs(static: Static, heads: int, K: int, V: int, chunk):
    """Return the specs of keys, values, gates, beta, owners and states; `chunk` maps a grid step to its chunk."""
    C, per_key_block = static.C, max(static.HV // static.H // heads, 1)

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
    )


def sums_matrix(C: int) -> jax.Array:
    """Return the constant operand of `gate_sums`."""
    return jnp.asarray(jnp.tile(tile.level_matrix(C), (1, 3)), jnp.bfloat16)


def launch(x: Operands, static: Static, final_state: bool = True, boundaries: bool = False):
    """Run the forward.

    Returns:
      o [NC C, HV V], the final states [N, HV, V, K] or None, and the states before every chunk [NC, HV, V, K] or None.
    """
    NC, HV, C = x.beta.shape
    K, V, heads = x.g.shape[1] // HV, x.v.shape[1] // HV, static.config.heads
    spec = specs(static, heads, K, V, lambda n: n)
    matrix = sums_matrix(C)

    def given(flag, value):
        return value if flag else None

    return pallas_call(
        functools.partial(_kda_kernel, static=static),
        *x[:4],
        matrix,
        *x[4:8],
        x.beta.reshape(NC, HV // heads, heads, C),
        *x[9:],
        name=f"fused_chunk_kda_fwd_c{C}",
        num_scalar_prefetch=4,
        # Blocks of heads are independent; chunks pass the state on in scratch, so they run in order.
        grid=(HV // heads, NC),
        dimension_semantics=("parallel", "arbitrary"),
        in_specs=[
            pl.BlockSpec(matrix.shape, lambda h, n, *tables: (0, 0)),
            spec["key"],
            spec["key"],
            spec["value"],
            spec["gate"],
            spec["beta"],
            given(x.owner is not None, spec["owner"]),
            given(x.initial_state is not None, spec["state"]),
        ],
        out_specs=[spec["value"], given(final_state, spec["state"]), given(boundaries, spec["boundary"])],
        out_shape=[
            out_struct(x.v.shape, x.v.dtype, *x),
            given(final_state, out_struct((static.N, HV, V, K), jnp.float32, *x)),
            given(boundaries, out_struct((NC, HV, V, K), jnp.float32, *x)),
        ],
        scratch_shapes=[pltpu.VMEM((heads, V, K), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=2 * NC * HV * C * (2 * C * K * C.bit_length() + 4 * C * C + 3 * K * V + 2 * C * V),
            transcendentals=NC * HV * C * K * (C.bit_length() + 2),
            bytes_accessed=sum(a.nbytes for a in x if a is not None) + x.v.nbytes,
        ),
    )
