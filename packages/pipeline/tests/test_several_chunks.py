"""Several chunks a grid step of the delta rules, interpreted, against the float64 recurrence."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import fused_gdn, kda, two_keys
from chunkwise.fused_gdn.operator import OPERATOR as GATED_DELTA_RULE
from chunkwise.kda.operator import OPERATOR as KDA
from chunkwise.shared.testing import inputs
from tests import pool_suite
from tests.recurrence import RESULTS, assert_recurrence, run
from tests.traced import launches


class Kernel(NamedTuple):
    """An operator whose grid steps take several chunks.

    Attributes:
      operator: its function over chunks.
      config: from the number of chunks of a grid step to the tile sizes, of as many heads in both directions.
      more: beside the steps of a row, those of a launch in which its later stages still have chunks, by its name.
      options: of its inputs.
    """

    operator: Callable
    config: Callable[[int], Any]
    more: Mapping[str, int]
    options: Mapping[str, Any] = MappingProxyType({})

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


GDN_STEPS, KDA_STEPS = dict(fwd=2, states=1, bwd=0), dict(fwd=1, summary=1, bwd=0)
of_kda = lambda module: lambda chunks: module.Config(2, 2, chunks, chunks)
KERNELS = {
    "gated_delta_rule": Kernel(
        fused_gdn.chunk_gated_delta_rule, lambda chunks: fused_gdn.Config(2, 2, chunks), GDN_STEPS
    ),
    "kda": Kernel(kda.chunk_kda, of_kda(kda), KDA_STEPS, dict(per_channel=True)),
    # Rows so long that the inverse has a stage of its own.
    "kda, long": Kernel(kda.chunk_kda, of_kda(kda), KDA_STEPS | dict(fwd=2, summary=2), dict(per_channel=True)),
    "gdn2": Kernel(two_keys.chunk_gdn2, of_kda(two_keys), KDA_STEPS, dict(per_channel=True, erase="gate")),
    "comba": Kernel(two_keys.chunk_comba, of_kda(two_keys), KDA_STEPS, dict(erase="key")),
}
FOUR_HEADS = KERNELS["gated_delta_rule"]._replace(config=lambda chunks: fused_gdn.Config(4, 4, chunks))
# Two rows, of which the last grid step has one of three chunks, and this chunk some tokens.
ROWS = (2, 200, 1, 2, 24, 40), dict(num_states=2)
# Rows have bfloat16 in several chunks, and what belongs to which sequence is the same for all types. Segments are for
# the simulated TPU.
THOROUGH = dict(
    test_packed_sequences=lambda name, dtype: (name, dtype) != ("gated_delta_rule", "float32"),
    test_values_and_gradients=lambda kernel, dtype: kernel is not KERNELS["gated_delta_rule"] or dtype != "float32",
    test_rows_are_isolated=lambda name: name != "kda",
    test_prefills=lambda name: name != "gated_delta_rule",
    test_chunks_in_turn=True,
)  # fmt: skip
of_rows = pytest.mark.parametrize(("name", "T"), [("gated_delta_rule", 130), ("kda", 130), ("kda, long", 310)])


def inputs_of(kernel: Kernel, *sizes: int, **options):
    return inputs.make_inputs(*sizes, **kernel.options, **options)


@pytest.mark.parametrize(
    ("kernel", "dtype", "sizes", "more", "chunks"),
    [
        (KERNELS["gated_delta_rule"], "float32", ROWS[0], ROWS[1] | dict(gate="resets"), 3),
        # Two blocks of heads, on a key head each, which the kernel scales to unit length.
        (KERNELS["gated_delta_rule"], "bfloat16", (1, 200, 2, 4, 128, 64), dict(normalise=False), 3),
        # Rounding of L where keys repeat, and step sizes near 2; four heads, whose grid step begins with the state.
        (FOUR_HEADS, "bfloat16", (1, 192, 1, 4, 24, 40), dict(repeat_key=True, beta=1.9, num_states=1), 3),
        (KERNELS["kda"], "float32", *ROWS, 3),
        # Two blocks of two heads side by side; the second path after strong gates; keys that the kernel scales.
        (KERNELS["kda"], "bfloat16", (1, 200, 4, 4, 64, 64), dict(normalise=False, gate="resets"), 3),
        # The state goes through a chunk two grid steps after it is prepared, with rows after strong gates.
        (KERNELS["kda, long"], "bfloat16", (1, 310, 2, 2, 24, 40), dict(num_states=1, gate="resets"), 2),
    ],
)  # fmt: skip
def test_values_and_gradients(kernel, dtype, sizes, more, chunks):
    x = inputs_of(kernel, *sizes, dtype=jnp.dtype(dtype), **more)
    kernel.assert_values_and_gradients(x, normalise=not more.get("normalise", True), chunks=chunks)


@pytest.mark.parametrize(("dtype", "HV", "turns"), [("float32", 2, 2), ("bfloat16", 16, 3)])
def test_chunks_in_turn(dtype, HV, turns):
    """Two rows of five grid steps: the forward, and the states by the inverses that it made.

    16 heads pass a chunk in two stages, so that turns overlap.
    """
    x = inputs.make_inputs(2, 80 * turns, 1, HV, 24, 40, dtype=jnp.dtype(dtype), num_states=2, gate="resets")
    call = lambda **x: fused_gdn.chunk_gated_delta_rule(
        **x, chunk_size=16, implementation="fused", config=fused_gdn.Config(HV, HV, turns=turns),
        use_qk_l2norm_in_kernel=False,
    )  # fmt: skip
    gradients = jax.grad(lambda x: call(**x)[0].astype(jnp.float32).sum())
    counts = [(name.split("_")[-2], steps) for name, steps, *_ in launches(gradients, x)]
    assert counts == [("fwd", 2 * 6), ("states", 2 * 6), ("bwd", 2 * 5 * turns)]
    assert_recurrence(call, x, output_final_state=True)


@of_rows
def test_rows_are_isolated(name, T):
    KERNELS[name].assert_rows_are_isolated(inputs_of(KERNELS[name], 3, T, 1, 2, 24, 40))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in KERNELS if "long" not in name])
def test_packed_sequences(name, dtype):
    x = inputs_of(KERNELS[name], 1, 208, 1, 2, 24, 40, dtype=jnp.dtype(dtype), num_states=3)
    KERNELS[name].assert_packed(x)


@pytest.mark.parametrize(("name", "operator"), [("gated_delta_rule", GATED_DELTA_RULE), ("kda", KDA)])
def test_prefills(name, operator):
    """Over a pool of bfloat16, in pieces of two chunks."""
    x = inputs_of(KERNELS[name], 1, pool_suite.PREFILL_TOKENS, 1, 2, 24, 40)
    pool_suite.assert_prefills(operator, x, jnp.bfloat16, chunk_size=16, config=KERNELS[name].config(2))
