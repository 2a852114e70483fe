"""The TPU generations that the kernels are built for: the one table of their abilities.

A new generation is one line here. Tests compile every kernel for all of them.
"""

from typing import NamedTuple

from jax.experimental.pallas import tpu as pltpu


class Chip(NamedTuple):
    """The abilities of one TensorCore of a generation.

    Attributes:
      topology: the smallest topology of the generation that libtpu compiles for.
      clock_ghz: peak clock.
      bandwidth_tb_s: bandwidth of its HBM in TB/s.
      vmem_bytes: bytes of its fast memory, VMEM.
      smem_bytes: bytes of its scalar memory, SMEM.
      matrix_unit: rows and columns of its matrix unit.
    """

    topology: str
    clock_ghz: float
    bandwidth_tb_s: float
    vmem_bytes: int
    smem_bytes: int
    matrix_unit: int


# Clocks are inferred from the published peak rates.
CHIPS = {
    "v5e": Chip("v5e:2x2", 1.5, 0.82, 128 * 2**20, 2**20, 128),
    "v5p": Chip("v5p:2x2x1", 1.75, 2.77, 64 * 2**20, 2**20, 128),
    "v6e": Chip("v6e:2x2", 1.75, 1.64, 128 * 2**20, 2**20, 256),
    "tpu7x": Chip("tpu7x:2x2x1", 2.2, 3.69, 64 * 2**20, 2**20, 256),
}

# Bytes of VMEM of generations that JAX describes, but that no released compiler compiles for. There, as on any TPU that
# is not in `CHIPS`, kernels run with the limits and orders that were made for the chips of `CHIPS`.
ANNOUNCED = {"tpu8i": 192 * 2**20, "tpu8t": 128 * 2**20}


def current() -> str | None:
    """Return the name, as in `CHIPS`, of the TPU that a program is traced for; None where JAX knows of no TPU."""
    try:
        version = str(pltpu.get_tpu_info().chip_version)
    except (ValueError, NotImplementedError):
        return None
    return version if version.startswith("v") else f"tpu{version}"
