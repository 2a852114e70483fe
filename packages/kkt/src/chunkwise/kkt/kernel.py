"""The interaction matrix of all chunks: a stage, whose kernels `chunk_map` makes."""

import jax.numpy as jnp

from chunkwise.kkt import config, tile
from chunkwise.shared.kernels import chunk_map

KKT = chunk_map.Stage(
    "chunk_scaled_dot_kkt",
    tile.kkt_tile,
    tile.kkt_bwd_tile,
    lambda k, **_: {"A": ((k.shape[2], k.shape[2]), jnp.float32)},
    config.cost,
)
