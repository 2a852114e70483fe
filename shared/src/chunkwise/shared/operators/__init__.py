"""What operators are made of: checks, chunk tables, the token recurrence, decode, the inverse in plain JAX."""

from chunkwise.shared.operators.block_inverse import block_inverse
from chunkwise.shared.operators.checks import (
    CHUNK_SIZES,
    check,
    check_array,
    check_chunk_size,
    check_cu_seqlens,
    check_delta_rule,
    check_gates,
    check_heads,
    check_initial_state,
    check_scale,
    choose_implementation,
)
from chunkwise.shared.operators.decode import check_slots, decode, decode_fits, token_by_token
from chunkwise.shared.operators.recurrence import packed_recurrence, recurrence, unit_rows

__all__ = [
    "CHUNK_SIZES",
    "block_inverse",
    "check",
    "check_array",
    "check_chunk_size",
    "check_cu_seqlens",
    "check_delta_rule",
    "check_gates",
    "check_heads",
    "check_initial_state",
    "check_scale",
    "check_slots",
    "choose_implementation",
    "decode",
    "decode_fits",
    "packed_recurrence",
    "recurrence",
    "token_by_token",
    "unit_rows",
]
