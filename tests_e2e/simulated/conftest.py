import pytest

from chunkwise.shared import compat
from chunkwise.shared.implementation import fused
from chunkwise.shared.kernels import matmul
from chunkwise.shared.testing import simulator


@pytest.fixture(autouse=True)
def simulated_tpu(request, monkeypatch):
    """Run every test on a simulated TPU, of as many cores as its parameter `cores` says, and demand some kernel."""
    if not compat.EFFECTS_UNDER_OPTIMIZE_REMAT:
        # By `optimize_remat` a forward computes less where a program reads no outputs. Here it computes them.
        monkeypatch.setattr(fused, "unless_unread", lambda whole, part, *args: whole(*args))
    # Loads and stores with a stride are simulated, where plain interpretation does without them.
    monkeypatch.setattr(matmul, "is_interpreted", lambda: False)
    cores = request.node.callspec.params.get("cores", 1) if hasattr(request.node, "callspec") else 1
    monkeypatch.setattr(compat, "cores", lambda: cores)
    with simulator.simulated(cores) as grid_steps:
        yield
    assert grid_steps, "no kernel ran on the simulated TPU"
