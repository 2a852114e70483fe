"""Our programs for tasks of JAXBench, Google's benchmark of TPU kernels: one file for each, for its command `evaluate`.

The inputs, the reference and the check come from a checkout of AI-Hypercomputer/accelerator-agents; none of its code is
here. Our programs are compared with the reference on this machine for a part of the heads, because the reference has a
score for every pair of tokens. Both are also compiled whole for TPUs that are not here.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from benchmarks import tpu, tpu_peers
from benchmarks.jaxbench.retnet_retention import BLOCK
from chunkwise.command.models import Layer

# By task: a module of this folder, and the layer by which the grid steps of its kernel are counted.
TASKS = {
    "15p_RetNet_Retention": ("retnet_retention", Layer("simple_gla", H=1, HV=1, K=256, V=256, T=4096)),
    "16p_Mamba2_SSD": ("mamba2_ssd", Layer("simple_gla", H=1, HV=1, K=64, V=128, T=4096)),
}
CHIPS = ("v5e", "v6e")
# The part of a task's batch of 4, and of its heads, that is compared here.
PART = {"batch": 1, "num_heads": 4}


def load(path: Path):
    """Return a file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(checkout: Path, task: str):
    """Return a task of the checkout."""
    return load(checkout / "JAXBench/benchmark" / task / "baseline.py")


def workload(checkout: Path, task: str, program: str):
    """Return the function of a task: our function for "ours", or else the checkout's function."""
    module = load(Path(__file__).parent / f"{TASKS[task][0]}.py") if program == "ours" else reference(checkout, task)
    return module.workload


def check(checkout: Path, task: str) -> dict:
    """Return the result of JAXBench's check for our program, for a part of the heads, on this machine."""
    sys.path.insert(0, str(checkout))
    from JAXBench.harness.correctness import check_correctness

    baseline = reference(checkout, task)
    baseline.CONFIG.update(PART)
    inputs = baseline.create_inputs()
    theirs, ours = (jax.jit(run)(*inputs) for run in (baseline.workload, workload(checkout, task, "ours")))
    return check_correctness(theirs, ours) | dict(shape=list(theirs.shape))


def estimate(checkout: str, task: str, program: str, chip: str) -> dict:
    """Return the TPU compiler's figures for a whole task; in a fresh process only."""
    case = TASKS[task][1]
    inner = tpu.turns_of(case)

    def turns(launch: str, loop) -> tuple[int, list[int]] | None:
        if "sums_of_scores" not in launch:
            return inner(launch, loop)
        # The first block of a row clears the sums; blocks before the diagonal, and the block on it, add.
        blocks = case.T // BLOCK
        return blocks**2, [blocks, blocks * (blocks - 1) // 2, blocks]

    shapes = list(jax.eval_shape(reference(Path(checkout), task).create_inputs))
    # The bytes of inputs and outputs; the output is as large as the values.
    floor = sum(x.size * x.dtype.itemsize for x in [*shapes, shapes[2]]) / tpu.CHIPS[chip].bandwidth_tb_s / 1e9
    build = lambda: (workload(Path(checkout), task, program), shapes)
    with tpu_peers.on_a_tpu():
        known = turns if program == "ours" else None
        return tpu.figures(build, chip, floor, turns=known, auto_layout=False)


def measure(checkout: Path, timeout: float) -> Iterator[dict]:
    """Yield a row for each check, and for each program and chip."""
    for task in TASKS:
        yield dict(task=task, program="check", **check(checkout, task))
        for chip in CHIPS:
            for program in ("reference", "ours"):
                code = f"from benchmarks.jaxbench import estimate; estimate({str(checkout)!r}, {task!r}, {program!r}, "
                yield dict(task=task, program=program, chip=chip) | tpu.result(f"{code}{chip!r})", timeout)
