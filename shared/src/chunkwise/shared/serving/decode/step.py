"""A serving step of a layer: one launch between its projections, if all sequences decode."""

import functools
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.serving import step_table
from chunkwise.shared.serving.decode import choose, launch
from chunkwise.shared.serving.decode.records import Decodes
from chunkwise.shared.serving.state_pool import StatePool

# The output of a step [T, HV V], the pools of its convolutions and the pool of its states.
Step = tuple[jax.Array, tuple[jax.Array, ...], StatePool]


def in_one_launch(
    x: Decodes, conv: tuple[jax.Array, ...], pool: StatePool, cu_seqlens: jax.Array, slots: Slots,
    implementation: str | None, otherwise: Callable[[], Step],
) -> Step:  # fmt: skip
    """Return the result of a serving step: by one launch if all of its sequences decode, else otherwise().

    Where a count of the step is traced, the program has both branches.

    Args:
      x: the tokens of the step.
      conv, pool: the pools of the convolutions, and the pool of states, of any kind.
      cu_seqlens, slots: the boundaries and the slots of the step.
      implementation: the user's name of the operator's implementation, or None.
      otherwise: returns the result of the step, by one operation after the other.
    """
    given, slots = slots, step_table.with_counts(Slots(*map(checks.as_int32, slots)))
    if not pool.replay:
        # A decode has a slot for each of its tokens.
        x = x._replace(static=x.static.with_tokens(choose.columns(slots)))
    if slots.num_decodes is None or not choose.by_kernel(implementation, x, pool, slots, conv=conv):
        return otherwise()
    together = functools.partial(launch.launch, x, conv, pool, checks.as_int32(cu_seqlens), slots)
    N = slots.state_indices.shape[0]
    sequences = N if given.num_sequences is None else given.num_sequences
    if all(isinstance(count, numbers.Integral) for count in (given.num_decodes, sequences)):
        if given.num_decodes < min(sequences, N):
            return otherwise()
        # The other way has all checks of arguments.
        jax.eval_shape(otherwise)
        return together()
    return lax.cond(slots.num_decodes >= jnp.minimum(sequences, N), together, otherwise)
