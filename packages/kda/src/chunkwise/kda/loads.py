"""The loads of both kernels of Kimi delta attention, and how launches cut the loaded arrays.

Queries and keys are loaded with unit length if the options ask for it, values times their write gates, and raw gates as
decays. Decays between the rows of a chunk are kept in scratch memory.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.kda import tile
from chunkwise.kda.operands import KdaOperands, KdaRefs, KdaStatic
from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.kernels.spans import layout, nonfinite


def decays_scratch(heads: int, C: int, K: int, base: int, erase_before_decay: bool):
    """Return the scratch of `store_block_decays`."""
    return pltpu.VMEM(
        (tile.count_decays(base, erase_before_decay), heads * K // packed.LANES, C, packed.LANES), jnp.float32
    )


def store_block_decays(
    ref, g, base: int, continuing=None, first: int = 0, in_nats: bool = True, erase_before_decay: bool = False,
    zeroed: bool = False,
) -> jax.Array | None:  # fmt: skip
    """Store the `tile.block_decays` of the gates g [C, heads K] of heads from tile `first` on, to base 2 or in nats.

    `continuing` is a Ref [C, 128] of `tile.continuing`, or None. With `zeroed`, rows that base blocks cannot have get
    zeros, and the last entry of the Ref keeps the gates, for these rows.

    To compute inside of blocks of 8 rows, one register has the first rows of 8 blocks, another the second rows, and so
    on. Loads with a stride from ref [n, heads K / 128, C, 128] fetch such registers, and stores with a stride put them
    back.

    Returns:
      With `zeroed`, the least factors of rows in base blocks, [heads K / 128, C / 8, 128]; otherwise None.
    """
    least, place = [], ref.shape[0] - 1 if zeroed else 0
    continuing = None if continuing is None else layout.load_every(continuing, tile.SUBLANES)  # each [C / 8, 128]
    for n in range(g.shape[1] // packed.LANES):
        each = g[:, n * packed.LANES : (n + 1) * packed.LANES]  # [C, 128]
        ref[place, first + n] = each * tiles.LOG2_E if in_nats else each
        gates = layout.load_every(ref.at[place, first + n], tile.SUBLANES)
        for i, x in enumerate(tile.block_decays(gates, base, continuing, erase_before_decay, zeroed)):
            layout.store_every(ref.at[i, first + n], x)
            if zeroed and i == 0:
                # Without new sequences in a block, the factor of its last row is the least one.
                least.append(x[-1] if continuing is None else functools.reduce(jnp.minimum, x))
    return jnp.stack(least) if zeroed else None


def load_decays(ref, heads: Sequence, K: int, base: int, erase_before_decay: bool) -> tile.ChannelDecays:
    """Return the decays of some heads, by their numbers, from the scratch memory that `store_block_decays` filled."""
    each = K // packed.LANES

    def load(i):
        return jnp.stack([jnp.concatenate([ref[i, n * each + m] for m in range(each)], axis=1) for n in heads])

    return tile.chunk_decays([load(i) for i in range(tile.count_decays(base, erase_before_decay))], base)


def kept_gates(ref, heads: Sequence, K: int) -> jax.Array:
    """Return the gates [C, heads K] of some heads that `store_block_decays` kept, to base 2."""
    each, last = K // packed.LANES, ref.shape[0] - 1
    return jnp.concatenate([ref[last, n * each + m] for n in heads for m in range(each)], axis=1)


def beyond_base(ref, heads: Sequence, K: int) -> jax.Array:
    """Return whether base blocks cannot have some row of consecutive heads, from scratch memory with their factors."""
    each = K // packed.LANES
    return jnp.min(ref[0, pl.ds(heads[0] * each, len(heads) * each)]) < jnp.float32(tile.LEAST_FACTOR)


def rows_beyond_base(ref, pack: range, K: int, C: int) -> jax.Array:
    """Return which rows of a pack base blocks cannot have, as 1 and 0, float32 [1, C, p C].

    Of a block these are all rows from some row on, because gates are at most 0.
    """
    each, rows = K // packed.LANES, []
    for n in pack:
        least = functools.reduce(jnp.minimum, [ref[0, n * each + m] for m in range(each)])  # [C, 128]
        least = jnp.min(least, axis=1, keepdims=True)[None]  # [1, C, 1]
        beyond = jnp.where(least < jnp.float32(tile.LEAST_FACTOR), jnp.float32(1.0), jnp.float32(0.0))
        rows.append(jnp.broadcast_to(beyond, (1, C, C)))
    return packed.concat_lanes(rows)


def of_chunks(refs: KdaRefs, static: KdaStatic, heads: int) -> list[KdaRefs]:
    """Return the Refs of every chunk of a grid step of several chunks, of which each has so many heads."""
    keys = "q", "k", "e", "dq", "dk", "de"
    tokens = *keys, "v", "b", "w", "o", "v_new_over_beta", "do", "dv", "db", "dw"
    entries = "beta", "dbeta", "h", "A_inv", "A_inv_out", "scores", "scores_out", "continuing"
    tokens, entries = ((*tokens, "g", "dg"), entries) if static.per_channel else (tokens, (*entries, "g", "dg"))

    def of_chunk(i: int):
        each = lambda count: slice(i * count, (i + 1) * count)
        at: dict[str, Any] = dict.fromkeys(tokens, each(static.C)) | dict.fromkeys(entries, i)
        at |= dict.fromkeys(("readers", "ends", "through", "u", "erase_new", "scores_prev"), each(heads))
        at |= dict.fromkeys(("A", "blocks", "P", "beta_prev"), each(heads // static.p))
        at["decays"] = slice(None), each(heads * static.K // packed.LANES)
        return layout.view(refs, at)

    return [of_chunk(i) for i in range(static.chunks)]


def load_keys(ref, valid, static: KdaStatic, which: slice = slice(None)) -> jax.Array:
    """Return queries or keys as float32 [key heads, C, K], rounded to the type of the tensors."""
    heads = layout.load_heads(ref, static.K, which, valid).astype(jnp.float32)  # [key heads, C, K]
    return tiles.l2norm(heads).astype(ref.dtype).astype(jnp.float32) if static.normalise else heads


def load_unit_keys(refs: KdaRefs, valid, static: KdaStatic, which: slice = slice(None)) -> tuple[Any, ...]:
    """Return keys as `load_keys` does, erase keys or None, and a factor for the step sizes or None.

    The factor [key heads, C, 1] makes up for the rounding of keys: see `tiles.unit_keys`. If erase keys have unit
    length, too, it is the mean of the factors of both.
    """
    if not static.compensate:
        keys = (None if ref is None else load_keys(ref, valid, static, which) for ref in (refs.k, refs.e))
        return *keys, None
    rows = [layout.load_heads(x, static.K, which, valid) for x in (refs.k, refs.e) if x is not None]
    keys, factors = zip(*(tiles.unit_keys(x.astype(jnp.float32), x.dtype) for x in rows), strict=True)
    k, e = (*keys, None)[:2]
    factor = factors[0] if e is None or factors[0] is None else 0.5 * (factors[0] + factors[1])
    return k.astype(jnp.float32), None if e is None else e.astype(jnp.float32), factor


def rows_of_heads(columns: list[jax.Array]) -> jax.Array:
    """Return numbers of the rows of heads, each [C, 1], as rows [heads, C]."""
    shape = (columns[0].shape[0], packed.LANES)
    lane, joined = lax.broadcasted_iota(jnp.int32, shape, 1), jnp.broadcast_to(columns[0], shape)
    for i, column in enumerate(columns[1:], 1):
        joined = jnp.where(lane == jnp.int32(i), column, joined)
    return jnp.swapaxes(joined, 0, 1)[: len(columns)]


def load_erase_gates(refs: KdaRefs, valid, static: KdaStatic, heads: slice = slice(None)) -> jax.Array:
    """Return the erase gates of some value heads, float32 [heads, C, K]."""
    return layout.load_heads(refs.b, static.K, heads, valid).astype(jnp.float32)


def gated_keys(refs: KdaRefs, k, e, valid, static: KdaStatic, heads: slice = slice(None)) -> jax.Array:
    """Return the erase keys of some value heads: e, or keys k for None, times their erase gates if there are any."""
    e = k if e is None else e
    return e if refs.b is None else e * load_erase_gates(refs, valid, static, heads)


def gated_rounding(k, e) -> jax.Array:
    """Return a factor [..., C, 1] that makes up for the rounding of erase keys e to bfloat16; erase gates made e of k.

    A token with the key k and the erase key e takes away k . e times the value that k reads from a state. The factor is
    k . e for the float32 e, divided by k . e for the rounded e; `tiles.unit_keys` has a factor for the rounding of k.
    Where positive and negative terms cancel in k . e, the factor is 1, because such a token takes little away, and no
    state grows.
    """
    # Eight bits of each sum are enough, because their quotient is at most 2^-9.
    terms = jnp.concatenate([e * k, (matmul.rounded(e) - e) * k], axis=1)
    ones = jnp.ones((e.shape[0], e.shape[2], packed.LANES), jnp.bfloat16)
    sums = matmul.dot(terms, ones, jnp.bfloat16)[:, :, :1]
    took, excess = sums[:, : e.shape[1]], sums[:, e.shape[1] :]
    made_up = (jnp.abs(excess) <= jnp.float32(2.0**-8) * jnp.abs(took)) & (took != 0.0)
    return lax.stop_gradient(jnp.where(made_up, took / jnp.where(made_up, took + excess, 1.0), 1.0))


def load_values(refs: KdaRefs, valid, static: KdaStatic, heads: slice = slice(None)) -> jax.Array:
    """Return values, times their write gates if there are any, float32 [heads, C, V]."""
    v = layout.load_heads(refs.v, static.V, heads, valid).astype(jnp.float32)
    return v if refs.w is None else v * layout.load_heads(refs.w, static.V, heads, valid).astype(jnp.float32)


def load_gates(refs: KdaRefs, valid, static: KdaStatic) -> tuple[jax.Array, jax.Array]:
    """Return gates [C, heads K] and beta [heads, C], zero in rows that are not valid; with a law, gates are raw."""
    g, beta = refs.g[...], refs.beta[...]
    valid_row: Any = None if valid is None else tiles.to_row(valid.astype(jnp.float32)[None])[0] > 0.0  # [1, C]
    if not static.per_channel:
        g = g if valid is None else jnp.where(valid_row, g, 0.0)
        column = tiles.to_column(g[:, None])  # [heads, C, 1]
        g = jnp.concatenate([jnp.broadcast_to(x, (static.C, static.K)) for x in column], axis=1)
    elif valid is not None:
        # With a law, `decays_of` selects the rows after it.
        g = jnp.where(valid, g, 0.0) if refs.law is None else g
    return g, beta if valid is None else jnp.where(valid_row, beta, 0.0)


def rows_block(x: jax.Array, static: KdaStatic, heads: int, cut: layout.Blocks) -> tuple[jax.Array, pl.BlockSpec]:
    """Return numbers per token and head [B, NT, HV, C] in the shape that a launch takes, and their spec."""
    blocks = x.reshape(static.B, -1, static.HV // heads, heads, static.C)
    return blocks, cut.rows(None if static.chunks == 1 else static.chunks, None, heads, static.C)


def gates_block(g: jax.Array, static: KdaStatic, heads: int, cut: layout.Blocks) -> tuple[jax.Array, pl.BlockSpec]:
    """Return gates, per head or per channel, in the shape that a launch takes, and their spec."""
    return (g, cut.tokens(heads * static.K)) if static.per_channel else rows_block(g, static, heads, cut)


def more_bytes(x: KdaOperands) -> int:
    """Return the bytes of erase keys, erase gates and write gates, which Kimi delta attention does not have."""
    return sum(y.size * y.dtype.itemsize for y in (x.e, x.b, x.w) if y is not None)


def decays_of(g, refs: KdaRefs, valid, static: KdaStatic, first: int = 0, unit: float = 1.0, exact: bool = True):
    """Return the decays of raw gates g [C, n] in the lanes from `first` on, zero in rows that are not valid.

    `unit` and `exact` as in `gate_activation.Law`.
    """
    A_log, dt_bias = (refs.law[i : i + 1, first : first + g.shape[1]] for i in range(2))  # [1, n]
    assert static.gate_law is not None
    g = static.gate_law.decay(g.astype(jnp.float32), A_log, dt_bias, unit, exact)  # [C, n]
    # Rows that are not tokens may hold any raw gates, and even a raw gate of zero would give a decay below 1.
    return g if valid is None else jnp.where(valid, g, 0.0)


def store_continuing(ref, masks: layout.SequenceMasks) -> None:
    """Store `tile.continuing` in a Ref [C, 128], if there is one."""
    if ref is not None:
        ref[...] = jnp.broadcast_to(tile.continuing(masks.same)[0], ref.shape)


def tokens_not_finite(refs: KdaRefs, static: KdaStatic) -> jax.Array:
    """Return which rows are not finite in q, k, g, beta, erase keys or erase gates, float32 [1, C, 1]."""
    g = refs.g[...] if refs.law is None else decays_of(refs.g[...], refs, None, static)
    # A gate of -inf is allowed: it forgets everything.
    g = jnp.where(g == -jnp.inf, 0.0, g)  # [C, heads K] or [heads, C]
    g = g[None] if static.per_channel else tiles.to_column(g[:, None])  # [1, C, heads K] or [heads, C, 1]
    beta = tiles.to_column(refs.beta[...][:, None])  # [heads, C, 1]
    # Each is [heads, C, K] of its heads.
    keys = [layout.load_heads(x, static.K) for x in (refs.q, refs.k, refs.e, refs.b) if x is not None]
    return nonfinite.rows_not_finite(*keys, g, beta)


def values_not_finite(refs: KdaRefs, static: KdaStatic) -> jax.Array:
    """Return which rows are not finite in v or its write gates, float32 [1, C, 1]."""
    return nonfinite.rows_not_finite(*(layout.load_heads(x, static.V) for x in (refs.v, refs.w) if x is not None))


def base_of(refs: KdaRefs, static: KdaStatic) -> int:
    """Return the base of the decays: if only dh0 is requested, no decay between two rows of a chunk is needed."""
    return 0 if refs.dq is None else static.base


class Loaded(NamedTuple):
    """What the backward makes of the tokens of a chunk alone; of several chunks, their heads follow one another.

    Attributes:
      q, k: [heads, C, K] float32, q scaled.
      erase: erase keys [heads, C, K] float32; None where keys erase.
      beta, betas: step sizes [heads, C, 1], and as rows [heads, C].
      rounding: the factor [heads, C] in the step sizes that makes up for the rounding of keys, or None.
      boundary: the result of `tile.boundary_tile`.
      do: [heads, C, V].
      least: the result of `store_block_decays`.
    """

    q: jax.Array
    k: jax.Array
    erase: jax.Array | None
    beta: jax.Array
    betas: jax.Array
    rounding: jax.Array | None
    boundary: tuple
    do: jax.Array
    least: Any

    @property
    def e(self) -> jax.Array:
        """Erase keys, which may be the keys."""
        return self.k if self.erase is None else self.erase


def load_chunk(refs: KdaRefs, valid, masks, static: KdaStatic) -> Loaded:
    """Load the tokens of a chunk, and store its decays in scratch memory; `valid` and `masks` as in `StageChunk`."""
    heads = static.config.heads_bwd
    if masks is not None:
        store_continuing(refs.continuing, masks)
    q = load_keys(refs.q, valid, static)  # [key heads, C, K]
    k, e, factor = load_unit_keys(refs, valid, static)  # [key heads, C, K or 1]
    gates, betas = load_gates(refs, valid, static)  # [C, heads K], [heads, C]
    group, rounding = min(static.group, heads), None
    g = gates if refs.law is None else decays_of(gates, refs, valid, static)
    base, early = base_of(refs, static), static.erase_before_decay
    continuing = None if masks is None else refs.continuing
    least = store_block_decays(refs.decays, g, base, continuing, erase_before_decay=early, zeroed=static.may_forget)
    by_value_head = lambda x: jnp.stack([x[n // group] for n in range(heads)])  # [heads, C, K]
    q, k = (by_value_head(x) for x in (q * static.scale, k))
    e = None if e is None else by_value_head(e)
    erase = gated_keys(refs, k, e, valid, static)
    if factor is not None:
        factor = by_value_head(factor)  # [heads, C, 1]
        factor = factor if refs.b is None else factor * gated_rounding(k, erase)
        rounding = rows_of_heads([*factor])  # [heads, C]
        betas = betas * rounding
    do = layout.load_heads(refs.do, static.V, valid=valid)  # [heads, C, V]
    beta = tiles.to_column(betas[:, None])  # [heads, C, 1]
    boundary = tile.boundary_tile(load_decays(refs.decays, range(heads), static.K, base, early), masks)
    erase = None if e is None and refs.b is None else erase
    return Loaded(q, k, erase, beta, betas, rounding, boundary, do, least)
