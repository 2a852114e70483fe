"""`chunkwise report`: times and errors of the layers of real models on this machine, in one JSON file.

`report.schema.json` beside this module is the schema of the file. docs/hardware.md explains it.
"""

import dataclasses
import datetime
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from chunkwise.command import device, info, models, tables, times
from chunkwise.shared import chips
from chunkwise.shared.call import checks
from chunkwise.shared.testing import compare, oracle

# The version of the file's schema. A reader of another version must not guess.
SCHEMA = 2
DTYPE = "bfloat16"
PASSES = ("forward", "forward+backward", "decode")
# How many sequences a decode step has, on an accelerator and on other machines, where layers are smaller, too.
DECODES, SMALL_DECODES = 64, 8
SMALL_TOKENS, SMALL_HEADS = 256, 8
# Gradients are judged over this number of tokens, because the float64 oracle keeps a state for each token.
JUDGED = 1024
# A sample is some calls in a row, which take SAMPLE_SECONDS, but at most CALLS, because waiting results take memory.
SAMPLE_SECONDS, CALLS = 0.02, 20
SAMPLES = 10


def read_schema() -> dict:
    """Return the JSON schema of the file."""
    return json.loads((resources.files("chunkwise.command") / "report.schema.json").read_text())


def smaller(case: models.Layer) -> models.Layer:
    """Return a case with fewer heads, with the same heads in a group, and with fewer tokens."""
    part = min(SMALL_HEADS, case.H)
    return dataclasses.replace(case, H=case.H // part, HV=case.HV // part, T=SMALL_TOKENS)


@dataclasses.dataclass(frozen=True)
class Job:
    """A measurement to do: a pass of a case in one implementation.

    Attributes:
      name: the name of the model in `models.MODELS`.
      case: its layer, perhaps a smaller one.
      way: one of PASSES.
      implementation: an implementation of the operator.
      decodes: how many sequences a decode step has.
    """

    name: str
    case: models.Layer
    way: str
    implementation: str
    decodes: int

    @property
    def mixture(self) -> models.Mixture:
        """The serving step of a decode."""
        return models.Mixture(self.decodes)

    def label(self) -> dict:
        """Return the fields that identify the row."""
        tokens = self.decodes if self.way == "decode" else self.case.T
        sizes = {name: getattr(self.case, name) for name in ("operator", "H", "HV", "K", "V")}
        row = {"case": self.name} | sizes | {"tokens": tokens, "pass": self.way, "dtype": DTYPE}
        return row | {"implementation": self.implementation}

    def prepare(self) -> tuple[Callable, tuple, Callable[[dict], dict[str, tuple[float, float]]]]:
        """Return the function, its arguments, and a function from results to errors and tolerances by name."""
        return self._decode() if self.way == "decode" else self._layer(self.way == "forward+backward")

    def _layer(self, backward: bool):
        case, T = self.case, self.case.T
        fn, _ = models.program(case, self.implementation, T, backward, None)
        x = case.inputs(T, jnp.dtype(DTYPE))
        do = np.random.default_rng(1).standard_normal((1, T, case.HV, case.V))
        # Tokens after the judged ones have no cotangent, so the gradients come from the judged ones alone.
        do[:, JUDGED:] = 0.0
        do = jnp.asarray(do, DTYPE)
        flat = {name: y.reshape(1, T, -1) for name, y in x.items()}
        args = (flat, None, do.reshape(1, T, -1)) if backward else (flat, None)
        shapes = {"o": do.shape} | {f"d{name}": y.shape for name, y in x.items()}

        def judge(results):
            tokens = slice(JUDGED if backward else None)
            results = case.part({name: y.reshape(shapes[name]) for name, y in results.items()}, tokens)
            some = case.part(x, tokens), case.part({"do": do}, tokens)["do"] if backward else None
            expected = {name: y for name, y in case.expected(*some).items() if name in results}
            return _errors(results, expected, lambda name: case.tolerance(name, DTYPE))

        return fn, args, judge

    def _decode(self):
        case, mixture = self.case, self.mixture
        x, group = case.inputs(mixture.T, jnp.dtype(DTYPE)), case.HV // case.H
        rng = np.random.default_rng(2)
        pool = rng.standard_normal((mixture.N, case.HV, case.K, case.V)).astype(np.float32)
        step = {name: jnp.asarray(value) for name, value in mixture.step().items()}
        run = models.serving_step(case, self.implementation)
        fn = lambda x, pool, step: dict(zip(("o", "states"), run(x, pool, step), strict=True))

        def judge(results):
            last = slice(mixture.T - 1, mixture.T)
            o, state = oracle.reference(
                **case.part(x, last), initial_state=pool[-1:, -group:].astype(np.float64),
                **({"use_qk_l2norm_in_kernel": True} if case.table.delta else {}),
            )  # fmt: skip
            some = case.part({"o": results["o"]}, last) | {"states": results["states"][-1:, -group:]}
            return _errors(some, {"o": o, "states": state}, lambda name: case.tolerance("o", DTYPE))

        return fn, (x, jnp.asarray(pool), step), judge

    def bytes_moved(self) -> int:
        """Return the bytes that the pass must move: every tensor and every state once in each direction."""
        if self.way == "decode":
            return models.moved_bytes(self.case, self.mixture)[0]
        return self.case.cost(self.case.T, jnp.dtype(DTYPE), self.way != "forward")[1]


def _errors(results: dict, expected: dict, tolerance: Callable[[str], float]) -> dict[str, tuple[float, float]]:
    return {name: (compare.error(results[name], y), tolerance(name)) for name, y in expected.items()}


def plan(names: list[str], small: bool) -> Iterator[Job]:
    """Yield the measurements: every pass of every model in the implementation that None selects, and in plain JAX."""
    for name in names:
        case = smaller(models.MODELS[name]) if small else models.MODELS[name]
        chosen = checks.choose_implementation(None, case.table.implementations, on_tpu=case.table.implementations[-1])
        for way in PASSES:
            for implementation in dict.fromkeys((chosen, "xla")):
                yield Job(name, case, way, implementation, SMALL_DECODES if small else DECODES)


# The figures of a row.
_FIGURES = ("compile_s", "calls", "samples", "median_ms", "least_ms", "quartiles_ms", "device_ms", "result", "error")
_FIGURES += ("tolerance",)


def measure(job: Job, samples: int, chip: str | None) -> dict:
    """Return the row of a job; after an exception it has no figures, and `message` describes the exception."""
    row = job.label() | dict.fromkeys(_FIGURES) | {"passed": False} | _outlook(job, chip) | {"message": ""}
    try:
        fn, args, judge = job.prepare()
        start = time.perf_counter()
        program = jax.jit(fn, donate_argnums=(1,) if job.way == "decode" else ()).lower(*args).compile()
        row["compile_s"] = time.perf_counter() - start
        results = jax.block_until_ready(program(*args))
        errors = judge(results)
        worst = max(errors, key=lambda name: errors[name][0] / errors[name][1])
        error, tolerance = errors[worst]
        row |= {"result": worst, "error": error if math.isfinite(error) else None, "tolerance": tolerance}
        row["passed"] = error <= tolerance
        if job.way == "decode":
            # The pool is donated, so every step gets the pool of the step before.
            state = {"pool": results["states"]}

            def call():
                found = program(args[0], state["pool"], args[2])
                state["pool"] = found["states"]
                return found

        else:
            call = lambda: program(*args)
        row |= _time(call, samples)
        row["device_ms"] = device.device_ms(call) if chip else None
    except Exception as problem:  # after any exception the other rows are still to be measured
        row |= {"passed": False, "message": tables.first_line(problem)}
    return row


def _time(call: Callable, samples: int) -> dict:
    """Return how long a call takes: a few samples, each of several calls in a row."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, min(CALLS, round(SAMPLE_SECONDS / (time.perf_counter() - start))))
    taken = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls - 1):
            call()
        jax.block_until_ready(call())
        taken.append(1e3 * (time.perf_counter() - start) / calls)
    quartiles = [float(x) for x in np.percentile(taken, [25, 75])]
    figures = {"median_ms": statistics.median(taken), "least_ms": min(taken), "quartiles_ms": quartiles}
    return {"calls": calls, "samples": samples} | figures


def _outlook(job: Job, chip: str | None) -> dict:
    """Return the times to expect on a chip: the time to move the bytes, and an estimate if the package has one.

    An estimate for fewer tokens is scaled. `times.device_ms` made it from the compiler's figures.
    """
    row = dict.fromkeys(("floor_ms", "estimate_ms", "estimate_tokens", "estimate_file"))
    if chip not in chips.CHIPS:
        return row
    row["floor_ms"] = job.bytes_moved() / chips.CHIPS[chip].bandwidth_tb_s / 1e9
    label = job.label()
    names = ("case", "pass", "implementation")
    for found in _estimates() if job.case == models.MODELS[job.name] else ():
        if found["chip"] == chip and all(found[name] == label[name] for name in names):
            row["estimate_ms"] = found["estimate_ms"] * label["tokens"] / found["tokens"]
            row |= {f"estimate_{name}": found[name] for name in ("tokens", "file")}
    return row


def _estimates() -> list[dict]:
    """Return the estimates of the package, which `python -m benchmarks pages --write` takes from docs/data."""
    return json.loads((resources.files("chunkwise.command") / "estimates.json").read_text())


def gather(small: bool) -> dict:
    """Return the head of a report; of the machine it has only the facts that matter for the figures."""
    installed = info.gather()
    libraries = {name: installed["libraries"][name] for name in ("python", *info.LIBRARIES)}
    names = {"chunkwise": installed["packages"]["chunkwise-pipeline"]} | libraries
    return {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": {
            "backend": jax.default_backend(),
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
            "chip": chips.current() if jax.default_backend() == "tpu" else None,
            "step_us": None,
            "clock_ghz": None,
        },
        "host": {"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count()},
        "versions": names,
        "small": small,
    }


def run(checked: list[dict], names: list[str], small: bool, samples: int, output: Path, console: Console) -> int:
    """Time the models; return 1 if a check failed or a result is wrong.

    After every measurement the file is written and a line is printed, so that nothing is lost if the run ends early.

    Args:
      checked: rows of the check, as JSON.
      names: names of models.
      small: whether to take smaller layers.
      samples: how many samples to take for every time.
      output: the file.
      console: prints the lines and the summary.
    """
    about = gather(small)
    about["device"] |= device.measure()
    planned, rows = list(plan(names, small)), []
    # Without the cache, because a program from another run's cache would not show the time of compiling.
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)

    def write():
        found = about | {"check": checked, "times": rows}
        output.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")

    write()
    console.print(f"\n{len(planned)} times, each with its compilation:")
    console.print(f"{LINE.format(*HEADINGS)}  verdict", style="bold")
    try:
        with tables.make_progress(console) as progress:
            task = progress.add_task("", total=len(planned))
            for job in planned:
                tables.announce(f"timing {job.name}, {job.way}, {job.implementation}", progress, task)
                rows.append(measure(job, samples, about["device"]["chip"]))
                console.print(*as_lines(rows[-1]), sep="\n")
                write()
                progress.advance(task)
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    failed = [row for row in (*checked, *rows) if not row["passed"]]
    size = "smaller layers than the models have" if small else "the layers of the models"
    console.print(
        f"{about['device']['kind']}, jax {about['versions']['jax']}, {size}, {DTYPE}. Time: the median of {samples} "
        "samples, without compilation, with its quartiles. Device: by the profiler, without what the host does. "
        f"Estimate: the time on the device that the TPU compiler's estimate makes likely, give or take "
        f"{100 * times.SPREAD:.0f} %.\n"
        f"{len(checked)} checks, {len(rows)} times, {len(failed)} failed. The report is {output}."
    )
    return int(bool(failed))


# One line of the table; every name fits the widths.
LINE = "{:18} {:16} {:7} {:>6} {:>9} {:>18} {:>10} {:>12} {:>10} {:>8}"
HEADINGS = (
    "model", "pass", "how", "tokens", "time, ms", "quartiles, ms", "device, ms", "estimate, ms", "compile, s", "error",
)  # fmt: skip


def as_lines(row: dict) -> list[str]:
    """Return a row as a line of the table, and a second line if there was an exception."""
    low, high = row["quartiles_ms"] or (None, None)
    cells = LINE.format(
        row["case"], row["pass"], row["implementation"], f"{row['tokens']:,}", _number(row["median_ms"]),
        f"{_number(low)} to {_number(high)}", _number(row["device_ms"]), _number(row["estimate_ms"]),
        _number(row["compile_s"]), _number(row["error"], ".1e"),
    )  # fmt: skip
    return tables.as_lines(cells, row["passed"], f"{row['case']}, {row['pass']}", row["message"])


def _number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else f"{value:{form}}"
