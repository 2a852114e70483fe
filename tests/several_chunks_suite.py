"""Several chunks a grid step, interpreted: what the tests of kernels with such steps share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.operator import Operator
from chunkwise.shared.testing import compare, inputs
from tests import poison, pool_suite, segment_suite
from tests.recurrence import RESULTS, assert_recurrence, run
from tests.traced import launches


class Kernel(NamedTuple):
    """An operator whose grid steps take several chunks.

    Attributes:
      operator: its function over chunks.
      config: from the number of chunks of a grid step to the tile sizes, of as many heads in both directions.
      more: beside the steps of a row, those of a launch in which its later stages still have chunks, by its name.
    """

    operator: Callable
    config: Callable[[int], Any]
    more: Mapping[str, int]

    def assert_steps(self, call, x, steps: int) -> None:
        """Fail unless launches have so many grid steps for a block of heads in a row, and those of later stages."""
        B, _, HV, _ = x["v"].shape
        gradients = jax.grad(lambda x: call(x)[0].astype(jnp.float32).sum())
        for name, count, *_ in launches(gradients, x):
            assert count == B * HV // self.config(1).heads * (steps + self.more[name.split("_")[-2]])

    def assert_values_and_gradients(self, x, normalise: bool, chunks: int = 3) -> None:
        """Compare so many chunks of 16 a grid step with the float64 recurrence."""
        options = dict(
            chunk_size=16, implementation="fused", config=self.config(chunks), use_qk_l2norm_in_kernel=normalise,
            output_final_state=True,
        )  # fmt: skip
        self.assert_steps(lambda x: self.operator(**x, **options), x, -(-x["v"].shape[1] // (chunks * 16)))
        assert_recurrence(self.operator, x, **options)

    def assert_rows_are_isolated(self, x) -> None:
        """What the first row leaves in fast memory is not in the next one, not even NaN."""
        call = lambda x: self.operator(
            **x, output_final_state=True, chunk_size=16, implementation="fused", config=self.config(2)
        )
        self.assert_steps(call, x, -(-x["v"].shape[1] // (2 * 16)))
        spoilt, run = x | {"v": x["v"].at[0, 5].set(jnp.nan)}, jax.jit(call)
        for found, expected in zip(run(spoilt), run(x), strict=True):
            np.testing.assert_array_equal(found[1:], expected[1:])
            assert np.isnan(found[0]).any()

    def over_segments(self, x, segment_ids) -> dict[str, jax.Array]:
        """Return o and final_state of rows of segments by name, with two chunks of 16 in a grid step."""
        o, state = self.operator(
            **x, segment_ids=segment_ids, output_final_state=True, chunk_size=16, implementation="fused",
            config=self.config(2),
        )  # fmt: skip
        return dict(o=o, final_state=state)

    def assert_segments(self, x) -> None:
        """Compare segments in two rows with the float64 recurrence, with NaN in their padding.

        Every chunk of the first row has several segments, the second row is one, and the last grid step has a chunk
        past the end of both.
        """
        ids, steps = segment_suite.random_segment_ids(3, x["v"].shape[:2]), -(-x["v"].shape[1] // 32)
        ids[1] = 0
        gradients = compare.with_gradients(self.over_segments)
        for name, count, *_ in launches(gradients, x, ids, jax.eval_shape(self.over_segments, x, ids)):
            assert count == 2 * (steps + self.more[name.split("_")[-2]])
        segment_suite.assert_segments(self.over_segments, x, ids)

    def assert_segments_are_isolated(self, x) -> None:
        """The state passes from one segment to the next within a grid step, but no NaN does."""
        ids = np.repeat([[0, 1, 2, -1, 3]], [20, 3, 50, 7, 50], axis=1).astype(np.int32)
        poison.assert_isolated(self.over_segments, x, segment_ids=ids)

    def assert_packed(self, x) -> None:
        """Compare pieces of two chunks with the float64 recurrence; a sequence ends within a piece, another is empty.

        A sequence at the first token has the same bits whatever follows it, NaN too.
        """
        cu_seqlens = inputs.boundaries(70, 0, 130)
        options = dict(
            cu_seqlens=cu_seqlens, output_final_state=True, chunk_size=16, implementation="fused",
            config=self.config(4),
        )  # fmt: skip
        self.assert_steps(lambda x: self.operator(**x, **options), x, -(-x["v"].shape[1] // 32) + 3)
        expected = [assert_recurrence(self.operator, x, **options)[name] for name in RESULTS]
        x = inputs.poison_padding(x, cu_seqlens)
        spoilt = x | {"v": x["v"].at[0, 80].set(jnp.nan)}
        results, _ = run(self.operator, spoilt, [jnp.zeros_like(y) for y in expected], **options)
        for found, want, first in zip(results, expected, (np.s_[:, :70], np.s_[:2]), strict=True):
            np.testing.assert_array_equal(found[first], want[first])
            assert np.isnan(found).any()

    def assert_prefills(self, operator: Operator, x, dtype) -> None:
        """Compare prefills over a pool of this type, in pieces of two chunks, with the float64 recurrence."""
        pool_suite.assert_prefills(operator, x, dtype, chunk_size=16, config=self.config(2))
