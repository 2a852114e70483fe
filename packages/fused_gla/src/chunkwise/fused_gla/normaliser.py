"""Outputs that are divided by what their queries read from the sums of keys, as in mLSTM, and their gradient.

    o_i = y_i / D_i        D_i = max(|z_i|, least_i) + eps        z_i = sum_j P_ij + from_start_i <q_i, n>

Here y is the output of gated linear attention, and z is its output for values of 1: the sums of keys n are one more row
of a state [V, K]. They have a tile of 8 equal rows behind the rows of values. The vector unit computes z and n in
float32, because the matrix unit would take as long for one channel as for 128, and the rounding of z is that of o.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import packs, tile
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


def next_sums(n: jax.Array, k: jax.Array, to_end: jax.Array, through: jax.Array) -> jax.Array:
    """Return the sums of keys after the chunk, [h, 1, K], as the state for values of 1; decays are columns."""
    return through * n + _column_sum(_of_values(k, n) * to_end)


def factors(P: jax.Array, q: jax.Array, n: jax.Array, from_start: jax.Array, least: jax.Array, eps: float):
    """Return 1 / D [h, C, 1] for the scores P [h, C, C], scaled decays [h, C, 1], and `least` [h, 1, C]."""
    z = _row_sum(P) + from_start * _row_sum(_of_values(q, n) * n)
    return 1.0 / (jnp.maximum(jnp.abs(z), tiles.to_column(least)) + eps)


class Divided(NamedTuple):
    """The sums of a chunk whose outputs are divided, and their part of `packs.chunk_bwd`.

    With P and the decays to outputs divided by D, y is o, and values of 1 have the cotangent e, which is
    -<do, o> sign(z) where |z| divides, and else 0.

    Attributes:
      n, dn: the sums before the chunk, and the gradient of the sums after it, [h, 1, K].
      least: [h, 1, C], and eps: as in `factors`.
      e: [h, 1, C], once `scores` has computed it.
    """

    n: jax.Array
    dn: Any
    least: jax.Array
    eps: Any
    e: Any = None

    def scores(self, pairs, start, dP, q, shared, by_state, like) -> tuple["Divided", tuple[jax.Array, ...]]:
        """Return these sums with e, and pairs, start and dP of a chunk that is not divided.

        `by_state` and `like`, queries or do, are the factors of what do reads of the state, to be added up over lanes.
        """
        of_state = _row_sum(by_state * like.astype(jnp.float32))
        q = _of_values(q, self.n)
        z = _column_sum(pairs * shared) + tiles.to_row(start[:, :, :1] * _row_sum(q * self.n))  # [h, 1, C]
        factor = 1.0 / (jnp.maximum(jnp.abs(z), self.least) + self.eps)
        pairs, start = pairs * factor, start * tiles.to_column(factor)
        read = _column_sum(pairs * shared * dP) + tiles.to_row(start[:, :, :1] * of_state)  # <do, o>
        e = jnp.where(jnp.abs(z) > self.least, -jnp.sign(z) * read, 0.0)
        return self._replace(e=e), (pairs, start, dP + e)

    def sums(self, x: packs.PackGradients, P, start, end, q, k, through) -> packs.PackGradients:
        """Return gradients with those of the sums of keys, and of their decays and weights."""
        keys, (d_scores, dq, dk) = len(q), x.sums
        q, k = _of_values(q, self.n), _of_values(k, self.n)
        read, end = start[:, :, :1] * tiles.to_column(self.e), end[:, :, :1]  # [h, C, 1]
        before = through * self.dn
        of_end = end * _row_sum(k * self.dn)
        dq, dk = dq + tile.to_key_heads(read * self.n, keys), dk + tile.to_key_heads(end * self.dn, keys)
        return x._replace(
            sums=(d_scores, dq, dk),
            dn=before + _column_sum(q * read),
            of_through=x.of_through + _row_sum(self.n * before),
            columns=(read * _row_sum(q * self.n), of_end, _row_sum(P * self.e) + of_end),
        )


def _of_values(x: jax.Array, n: jax.Array) -> jax.Array:
    """Return a tile of key heads in float32 for every value head."""
    return tiles.repeat_heads(x, n.shape[0]).astype(jnp.float32)


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=2, keepdims=True)


def _column_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)
