"""What operators are made of: checks, chunk tables, the token recurrence, decode, the inverse in plain JAX."""

from chunkwise.shared.operators.arguments import Arguments, Implementation, Options, run_chunked, total_gate
from chunkwise.shared.operators.block_inverse import block_inverse
from chunkwise.shared.operators.checks import (
    CHUNK_SIZES,
    check,
    check_array,
    check_cu_seqlens,
    check_delta_rule,
    check_flags,
    check_gates,
    check_heads,
    check_initial_state,
    check_scale,
    choose_chunk_size,
    choose_implementation,
)
from chunkwise.shared.operators.decode import Slots, recurrent_cost, run_recurrent, token_by_token
from chunkwise.shared.operators.recurrence import packed_recurrence, recurrence, unit_rows

__all__ = [
    "Arguments",
    "CHUNK_SIZES",
    "Implementation",
    "Options",
    "Slots",
    "block_inverse",
    "check",
    "check_array",
    "check_cu_seqlens",
    "check_delta_rule",
    "check_flags",
    "check_gates",
    "check_heads",
    "check_initial_state",
    "check_scale",
    "choose_chunk_size",
    "choose_implementation",
    "packed_recurrence",
    "recurrence",
    "recurrent_cost",
    "run_chunked",
    "run_recurrent",
    "token_by_token",
    "total_gate",
    "unit_rows",
]
