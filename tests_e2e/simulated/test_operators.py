"""The fused kernels of the operators against the float64 recurrence: values, and values with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import fused_gdn, fused_gla, kda, two_keys
from chunkwise.pipeline import operators
from chunkwise.shared.testing import compare, inputs, oracle
from tests import laws, segment_suite

# Tiles so small that every axis of a grid has several steps: one head, and two chunks of fused_gla.
CONFIGS = {
    "gated_delta_rule": fused_gdn.Config(1, 1),
    "kda": kda.Config(1, 1),
    "gdn2": two_keys.Config(1, 1),
    "comba": two_keys.Config(1, 1),
    "gla": fused_gla.Config(1, 1, 2),
    "simple_gla": fused_gla.Config(1, 1, 2),
}
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
    test_several_chunks_of_a_step=lambda dtype: dtype == "bfloat16",
    test_erase_gates=lambda gradients: gradients,
)


@pytest.mark.parametrize(("dtype", "cores"), [("float32", 1), ("bfloat16", 2)])
@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("operator", CONFIGS)
def test_operator(operator, batch, gradients, dtype, cores):
    """In bfloat16 on two cores, with keys that the kernel normalises: each changes a large part of a kernel."""
    assert_operator(operator, *BATCHES[batch], gradients, dtype)


@pytest.mark.parametrize(("dtype", "cores"), [("float32", 1), ("bfloat16", 2)])
def test_several_chunks_of_a_step(dtype, cores):
    """Two rows of 9 chunks, two in a grid step, of which the last has one; and the inverses that the backward reads."""
    config = fused_gdn.Config(1, 1, 2)
    assert_operator("gated_delta_rule", {}, (2, 140), True, True, dtype, config=config)


@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
def test_erase_gates(gradients):
    """The sample of GDN-2 in every session: the kernels of kda with more operands, over a chunk and its tail."""
    assert_operator("gdn2", {}, (1, 24), True, gradients, "float32")


def assert_operator(operator, sequences, sizes, states, gradients, dtype, config=None, **more):
    """Fail unless an operator gives the values, and if asked for the gradients, of the float64 recurrence."""
    entry = operators.OPERATORS[f"chunk_{operator}"]
    normalise = dict(use_qk_l2norm_in_kernel=True) if entry.delta and dtype == "bfloat16" else {}
    count = len(sequences["cu_seqlens"]) - 1 if "cu_seqlens" in sequences else sizes[0]
    x = operators.operator_inputs(
        entry, *sizes, 1, 2, 12, 20, dtype=jnp.dtype(dtype), num_states=count * states, **more
    )
    run = functools.partial(
        entry.function, **normalise, output_final_state=states, chunk_size=16, implementation="fused",
        config=config or CONFIGS[operator],
    )  # fmt: skip

    def results(x, sequences):
        o, state = run(**x, **sequences)
        return dict(o=o, final_state=state) if states else dict(o=o)

    rng, cotangents, fn = np.random.default_rng(1), {}, results
    if gradients:
        cotangents["o"] = jnp.asarray(rng.standard_normal(x["v"].shape), dtype)
        if states:
            cotangents["final_state"] = jnp.asarray(rng.standard_normal(x["initial_state"].shape), jnp.float32)
        fn = functools.partial(compare.with_gradients(results), cotangents=cotangents)
    got = jax.jit(fn)(inputs.poison_padding(x, **sequences), sequences)
    o, final_state, *rest = oracle.reference(
        **x, **sequences, **normalise, do=cotangents.get("o"), dht=cotangents.get("final_state")
    )
    want = dict(o=o, final_state=final_state) | {f"d{name}": y for dx in rest for name, y in dx.items()}
    for name, y in got.items():
        compare.assert_close(name, y, want[name], compare.tolerance(name, dtype))
    assert not np.asarray(got["o"], np.float32)[padding(sequences, sizes)].any(), "o of padding must be zero"


def padding(sequences, sizes):
    """Return which tokens are in no sequence, bool [B, T]."""
    if "segment_ids" in sequences:
        return np.asarray(sequences["segment_ids"]) < 0
    end = sequences["cu_seqlens"][-1] if "cu_seqlens" in sequences else sizes[1]
    return np.broadcast_to(np.arange(sizes[1]) >= int(end), sizes)


@pytest.mark.parametrize(("bound", "cores"), [(None, 1), (-5.0, 2)])
def test_raw_gates(bound, cores):
    """The kernels of kda make decays of raw gates, also of the tokens that pad a chunk, and their gradients."""
    x = laws.raw_inputs(inputs.make_inputs(1, 60, 1, 2, 12, 20, per_channel=True, num_states=6))
    rng = np.random.default_rng(1)
    cotangents = {
        name: jnp.asarray(rng.standard_normal(x[like].shape), jnp.float32)
        for name, like in (("o", "v"), ("final_state", "initial_state"))
    }

    def results(x, sequences):
        o, state = kda.chunk_kda(
            **x, **sequences, use_gate_in_kernel=True, lower_bound=bound, use_beta_sigmoid_in_kernel=True,
            output_final_state=True, chunk_size=16, implementation="fused", config=CONFIGS["kda"],
        )  # fmt: skip
        return dict(o=o, final_state=state)

    got = jax.jit(compare.with_gradients(results))(inputs.poison_padding(x, **PACK), PACK, cotangents)
    raw = {name: x[name] for name in ("g", "beta", "A_log", "dt_bias")}
    made, pull = laws.law_reference(**raw, lower_bound=bound)
    decayed = {name: y for name, y in x.items() if name not in raw} | made
    o, final_state, gradients = oracle.reference(**decayed, **PACK, do=cotangents["o"], dht=cotangents["final_state"])
    gradients |= pull(gradients["g"], gradients["beta"])
    want = dict(o=o, final_state=final_state) | {f"d{name}": y for name, y in gradients.items()}
    for name, y in got.items():
        compare.assert_close(name, y, want[name], compare.tolerance(name, "float32"))
