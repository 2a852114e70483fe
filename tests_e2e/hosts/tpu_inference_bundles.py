"""The bundles of tpu-inference's kernel of decodes, by the TPU compiler, which needs no TPU.

`python -m tests_e2e.hosts.tpu_inference_bundles OPTIONS RESULT` writes them to RESULT; OPTIONS is JSON, as `Options`
has it. The compiler reads its flags once in a process, so it is one of its own.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import regions, tpu
from chunkwise.shared.testing import tpu as compiler
from tests_e2e.hosts.host import load

WIDTH, K, SLOTS, SEQUENCES, TILE = 4, 128, 257, 64, 4
PARTS = ("config", "memory_ref", "metadata", "vmem_ldst", "compute_conv1d", "compute_gdn", "wrapper")


class Options(NamedTuple):
    """What is compiled: 64 decodes over a pool of bfloat16, at the heads of a device.

    Attributes:
      H, HV: key heads and value heads.
      chip: such as "v6e".
    """

    H: int
    HV: int
    chip: str


def load_kernel():
    """Return the module of the kernel, without what the rest of its package imports."""
    *_, module = [load("tpu-inference", f"tpu_inference.kernels.gdn.v3.{part}") for part in PARTS]
    return module


def main(o: Options, result: Path) -> None:
    """Compile 64 decodes, and count the bundles of a sequence."""
    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:
        compiler.setup(tpu.dump_flags(folder))
        spec = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
        integers = lambda n: spec(n, dtype=jnp.int32)
        channels, N = 2 * o.H * K + o.HV * K, SEQUENCES
        tokens = [spec(N, n, dtype=jnp.bfloat16) for n in (channels, o.HV, o.HV)]
        pools = [spec(SLOTS, WIDTH - 1, channels), spec(SLOTS, o.HV, K, K, dtype=jnp.bfloat16)]
        weights = [spec(channels, 1, WIDTH, dtype=jnp.bfloat16), spec(o.HV), spec(o.HV)]
        function = load_kernel().fused_conv1d_gdn
        sizes = dict(n_kq=o.H, n_v=o.HV, d_k=K, d_v=K, kernel_size=WIDTH, decode_tile_size=TILE)
        run = lambda x, pools, w, steps: function(*x, *pools, w[0], None, *w[1:], *steps, **sizes)
        steps = [integers(N + 1), integers(N), integers(3), integers(N), integers(N)]
        text = compiler.compile_for(run, tokens, pools, weights, steps, chip=o.chip).as_text()
        (launch,) = [name for name in compiler.launches(text) if "batched" in name]
        bundles = regions.turn_bundles(regions.kernel_text(folder, launch))
    result.write_text(json.dumps(dict(bundles=bundles, sequences=TILE, jax=jax.__version__)))


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])), Path(sys.argv[2]))
