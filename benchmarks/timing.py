"""Times on this machine: runs alternate, compilation is timed separately, and a wrong result has no ratio."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from chunkwise.shared.testing.compare import error, with_gradients


@dataclass
class Run:
    """A program to time: `call()` returns a dict of results, for which `jax.block_until_ready` waits."""

    name: str
    call: Callable[[], dict]
    compile_s: float | None = None
    memory: int | None = None


def compiled(name: str, fn: Callable, x: dict, cu_seqlens, cotangents: dict | None = None, devices: int = 1) -> Run:
    """Compile a function of JAX for its arguments, with gradients if there are cotangents, heads split over devices.

    The memory is the memory of arguments, results and temporaries together.
    """
    args: tuple = (x, cu_seqlens)
    if cotangents is not None:
        fn, args = with_gradients(fn), (*args, cotangents)
    if devices > 1:
        fn, args = by_heads(fn, args, devices)
    start = time.perf_counter()
    program = jax.jit(fn).lower(*args).compile()
    seconds, m = time.perf_counter() - start, program.memory_analysis()
    memory = devices * (m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes)
    return Run(name, lambda: program(*args), seconds, memory)


def by_heads(fn: Callable, args: tuple, devices: int) -> tuple[Callable, tuple]:
    """Return fn and its arguments with all heads split over devices: the third axis of every array in a dict."""
    mesh = jax.make_mesh((devices,), ("heads",), (AxisType.Auto,), devices=jax.devices()[:devices])
    heads = PartitionSpec(None, None, "heads")
    specs = tuple(heads if isinstance(x, dict) else PartitionSpec() for x in args)
    args = tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True))
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False), args


def wall_and_cpu(call: Callable) -> tuple[float, float]:
    """Return the elapsed time of one call, and the processor time of all threads of this process in it."""
    start, start_cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - start, time.process_time() - start_cpu


def measure(runs: list[Run], peers: list[Run], verdict: Callable, repeats: int) -> list[dict]:
    """Time runs and peers in turn, and return a row for each.

    Args:
      runs: ours.
      peers: the programs to compare with.
      verdict: from the results of a call to (error, whether they are correct).
      repeats: how many calls of each are timed; a call that is not timed comes before each of them.
    """
    everyone = [*runs, *peers]
    judged = {run.name: verdict(jax.block_until_ready(run.call())) for run in everyone}
    times: dict[str, list[float]] = {run.name: [] for run in everyone}
    processor: dict[str, list[float]] = {run.name: [] for run in everyone}
    for _ in range(repeats):
        for run in everyone:
            # This call is not timed: after a peer has freed gigabytes, the next call must get the pages again.
            jax.block_until_ready(run.call())
            wall, cpu = wall_and_cpu(run.call)
            times[run.name].append(wall)
            processor[run.name].append(cpu)
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    rows = []
    for run in everyone:
        (err, correct), median = judged[run.name], medians[run.name]
        low, high = np.percentile(times[run.name], [25, 75])
        row = {
            "implementation": run.name,
            "error": err,
            "correct": correct,
            "median_ms": 1e3 * median,
            "spread_ms": 1e3 * float(high - low),
            # The least of all calls. Other work on the machine hardly changes processor time, unlike elapsed time.
            "cpu_ms": 1e3 * min(processor[run.name]),
            "memory_mib": None if run.memory is None else run.memory / 2**20,
            "compile_s": run.compile_s,
        }
        for peer in peers if run in runs else ():
            both = correct and judged[peer.name][1]
            row[f"x {peer.name}"] = medians[peer.name] / median if both else None
        rows.append(row)
    return rows


def _as_numpy(x) -> np.ndarray:
    """Return an array of JAX or a tensor of torch in numpy."""
    return x.float().cpu().numpy() if hasattr(x, "cpu") else np.asarray(x, np.float64)


def worst(results: dict, expected: dict, tolerances: dict) -> tuple[float, bool]:
    """Return the error with the largest ratio to its tolerance, and whether all errors are within their tolerances."""
    errors = {name: error(_as_numpy(results[name]), want) for name, want in expected.items()}
    name = max(errors, key=lambda n: errors[n] / tolerances[n])
    return errors[name], all(errors[n] <= tolerances[n] for n in errors)
