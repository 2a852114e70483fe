"""Chunked linear attention: the operators of all packages, with chains of stages as a further implementation."""

from chunkwise.delta_product import (
    chunk_gated_delta_product,
    ragged_gated_delta_product,
    recurrent_gated_delta_product,
)
from chunkwise.dplr import (
    chunk_dplr_delta_rule,
    chunk_rwkv7,
    ragged_dplr_delta_rule,
    recurrent_dplr_delta_rule,
    recurrent_rwkv7,
)
from chunkwise.fused_gdn import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    ragged_delta_rule,
    ragged_gated_delta_rule,
    recurrent_delta_rule,
    recurrent_gated_delta_rule,
)
from chunkwise.fused_gla import (
    chunk_gla,
    chunk_simple_gla,
    ragged_gla,
    ragged_simple_gla,
    recurrent_gla,
    recurrent_simple_gla,
)
from chunkwise.kda import chunk_kda, ragged_kda, recurrent_kda
from chunkwise.mamba2 import chunk_mamba2, ragged_mamba2, recurrent_mamba2
from chunkwise.mlstm import MlstmState, chunk_mlstm, recurrent_mlstm
from chunkwise.pipeline.check_inputs import check_inputs
from chunkwise.pipeline.check_step import check_step
from chunkwise.pipeline.staged import register_all
from chunkwise.shared import version
from chunkwise.shared.serving.state_pool import StatePool, make_pool, pool_formats, read_states, write_states
from chunkwise.two_keys import chunk_comba, chunk_gdn2, ragged_comba, ragged_gdn2, recurrent_comba, recurrent_gdn2

register_all()

__version__ = version.of(__name__)
__all__ = [
    "MlstmState",
    "StatePool",
    "check_inputs",
    "check_step",
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_kda",
    "chunk_mamba2",
    "chunk_mlstm",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "make_pool",
    "pool_formats",
    "ragged_comba",
    "ragged_delta_rule",
    "ragged_dplr_delta_rule",
    "ragged_gated_delta_product",
    "ragged_gated_delta_rule",
    "ragged_gdn2",
    "ragged_gla",
    "ragged_kda",
    "ragged_mamba2",
    "ragged_simple_gla",
    "read_states",
    "recurrent_comba",
    "recurrent_delta_rule",
    "recurrent_dplr_delta_rule",
    "recurrent_gated_delta_product",
    "recurrent_gated_delta_rule",
    "recurrent_gdn2",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_mamba2",
    "recurrent_mlstm",
    "recurrent_rwkv7",
    "recurrent_simple_gla",
    "write_states",
]
