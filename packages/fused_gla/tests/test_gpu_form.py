"""The way of plain JAX for GPUs, on a CPU: values and gradients. `nox -s gpu` runs the other tests on it too."""

import pytest

from tests.either_gla import chunk_either_gla
from tests.gpu_suite import BATCHES, UNFILLED, assert_final_states, assert_gpu_form

THOROUGH = dict(
    # The delta rule has a quick one.
    test_gpu_form=True,
    # A CPU takes all chunks at once, and nothing fills them.
    test_final_states=lambda batch, on_gpu: not on_gpu or batch == "one chunk",
)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_gpu_form(batch, per_channel):
    assert_gpu_form(chunk_either_gla, batch, False, None, per_channel, delta=False)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["on a CPU", "on a GPU"])
@pytest.mark.parametrize("batch", UNFILLED)
def test_final_states(batch, on_gpu):
    assert_final_states(chunk_either_gla, batch, on_gpu, per_channel=True, delta=False)
