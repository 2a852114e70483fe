"""What the chunkwise packages share: chunk tables, launch helpers, products, checks, the oracle and test inputs."""

from chunkwise.shared.checks import (
    CHUNK_SIZES,
    check,
    check_array,
    check_chunk_size,
    check_cu_seqlens,
    check_heads,
    check_initial_state,
    choose_implementation,
)
from chunkwise.shared.chunk_map import map_chunks
from chunkwise.shared.chunks import Chunking, StreamMasks, num_chunks, pad_tokens, stream_masks
from chunkwise.shared.compat import out_struct, varying_zeros
from chunkwise.shared.dot import bf16_parts, dot, dot_nt, dot_parts, dot_tn, emulate_mxu, operand_dtype
from chunkwise.shared.launch import head_block, largest_divisor, pallas_call, pick_heads
from chunkwise.shared.recurrence import l2norm, packed_recurrence, recurrence, update
from chunkwise.shared.tiles import (
    column_index,
    last_valid,
    lower,
    masked_exp,
    pair_decay,
    repeat_heads,
    row_index,
    split_gate,
    strictly_lower,
    sum_groups,
    to_column,
    to_row,
)

__all__ = [
    "CHUNK_SIZES",
    "Chunking",
    "StreamMasks",
    "bf16_parts",
    "check",
    "check_array",
    "check_chunk_size",
    "check_cu_seqlens",
    "check_heads",
    "check_initial_state",
    "choose_implementation",
    "column_index",
    "dot",
    "dot_nt",
    "dot_parts",
    "dot_tn",
    "emulate_mxu",
    "head_block",
    "l2norm",
    "largest_divisor",
    "last_valid",
    "lower",
    "map_chunks",
    "masked_exp",
    "num_chunks",
    "operand_dtype",
    "out_struct",
    "packed_recurrence",
    "pad_tokens",
    "pair_decay",
    "pallas_call",
    "pick_heads",
    "recurrence",
    "repeat_heads",
    "row_index",
    "split_gate",
    "stream_masks",
    "strictly_lower",
    "sum_groups",
    "to_column",
    "to_row",
    "update",
    "varying_zeros",
]
