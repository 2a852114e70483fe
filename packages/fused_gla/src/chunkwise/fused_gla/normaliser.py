"""Outputs that are divided by what their queries read from the sums of keys, as in mLSTM, and their gradient.

    o_i = y_i / D_i        D_i = max(|z_i|, least_i) + eps        z_i = sum_j P_ij + from_start_i <q_i, n>

Here y is the output of gated linear attention, and z is its output for values of 1: the sums of keys n are one more row
of a state [V, K]. They have a tile of 8 equal rows behind the rows of values. The vector unit computes z and n in
float32, because the matrix unit would take as long for one channel as for 128, and the rounding of z is that of o.
"""

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import tile
from chunkwise.fused_gla.operands import GlaStatic
from chunkwise.shared.kernels import tiles


def split(state: jax.Array, s: GlaStatic) -> tuple[jax.Array, jax.Array | None]:
    """Return the rows of values of states [h, V, K], and the sums of keys [h, 1, K], None if nothing is divided."""
    return (state, None) if s.eps is None else (state[:, : s.V], state[:, s.V : s.V + 1])


def store(ref, S: jax.Array, n: jax.Array | None) -> None:
    """Store states in a Ref [h, rows, K]; the inverse of `split`."""
    if n is None:
        ref[...] = S
        return
    h, V, K = S.shape
    ref[:, :V] = S
    ref[:, V:] = jnp.broadcast_to(n, (h, 8, K))


def next_sums(n: jax.Array, k: jax.Array, decays: tile.GlaDecays) -> jax.Array:
    """Return the sums of keys after the chunk, [h, 1, K], as `tile.next_state` for values of 1."""
    return decays.through * n + _column_sum(_of_values(k, n) * decays.to_end)


def factors(P: jax.Array, q: jax.Array, n: jax.Array, decays: tile.GlaDecays, least: jax.Array, eps: float):
    """Return 1 / D [h, C, 1] for the scores P [h, C, C] and `least` [h, 1, C]."""
    z = _row_sum(P) + decays.from_start * _row_sum(_of_values(q, n) * n)
    return 1.0 / (jnp.maximum(jnp.abs(z), tiles.to_column(least)) + eps)


def chunk_bwd(by_keys, products, n, dn, q, pairs_t, decays: tile.GlaDecays, least, eps):
    """Return what `tile.chunk_bwd` takes for outputs that are divided, and the gradient of n.

    With P and from_start divided by D, y is o, and values of 1 have the cotangent e, which is -<do, o> sign(z) where
    |z| divides, and else 0. The row e adds to the products of do and values, and to those of do and states.

    Args:
      by_keys, products: the results of `tile.chunk_products`.
      n, dn: the sums before the chunk, and the gradient of the sums after it, [h, 1, K].
      q, pairs_t, decays: as in `tile.chunk_bwd`.
      least, eps: as in `factors`.

    Returns:
      The products, pairs_t and decays of a chunk that is not divided; the gradient of n; and that of the exponent of
      `through`, from n alone [h, 1, 1].
    """
    of_k, by_v, dP, by_do, do_t = products
    by_keys, q = (_of_values(y, n) for y in (by_keys, q))  # [h, C, C], transposed, and [h, C, K]
    z = _column_sum(pairs_t * by_keys) + tiles.to_row(decays.from_start * _row_sum(q * n))  # [h, 1, C]
    factor = 1.0 / (jnp.maximum(jnp.abs(z), least) + eps)
    pairs_t, from_start = pairs_t * factor, decays.from_start * tiles.to_column(factor)
    read = _column_sum(pairs_t * by_keys * dP) + tiles.to_row(from_start * _row_sum(q * by_do))  # <do, o>
    e = jnp.where(jnp.abs(z) > least, -jnp.sign(z) * read, 0.0)
    column, passed = tiles.to_column(e), decays.through * dn
    products = of_k, by_v + dn, dP + e, by_do + column * n, do_t
    before = passed + _column_sum(q * (from_start * column))
    return products, pairs_t, decays._replace(from_start=from_start), before, _row_sum(n * passed)


def weight_bwd(exponents: tuple) -> jax.Array:
    """Return the gradient of the logs of weights [h, 1, C] from the exponents of `tile.chunk_bwd`."""
    pairs, _, to_end, _ = exponents
    return tiles.to_row(_row_sum(pairs) + _row_sum(to_end))


def _of_values(x: jax.Array, n: jax.Array) -> jax.Array:
    """Return a tile of key heads in float32 for every value head."""
    return tiles.repeat_heads(x, n.shape[0]).astype(jnp.float32)


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=2, keepdims=True)


def _column_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)
