"""The fused kernels of the operators against the float64 recurrence: values, and values with gradients."""

import jax.numpy as jnp
import pytest

from chunkwise import fused_gdn, fused_gla, kda, two_keys
from chunkwise.pipeline import operators
from chunkwise.shared.testing import inputs
from tests import laws, segment_suite
from tests.recurrence import assert_recurrence

# Tiles so small that every axis of a grid has several steps: two heads of 64, and two chunks of fused_gla.
CONFIGS = {
    "gated_delta_rule": fused_gdn.Config(2, 2),
    "kda": kda.Config(2, 2),
    "gdn2": two_keys.Config(2, 2),
    "comba": two_keys.Config(2, 2),
    "gla": fused_gla.Config(2, 2, 2),
    "simple_gla": fused_gla.Config(2, 2, 2),
}
# Heads of keys and of values, and their channels: two heads of a block fill whole registers. A key head of a divided
# group fills one alone; kernels of kda hold two heads side by side where each has its keys.
SHARED, SIDE_BY_SIDE = (1, 4, 128, 64), (4, 4, 64, 64)
PACK = dict(cu_seqlens=inputs.boundaries(3, 0, 34, 16, 0, 1))
SEGMENTS = dict(segment_ids=jnp.asarray(segment_suite.SEGMENT_IDS))
# The sequences, [B, T], and whether there are states. Tails of chunks, empty sequences, padding.
BATCHES = {
    "rows": ({}, (2, 50), True),
    "whole chunks without states": ({}, (1, 64), False),
    "pack with states": (PACK, (1, 60), True),
    "pack without states": (PACK, (1, 60), False),
    "segments with states": (SEGMENTS, segment_suite.SEGMENT_IDS.shape, True),
    "segments without states": (SEGMENTS, segment_suite.SEGMENT_IDS.shape, False),
}
QUICK = {
    ("gated_delta_rule", "segments with states", True, "float32"),
}
THOROUGH = dict(
    test_operator=lambda operator, batch, gradients, dtype: (operator, batch, gradients, dtype) not in QUICK,
    test_raw_gates=True,
    test_several_chunks_of_a_step=True,
    test_long_rows=True,
    test_segments_in_several_chunks=True,
    test_chunks_in_turn=True,
    test_widths_of_heads=True,
    test_erase_gates=lambda gradients: gradients,
    test_heads_side_by_side=lambda dtype: dtype == "bfloat16",
)


@pytest.mark.parametrize(("dtype", "cores"), [("float32", 1), ("bfloat16", 2)])
@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("operator", CONFIGS)
def test_operator(operator, batch, gradients, dtype, cores):
    """In bfloat16 on two cores, with keys that the kernel normalises: each changes a large part of a kernel.

    And gates that only the second path of the kernels of kda and gla can hold.
    """
    assert_operator(operator, *BATCHES[batch], gradients, dtype)


@pytest.mark.parametrize(("dtype", "cores"), [("float32", 1), ("bfloat16", 2)])
def test_heads_side_by_side(dtype, cores):
    """Simple GLA with four heads of 32 channels in a register, and keys of no whole register."""
    x = inputs.make_inputs(1, 60, 1, 4, 48, 32, dtype=jnp.dtype(dtype), num_states=6)
    del x["beta"]
    options = dict(chunk_size=16, implementation="fused", config=fused_gla.Config(4, 4, 2))
    assert_recurrence(fused_gla.chunk_simple_gla, x, **PACK, **options)


@pytest.mark.parametrize(("dtype", "cores"), [("float32", 1), ("bfloat16", 2)])
def test_several_chunks_of_a_step(dtype, cores):
    """Two rows of 5 chunks, two in a grid step, of which the last has one; and what the backward reads."""
    config = fused_gdn.Config(2, 2, 2)
    keeps = dict(disable_recompute=dtype == "float32")
    assert_operator("gated_delta_rule", {}, (2, 76), True, True, dtype, config, keeps)
    operator = "kda" if dtype == "float32" else "comba"  # gates per channel, and per head
    assert_operator(operator, {}, (2, 76), True, True, dtype, kda.Config(2, 2, 2, 2))


def test_long_rows():
    """The inverses of KDA have a stage of their own between two others."""
    assert_operator("kda", {}, (1, 310), True, False, "bfloat16", kda.Config(2, 2, 2, 2))


@pytest.mark.parametrize(("dtype", "cores"), [("float32", 1), ("bfloat16", 2)])
@pytest.mark.parametrize("operator", ["gated_delta_rule", "kda"])
def test_segments_in_several_chunks(operator, dtype, cores):
    """Two rows of 9 chunks, two in a grid step, with many segments and with one."""
    ids = segment_suite.random_segment_ids(3, (2, 140))
    ids[1] = 0
    config = fused_gdn.Config(2, 2, 2) if operator == "gated_delta_rule" else kda.Config(2, 2, 2, 2)
    assert_operator(operator, dict(segment_ids=jnp.asarray(ids)), (2, 140), True, True, dtype, config)


@pytest.mark.parametrize(("dtype", "cores"), [("float32", 1), ("bfloat16", 2)])
def test_chunks_in_turn(dtype, cores):
    """Two rows of 8 chunks, two in a grid step, one after the other; and what the backward reads."""
    keeps, config = dict(disable_recompute=dtype == "float32"), fused_gdn.Config(2, 2, turns=2)
    assert_operator("gated_delta_rule", {}, (2, 128), True, True, dtype, config, keeps)


@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
def test_erase_gates(gradients):
    """The sample of GDN-2 in every session: the kernels of kda with more operands, over a chunk and its tail."""
    assert_operator("gdn2", {}, (1, 24), True, gradients, "float32")


@pytest.mark.parametrize(("dtype", "cores"), [("float32", 1), ("bfloat16", 1)])
@pytest.mark.parametrize(("K", "V"), [(96, 192), (64, 64), (16, 80)])
def test_widths_of_heads(K, V, dtype, cores):
    """Tiles that are no whole registers, two chunks in turn."""
    config = fused_gdn.Config(2, 2, turns=2)
    assert_operator("gated_delta_rule", {}, (1, 128), True, True, dtype, config, heads=(1, 2, K, V))


def assert_operator(
    operator, sequences, sizes, states, gradients, dtype, config=None, more=None, heads=None
):  # fmt: skip
    """Fail unless an operator gives the values, and if asked for the gradients, of the float64 recurrence."""
    entry = operators.OPERATORS[f"chunk_{operator}"]
    count = len(sequences["cu_seqlens"]) - 1 if "cu_seqlens" in sequences else sizes[0]
    gate = "resets" if dtype == "bfloat16" and entry.per_channel else "logsigmoid"
    heads = heads or (SIDE_BY_SIDE if operator in ("kda", "comba") else SHARED)
    x = entry.source.inputs(*sizes, *heads, dtype=jnp.dtype(dtype), num_states=count * states, gate=gate)
    options = dict(use_qk_l2norm_in_kernel=True) if entry.delta and dtype == "bfloat16" else {}
    options |= dict(chunk_size=16, implementation="fused", config=config or CONFIGS[operator], **more or {})
    assert_recurrence(entry.function, x, gradients=gradients, **sequences, **options)


@pytest.mark.parametrize(("bound", "cores"), [(None, 1), (-5.0, 2)])
def test_raw_gates(bound, cores):
    """The kernels of kda make decays of raw gates, also of the tokens that pad a chunk, and their gradients."""
    x = laws.raw_inputs(inputs.make_inputs(1, 60, *SIDE_BY_SIDE, per_channel=True, num_states=6))
    assert_recurrence(
        kda.chunk_kda, x, **PACK, use_gate_in_kernel=True, lower_bound=bound, use_beta_sigmoid_in_kernel=True,
        chunk_size=16, implementation="fused", config=CONFIGS["kda"],
    )  # fmt: skip
