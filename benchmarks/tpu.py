"""The cost of programs on TPUs that are not here: estimates of the TPU compiler, and no measurements.

Every estimate runs in a new process, because the compiler reads its flags once, and may abort the process.
"""

import collections
import contextlib
import dataclasses
import glob
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import hlo, regions, tpu_peers
from benchmarks.cases import Composed, Whole
from benchmarks.turns import Turns, turns_of
from chunkwise.command import times
from chunkwise.command.models import Layer
from chunkwise.command.models import program as ours
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import tpu as compiler
from chunkwise.shared.testing.tpu import launches


def dump_flags(folder: str) -> str:
    """Return the flags of libtpu that write a program's final code into a folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"


def profile_flags(folder: str) -> str:
    """Return the flags of libtpu that write the profile of a program, which `profiled` reads, into a folder."""
    os.makedirs(f"{folder}/profile")
    return f"--xla_jf_dump_static_llo_profile_to={folder}/profile"


def profiled(folder: str) -> collections.Counter:
    """Return the estimated cycles of operations by name from a dumped profile; empty if there is no profile."""
    cycles = collections.Counter()
    for path in glob.glob(f"{folder}/profile/*"):
        with open(path, errors="replace") as text:
            for operation, n in re.findall(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)', text.read()):
                cycles[operation] += int(n)
    return cycles


def digest(traced) -> str:
    """Return a digest of a traced program, kernels included: another one is another program for the compiler."""
    return hashlib.sha256(str(traced.jaxpr).encode()).hexdigest()[:12]


# Operations that only move or convert numbers.
_MOVES = {"bitcast", "broadcast", "concatenate", "constant", "convert", "copy", "copy-done", "copy-start"}
_MOVES |= {"dynamic-slice", "dynamic-update-slice", "get-tuple-element", "pad", "parameter", "reshape", "reverse"}
_MOVES |= {"slice", "transpose", "tuple"}


def operations(text: str) -> collections.Counter:
    """Return the cycles that the compiler expects of a program's operations, without kernels, from its compiled text.

    They are by kind: "products", fusions with a product of matrices; "copies", which only move or convert numbers; and
    "others". A loop counts for the iterations that the text tells, or once if it tells none; of a condition the most
    expensive branch counts.
    """
    parts, entry = hlo.computations(text)

    def kind(x: hlo.Operation) -> str:
        called = x.names("calls") if x.kind == "fusion" else ()
        if inside := {kind(y) for name in called for y in parts.get(name, ())}:
            return next(name for name in ("products", "others", "copies") if name in inside)
        return "copies" if x.kind in _MOVES else "products" if x.kind in ("convolution", "dot") else "others"

    def total(part: str) -> collections.Counter:
        cycles = collections.Counter()
        for x in parts[part]:
            if told := re.findall(r'"estimated_cycles":"(\d+)"', x.rest):
                cycles[kind(x)] += sum(map(int, told))
            for body in x.names("body") if x.kind == "while" else ():
                for _ in range(x.turns or 1):
                    cycles += total(body)
            cycles += max(map(total, x.branches), key=lambda x: x.total(), default=collections.Counter())
        return cycles

    return total(entry)


def launch_bytes(text: str) -> dict[str, int]:
    """Return the bytes of the operands and results of kernels' launches, by name, from a program's compiled text.

    An array that lies in the fast memory (a layout with `S(1)`) is not counted.
    """
    found = {x.name: x for part in hlo.computations(text)[0].values() for x in part}

    def size(shape: str) -> int:
        bits = 0
        for kind, sizes, layout in re.findall(r"([a-z]+\d*)\w*\[([\d,]*)\](?:\{([^}]*)\})?", shape):
            width = int(re.sub(r"\D", "", kind) or 8)
            bits += 0 if "S(" in layout else width * math.prod(int(n) for n in sizes.split(",") if n)
        return bits // 8

    read = lambda x: re.findall(r"%([\w.\-]+)", x.rest.partition("), custom_call_target")[0])
    results = lambda x: [x.result, *(found[name].result for name in read(x))]
    return {name: sum(map(size, results(found[name]))) for name in launches(text)}


def counts(folder: str, kernels: set[str], turns: Turns | None = None) -> dict[str, tuple[int, int]]:
    """Return the bundles of each kernel, without waits, and the steps of its grid.

    A kernel is left out if it has no dump, or a loop whose number of iterations is not known.

    Args:
      folder: the folder of the dumps.
      kernels: names of operations.
      turns: the steps that run each region of a kernel; None if every step runs all of them.
    """
    found: dict[str, tuple[int, int]] = {}
    for path in glob.glob(f"{folder}/*-final_bundles.txt"):
        name = re.fullmatch(r"\d+-(.*)-\d+-final_bundles\.txt", os.path.basename(path))
        if not name or name[1] not in kernels:
            continue
        with open(path, errors="replace") as file:
            text = file.read()
        counted = regions.whole_bundles(text)
        if turns is not None and (told := turns(name[1], loop := regions.read_loop(text))):
            counted = regions.kernel_bundles(loop, *told), loop.turns - 2
        if counted is not None:
            found[name[1]] = counted
    return found


def cycles_to_move(moved: int, chip: str) -> int:
    """Return the cycles that the memory of a chip takes for so many bytes."""
    return round(moved / CHIPS[chip].bandwidth_tb_s * CHIPS[chip].clock_ghz / 1e3)


def timed(
    counted: dict[str, tuple[int, int]], moved: dict[str, int], floor: Callable[[int], float]
) -> dict[str, times.Launch] | None:
    """Return the launches of kernels by name, or None if there is no kernel, or one that `counts` left out.

    Args:
      counted: the result of `counts`.
      moved: the result of `launch_bytes`.
      floor: from bytes to the milliseconds that the memory takes for them.
    """
    if not moved or counted.keys() != moved.keys():
        return None
    return {name: times.Launch(*counted[name], floor(n)) for name, n in moved.items()}


@contextlib.contextmanager
def building(case: Layer, implementation: str, T: int, backward: bool) -> Iterator[Callable[[], tuple]]:
    """Give what builds the function of a case, ours or a peer's, and its shapes, to be compiled in this context."""
    if implementation in tpu_peers.PEERS:
        with tpu_peers.on_a_tpu():
            yield lambda: tpu_peers.PEERS[implementation].build(case, T, backward)
    else:
        cu_seqlens = jax.ShapeDtypeStruct((case.sequences + 1,), jnp.int32) if case.sequences else None
        yield lambda: ours(case, implementation, T, backward, cu_seqlens)


def estimate(case: Layer, implementation: str, chip: str, T: int, backward: bool) -> dict:
    """Compile a case for `chip` and return the compiler's figures; call in a fresh process only."""
    floor = case.cost(T, jnp.bfloat16, backward)[1] / CHIPS[chip].bandwidth_tb_s / 1e9
    whole = case.sequences or implementation != "fused"
    layer = case.runs(T) if isinstance(case, Composed) else dataclasses.replace(case, T=T)
    turns = None if whole else turns_of(layer)
    with building(case, implementation, T, backward) as build:
        return figures(build, chip, floor, turns)


def figures(
    build: Callable[[], tuple], chip: str, floor_ms: float, turns: Turns | None = None,
    auto_layout: bool = True,
) -> dict:  # fmt: skip
    """Compile the function and shapes that `build` returns, and return the figures; in a fresh process only.

    `turns` is the argument of `counts`. Without `auto_layout`, inputs and outputs have JAX's default layout.
    """

    def trace():
        fn, specs = build()
        return compiler.trace_for(fn, *specs, chip=chip, auto_layout=auto_layout)

    return read(trace, chip, floor_ms, turns)[1]


def read(trace: Callable[[], Any], chip: str, floor_ms: float = 0.0, turns: Turns | None = None) -> tuple[Any, dict]:
    """Return the program that is compiled from a traced one, and its figures in the compiler's dumps."""
    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:  # dumps take gigabytes
        compiler.setup(dump_flags(folder))
        traced, start = trace(), time.perf_counter()
        program = traced.lower().compile()
        compile_s, text = time.perf_counter() - start, program.as_text()
        moved, kinds = launch_bytes(text), operations(text)
        counted = counts(folder, set(moved), turns)
    floor = lambda n: n / CHIPS[chip].bandwidth_tb_s / 1e9
    found = timed(counted, moved, floor)
    return program, {
        "around_cycles": kinds.total(),
        "operations": kinds,
        "least_kernel_cycles": sum(
            max(counted.get(name, (0,))[0], cycles_to_move(n, chip)) for name, n in moved.items()
        ),
        "bundles": found and sum(x.bundles for x in found.values()),
        "grid_steps": found and sum(x.grid_steps for x in found.values()),
        "launches": found,
        "estimate_ms": found and times.device_ms(CHIPS[chip], found.values(), kinds.total(), floor_ms),
        "floor_ms": floor_ms,
        "temporaries_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
        "compile_s": compile_s,
        "traced": digest(traced),
    }


def can_run(case, implementation: str, backward: bool) -> bool:
    """Return whether an implementation supports the case."""
    if isinstance(case, Whole):
        return implementation in ("fused", "xla")
    if implementation in tpu_peers.PEERS:
        return tpu_peers.PEERS[implementation].has(case, backward)
    return True


def measure(case: Layer, implementation: str, chip: str, T: int, backward: bool, timeout: float) -> dict:
    """Run `estimate` in a new process; if the compiler gave no result, the row has `failed` set."""
    arguments = f"{case!r}, {implementation!r}, {chip!r}, {T}, {backward}"
    return result(f"from benchmarks.tpu import Composed, Layer, Whole, estimate; estimate({arguments})", timeout)


def require_compiler() -> None:
    """End the command without the TPU compiler."""
    if not compiler.has_libtpu():
        raise SystemExit(
            "An estimate needs the TPU compiler: `python -m pip install libtpu` brings it, for Linux on x86."
        )


def result(code: str, timeout: float) -> dict:
    """Run a program in a new process and return the value of its last statement, an expression for JSON.

    `failed` is set if there is none. Without the TPU compiler there could be none, so the whole command ends.
    """
    require_compiler()
    imports, _, expression = code.rpartition("; ")
    code = f"import json; {imports}; print(json.dumps({expression}))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {timeout:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    problem = re.findall(r"^\w*(?:Error|Exception)\w*: (.*)", done.stderr, re.MULTILINE)
    return {"failed": problem[-1][:160] if problem else f"the compiler ended with {done.returncode}"}
