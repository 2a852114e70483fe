"""Segments of rows under every operator: values, gradients, isolation, launches, and one program for all ids."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from chunkwise.pipeline.operators import CHUNKED, OPERATORS
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import compare, tpu
from tests import poison
from tests.segment_suite import SEGMENT_IDS, assert_segments
from tests.transforms import assert_traced_once

B, T = SEGMENT_IDS.shape
CASES = [(x, how, "float32") for x in CHUNKED for how in x.implementations]
# One product of all pairs, of which those of later sequences of a chunk do not read the state before it.
CASES.append((OPERATORS["chunk_gla"], "fused", "bfloat16"))
named = functools.partial(pytest.mark.parametrize, ids=lambda x: getattr(x, "name", None))
of_both = named(("operator", "implementation"), [(x, how) for x in CHUNKED for how in ("xla", "fused")])
# Kernels read the same tables, and a simulated TPU has their values; what stands before the stages is the same for all.
is_other = lambda operator: operator.name != "chunk_simple_gla"
THOROUGH = dict(
    test_values_and_gradients=lambda operator, implementation: is_other(operator) or implementation == "staged",
    test_isolated=is_other,
    test_one_launch_a_direction=lambda operator: is_other(operator) and operator.name != "chunk_kda",
    test_compiles=True,
)


def inputs_of(operator, B=B, T=T, K=8, dtype=jnp.float32):
    return operator.source.inputs(B, T, 1, 2, K, K, dtype=jnp.dtype(dtype), num_states=B)


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


@named(("operator", "implementation", "dtype"), CASES)
def test_values_and_gradients(operator, implementation, dtype):
    assert_segments(over_segments(operator.function, implementation), inputs_of(operator, dtype=dtype))


@of_both
def test_isolated(operator, implementation):
    """Where a segment begins "xla" has a gate that forgets, and sums of gates before it round what follows."""
    poison.assert_isolated(
        over_segments(operator.function, implementation), inputs_of(operator), segment_ids=SEGMENT_IDS,
        shared=("g_gamma",), tolerance=1e-6 if implementation == "xla" else 0.0,
    )  # fmt: skip


@named("operator", CHUNKED)
def test_one_launch_a_direction(operator):
    """Beside it, the gated delta rule makes its states again in the backward."""
    run, x, ids = over_segments(operator.function, "fused"), inputs_of(operator), jnp.zeros((B, T), jnp.int32)
    cotangents = jax.tree.map(lambda y: jnp.ones(y.shape, y.dtype), jax.eval_shape(run, x, ids))
    gradients = lambda x: compare.with_gradients(run)(x, ids, cotangents)
    forward, both = (tpu.text_for_tpu(f, x).count("tpu_custom_call") for f in (lambda x: run(x, ids), gradients))
    assert (forward, both) == (1, 3 if operator.name == "chunk_gated_delta_rule" else 2)


@pytest.mark.tpu
@pytest.mark.skipif(not tpu.has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("chip", CHIPS)
@named("operator", CHUNKED)
def test_compiles(operator, chip):
    """Forward and backward with states, by masks and without."""
    run, ids = over_segments(operator.function, "fused"), jax.ShapeDtypeStruct((2, 200), jnp.int32)
    x = jax.eval_shape(lambda: inputs_of(operator, 2, 200, 128, jnp.bfloat16))
    program = tpu.compile_for(compare.with_gradients(run), x, ids, jax.eval_shape(run, x, ids), chip=chip)
    assert "tpu_custom_call" in program.as_text()


def test_new_ids_are_the_same_program():
    """All implementations that know no segments share what is around them."""
    operator = OPERATORS["chunk_simple_gla"]
    x = inputs_of(operator)
    run = lambda ids: operator.function(**x, segment_ids=ids, implementation="xla")[0]
    assert_traced_once(run, (jnp.asarray(SEGMENT_IDS),), (jnp.zeros((B, T), jnp.int32),))


@named("operator", CHUNKED)
def test_errors(operator):
    x = inputs_of(operator)
    ids = jnp.zeros((B, T), jnp.int32)
    bad = {
        r"`segment_ids` must be int32 of shape \(3, 40\); got int32 \(40,\)": ids[0],
        r"`segment_ids` must be int32 of shape \(3, 40\); got float32 \(3, 40\)": ids.astype(jnp.float32),
        r"`segment_ids` must be int32 of shape \(3, 40\); got list": ids.tolist(),
    }
    for message, segment_ids in bad.items():
        with pytest.raises(ValueError, match=message):
            operator.function(**x, segment_ids=segment_ids)
    row = {name: y if name == "g_gamma" else y[:1] for name, y in x.items()}
    with pytest.raises(ValueError, match="`segment_ids` must be None if `cu_seqlens` is given; got both"):
        operator.function(**row, segment_ids=ids[:1], cu_seqlens=jnp.array([0, T], jnp.int32))
