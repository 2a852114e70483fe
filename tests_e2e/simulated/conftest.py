import contextlib

import jax
import pytest

from chunkwise.shared import compat
from chunkwise.shared.implementation import remat
from chunkwise.shared.kernels import matmul
from tests_e2e.simulated import simulator


@pytest.fixture(autouse=True)
def _keep_no_programs():
    """Write no compiled programs into JAX's cache: the cores' threads compile side by side, where this may crash."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


@pytest.fixture(autouse=True)
def simulated_tpu(request, monkeypatch):
    """Run every test on a simulated TPU, of as many cores as its parameter `cores` says, and demand some kernel.

    The option `--simulator` of pytest sets what the simulator is told besides.
    """
    if not compat.EFFECTS_UNDER_OPTIMIZE_REMAT:
        # By `optimize_remat` a forward computes less where a program reads no outputs. Here it computes them.
        monkeypatch.setattr(remat, "recompute_if_unused", lambda whole, part, *args: whole(*args))
    # Loads and stores with a stride are simulated, where plain interpretation does without them.
    monkeypatch.setattr(matmul, "is_interpreted", lambda: False)
    cores = request.node.callspec.params.get("cores", 1) if hasattr(request.node, "callspec") else 1
    monkeypatch.setattr(compat, "cores", lambda: cores)
    chosen = (text.partition("=") for text in request.config.getoption("--simulator"))
    options = {name: int(value) if value.isdigit() else value for name, _, value in chosen}
    # The padding of a buffer depends on the generation, which JAX reads from the mesh.
    chip = jax.sharding.AbstractDevice(device_kind="TPU7x", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
    padded = jax.sharding.use_abstract_mesh(mesh) if "buffer_bounds" in options else contextlib.nullcontext()
    with simulator.simulated(cores, **options) as grid_steps, padded:
        yield
    assert grid_steps, "no kernel ran on the simulated TPU"
