"""What a program would cost on TPUs that are not here, as the TPU compiler estimates it: not a measurement.

Every estimate runs in a process of its own, because the compiler aborts the process on what it cannot profile.
"""

import glob
import json
import re
import subprocess
import sys
import tempfile
import time

# Peak clock in GHz and memory bandwidth in TB/s of one core.
RATES = {"v5e": (1.5, 0.82), "v5p": (1.75, 2.77), "v6e": (1.75, 1.64), "tpu7x": (2.2, 3.69)}


def estimate(name: str, implementation: str, chip: str, T: int, backward: bool) -> dict:
    """Compile a case for `chip` and return what the compiler says of it; call in a fresh process only."""
    from chunkwise.shared import tpu

    profile = tempfile.mkdtemp(prefix="chunkwise_profile_")
    tpu.setup(f"--xla_jf_dump_static_llo_profile_to={profile}")
    import jax
    import jax.numpy as jnp

    from benchmarks.cases import CASES

    case = CASES[name]
    specs, cu_seqlens = case.specs(T, jnp.bfloat16), None
    if case.sequences:
        cu_seqlens = jax.ShapeDtypeStruct((case.sequences + 1,), jnp.int32)

    def forward(x, cu_seqlens):
        return case.run(implementation, x, cu_seqlens)

    gradient = jax.grad(lambda x, cu_seqlens: forward(x, cu_seqlens).astype(jnp.float32).sum())
    start = time.perf_counter()
    program = tpu.compile_for(gradient if backward else forward, specs, cu_seqlens, chip=chip, auto_layout=True)
    compile_seconds = time.perf_counter() - start
    cycles = 0
    for path in glob.glob(profile + "/*"):
        with open(path, errors="replace") as text:
            cycles += sum(int(n) for n in re.findall(r"estimated_cycles: (\d+)", text.read()))
    memory, (clock, bandwidth) = program.memory_analysis(), RATES[chip]
    moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "cycles": cycles,
        "estimate_ms": cycles / clock / 1e6,
        "floor_ms": moved / bandwidth / 1e9,
        "temporaries_mib": memory.temp_size_in_bytes / 2**20,
        "compile_s": compile_seconds,
    }


def measure(name: str, implementation: str, chip: str, T: int, backward: bool, timeout: float) -> dict:
    """Run `estimate` in a process of its own; a row with `failed` set where the compiler gave none."""
    code = f"import json; from benchmarks.tpu import estimate; print(json.dumps(estimate({name!r}, {implementation!r}, \
{chip!r}, {T}, {backward})))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {timeout:.0f} s"}
    if done.returncode:
        return {"failed": f"the compiler ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])
