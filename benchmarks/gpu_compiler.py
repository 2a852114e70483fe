"""Compile for an NVIDIA GPU on a machine that has none, and count the launches of a program.

It needs Python 3.12, the same version of jax, jax-cuda13-plugin and jax-cuda13-pjrt, and nvidia-cuda-nvcc, which has an
assembler. Call `setup()` before the first computation of the process.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import hlo

# The data about a GPU that XLA would ask the GPU for.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 1 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# Operations of a compiled program that launch nothing; they include the ends of operations that start and end apart.
_NO_LAUNCH = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id", "iota",
    "opt-barrier",
}  # fmt: skip


def setup() -> None:
    """Select the CPU as backend, and put the assembler of nvidia-cuda-nvcc on the path."""
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [str(path.parent) for folder in folders for path in Path(folder).glob("*/bin/ptxas")]
    os.environ["PATH"] = os.pathsep.join([*found, os.environ["PATH"]])


def compile_for(fn, *specs, device: str = H100, donate_argnums: tuple[int, ...] = ()):
    """Return the executable of `fn` for one GPU; nothing is allocated.

    Inside of `platforms.gpu_forms` operators take their forms for GPUs.

    Args:
      fn: a function of arrays.
      *specs: a `jax.ShapeDtypeStruct`, None, or a tree of them for every argument.
      device: the data that XLA needs about the GPU.
      donate_argnums: arguments whose memory the outputs may take, as in `jax.jit`.
    """
    topology = topologies.get_topology_desc("", "cuda", target_config=device, topology="1x1x1")
    placement = SingleDeviceSharding(topology.devices[0])
    placed = jax.jit(fn, in_shardings=placement, out_shardings=placement, donate_argnums=donate_argnums)
    return placed.trace(*specs).lower().compile()


def count_launches(text: str, branches: Sequence[int] = ()) -> int:
    """Return how many operations a compiled program launches when it runs, from its text.

    Args:
      text: the text of the program; a loop counts once for every iteration, and the text must say how many there are.
      branches: the branches that the program's conditions take, in order.
    """
    computations, entry = hlo.computations(text)
    taken = iter(branches)

    def of(name: str) -> int:
        return sum(map(launches, computations[name]))

    def launches(operation: hlo.Operation) -> int:
        if operation.kind == "while":
            if operation.turns is None:
                raise ValueError("The text must say how often its loops turn; one does not.")
            return operation.turns * of(*operation.names("body"))
        if operation.kind == "call":
            return of(*operation.names("to_apply"))
        if operation.kind == "conditional":
            return of(operation.branches[next(taken)])
        return int(operation.kind not in _NO_LAUNCH and not operation.kind.endswith("-done"))

    return of(entry)
