"""The launches over tokens that are split over devices: together they are the operator, and make nothing twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import api
from chunkwise.shared.operators import Arguments, Laws, Options
from chunkwise.shared.operators.chunked import prepare
from chunkwise.shared.testing import (
    SEGMENT_IDS,
    assert_close,
    boundaries,
    make_inputs,
    raw_inputs,
    spoil_padding,
)

thorough = pytest.mark.thorough
# The other order of the same sums, in float32, or of products of bfloat16.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}
PACKED = dict(cu_seqlens=boundaries(1, 17, 0, 3))
SEGMENTS = dict(segment_ids=jnp.asarray(SEGMENT_IDS))


def launches(fixed: dict, laws: Laws, C: int):
    """Return the operator, alone and with what the map of a device keeps, as functions of its arrays.

    C is the chunk size.
    """

    def arguments(x):
        options = Options(True, chunk_size=C, laws=laws)
        return prepare(Arguments(**x, **fixed), options, "fused", raw_gates=True)

    def states_after(x, S):
        y, options = arguments(x | dict(initial_state=S))
        return api._summary(y, options, config=None)

    def run(x, kept=None):
        return api._fused(*arguments(x), kept, config=None)

    def state_gradient(x, kept, do, dstates):
        return api._state_gradient(*arguments(x), kept, do, dstates, config=None)

    return states_after, run, state_gradient


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("dtype", "sizes", "fixed", "laws"),
    [
        pytest.param("float32", (2, 21, 1, 2, 8, 12), {}, Laws(True, -5.0), id="rows", marks=thorough),
        pytest.param("bfloat16", (2, 21, 2, 4, 136, 72), {}, Laws(), id="wide", marks=thorough),
        # 16 heads a step, in the order of products that was searched for.
        pytest.param("bfloat16", (1, 130, 16, 16, 8, 8), {}, Laws(), id="measured", marks=thorough),
        pytest.param("float32", (1, 24, 1, 2, 8, 12), PACKED, Laws(True, -5.0), id="documents", marks=thorough),
        pytest.param("bfloat16", (1, 24, 1, 2, 8, 12), PACKED, Laws(), id="documents-bfloat16", marks=thorough),
        pytest.param(
            "bfloat16", (*SEGMENT_IDS.shape, 1, 2, 8, 12), SEGMENTS, Laws(True), id="segments", marks=thorough
        ),
        pytest.param("float32", (*SEGMENT_IDS.shape, 1, 2, 8, 12), SEGMENTS, Laws(), id="segments-32", marks=thorough),
    ],
)
def test_together_they_are_the_operator(dtype, sizes, fixed, laws):
    B, T, H, HV, K, V = sizes
    N = len(fixed["cu_seqlens"]) - 1 if "cu_seqlens" in fixed else B
    x = make_inputs(*sizes, dtype=jnp.dtype(dtype), per_channel=True, num_states=N)
    if laws.use_gate_in_kernel:
        x |= {name: y for name, y in raw_inputs(x, dtype=jnp.dtype(dtype)).items() if name != "beta"}
    x = spoil_padding(x, fixed.get("cu_seqlens"))
    if "segment_ids" in fixed:
        padding = np.asarray(SEGMENT_IDS) < 0
        x |= {name: x[name].at[padding].set(jnp.nan) for name in ("q", "k", "v", "g", "beta")}
    states_after, run, state_gradient = launches(fixed, laws, 16 if T < 64 else 64)
    # From zeros without values, and what the tokens do to the identity.
    S = jnp.concatenate([jnp.zeros((N, HV, K, V)), jnp.broadcast_to(jnp.eye(K), (N, HV, K, K))], axis=3)

    @jax.jit
    def programs(x, do, dstates):
        (o, states), pull = jax.vjp(run, x)
        want = dict(o=o, states=states, **pull((do, dstates))[0])
        map_, kept = states_after(x, S)
        (o, states), pull = jax.vjp(lambda x: run(x, kept), x)
        got = dict(o=o, states=states, **pull((do, dstates))[0])
        mapped = map_[..., :V] + jnp.matmul(map_[..., V:], x["initial_state"], precision="highest")
        return got, want, mapped, state_gradient(x, kept, do, dstates)

    rng = np.random.default_rng(1)
    cotangents = ((x["v"].shape, dtype), ((N, HV, K, V), "float32"))
    got, want, mapped, dh0 = programs(x, *(jnp.asarray(rng.standard_normal(s), t) for s, t in cotangents))
    for name, y in got.items():
        assert_close(name, y, want[name], TOLERANCE[dtype])
    assert_close("states through the map", mapped, want["states"], TOLERANCE[dtype])
    assert_close("dh0", dh0, want["initial_state"], TOLERANCE[dtype])
