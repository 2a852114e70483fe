"""Check the values of a serving step, for programs that shall raise an error where an operator cannot."""

import jax

from chunkwise.shared.call import checks, faults
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.serving import step_table


def check_step(
    cu_seqlens: jax.Array,
    state_indices: jax.Array,
    *,
    num_slots: int,
    num_tokens: int,
    has_initial_state: jax.Array | None = None,
    num_decodes: int | jax.Array = 0,
    num_sequences: int | jax.Array | None = None,
    read_indices: jax.Array | None = None,
    num_accepted_tokens: jax.Array | None = None,
    block_state_indices: jax.Array | None = None,
    block_size: int | None = None,
    decode_tokens: int | None = None,
) -> None:
    """Check the values of the arrays that describe a serving step, beyond their shapes and types.

    It finds boundaries that decrease or pass the end, counts that do not fit, decodes of too many tokens, slots out of
    range, slots that are written twice, and slots that one sequence writes and another starts from. Outside of jit the
    operators find these faults themselves. Under jit nothing can be raised, unless the program is made for it::

        checked = checkify.checkify(step)  # step calls check_step; checkify is of jax.experimental
        error, results = jax.jit(checked)(...)
        error.throw()

    Args:
      cu_seqlens, state_indices, has_initial_state, num_decodes, num_sequences: as in `ragged_gated_delta_rule`.
      read_indices, num_accepted_tokens, block_state_indices, block_size, decode_tokens: as in
        `ragged_gated_delta_rule`.
      num_slots: slots of the pool; static.
      num_tokens: T, tokens of the stream; static.

    Raises:
      ValueError: a shape or type is wrong, or outside of jit a value.
    """
    slots = Slots(
        state_indices, has_initial_state, read_indices, num_accepted_tokens, block_state_indices, num_decodes,
        num_sequences,
    )  # fmt: skip
    checks.check_packed(cu_seqlens, 1)
    checks.check_step_types(slots, cu_seqlens.shape[0] - 1, block_size)
    sizes = num_slots, num_tokens, block_size, decode_tokens
    faults.check_values((cu_seqlens, *slots), lambda: step_table.find_faults(cu_seqlens, slots, *sizes))
