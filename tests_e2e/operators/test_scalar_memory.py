"""The tables of kernels in scalar memory, of which every TPU has 1 MiB: what they take for a million tokens."""

import functools

import jax
import jax.numpy as jnp
import pytest

from chunkwise.pipeline.operators import CHUNKED, OPERATORS
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import tpu
from tests import traced

K = 128
MILLION = 2**20
# Rows of the batch, and the tokens of a row.
ROWS = [(1, MILLION), (32, MILLION // 32)]
FORMS = ["rows", "segments", "packed", "packed with states"]
SEQUENCES = 1000
COMPILED = [
    *(("gated_delta_rule", form) for form in FORMS),
    ("kda", "rows"),
    ("kda", "packed with states"),
    ("gla", "segments"),
    ("simple_gla", "packed"),
]
# Kernels with a gate for every channel take ten seconds to trace, and programs that look for sequences to compile.
THOROUGH = dict(
    test_tables_of_a_million_tokens=lambda operator: operator.per_channel,
    test_a_million_tokens_compile=lambda name, form, chip: (name, form) != ("gated_delta_rule", "rows"),
)


def program(operator, form: str, B: int, T: int):
    """Return the forward and the gradient of an operator over B rows of T tokens, and the shapes of its arguments."""
    small = jax.eval_shape(functools.partial(operator.source.inputs, 1, 16, 1, 1, K, K, dtype=jnp.bfloat16))
    of = lambda y: jax.ShapeDtypeStruct((B, T, *y.shape[2:]) if y.ndim > 1 else y.shape, y.dtype)
    x, more = jax.tree.map(of, small), {}
    if form == "segments":
        more["segment_ids"] = jax.ShapeDtypeStruct((B, T), jnp.int32)
    if "packed" in form:
        more["cu_seqlens"] = jax.ShapeDtypeStruct((SEQUENCES + 1,), jnp.int32)
    if "states" in form:
        x["initial_state"] = jax.ShapeDtypeStruct((SEQUENCES, 1, K, K), jnp.float32)

    def run(x, more):
        outputs = lambda x: operator.function(
            **x, **more, output_final_state="states" in form, chunk_size=64, implementation="fused"
        )
        results, pull = jax.vjp(outputs, x)
        return results, pull(results)

    return run, x, more


@pytest.mark.parametrize(("form", "size"), [(form, size) for form in FORMS for size in ROWS[: 2 - ("packed" in form)]])
@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_tables_of_a_million_tokens(operator, form, size):
    """Rows of one sequence have none; a chunk takes a number, and a piece four: of 8 chunks for GLA, 4 for one head."""
    (B, T), chunks = size, 8 if "gla" in operator.name else 4
    bytes_of = {
        "rows": 0,
        "segments": 4 * (MILLION // 64 + 128),
        "packed": 4 * (MILLION // 64 + 128),
        "packed with states": 16 * (MILLION // 64 // chunks + 1024),
    }
    launches = traced.launches(*program(operator, form, B, T))
    assert launches
    assert {launch.table_bytes for launch in launches} == {bytes_of[form]}


@pytest.mark.tpu
@pytest.mark.skipif(not tpu.has_libtpu(), reason="libtpu is not installed")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("name", "form"), COMPILED)
def test_a_million_tokens_compile(name, form, chip):
    run, *shapes = program(OPERATORS[f"chunk_{name}"], form, 1, MILLION)
    assert tpu.launches(tpu.compile_for(run, *shapes, chip=chip).as_text())


@pytest.mark.parametrize(
    ("form", "most"), [("segments", "chunks .* 245760; got 262145"), ("packed with states", "61440")]
)
@pytest.mark.parametrize("name", ["gated_delta_rule", "simple_gla"])
def test_too_many_tokens_are_refused(name, form, most):
    """Before anything is traced for a kernel; pieces of simple GLA are of 512 tokens."""
    T = 2**25 if name == "simple_gla" and form != "segments" else 2**24
    run, *shapes = program(OPERATORS[f"chunk_{name}"], form, 1, T)
    with pytest.raises(NotImplementedError, match=f"{most}.*: use fewer tokens"):
        jax.eval_shape(run, *shapes)
