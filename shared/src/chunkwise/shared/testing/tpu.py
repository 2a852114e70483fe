"""Compile for real TPUs on a machine that has none; libtpu, which has the compiler, needs no TPU for that.

Install `chunkwise-shared[tpu]`. Call `setup()` before the first computation of the process.
"""

import importlib.util
import os
import re

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh

from chunkwise.shared import chips


def setup(libtpu_flags: str = "") -> None:
    """Select the CPU as backend and set the environment that libtpu reads once, when jax first loads it."""
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        LIBTPU_INIT_ARGS=libtpu_flags,
    )


def compile_for(fn, *specs, chip: str = "v6e", auto_layout: bool = False, donate_argnums: tuple[int, ...] = ()):
    """Return the executable of `fn` for one device of a TPU generation; nothing is allocated.

    Args:
      fn: a function of arrays.
      *specs: a `jax.ShapeDtypeStruct`, None, or a tree of them for every argument.
      chip: a name in `chunkwise.shared.chips`.
      auto_layout: let the compiler choose the layout of inputs and outputs, as it does inside a larger program.
      donate_argnums: arguments whose memory the outputs may take, as in `jax.jit`.
    """
    return trace_for(fn, *specs, chip=chip, auto_layout=auto_layout, donate_argnums=donate_argnums).lower().compile()


def trace_for(fn, *specs, chip: str = "v6e", auto_layout: bool = False, donate_argnums: tuple[int, ...] = ()):
    """Return what `compile_for` compiles, traced for one device of a TPU generation; it has the same arguments."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=chips.CHIPS[chip].topology).devices[0]
    placement = jax.sharding.SingleDeviceSharding(device)
    if auto_layout:
        placement = Format(Layout.AUTO, placement)
    # A kernel may ask for the kind of device while it is traced.
    mesh = jax.sharding.Mesh(np.array([device]), ("x",)).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        placed = jax.jit(fn, in_shardings=placement, out_shardings=placement, donate_argnums=donate_argnums)
        return placed.trace(*specs)


def text_for_tpu(fn, *args) -> str:
    """Return the text of a program that is lowered for a TPU, which names the kernels that it launches."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def topology_mesh(topology: str, axis: str, count: int | None = None) -> Mesh:
    """Return a mesh of the first `count` devices of a topology, such as "v5p:2x2x1", or of all, along one axis."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices[:count]), (axis,), axis_types=(AxisType.Auto,))


def launches(text: str) -> list[str]:
    """Return the names of the kernels' launches in a compiled program's text, in order."""
    launch = r'^\s*(?:ROOT )?%?(\S+) = .* custom-call\(.*custom_call_target="tpu_custom_call"'
    return re.findall(launch, text, re.MULTILINE)


def has_libtpu() -> bool:
    """Return whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None
