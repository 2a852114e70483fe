"""The output of all chunks: a stage, whose kernels `chunk_map` makes."""

from chunkwise.chunk_o import config, tile
from chunkwise.shared.kernels import chunk_map

OUTPUT = chunk_map.Stage(
    "chunk_fwd_o", tile.output_tile, tile.output_bwd_tile, lambda v, **_: {"o": (v.shape[2:], v.dtype)}, config.cost
)
