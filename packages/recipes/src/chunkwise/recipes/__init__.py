"""Operators that are a few lines around another one: HGRN2, RWKV-6, Mamba-3 and preconditioned delta rules."""

from chunkwise.recipes.hgrn2 import chunk_hgrn2, recurrent_hgrn2
from chunkwise.recipes.mamba3 import Mamba3State, chunk_mamba3, recurrent_mamba3
from chunkwise.recipes.preconditioned import (
    PrecondState,
    chunk_precond_gated_delta_rule,
    chunk_precond_kda,
    recurrent_precond_gated_delta_rule,
    recurrent_precond_kda,
)
from chunkwise.recipes.rwkv6 import chunk_rwkv6, recurrent_rwkv6
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = [
    "Mamba3State",
    "PrecondState",
    "chunk_hgrn2",
    "chunk_mamba3",
    "chunk_precond_gated_delta_rule",
    "chunk_precond_kda",
    "chunk_rwkv6",
    "recurrent_hgrn2",
    "recurrent_mamba3",
    "recurrent_precond_gated_delta_rule",
    "recurrent_precond_kda",
    "recurrent_rwkv6",
]
