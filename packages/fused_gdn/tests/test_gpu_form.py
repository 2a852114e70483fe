"""The form of plain JAX for GPUs, on a CPU: values and gradients. `nox -s gpu` runs the other tests on it too."""

import pytest

from chunkwise.fused_gdn import chunk_gated_delta_rule
from tests.gpu_suite import BATCHES, UNFILLED, assert_final_states, assert_gpu_form

THOROUGH = dict(
    test_gpu_form=lambda batch, by_maps, passes: (batch, by_maps, passes) != ("rows", True, None),
    # The form has a quick test above.
    test_final_states=True,
)


@pytest.mark.parametrize("passes", [None, 3])
@pytest.mark.parametrize("by_maps", [False, True], ids=["one by one", "by maps"])
@pytest.mark.parametrize("batch", BATCHES)
def test_gpu_form(batch, by_maps, passes):
    assert_gpu_form(chunk_gated_delta_rule, batch, by_maps, passes, per_channel=False)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["on a CPU", "on a GPU"])
@pytest.mark.parametrize("batch", UNFILLED)
def test_final_states(batch, on_gpu):
    assert_final_states(chunk_gated_delta_rule, batch, on_gpu, per_channel=False)
