"""What a program would cost on TPUs that are not here, as the TPU compiler estimates it: not a measurement.

Every estimate runs in a process of its own, because the compiler aborts the process on what it cannot profile; such a
program is compiled again without the profile, and its row then has no cycles.
"""

import collections
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time

from benchmarks.block import Block
from benchmarks.cases import Case
from benchmarks.mixer import Mixer
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.tpu import launches


def ours(case, implementation: str, T: int, backward: bool, cu_seqlens, sharding=None, results: bool = False):
    """Return one of our implementations and its shapes: [B, T, heads * channels], as the projections leave them.

    `sharding` is of v, over devices; None for one device. With `results` the output is wanted beside the gradients.
    """
    import jax
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct

    from chunkwise.shared.testing.compare import with_gradients

    shapes = case.specs(T, jnp.bfloat16)
    # Weights stay as they are.
    flat = {
        n: ShapeDtypeStruct((1, T, x.size // T), x.dtype) if x.shape[:2] == (1, T) else x for n, x in shapes.items()
    }

    def run(flat, cu_seqlens):
        x = {name: y.reshape(shapes[name].shape) for name, y in flat.items()}
        function = case.function(implementation, sharding) if sharding else case.function(implementation)
        return {"o": function(x, cu_seqlens)["o"].reshape(1, T, -1)}

    if not backward:
        return run, (flat, cu_seqlens)
    do = ShapeDtypeStruct((1, T, case.width), jnp.bfloat16)

    def gradients(flat, cu_seqlens, do):
        found = with_gradients(run)(flat, cu_seqlens, {"o": do})
        return {name: x for name, x in found.items() if results or name != "o"}

    return jax.jit(gradients), (flat, cu_seqlens, do)


def _tokamax(case, T):
    """Return tokamax's kernel for the same layer and the shapes it takes: forward, one sequence.

    Its gated delta rule comes fused with the convolution before it; its KDA takes heads first, and windows of several
    heads, which the profile counts as 0 cycles where a head has several chunks. So every chunk of 64 is a head here: as
    many grid steps of the same code, of as many bytes.
    """
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct

    if case.operator == "kda":
        from tokamax._src.ops.kda import pallas_mosaic_tpu as kda

        op = kda.PallasMosaicTpuKimiDeltaAttention()
        chunk = 64
        heads = lambda *tail: (case.HV * -(-T // chunk), 1, chunk, *tail)
        specs = [ShapeDtypeStruct(heads(n), jnp.bfloat16) for n in (case.K, case.K, case.V)]
        specs += [ShapeDtypeStruct(heads(case.K), jnp.float32), ShapeDtypeStruct(heads(), jnp.float32)]
        return lambda *x: op.replace(bypass_device_check=True)(*x, scale=case.K**-0.5), specs
    from tokamax._src.ops.causal_conv1d_gated_delta_rule import arg_specs, pallas_mosaic_tpu

    op = pallas_mosaic_tpu.PallasMosaicTpuCausalConv1dGatedDeltaRule()
    spec = arg_specs.make_gdn_spec(
        project="", name="", lengths=[T], n_kq=case.H, n_v=case.HV, d_k=case.K, d_v=case.V, state_dtype=jnp.float32
    )
    sizes = {name: value for name, value in spec.args.items() if isinstance(value, int)}
    names = [name for name in spec.args if name not in sizes]
    specs = [ShapeDtypeStruct(spec.args[name].shape, spec.args[name].dtype) for name in names]
    return lambda *x: op.replace(bypass_device_check=True)(**dict(zip(names, x, strict=True)), **sizes), specs


def _static(folder: str) -> dict:
    """Return registers spilled in loops, and the share of matrix slots used in the largest loop, of dumped kernels."""
    spills, largest = 0, (0, None)
    for path in glob.glob(f"{folder}/*-final_hlo-static-per-bundle-utilization.txt"):
        with open(path, errors="replace") as text:
            head, _, body = text.read().partition("== UTILIZATION:")
        found = re.search(r"\n([A-Z:, ]+)\n\s*([\d ]+)\n", head)
        rows = [[int(n) for n in line.split()] for line in body.strip().splitlines()]
        if not found or not rows:
            continue
        slots, capacity = [name.strip() for name in found[1].split(",")], [int(n) for n in found[2].split()]
        used = [sum(column) for column in zip(*rows, strict=True)]
        totals = dict(zip(slots, used, strict=False))
        spills += sum(count for name, count in totals.items() if "SPILL" in name and "STORE" in name)
        if len(rows) > largest[0] and "MXU" in totals:
            largest = len(rows), totals["MXU"] / (len(rows) * capacity[slots.index("MXU")])
    return {"spills": spills, "matrix_use": largest[1]}


def dump_flags(folder: str, profile: bool) -> str:
    """Return the flags of libtpu that write a program's final code, and its profile, into a folder."""
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
    os.makedirs(f"{folder}/profile")
    return flags + (f" --xla_jf_dump_static_llo_profile_to={folder}/profile" if profile else "")


def profiled(folder: str) -> collections.Counter:
    """Return the estimated cycles of operations by name, from a dumped profile; nothing where there is none."""
    cycles = collections.Counter()
    for path in glob.glob(f"{folder}/profile/*"):
        with open(path, errors="replace") as text:
            for operation, n in re.findall(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)', text.read()):
                cycles[operation] += int(n)
    return cycles


def operations(text: str) -> int | None:
    """Return the cycles that the compiler expects of a program's operations, without kernels, from its compiled text.

    None if there is a loop, because the text does not say how often it runs.
    """
    entry = text[text.index("\nENTRY ") :].partition("\n}")[0]
    return None if " while(" in entry else sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry)))


def bundles(folder: str, kernels: set[str]) -> int | None:
    """Return what the kernels would take if nothing in them waited: bundles of the loop over the grid times its steps.

    `kernels` are names of operations. None where one of them has no dump or no such loop, or another loop beside or in
    it.
    """
    total, found = 0, set()
    for path in glob.glob(f"{folder}/*-final_bundles.txt"):
        name = re.fullmatch(r"\d+-(.*)-\d+-final_bundles\.txt", os.path.basename(path))
        if not name or name[1] not in kernels:
            continue
        found.add(name[1])
        with open(path, errors="replace") as text:
            lines = [line for line in text if re.match(r"\s*(0x[0-9a-f]+|0)\s[^{]*:", line)]
        inside = [n for n, line in enumerate(lines) if re.match(r"[^{]*:\s*>", line)]
        exits = [x for line in lines for x in re.findall(r": > \{.*?(\d+) /\* loop exit test", line)]
        if len(exits) != 1 or any(re.match(r"[^{]*:\s*>\s*>", line) for line in lines):
            return None
        # Copies of the first and the last step's blocks take a turn of the loop each.
        total += (inside[-1] - inside[0] + 1) * (int(exits[0]) - 2)
    return total if total and found == kernels else None


def estimate(case: Case, implementation: str, chip: str, T: int, backward: bool, profile: bool) -> dict:
    """Compile a case for `chip` and return what the compiler says of it; call in a fresh process only."""
    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:  # dumps take gigabytes
        return _estimate(case, implementation, chip, T, backward, profile, folder)


def _estimate(case, implementation, chip, T, backward, profile, folder) -> dict:
    from chunkwise.shared.testing import tpu

    tpu.setup(dump_flags(folder, profile))
    import jax
    import jax.numpy as jnp

    cu_seqlens = jax.ShapeDtypeStruct((case.sequences + 1,), jnp.int32) if case.sequences else None
    if implementation == "tokamax":
        fn, specs = _tokamax(case, T)
    else:
        fn, specs = ours(case, implementation, T, backward, cu_seqlens)
    start = time.perf_counter()
    program = tpu.compile_for(fn, *specs, chip=chip, auto_layout=True)
    compile_s = time.perf_counter() - start
    kernels, cycles = set(launches(program.as_text())), profiled(folder)
    kernel = sum(n for name, n in cycles.items() if name in kernels)
    around = sum(cycles.values()) - kernel
    clock, bandwidth = CHIPS[chip].clock_ghz, CHIPS[chip].bandwidth_tb_s
    floor = case.cost(T, jnp.bfloat16, backward)[1] / bandwidth / 1e9
    time_ms = (kernel + around) / clock / 1e6
    return {
        "kernel_cycles": kernel or None,
        "around_cycles": around if kernel else None,
        "bundles": bundles(folder, kernels),
        "estimate_ms": max(time_ms, floor) if kernel else None,
        "floor_ms": floor,
        "temporaries_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
        **_static(folder),
        "compile_s": compile_s,
    }


def estimate_block(case: Block, implementation: str, chip: str, T: int, backward: bool) -> dict:
    """Do as `estimate` does for a whole block, which takes too long to profile and to dump: kernels have no cycles."""
    from chunkwise.shared.testing import tpu

    tpu.setup()
    import jax.numpy as jnp

    fn, specs = ours(case, implementation, T, backward, None)
    start = time.perf_counter()
    program = tpu.compile_for(fn, *specs, chip=chip, auto_layout=True)
    text = program.as_text()
    return {
        "operations_cycles": operations(text),
        "kernels": len(launches(text)),
        "temporaries_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
        "floor_ms": case.cost(T, jnp.bfloat16, backward)[1] / CHIPS[chip].bandwidth_tb_s / 1e9,
        "compile_s": time.perf_counter() - start,
    }


def peers() -> list[str]:
    """Return the peers that are installed."""
    return ["tokamax"] if importlib.util.find_spec("tokamax") else []


def can_run(case, implementation: str, backward: bool) -> bool:
    """Return whether an implementation has the case: tokamax has two operators, forward, unpacked."""
    if implementation == "mixed":
        return isinstance(case, Mixer)
    if isinstance(case, Block):
        return implementation != "tokamax"
    return implementation != "tokamax" or (case.table.delta and not backward and not case.sequences)


def measure(case: Case, implementation: str, chip: str, T: int, backward: bool, timeout: float) -> dict:
    """Run `estimate` in a process of its own; a row with `failed` set where the compiler gave none."""
    arguments = f"{case!r}, {implementation!r}, {chip!r}, {T}, {backward}"
    codes = [
        f"from benchmarks.tpu import Block, Case, Mixer, estimate; estimate({arguments}, {x})" for x in (True, False)
    ]
    return first_result(codes, timeout)


def first_result(codes: list[str], timeout: float) -> dict:
    """Return what the first of these programs gives that ends well, each in a process of its own.

    The last statement of a program is an expression that JSON can hold; `failed` is set if none gave a result.
    """
    failure = ""
    for code in codes:
        imports, _, expression = code.rpartition("; ")
        code = f"import json; {imports}; print(json.dumps({expression}))"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            failure = f"no result within {timeout:.0f} s"
            continue
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        problem = re.findall(r"^\w*(?:Error|Exception)\w*: (.*)", done.stderr, re.MULTILINE)
        failure = problem[-1][:160] if problem else f"the compiler ended with {done.returncode}"
    return {"failed": failure}
