"""The time of the first call of an operator on this machine: JAX traces and compiles it, or reads it from a cache.

Every measurement is a new process, in which JAX has compiled nothing yet.
"""

import json
import subprocess
import sys
import tempfile
import time

# The sizes of the program in the README.
SIZES = {"B": 1, "T": 300, "H": 2, "HV": 4, "K": 64, "V": 64}


def seconds(operator: str, backward: bool, cache: str | None) -> dict[str, float]:
    """Return the seconds of the first call, elapsed and in all threads, and of the second call; in a new process only.

    `cache` is the folder of JAX's compilation cache; None for no cache.
    """
    import jax

    from chunkwise.pipeline.operators import OPERATORS, operator_inputs

    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        # By default JAX stores only programs that take a second or more to compile.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    entry = OPERATORS[operator]
    x = operator_inputs(entry, *SIZES.values())
    x.pop("g_gamma", None)
    program = lambda x: entry.function(**x, implementation="xla")[0]
    if backward:
        forward = program
        program = jax.grad(lambda x: (forward(x) ** 2).sum())
    program = jax.jit(program)
    times = []
    for _ in range(2):
        start, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(program(x))
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    (first, first_cpu), (second, _) = times
    return {"first": first, "first_cpu": first_cpu, "second": second}


def measure(operator: str, backward: bool, repeats: int) -> dict:
    """Return the least seconds of the first call without a cache, and with one that an earlier process has filled."""
    with tempfile.TemporaryDirectory(prefix="chunkwise_cache_") as cache:
        run = lambda folder: _in_new_process(operator, backward, folder)
        run(cache)
        cold, cached = ([run(folder) for _ in range(repeats)] for folder in (None, cache))
    least = lambda found, key: min(times[key] for times in found)
    return {
        "cold_s": least(cold, "first"),
        "cold_cpu_s": least(cold, "first_cpu"),
        "cached_s": least(cached, "first"),
        "cached_cpu_s": least(cached, "first_cpu"),
        "second_ms": 1000 * least(cold, "second"),
    }


def _in_new_process(operator: str, backward: bool, cache: str | None) -> dict[str, float]:
    arguments = f"{operator!r}, {backward}, {cache!r}"
    code = f"import json; from benchmarks import first_call; print(json.dumps(first_call.seconds({arguments})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])
