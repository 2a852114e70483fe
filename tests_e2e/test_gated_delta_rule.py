"""The gated delta rule as a user calls it: stage by stage, packed, and beside the model it comes from."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.chunk_h import chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.pipeline import chunk_gated_delta_rule
from chunkwise.shared.reference import reference
from chunkwise.shared.testing import TOLERANCE, assert_close, make_inputs
from chunkwise.solve_tril import solve_tril
from chunkwise.wy_fast import recompute_w_u

LADDER = np.cumsum([0, 1, 17, 31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 191, 192, 193, 367]).astype(np.int32)


@pytest.fixture(scope="module", params=[jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def ladder(request):
    """A pack of ragged sequences with a state each, and what the recurrence makes of it."""
    inputs = make_inputs(1, int(LADDER[-1]), 1, 2, 64, 64, dtype=request.param, num_states=len(LADDER) - 1)
    return inputs, *reference(**inputs, cu_seqlens=LADDER)


@pytest.mark.parametrize("chunk_size", [64, 128])
@pytest.mark.parametrize("implementation", ["xla", "staged"])
def test_ladder(ladder, implementation, chunk_size):
    inputs, o_ref, state_ref = ladder
    o, state = chunk_gated_delta_rule(
        **inputs, cu_seqlens=jnp.asarray(LADDER), output_final_state=True, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    tolerance = TOLERANCE[str(inputs["v"].dtype)]
    for n, (start, stop) in enumerate(itertools.pairwise(LADDER)):
        assert_close(f"o of sequence {n}", o[:, start:stop], o_ref[:, start:stop], tolerance)
        assert_close(f"state of sequence {n}", state[n], state_ref[n], tolerance)


@pytest.mark.parametrize("chunk_size", [64, 128])
def test_ladder_without_states(ladder, chunk_size):
    inputs = {name: x for name, x in ladder[0].items() if name != "initial_state"}
    o, _ = chunk_gated_delta_rule(**inputs, cu_seqlens=jnp.asarray(LADDER), chunk_size=chunk_size, implementation="xla")
    assert_close("o", o, reference(**inputs, cu_seqlens=LADDER)[0], TOLERANCE[str(inputs["v"].dtype)])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_stage_by_stage(dtype, implementation):
    inputs = make_inputs(2, 100, 1, 2, 32, 48, dtype=dtype, num_states=2)
    q, k, v, g, beta, h0 = (inputs[name] for name in ("q", "k", "v", "g", "beta", "initial_state"))
    run = {"implementation": implementation}
    g_cum = chunk_local_cumsum(g, 32, **run)
    A = chunk_scaled_dot_kkt(k, beta, g_cum, chunk_size=32, **run)
    A_inv = solve_tril(A, **run)
    w, u = recompute_w_u(k, v, beta, A_inv, g_cum, **run)
    h, v_new, state = chunk_gated_delta_rule_fwd_h(k, w, u, g_cum, h0, True, chunk_size=32, **run)
    o = chunk_fwd_o(q, k, v_new, h, g_cum, chunk_size=32, **run)
    o_ref, state_ref = reference(**inputs)
    assert_close("o", o, o_ref, TOLERANCE[str(jnp.dtype(dtype))])
    assert_close("final_state", state, state_ref, TOLERANCE[str(jnp.dtype(dtype))])


@pytest.mark.parametrize("implementation", ["xla", "staged"])
@pytest.mark.parametrize("T", [1, 64, 150])
def test_transformers(implementation, T):
    """Qwen3-Next's own function, on the same float32 inputs."""
    torch = pytest.importorskip("torch", reason="torch has a CPU build under Python 3.11 only")
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = make_inputs(2, T, 2, 2, 32, 48, num_states=2, normalise=False)
    tensors = {name: torch.tensor(np.asarray(x)) for name, x in inputs.items()}
    q, k, v = (tensors.pop(name) for name in ("q", "k", "v"))
    theirs, their_state = qwen.torch_chunk_gated_delta_rule(
        q, k, v, **tensors, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    o, state = chunk_gated_delta_rule(
        **inputs, output_final_state=True, use_qk_l2norm_in_kernel=True, implementation=implementation
    )
    assert_close("o", o, theirs.numpy(), 1e-5)
    assert_close("final_state", state, their_state.numpy(), 1e-5)
