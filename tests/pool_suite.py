"""Prefills over a pool of states: a hard step of them, and an operator compared with the float64 recurrence on it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call import arguments
from chunkwise.shared.operator import Operator
from chunkwise.shared.testing import compare, inputs, oracle

# A first sequence that ends within the first chunk, an empty one in the middle and one at the end, one that ends with a
# chunk of 16, and one of a token.
LENGTHS = (3, 17, 0, 1, 43, 16, 3, 0)
PREFILL_TOKENS = 88  # 5 of them are padding
BLOCK = 16
# The slots that the sequences start from and end in: the second sequence reads another slot than it writes, the fourth
# starts from zeros, the fifth has no slot at all, and the sixth writes none.
READ = (11, 3, 7, 1, -1, 0, 8, 2)
WRITE = (11, 5, 7, 1, -1, -1, 8, 2)
HAS_STATE = (True, True, True, False, True, True, True, True)
# The slots of the states after blocks of 16 tokens, of two sequences.
BLOCKS = {1: (9,), 4: (10, -1)}
NUM_SLOTS = 12


@functools.cache
def step_of(operator: Operator, implementation: str, options: tuple) -> Callable:
    """Return a jitted function of inputs by name, boundaries and slots to o and the pool; the same one every time."""

    @jax.jit
    def run(x, cu_seqlens, slots):
        given: dict[str, Any] = {"beta": None, **x}
        y = arguments.Arguments(**given, cu_seqlens=cu_seqlens, slots=slots)
        return operator.ragged(y, arguments.Options(True, **dict(options)), implementation)

    return run


def assert_prefills(
    operator: Operator, x: dict[str, jax.Array], dtype, implementation: str = "fused", blocks: bool = False, **options
) -> None:
    """Fail unless a step of prefills gives the outputs and the pool of the recurrence, and leaves other slots alone.

    Args:
      operator: its record.
      x: its inputs by name, PREFILL_TOKENS tokens; an initial state is not among them.
      dtype: of the pool.
      implementation: its name.
      blocks: whether states after blocks of tokens are wanted too.
      **options: of `Options`.
    """
    rng, (HV, V), K = np.random.default_rng(2), x["v"].shape[2:], x["q"].shape[3]
    pool = rng.standard_normal((NUM_SLOTS, HV, K, V))
    pool[[1, 4, 5, 9]] = np.nan  # slots that are free
    pool = jnp.asarray(pool, dtype)
    cu_seqlens, N = inputs.boundaries(*LENGTHS), len(LENGTHS)
    named = np.full((N, 2), -1, np.int32)
    for n, slots in BLOCKS.items():
        named[n, : len(slots)] = slots
    slots = arguments.Slots(
        jnp.asarray(WRITE, jnp.int32), jnp.asarray(HAS_STATE), read_indices=jnp.asarray(READ, jnp.int32),
        block_state_indices=jnp.asarray(named) if blocks else None,
    )  # fmt: skip
    options |= dict(block_size=BLOCK) if blocks else {}
    run = step_of(operator, implementation, tuple(options.items()))
    o, after = run(inputs.poison_padding(x, cu_seqlens) | dict(initial_state=pool), cu_seqlens, slots)

    want, expected = np.zeros(o.shape), np.array(pool, np.float64)
    normalise = dict(use_qk_l2norm_in_kernel=options.get("use_qk_l2norm_in_kernel", False))

    def prefill(n, length):
        begin = int(cu_seqlens[n])
        tokens = slice(begin, begin + length)
        start = pool[READ[n]] if READ[n] >= 0 and HAS_STATE[n] else jnp.zeros_like(pool[0])
        return oracle.reference(**{name: y[:, tokens] for name, y in x.items()}, initial_state=start[None], **normalise)

    for n, length in enumerate(LENGTHS):
        if not length:
            continue
        begin = int(cu_seqlens[n])
        want[:, begin : begin + length], state = prefill(n, length)
        if WRITE[n] >= 0:
            expected[WRITE[n]] = state[0]
        for i, slot in enumerate(BLOCKS.get(n, ()) if blocks else ()):
            if slot >= 0:
                expected[slot] = prefill(n, (i + 1) * BLOCK)[1][0]
    tolerance = compare.TOLERANCE[str(x["v"].dtype)]
    compare.assert_close("o", o, want, tolerance)
    assert after.dtype == pool.dtype
    written = {slot for n, slot in enumerate(WRITE) if slot >= 0 and LENGTHS[n]}
    written |= {slot for row in BLOCKS.values() for slot in row if slot >= 0} if blocks else set()
    for slot in range(NUM_SLOTS):
        if slot in written:
            rounding = {"float32": 0.0, "float16": 1e-3, "bfloat16": 4e-3}[str(pool.dtype)]
            compare.assert_close(f"slot {slot}", after[slot], expected[slot], max(tolerance, rounding))
        else:
            assert np.asarray(after[slot]).tobytes() == np.asarray(pool[slot]).tobytes(), f"slot {slot} has changed"
