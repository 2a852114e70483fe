"""The gated delta rule as a user calls it: packed, and beside the model it comes from."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.pipeline import chunk_gated_delta_rule
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from chunkwise.shared.testing.oracle import reference

THOROUGH = dict(test_ladder=lambda chunk_size: chunk_size == 128)


IMPLEMENTATIONS = ("xla", "staged", "fused")
LADDER = boundaries(1, 63, 64, 65, 127, 128, 129, 447, 512, 640, 1920)


@pytest.fixture(scope="module")
def ladder():
    """Packed bfloat16 sequences, and what the recurrence makes of them."""
    inputs = make_inputs(1, int(LADDER[-1]), 1, 2, 64, 64, dtype=jnp.bfloat16)
    return inputs, reference(**inputs, cu_seqlens=LADDER)[0]


@pytest.mark.parametrize("chunk_size", [64, 128])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ladder(ladder, implementation, chunk_size):
    inputs, expected = ladder
    o, _ = chunk_gated_delta_rule(**inputs, cu_seqlens=LADDER, chunk_size=chunk_size, implementation=implementation)
    o = np.asarray(o, np.float64)
    for start, stop in itertools.pairwise(np.asarray(LADDER)):
        ours, theirs = o[:, start:stop], expected[:, start:stop]
        assert_close(f"o of {stop - start} tokens", ours, theirs, TOLERANCE["bfloat16"])


@pytest.mark.torch
@pytest.mark.parametrize("implementation", ["xla", "staged"])
def test_transformers(implementation):
    """Qwen3-Next's own function, on the same float32 inputs; test_real_model.py has whole layers."""
    torch = pytest.importorskip("torch", reason="torch has a CPU build under Python 3.11 only")
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = make_inputs(2, 150, 2, 2, 32, 48, num_states=2, normalise=False)
    tensors = {name: torch.tensor(np.asarray(x)) for name, x in inputs.items()}
    q, k, v = (tensors.pop(name) for name in ("q", "k", "v"))
    theirs, their_state = qwen.torch_chunk_gated_delta_rule(
        q, k, v, **tensors, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    o, state = chunk_gated_delta_rule(
        **inputs, output_final_state=True, use_qk_l2norm_in_kernel=True, implementation=implementation
    )
    assert_close("o", o, theirs.numpy(), TOLERANCE["float32"])
    assert_close("final_state", state, their_state.numpy(), TOLERANCE["float32"])
