"""Backward: one reverse pass over the chunks; tile mathematics, kernel body, launcher.

With W' = X (V - e^G K S) and W = B W' (v_new), the names of kernel.py, and dS' arriving from the right:

    dW = P^T dO + e^(G_last - G) K dS'        dR = X^T B dW            dV = dR
    dN = -tril(dR W'^T, -1)                   dP = tril(dO W^T)        N, P: the matrices of `scores`
    dS = e^G_last dS' + Q^T (scale e^G dO) - K^T (e^G dR)

dN needs no further product with X: -X^T (B dW R^T) X^T = -dR W'^T.
"""

import jax
import jax.numpy as jnp
from chunkwise.fused_gdn.config import Config
from chunkwise.fused_gdn.inverse import place
from chunkwise.fused_gdn.kernel import (
    FIRST,
    LAST,
    Options,
    Shape,
    blocks,
    columns,
    flow_of,
    gap,
    gates,
    key_packs,
    lanes,
    load_chunk,
    load_owner,
    load_tiles,
    named,
    packed_columns,
    packed_rows,
    parts,
    place_tiles,
    rows,
    scores,
    split_lanes,
    store_tiles,
    zero_tail,
)
from chunkwise.shared import dot, dot_nt, dot_tn, l2norm, out_struct, pallas_call
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu



def row_sums(x: jax.Array, s: Shape) -> jax.Array:
    """Return the sums along the lanes of every head of packed x [n, C, p C], as [C, heads]."""
    owner = lax.shift_right_logical(lax.broadcasted_iota(jnp.int32, (s.C, s.p * s.C), 1), s.C.bit_length() - 1)
    sums = [
        jnp.sum(jnp.where(owner == i, x[n], 0.0) if s.p > 1 else x[n], axis=1, keepdims=True)
        for n in range(x.shape[0])
        for i in range(s.p)
    ]
    return side_by_side(sums)


def side_by_side(values: list[jax.Array]) -> jax.Array:
    """Return columns [C, 1] as [C, heads]."""
    heads = len(values)
    lane = lax.broadcasted_iota(jnp.int32, (values[0].shape[0], heads), 1)
    return sum(jnp.where(lane == i, x, 0.0) for i, x in enumerate(values))


def column_sums(x: jax.Array, s: Shape) -> jax.Array:
    """Return the sums over the rows of packed x [n, C, p C], as [C, heads]."""
    total = jnp.sum(x, axis=1, keepdims=True)  # [n, 1, p C]
    diagonal = lax.broadcasted_iota(jnp.int32, (1, s.C, s.p * s.C), 1) == (
        lax.broadcasted_iota(jnp.int32, (1, s.C, s.p * s.C), 2) & (s.C - 1)
    )
    return row_sums(jnp.where(diagonal, total, 0.0), s)
