"""Rows of segments: a hard batch of them, and the tests of an operator on it. They need pytest and hypothesis."""

import functools
from collections.abc import Callable
from typing import ClassVar

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from chunkwise.shared import chips
from chunkwise.shared.testing import compare, inputs, oracle, tpu
from tests import poison
from tests.gradients import gradient_program

# Padding before, between and after segments, and between two of one id; a segment of one token; one that ends with a
# chunk of 16; an ordinary row; a row of padding.
SEGMENT_IDS = np.array(
    [
        [-1, -1, *[5] * 5, 2, -7, *[2] * 7, *[3] * 20, 9, 9, -1, -1],
        [*[1] * 33, *[0] * 7],
        [-1] * 40,
    ],
    np.int32,
)

# The tests that are thorough ones of an operator whose kernels read the same tables as another operator's.
SHOWN_ELSEWHERE = dict(
    test_values_and_gradients_of_plain_jax=True,
    test_values_and_gradients_of_the_kernels=True,
    test_random_segments=True,
    test_isolated=True,
    test_isolated_to_the_bit=True,
    test_compiles=True,
)


def random_segment_ids(seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Return random ids [B, T]: runs of 1 to 20 tokens, of which every fourth is padding."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(shape[0]):
        lengths = rng.integers(1, 20, shape[1])
        rows.append(np.repeat(rng.integers(-1, 3, shape[1]), lengths)[: shape[1]])
    return np.stack(rows).astype(np.int32)


@functools.cache
def over_segments(operator: Callable, implementation: str, states: bool = True) -> Callable[[dict, jax.Array], dict]:
    """Return a function of inputs by name and segment ids to o and, with `states`, final_state by name.

    It is the same one every time, so that what tests share of it is compiled once.
    """

    def run(x, segment_ids):
        o, state = operator(
            **x, output_final_state=states, segment_ids=segment_ids, chunk_size=16, implementation=implementation
        )
        return dict(o=o, final_state=state) if states else dict(o=o)

    return run


def assert_random_segments(fn: Callable[[dict, jax.Array], dict], x: dict[str, jax.Array], seed: int) -> None:
    """Fail unless o and final_state are those of the recurrence, for random ids."""
    B, T = x["v"].shape[:2]
    ids = random_segment_ids(seed, (B, T))
    got = _jitted(fn)(x, jnp.asarray(ids))
    for name, want in zip(("o", "final_state"), oracle.reference(**x, segment_ids=ids), strict=True):
        compare.assert_close(name, got[name], want, compare.TOLERANCE["float32"])


_jitted = functools.cache(jax.jit)


def segment_launches(fn: Callable[[dict, jax.Array], dict], x: dict[str, jax.Array]) -> tuple[int, int]:
    """Return how many kernels are launched for a TPU: for the results, and for results and gradients."""
    ids = jnp.zeros(x["v"].shape[:2], jnp.int32)
    cotangents = jax.tree.map(lambda y: jnp.ones(y.shape, y.dtype), jax.eval_shape(fn, x, ids))
    gradients = lambda x: compare.with_gradients(fn)(x, ids, cotangents)
    forward, both = (tpu.text_for_tpu(f, x).count("tpu_custom_call") for f in (lambda x: fn(x, ids), gradients))
    return forward, both


def assert_segments(
    fn: Callable[[dict, jax.Array], dict], x: dict[str, jax.Array], segment_ids=SEGMENT_IDS,
    tolerance=compare.TOLERANCE, gradient_tolerance=compare.GRADIENT_TOLERANCE,
) -> None:  # fmt: skip
    """Fail unless results and gradients are those of the recurrence, with NaN in the padding, where all must be zero.

    Args:
      fn: a function of inputs by name and segment ids that returns o and maybe final_state by name.
      x: inputs by the names of `reference`.
      segment_ids: concrete ids [B, T].
      tolerance, gradient_tolerance: of results and of gradients, by the name of a type.
    """
    padding, shared = segment_ids < 0, ("initial_state", "g_gamma")
    rng = np.random.default_rng(1)
    cotangents = {
        name: jnp.asarray(rng.standard_normal(y.shape), y.dtype)
        for name, y in jax.eval_shape(fn, x, jnp.asarray(segment_ids)).items()
    }
    nonfinite = inputs.poison_padding(jax.tree.map(jnp.asarray, x), segment_ids=segment_ids)
    got = gradient_program(fn)(nonfinite, jnp.asarray(segment_ids), cotangents)
    o, state, gradients = oracle.reference(
        **x, segment_ids=segment_ids, do=cotangents["o"], dht=cotangents.get("final_state"),
    )  # fmt: skip
    kind = x["v"].dtype.name
    for name, want in (("o", o), ("final_state", state)):
        if name in got:
            compare.assert_close(name, got[name], want, tolerance[kind])
    for name, want in gradients.items():
        compare.assert_close(f"d{name}", got[f"d{name}"], want, gradient_tolerance[kind])
    for name, y in got.items():
        if name.removeprefix("d") not in (*shared, "final_state"):
            assert not np.asarray(y.astype(jnp.float32))[padding].any(), f"{name} of padding is not zero"


def compile_segments(fn: Callable[[dict, jax.Array], dict], x: dict[str, jax.Array], chip: str):
    """Return the results and gradients of fn, as in `assert_segments`, compiled for a TPU."""
    ids = jax.ShapeDtypeStruct(x["v"].shape[:2], jnp.int32)
    x = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), x)
    return tpu.compile_for(compare.with_gradients(fn), x, ids, jax.eval_shape(fn, x, ids), chip=chip)


class SegmentTests:
    """Values, gradients, isolation and launches of an operator that has kernels for segments, which a package sets.

    Attributes:
      operator: the operator, a static method.
      make_inputs: from sizes, and named type and number of states, to inputs by name, a static method.
      launches: how many kernels are launched for the results, and for results and gradients.
      shared: inputs that all segments share.
    """

    operator: ClassVar[Callable]
    make_inputs: ClassVar[Callable] = inputs.make_inputs
    launches: ClassVar[tuple[int, int]]
    shared: ClassVar[tuple[str, ...]] = ()

    def inputs(self, B=SEGMENT_IDS.shape[0], T=SEGMENT_IDS.shape[1], K=8, dtype=jnp.float32) -> dict[str, jax.Array]:
        """Return inputs of the operator with two value heads for a key head, and initial states."""
        return type(self).make_inputs(B, T, 1, 2, K, K, dtype=dtype, num_states=B)

    def run(self, implementation: str, states: bool = True) -> Callable:
        """Return the operator as `over_segments` does."""
        return over_segments(self.operator, implementation, states)

    def test_values_and_gradients_of_the_kernels(self):
        assert_segments(self.run("fused"), self.inputs())

    def test_values_and_gradients_of_plain_jax(self):
        assert_segments(self.run("xla"), self.inputs())

    # The tests of several operators are one function.
    @hypothesis.settings(
        max_examples=10, deadline=None, suppress_health_check=[hypothesis.HealthCheck.differing_executors]
    )
    @hypothesis.given(st.integers(0, 2**16))
    def test_random_segments(self, seed):
        assert_random_segments(self.run("fused"), self.inputs(), seed)

    def test_isolated(self):
        """Where a segment begins "xla" has a gate that forgets, and sums of gates before it round what follows."""
        poison.assert_isolated(
            self.run("xla"), self.inputs(), segment_ids=SEGMENT_IDS, shared=self.shared, tolerance=1e-6
        )  # fmt: skip

    def test_isolated_to_the_bit(self):
        poison.assert_isolated(self.run("fused"), self.inputs(), segment_ids=SEGMENT_IDS, shared=self.shared)

    def test_one_launch_a_direction(self):
        assert segment_launches(self.run("fused"), self.inputs()) == self.launches

    @pytest.mark.tpu
    @pytest.mark.skipif(not tpu.has_libtpu(), reason="needs libtpu")
    @pytest.mark.parametrize("chip", chips.CHIPS)
    def test_compiles(self, chip):
        """Forward and backward with states, by masks and without."""
        x = self.inputs(2, 200, 128, jnp.bfloat16)
        assert "tpu_custom_call" in compile_segments(self.run("fused"), x, chip).as_text()
