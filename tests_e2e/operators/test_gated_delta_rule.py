"""The gated delta rule beside the model that it comes from."""

import numpy as np
import pytest

from chunkwise.pipeline import chunk_gated_delta_rule
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import make_inputs


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
