"""The launches over tokens that are split over devices: together they are the operator, and make nothing twice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import kda
from chunkwise.fused_gdn.operator import OPERATOR as GATED_DELTA_RULE
from chunkwise.kda.operator import OPERATOR as KDA
from chunkwise.shared.call import arguments
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.implementation import implementations
from chunkwise.shared.testing import compare, inputs, oracle
from tests.laws import raw_inputs
from tests.segment_suite import SEGMENT_IDS

# The other order of the same sums, in float32, or of products of bfloat16.
_TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


_PACKED = dict(cu_seqlens=inputs.boundaries(1, 17, 0, 3))
_SEGMENTS = dict(segment_ids=jnp.asarray(SEGMENT_IDS))
# The operator, its type, sizes, and form of the batch.
BOTH: dict[str, tuple] = {
    "rows": ("float32", (2, 21, 1, 2, 8, 12), {}),
    # A map may take a launch of its own.
    "wide": ("bfloat16", (2, 21, 2, 4, 136, 72), {}),
    "documents": ("float32", (1, 24, 1, 2, 8, 12), _PACKED),
    "documents-bfloat16": ("bfloat16", (1, 24, 1, 2, 8, 12), _PACKED),
    "segments": ("bfloat16", (*SEGMENT_IDS.shape, 1, 2, 8, 12), _SEGMENTS),
    "segments-32": ("float32", (*SEGMENT_IDS.shape, 1, 2, 8, 12), _SEGMENTS),
}
CASES = [(operator, name, *case) for operator in (GATED_DELTA_RULE, KDA) for name, case in BOTH.items()] + [
    # Value heads that no even number divides share a key head.
    (GATED_DELTA_RULE, "three", "bfloat16", (2, 21, 2, 6, 16, 12), {}),
    (GATED_DELTA_RULE, "four", "bfloat16", (1, 70, 2, 8, 16, 12), {}),
    # 32 heads a step, or 16, in the order of products that was searched for.
    (GATED_DELTA_RULE, "measured", "bfloat16", (1, 130, 16, 32, 8, 8), {}),
    (KDA, "measured", "bfloat16", (1, 130, 16, 16, 8, 8), {}),
    # Several chunks a grid step, of which the last one has one; the inverses of the map are read.
    (GATED_DELTA_RULE, "nine chunks", "bfloat16", (1, 530, 1, 2, 8, 12), {}),
    # Two chunks a grid step in the map, with rows after strong gates.
    (KDA, "eight chunks", "bfloat16", (1, 512, 2, 16, 72, 60), {}),
]
LAWS = {"rows": GateActivation(True, -5.0), "documents": GateActivation(True, -5.0), "segments": GateActivation(True)}
# Over devices of a mesh the end-to-end tests have quick ones.
THOROUGH = dict(test_together_they_are_the_operator=True, test_a_segment_that_is_not_finite=True)


def make(dtype: str, sizes: tuple, fixed: dict, **options) -> dict:
    """Return inputs."""
    N = len(fixed["cu_seqlens"]) - 1 if "cu_seqlens" in fixed else sizes[0]
    return inputs.make_inputs(*sizes, dtype=jnp.dtype(dtype), num_states=N, **options)


def assert_split(
    implementation: implementations.Implementation, x: dict, fixed: dict, activation: GateActivation
) -> None:
    """Compare the operator behind the map of its tokens with the operator alone: values and all gradients.

    The map must also say what the tokens do to any state. Padding is NaN. Where the operator alone is not finite
    because a sequence is not, the other must not be finite either, and there are no gradients to compare.

    Args:
      implementation: of the operator.
      x: its floating-point arrays by name, initial_state among them.
      fixed: its other arguments.
      activation: of its gates.
    """
    dtype, T, S = str(x["v"].dtype), x["v"].shape[1], x["initial_state"]
    options = arguments.Options(True, chunk_size=16 if T < 64 else 64, activation=activation)
    given = lambda x: arguments.Arguments(**x, **fixed)
    finite = all(np.isfinite(np.asarray(y, np.float32)).all() for y in x.values())
    x = inputs.poison_padding(x, **fixed)

    def results(pull: Callable, o, states, cotangents) -> dict[str, Any]:
        return dict(o=o, states=states) | (pull(cotangents)[0] if finite else {})

    @jax.jit
    def programs(x, *cotangents):
        plan, of_states = (implementations.plan(implementation, given(x), options, states) for states in (False, True))
        (o, states), pull = jax.vjp(lambda x: implementations.run(plan, given(x)), x)
        want = results(pull, o, states, cotangents)
        found, precomputed = implementations.map_states(of_states, given(x | dict(initial_state=jnp.zeros_like(S))))
        (o, states), pull = jax.vjp(lambda x: implementations.run(plan, given(x), precomputed), x)
        mapped = found.N + jnp.matmul(found.M, x["initial_state"], precision="highest")
        dh0 = implementations.state_gradient(of_states, given(x), precomputed, *cotangents)
        return results(pull, o, states, cotangents), want, mapped, dh0

    rng = np.random.default_rng(1)
    cotangents = ((x["v"].shape, dtype), (S.shape, "float32"))
    got, want, mapped, dh0 = programs(x, *(jnp.asarray(rng.standard_normal(s), t) for s, t in cotangents))
    for name, y in got.items():
        nonfinite = np.isnan(np.asarray(want[name], np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(y, np.float32)), nonfinite)
        compare.assert_close(name, np.where(nonfinite, 0, y), np.where(nonfinite, 0, want[name]), _TOLERANCE[dtype])
    if finite:
        compare.assert_close("states through the map", mapped, want["states"], _TOLERANCE[dtype])
        compare.assert_close("dh0", dh0, want["initial_state"], _TOLERANCE[dtype])


@pytest.mark.parametrize(("operator", "name", "dtype", "sizes", "fixed"), CASES)
def test_together_they_are_the_operator(operator, name, dtype, sizes, fixed):
    gate, law = "resets" if name == "eight chunks" else "logsigmoid", GateActivation()
    x = make(dtype, sizes, fixed, per_channel=operator is KDA, gate=gate)
    if operator is KDA and name in LAWS:
        x |= {name: y for name, y in raw_inputs(x, dtype=x["v"].dtype).items() if name != "beta"}
        law = LAWS[name]
    assert_split(operator.implementations["fused"], x, fixed, law)


@pytest.mark.parametrize("name", ["k", "v", "g"])
def test_a_segment_that_is_not_finite(name):
    """It spoils its own results alone, also where the operator is given what was made of its values."""
    x = make(*BOTH["segments-32"])
    x[name] = x[name].at[0, 10].set(jnp.nan).at[1, 39].set(jnp.nan)
    assert_split(GATED_DELTA_RULE.implementations["fused"], x, _SEGMENTS, GateActivation())


def test_map_of_two_chunks_a_grid_step():
    """The final state of zeros, and of any state: 8 chunks of a pack of heads, some channels with strong gates."""
    x = inputs.make_inputs(1, 512, 1, 2, 72, 60, dtype=jnp.bfloat16, per_channel=True, gate="zero", num_states=1)
    x["g"] = (x["g"] - 0.004).at[:, 70::97, :, :20].set(-200.0)
    start, options = x["initial_state"], arguments.Options(True, chunk_size=64, scale=0.3, config=kda.Config(2, 2))
    x["initial_state"] = jnp.zeros_like(start)
    found = jax.jit(lambda x: KDA.implementations["fused"].state_map(arguments.Arguments(**x), options, True)[0])(x)
    want, of_start = (oracle.reference(**x | dict(initial_state=S))[1] for S in (None, start))
    compare.assert_close("N", found.N, want, 4e-3)
    M_S = of_start - want
    assert np.abs(M_S).max() > 1e-2
    compare.assert_close("M S", jnp.matmul(found.M, start, precision="highest"), M_S, 4e-3)
