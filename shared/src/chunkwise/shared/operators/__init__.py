"""What operators are made of: checks, chunk tables, the token recurrence, decode, the inverse in plain JAX."""

from chunkwise.shared.operators.affine_scan import shift
from chunkwise.shared.operators.arguments import Arguments, Devices, Options, Sharding, Slots, total_gate
from chunkwise.shared.operators.block_inverse import block_inverse
from chunkwise.shared.operators.checks import (
    CHUNK_SIZES,
    check,
    check_activation,
    check_array,
    check_cu_seqlens,
    check_delta_rule,
    check_flags,
    check_floating,
    check_gates,
    check_heads,
    check_initial_state,
    check_packed,
    check_scale,
    check_segment_ids,
    check_slots,
    check_step_types,
    choose_chunk_size,
    choose_implementation,
)
from chunkwise.shared.operators.chunked import Implementation, Launches, run_chunked
from chunkwise.shared.operators.decode import read_slots, recurrent_cost, run_recurrent, token_by_token, write_slots
from chunkwise.shared.operators.gates import Laws, lay_out_law
from chunkwise.shared.operators.isolation import keep_apart, spoilt_tokens
from chunkwise.shared.operators.partition import Layout, find_division, over_mesh, size_of, token_axes
from chunkwise.shared.operators.ragged import ChunkStates, Forms, check_step_values, find_step, run_ragged, with_counts
from chunkwise.shared.operators.recurrence import packed_recurrence, recurrence, unit_rows
from chunkwise.shared.operators.segments import run_segments, spoilt_segments
from chunkwise.shared.operators.stream import document_ids, document_of, documents_end, first_token, own_boundaries

__all__ = [
    "Arguments",
    "CHUNK_SIZES",
    "ChunkStates",
    "Devices",
    "Forms",
    "Implementation",
    "Launches",
    "Laws",
    "Layout",
    "Options",
    "Sharding",
    "Slots",
    "block_inverse",
    "check",
    "check_activation",
    "check_array",
    "check_cu_seqlens",
    "check_delta_rule",
    "check_flags",
    "check_floating",
    "check_gates",
    "check_heads",
    "check_initial_state",
    "check_packed",
    "check_scale",
    "check_segment_ids",
    "check_slots",
    "check_step_types",
    "check_step_values",
    "choose_chunk_size",
    "choose_implementation",
    "document_ids",
    "document_of",
    "documents_end",
    "find_division",
    "find_step",
    "first_token",
    "keep_apart",
    "lay_out_law",
    "over_mesh",
    "own_boundaries",
    "packed_recurrence",
    "read_slots",
    "recurrence",
    "recurrent_cost",
    "run_chunked",
    "run_ragged",
    "run_recurrent",
    "run_segments",
    "shift",
    "size_of",
    "spoilt_segments",
    "spoilt_tokens",
    "token_axes",
    "token_by_token",
    "total_gate",
    "unit_rows",
    "with_counts",
    "write_slots",
]
