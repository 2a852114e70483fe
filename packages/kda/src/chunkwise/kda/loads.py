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
from chunkwise.shared import trees
from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.kernels.spans import lanes, layout, nonfinite


def decays_scratch(heads: int, static: KdaStatic, base: int):
    """Return the scratch of `store_block_decays` for so many heads."""
    count, registers = tile.count_decays(base, static.erase_before_decay), heads // static.m * _registers(static)
    return pltpu.VMEM((count, registers, static.C, packed.LANES), jnp.float32)


def _registers(static: KdaStatic) -> int:
    """Return the registers of a row of a tile of keys."""
    return static.keys.size // packed.LANES


def store_block_decays(
    ref, g, base: int, continuing=None, first: int = 0, in_nats: bool = True, erase_before_decay: bool = False,
    zeroed: bool = False,
) -> jax.Array | None:  # fmt: skip
    """Store the `tile.block_decays` of the gates g [C, t KL] of tiles from register `first` on, to base 2 or in nats.

    `continuing` is a Ref [C, 128] of `tile.continuing`, or None. With `zeroed`, rows that base blocks cannot have get
    zeros, and the last entry of the Ref keeps the gates, for these rows.

    To compute inside of blocks of 8 rows, one register has the first rows of 8 blocks, another the second rows, and so
    on. Loads with a stride from ref [n, t KL / 128, C, 128] fetch such registers, and stores with a stride put them
    back.

    Returns:
      With `zeroed`, the least factors of rows in base blocks, [t KL / 128, C / 8, 128]; otherwise None.
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


def load_decays(ref, which: Sequence, static: KdaStatic, base: int) -> tile.ChannelDecays:
    """Return the decays of some tiles, by their numbers, from the scratch memory that `store_block_decays` filled."""
    each = _registers(static)

    def load(i):
        return jnp.stack([jnp.concatenate([ref[i, n * each + m] for m in range(each)], axis=1) for n in which])

    return tile.chunk_decays([load(i) for i in range(tile.count_decays(base, static.erase_before_decay))], base)


def kept_gates(ref, which: Sequence, static: KdaStatic) -> jax.Array:
    """Return the gates [C, t KL] of some tiles that `store_block_decays` kept, to base 2."""
    each, last = _registers(static), ref.shape[0] - 1
    return jnp.concatenate([ref[last, n * each + m] for n in which for m in range(each)], axis=1)


def beyond_base(ref, which: Sequence, static: KdaStatic) -> jax.Array:
    """Return whether base blocks cannot have some row of consecutive tiles, from scratch memory with their factors."""
    each = _registers(static)
    return jnp.min(ref[0, pl.ds(which[0] * each, len(which) * each)]) < jnp.float32(tile.LEAST_FACTOR)


def rows_beyond_base(ref, which: range, static: KdaStatic) -> jax.Array:
    """Return which rows of some tiles base blocks cannot have, as 1 and 0, float32 [1, C, heads C].

    Of a block these are all rows from some row on, because gates are at most 0.
    """
    each, rows, C = _registers(static), [], static.C
    of_tiles = (functools.reduce(jnp.minimum, [ref[0, n * each + m] for m in range(each)]) for n in which)  # [C, 128]
    for least in (y for x in of_tiles for y in static.keys.parts(x, tile.ANCHOR)):
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
        at |= dict.fromkeys(("readers", "ends", "through", "u", "erase_new", "scores_prev"), each(heads // static.m))
        at |= dict.fromkeys(("A", "blocks", "P", "beta_prev"), each(heads // static.p))
        at["decays"] = slice(None), each(heads // static.m * _registers(static))
        return layout.slice_refs(refs, at)

    return [of_chunk(i) for i in range(static.chunks)]


def load_keys(ref, valid, static: KdaStatic, which: slice = slice(None)) -> jax.Array:
    """Return some tiles of queries or keys as float32 [key tiles, C, KL], rounded to the type of the tensors."""
    keys, x = static.keys, static.keys.load(ref, which, valid).astype(jnp.float32)  # [key tiles, C, KL]
    return keys.together(tiles.l2norm(keys.apart(x)).astype(ref.dtype).astype(jnp.float32)) if static.normalise else x


def load_unit_keys(refs: KdaRefs, valid, static: KdaStatic, which: slice = slice(None)) -> tuple[Any, ...]:
    """Return keys as `load_keys` does, erase keys or None, and a factor for the step sizes or None.

    The factor [key heads, C, 1] makes up for the rounding of keys: see `tiles.unit_keys`. If erase keys have unit
    length, too, it is the mean of the factors of both.
    """
    if not static.compensate:
        keys = (None if ref is None else load_keys(ref, valid, static, which) for ref in (refs.k, refs.e))
        return *keys, None
    keys, rows = static.keys, [static.keys.load(x, which, valid) for x in (refs.k, refs.e) if x is not None]
    units, factors = zip(*(tiles.unit_keys(keys.apart(x.astype(jnp.float32)), x.dtype) for x in rows), strict=True)
    k, e = (*units, None)[:2]
    factor = factors[0] if e is None or factors[0] is None else 0.5 * (factors[0] + factors[1])
    together = lambda x: None if x is None else keys.together(x.astype(jnp.float32))
    return together(k), together(e), factor


def rows_of_heads(columns: list[jax.Array]) -> jax.Array:
    """Return numbers of the rows of heads, each [C, 1], as rows [heads, C]."""
    shape = (columns[0].shape[0], packed.LANES)
    lane, joined = lax.broadcasted_iota(jnp.int32, shape, 1), jnp.broadcast_to(columns[0], shape)
    for i, column in enumerate(columns[1:], 1):
        joined = jnp.where(lane == jnp.int32(i), column, joined)
    return jnp.swapaxes(joined, 0, 1)[: len(columns)]


def load_erase_gates(refs: KdaRefs, valid, static: KdaStatic, which: slice = slice(None)) -> jax.Array:
    """Return the erase gates of some tiles, float32 [t, C, KL]."""
    return static.keys.load(refs.b, which, valid).astype(jnp.float32)


def gated_keys(refs: KdaRefs, k, e, valid, static: KdaStatic, which: slice = slice(None)) -> jax.Array:
    """Return the erase keys of some tiles: e, or keys k for None, times their erase gates if there are any."""
    e = k if e is None else e
    return e if refs.b is None else e * load_erase_gates(refs, valid, static, which)


def gated_rounding(k, e, keys: lanes.Lanes) -> jax.Array:
    """Return a factor [heads, C, 1] that makes up for the rounding to bfloat16 of erase keys e, which gates made of k.

    A token with the key k and the erase key e takes away k . e times the value that k reads from a state. The factor is
    k . e for the float32 e, divided by k . e for the rounded e; `tiles.unit_keys` has a factor for the rounding of k.
    Where positive and negative terms cancel in k . e, the factor is 1, because such a token takes little away, and no
    state grows.
    """
    # Eight bits of each sum are enough, because their quotient is at most 2^-9.
    terms = keys.apart(jnp.concatenate([e * k, (matmul.rounded(e) - e) * k], axis=1))  # [heads, 2 C, KL]
    ones = jnp.ones((terms.shape[0], e.shape[2], packed.LANES), jnp.bfloat16)
    sums = matmul.dot(terms, ones, jnp.bfloat16)[:, :, :1]
    took, excess = sums[:, : e.shape[1]], sums[:, e.shape[1] :]
    made_up = (jnp.abs(excess) <= jnp.float32(2.0**-8) * jnp.abs(took)) & (took != 0.0)
    return lax.stop_gradient(jnp.where(made_up, took / jnp.where(made_up, took + excess, 1.0), 1.0))


def load_values(refs: KdaRefs, valid, static: KdaStatic, which: slice = slice(None)) -> jax.Array:
    """Return some tiles of values, times their write gates if there are any, float32 [t, C, VL]."""
    v = static.values.load(refs.v, which, valid).astype(jnp.float32)
    return v if refs.w is None else v * static.values.load(refs.w, which, valid).astype(jnp.float32)


def load_gates(refs: KdaRefs, valid, static: KdaStatic) -> tuple[jax.Array, jax.Array]:
    """Return gates [C, t KL] and beta [heads, C], zero in rows that are not valid; with a law, gates are raw."""
    g, beta = None if refs.g is None else refs.g[...], refs.beta[...]
    valid_row: Any = None if valid is None else tiles.to_row(valid.astype(jnp.float32)[None])[0] > 0.0  # [1, C]
    if g is None:
        g = jnp.zeros((static.C, beta.shape[0] // static.m * static.keys.size), jnp.float32)
    elif not static.per_channel:
        g = g if valid is None else jnp.where(valid_row, g, 0.0)
        column = static.keys.together(tiles.to_column(g[:, None]))  # [t, C, 1], or [t, C, KL] of several heads
        g = jnp.concatenate([jnp.broadcast_to(x, (static.C, static.keys.size)) for x in column], axis=1)
    else:
        g = static.keys.spread(g)
        # With a law, `decays_of` selects the rows after it.
        g = g if valid is None or refs.law is not None else jnp.where(valid, g, 0.0)
    return g, beta if valid is None else jnp.where(valid_row, beta, 0.0)


def rows_block(x: jax.Array, static: KdaStatic, heads: int, cut: layout.Blocks) -> tuple[jax.Array, pl.BlockSpec]:
    """Return numbers per token and head [B, NT, HV, C] in the shape that a launch takes, and their spec."""
    blocks = x.reshape(static.B, -1, static.HV // heads, heads, static.C)
    return blocks, cut.rows(None if static.chunks == 1 else static.chunks, None, heads, static.C)


def gates_block(g: jax.Array | None, static: KdaStatic, heads: int, cut: layout.Blocks) -> tuple[Any, Any]:
    """Return gates, per head or per channel or None, in the shape that a launch takes, and their spec."""
    return (g, cut.tokens(heads * static.K)) if g is None or static.per_channel else rows_block(g, static, heads, cut)


def more_bytes(x: KdaOperands) -> int:
    """Return the bytes of erase keys, erase gates and write gates, which Kimi delta attention does not have."""
    return sum(y.size * y.dtype.itemsize for y in (x.e, x.b, x.w) if y is not None)


def decays_of(g, refs: KdaRefs, valid, static: KdaStatic, first: int = 0, unit: float = 1.0, exact: bool = True):
    """Return the decays of raw gates g [C, n] of tiles, in the lanes from `first` on, zero in rows that are not valid.

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
    gates = []
    if refs.g is not None:
        g = refs.g[...] if refs.law is None else decays_of(static.keys.spread(refs.g[...]), refs, None, static)
        # A gate of -inf is allowed: it forgets everything.
        g = jnp.where(g == -jnp.inf, 0.0, g)  # [C, heads K] or [heads, C]
        # [1, C, heads K or t KL] or [heads, C, 1]
        gates.append(g[None] if static.per_channel else tiles.to_column(g[:, None]))
    gates.append(tiles.to_column(refs.beta[...][:, None]))  # [heads, C, 1]
    # Each is [tiles, C, KL] of its heads.
    keys = [static.keys.load(x) for x in (refs.q, refs.k, refs.e, refs.b) if x is not None]
    return nonfinite.rows_not_finite(*keys, *gates)


def values_not_finite(refs: KdaRefs, static: KdaStatic) -> jax.Array:
    """Return which rows are not finite in v or its write gates, float32 [1, C, 1]."""
    return nonfinite.rows_not_finite(*(static.values.load(x) for x in (refs.v, refs.w) if x is not None))


def base_of(refs: KdaRefs, static: KdaStatic) -> int:
    """Return the base of the decays: if only dh0 is requested, no decay between two rows of a chunk is needed."""
    return 0 if refs.dq is None else static.base


class Loaded(NamedTuple):
    """What the backward makes of the tokens of a chunk alone; of several chunks, their heads follow one another.

    Attributes:
      q, k: [t, C, KL] float32, q scaled.
      erase: erase keys [t, C, KL] float32; None where keys erase.
      beta, betas: step sizes [heads, C, 1], and as rows [heads, C].
      rounding: the factor [heads, C] in the step sizes that makes up for the rounding of keys, or None.
      boundary: the result of `tile.boundary_tile`.
      do: [t, C, VL].
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

    def of_heads(self, heads: slice, static: KdaStatic) -> "Loaded":
        """Return the tokens of some heads, without `least`."""
        places = dict.fromkeys(("beta", "betas", "rounding"), heads)
        at = lambda name, x: trees.at(x, places.get(name, static.tiles(heads)))
        return Loaded(**{name: at(name, x) for name, x in self._replace(least=None)._asdict().items()})


def load_chunk(refs: KdaRefs, valid, masks, static: KdaStatic) -> Loaded:
    """Load the tokens of a chunk, and store its decays in scratch memory; `valid` and `masks` as in `StageChunk`."""
    heads = static.config.heads_bwd
    if masks is not None:
        store_continuing(refs.continuing, masks)
    q = load_keys(refs.q, valid, static)  # [key tiles, C, KL]
    k, e, factor = load_unit_keys(refs, valid, static)  # [key tiles, C, KL], factors [key heads, C, 1]
    gates, betas = load_gates(refs, valid, static)  # [C, t KL], [heads, C]
    group, rounding = min(static.group, heads), None
    g = gates if refs.law is None else decays_of(gates, refs, valid, static)
    base, early = base_of(refs, static), static.erase_before_decay
    continuing = None if masks is None else refs.continuing
    least = store_block_decays(refs.decays, g, base, continuing, erase_before_decay=early, zeroed=static.may_forget)
    by_value_head = lambda x: jnp.stack([x[n // group] for n in range(len(x) * group)])  # [t or heads, C, ...]
    q, k = (by_value_head(x) for x in (q * static.scale, k))
    e = None if e is None else by_value_head(e)
    erase = gated_keys(refs, k, e, valid, static)
    if factor is not None:
        factor = by_value_head(factor)  # [heads, C, 1]
        factor = factor if refs.b is None else factor * gated_rounding(k, erase, static.keys)
        rounding = rows_of_heads([*factor])  # [heads, C]
        betas = betas * rounding
    do = static.values.load(refs.do, valid=valid)  # [t, C, VL]
    beta = tiles.to_column(betas[:, None])  # [heads, C, 1]
    boundary = tile.boundary_tile(load_decays(refs.decays, range(heads // static.m), static, base), masks)
    erase = None if e is None and refs.b is None else erase
    return Loaded(q, k, erase, beta, betas, rounding, boundary, do, least)
