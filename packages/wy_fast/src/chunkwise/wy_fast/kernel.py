"""The effective keys and values of all chunks: a stage, whose kernels `chunk_map` makes."""

import jax.numpy as jnp

from chunkwise.shared.kernels import chunk_map
from chunkwise.wy_fast import config, tile

W_U = chunk_map.Stage(
    "recompute_w_u",
    tile.wy_tile,
    tile.wy_bwd_tile,
    lambda k, v, **_: {"w": (k.shape[2:], jnp.float32), "u": (v.shape[2:], jnp.float32)},
    config.cost,
)
