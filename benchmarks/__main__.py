"""The command line, `python -m benchmarks`: `--help` lists its commands."""

import argparse
import functools
import json
import platform
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from benchmarks import (
    accuracy,
    cases,
    decode_mixer,
    figures,
    gpu,
    gpu_compiler,
    jaxbench,
    peers,
    production,
    scale,
    shipped,
    stale,
    step,
    tpu,
    tpu_peers,
)
from benchmarks.cases import CASES, COMPOSED, WHOLE
from chunkwise import pipeline
from chunkwise.command import info
from chunkwise.command.models import Layer
from chunkwise.command.tables import make_console, make_progress, make_table
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.chips import CHIPS

TEXT = {"case", "pass", "dtype", "implementation", "chip", "sweep", "operator", "form", "failed", "task", "topology"}
TEXT |= {"collectives", "mixture", "program", "traced", "file"}
# The fields that identify a row.
NAMES = ("case", "T", "pass", "dtype", "implementation", "devices", "chip", "sweep", "operator", "form", "point")
NAMES += ("topology", "mixture", "task", "program")
SWEEPS = {"gate": "gate strength", "keys": "repeated keys"}
# The file in which `gpu` saves the rows of all programs.
GPU_RESULT = Path(__file__).parent.parent / "docs/data/gpu-h100.json"


def parse(arguments=None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    saved = argparse.ArgumentParser(add_help=False)
    saved.add_argument("--json", type=Path, help="write the result here")
    saved.add_argument("--keep", action="store_true", help="keep the rows there that this run has no newer ones of")
    sizes = argparse.ArgumentParser(add_help=False)
    sizes.add_argument("--tokens", action="append", type=int, help="instead of the case's own; may be repeated")
    sizes.add_argument("--backward", action="store_true", help="forward and backward instead of forward")
    known = ["xla", "staged", "fused", "pallas", *tpu_peers.PEERS]
    sizes.add_argument("--implementation", action="append", choices=known, help="may be repeated")
    compiled = argparse.ArgumentParser(add_help=False)
    compiled.add_argument("--timeout", type=float, default=600, help="seconds for one compilation")
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    timed.add_argument("--repeats", type=int, default=7)
    one = commands.add_parser("time", parents=[sizes, timed, saved], help="operators on this machine, beside peers")
    add_cases(one, CASES | COMPOSED)
    one.add_argument("--beside", action="append", default=[], choices=peers.NAMES, help="a peer that must be installed")
    one.add_argument("--devices", type=int, default=1, help="split heads over so many; a CPU is made into them")
    one = commands.add_parser("tpu", parents=[sizes, compiled, saved], help="the TPU compiler's estimate; needs no TPU")
    one.add_argument("--chip", action="append", choices=list(CHIPS))
    add_cases(one, CASES | COMPOSED | WHOLE)
    one = commands.add_parser("gpu", parents=[saved], help="launches and temporaries on an H100; needs no GPU")
    one.add_argument("--program", action="append", choices=list(gpu.PROGRAMS), help="may be repeated")
    one = commands.add_parser("scale", parents=[sizes, compiled, saved], help="estimates of operators over devices")
    add_cases(one, {name: case for name, case in CASES.items() if not case.sequences})
    one.add_argument("--topology", action="append", required=True, help="of TPUs, as v5p:2x2x2, with tokens each")
    one.add_argument("--total", action="store_true", help="tokens are those of all devices of a topology together")
    one = commands.add_parser("step", parents=[timed, compiled, saved], help="a serving step of decodes and prefills")
    add_cases(one, {name: x for name, x in CASES.items() if hasattr(pipeline, f"ragged_{x.operator}")})
    one.add_argument("--mixture", action="append", choices=list(step.MIXTURES), help="of sequences; may be repeated")
    one.add_argument("--implementation", action="append", choices=["xla", "staged", "fused"], help="may be repeated")
    one.add_argument("--chip", action="append", choices=list(CHIPS), help="estimate for it instead of timing")
    one = commands.add_parser("decodes", parents=[compiled, saved], help="estimates of the whole mixer of decodes")
    add_cases(one, decode_mixer.MIXERS)
    known = decode_mixer.mixtures("qwen3-next-80b-tp8")
    one.add_argument("--mixture", action="append", choices=known, help="of sequences; may be repeated")
    one.add_argument("--chip", action="append", choices=list(CHIPS))
    one = commands.add_parser("production", parents=[saved], help="errors on inputs that broke others")
    one.add_argument("--case", action="append", choices=list(production.REPORTS), help="may be repeated")
    one = commands.add_parser("jaxbench", parents=[saved], help="our programs for JAXBench: its check, and estimates")
    one.add_argument("checkout", type=Path, help="a folder of AI-Hypercomputer/accelerator-agents")
    one.add_argument("--timeout", type=float, default=900, help="seconds for one compilation")
    one = commands.add_parser("accuracy", parents=[saved], help="errors against gate strength and repeated keys")
    one.add_argument("sweep", choices=list(SWEEPS))
    one.add_argument("--operator", action="append", choices=accuracy.NAMES)
    one.add_argument("--implementation", action="append", choices=["xla", "staged", "fused"])
    one.add_argument("--tokens", type=int, default=256)
    one = commands.add_parser("stale", parents=[saved], help="estimates of docs/data whose programs have changed")
    one.add_argument("file", type=Path, nargs="*", help="all files of docs/data if none is named")
    one = commands.add_parser("pages", help="compare the figures of pages and packages with docs/data")
    one.add_argument("--write", action="store_true", help="write them instead")
    one = commands.add_parser("plot", help="a PNG of the errors that `accuracy` saved")
    one.add_argument("result", type=Path)
    one.add_argument("output", type=Path)
    return parser.parse_args(arguments)


def add_cases(parser: argparse.ArgumentParser, cases: dict[str, Layer]) -> None:
    """Add the option that chooses cases."""
    parser.add_argument("--case", action="append", choices=list(cases), help="a model's layer; may be repeated")


def shapes(options: argparse.Namespace) -> Iterator[tuple]:
    """Yield (name, case, T, label) of the cases asked for."""
    for name in options.case or ["gdn-16"]:
        layer = cases.case(name)
        for T in options.tokens or [layer.T]:
            label = {"case": name, "T": T, "pass": "forward+backward" if options.backward else "forward"}
            yield name, layer, T, label


def jobs(options: argparse.Namespace) -> Iterator[tuple]:
    """Yield (description of a job, label of its rows, function that returns its rows) for a command."""
    default = ["xla"] if jax.default_backend() != "tpu" else ["xla", "staged", "fused"]
    # Functions that return several rows, and one row.
    several, one = functools.partial, lambda run, *args: lambda: [run(*args)]
    if options.command == "time":
        more = jnp.dtype(options.dtype), options.implementation or default, options.backward, options.repeats
        for name, case, T, label in shapes(options):
            run = several(peers.measure, case, T, *more, options.devices, options.beside)
            yield f"{name}, T = {T}", label | {"dtype": options.dtype, "devices": options.devices}, run
    elif options.command == "tpu":
        implementations = options.implementation or ["fused", *tpu_peers.installed()]
        for (name, case, T, label), x, chip in product(shapes(options), implementations, options.chip or CHIPS):
            if tpu.can_run(case, x, options.backward):
                run = one(tpu.measure, case, x, chip, T, options.backward, options.timeout)
                yield f"{name}, {x}, {chip}", label | {"implementation": x, "chip": chip}, run
    elif options.command == "gpu":
        for name in options.program or gpu.PROGRAMS:
            program = gpu.PROGRAMS[name]
            label = {"program": name, "operator": program.layer.operator, "pass": program.kind, "T": program.T}
            yield name, label | {"HV": program.layer.HV}, one(gpu.measure, program)
    elif options.command == "scale":
        more = options.total, options.backward, options.timeout
        for (name, case, T, label), topology, x in product(
            shapes(options), options.topology, options.implementation or ["fused"]
        ):
            run = several(scale.measure, case, x, topology, T, *more)
            yield f"{name}, {topology}", label | {"implementation": x, "topology": topology}, run
    elif options.command == "step":
        more = jnp.dtype(options.dtype), options.implementation or default, options.repeats
        for case, name in product(options.case or ["qwen3-next-80b"], options.mixture or step.MIXTURES):
            about, label = (CASES[case], step.MIXTURES[name]), {"case": case, "mixture": name}
            if not options.chip:
                yield f"{case}, {name}", label | {"dtype": options.dtype}, several(step.measure, *about, *more)
            for chip in options.chip or ():
                run = one(step.estimate, *about, chip, options.timeout)
                yield f"{case}, {name}, {chip}", label | {"chip": chip}, run
    elif options.command == "decodes":
        for case, chip in product(options.case or decode_mixer.MIXERS, options.chip or CHIPS):
            for mixture in options.mixture or decode_mixer.mixtures(case):
                about = decode_mixer.MIXERS[case], step.MIXTURES[mixture], chip, options.timeout
                label = {"case": case, "mixture": mixture, "chip": chip}
                yield f"{case}, {mixture}, {chip}", label, one(decode_mixer.estimate, *about)
    elif options.command == "production":
        for name in options.case or production.REPORTS:
            yield name, {"case": name}, several(production.measure, name)
    elif options.command == "stale":
        for path in options.file or sorted(stale.DATA.glob("*.json")):
            yield path.name, {"file": path.name}, several(stale.measure, path)
    elif options.command == "jaxbench":
        yield "tasks", {}, several(jaxbench.measure, options.checkout, options.timeout)
    else:
        sweep, more = SWEEPS[options.sweep], (options.implementation or ["xla", "fused"], options.tokens)
        some = [x for x in accuracy.NAMES if options.sweep == "gate" or OPERATORS[f"chunk_{x}"].delta]
        for operator in options.operator or some:
            yield operator, {}, several(accuracy.measure, operator, sweep, *more)


def show(rows: list[dict], console: Console) -> None:
    """Print rows as a table, without tables in them, which only a file has room for."""
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, dict)))
    text = [key for key in columns if key in TEXT]
    table = make_table(console, text, [key for key in columns if key not in TEXT])
    for row in rows:
        style = "red" if row.get("correct") is False or row.get("within") is False else None
        style = "red" if row.get("failed") else style
        table.add_row(*(_cell(row.get(key)) for key in (*text, *(k for k in columns if k not in TEXT))), style=style)
    console.print(table)


def _cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def save(options: argparse.Namespace, rows: list[dict]) -> None:
    """Write a result; with `--keep`, add earlier rows of the same command, version and machine that it lacks."""
    about = {"jax": jax.__version__, "backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
    about |= {"command": options.command, "python": platform.python_version(), "libtpu": info.version("libtpu")}
    if options.keep and options.json.exists():
        earlier = json.loads(options.json.read_text())
        others = {key: value for key, value in earlier.items() if key != "rows" and value != about.get(key)}
        if others:
            raise ValueError(f"`--keep` adds to a result of the same kind; got {others} for {about}.")
        name = lambda row: tuple(row.get(key) for key in NAMES)
        new = {name(row) for row in rows}
        rows = [row for row in earlier["rows"] if name(row) not in new] + rows
    options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def main(arguments=None) -> int:
    """Measure, print a table, write JSON; return 1 if a result is wrong or is that of another program."""
    options = parse(arguments)
    if options.command == "pages":
        return figures.main(options.write) | shipped.main(options.write)
    if options.command == "plot":
        accuracy.draw(json.loads(options.result.read_text())["rows"], options.output)
        return 0
    if options.command == "gpu":
        gpu_compiler.setup()
        options.json = options.json or (None if options.program else GPU_RESULT)
    elif getattr(options, "devices", 1) > 1:
        jax.config.update("jax_num_cpu_devices", options.devices)
    console, rows = make_console(200), []
    with make_progress(console) as progress:
        planned = list(jobs(options))
        task = progress.add_task("", total=len(planned))
        for description, label, run in planned:
            progress.update(task, description=description)
            rows += [label | row for row in run()]
            progress.advance(task)
    show(rows, console)
    if options.json:
        save(options, rows)
    return int(any(row.get(key) is False for row in rows for key in ("correct", "within", "current")))


if __name__ == "__main__":
    sys.exit(main())
