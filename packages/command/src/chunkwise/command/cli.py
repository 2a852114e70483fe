"""The command `chunkwise`: `chunkwise demo`, `chunkwise check`, `chunkwise info` and `chunkwise report`."""

import argparse
import errno
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import jax
from rich.console import Console

from chunkwise.command import check, demo, info, models, report, tables

# The number of checks that are compiled at once, or more on a machine with more cores; their lines are printed
# together.
BATCH = 8


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 1 if a check fails."""
    options = make_parser().parse_args(argv)
    return options.run(options, tables.make_console(width=140))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the attribute `run` of its result is the function of the command."""
    parser = argparse.ArgumentParser(prog="chunkwise", description="Chunked linear attention for JAX.")
    version = info.version("chunkwise-pipeline") or "of a source tree"
    about = f"chunkwise {version}, jax {jax.__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=about)
    commands = parser.add_subparsers(required=True, metavar="command")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    about = "run every kernel on this machine against float64; exit code 1 on any failure"
    command = commands.add_parser("check", parents=[common], help=about, description=about)
    command.add_argument(
        "--quick",
        action="store_true",
        help="one batch for every kernel and implementation, forward and backward; "
        "off TPU without most optimisations of the compiler",
    )
    command.add_argument(
        "--interpret", action="store_true", help="off TPU, run the Pallas kernels too, interpreted (slow)"
    )
    command.add_argument("--kernel", default="", metavar="TEXT", help="only kernels with this in their name")
    command.set_defaults(run=run_check)
    about = "print what is installed, what it runs on, and which implementation None selects"
    commands.add_parser("info", parents=[common], help=about, description=about).set_defaults(run=run_info)
    about = "check this machine, time the layers of real models on it, and write both to a JSON file"
    command = commands.add_parser("report", help=about, description=about)
    command.add_argument("--output", type=Path, default=Path("chunkwise-report.json"), help="(chunkwise-report.json)")
    size = command.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", default=None, help="smaller layers: the default on a CPU")
    size.add_argument("--full", action="store_false", dest="small", help="the layers as the models have them")
    command.add_argument("--case", action="append", choices=list(models.MODELS), help="a model; may be repeated")
    command.add_argument("--kernel", default="", metavar="TEXT", help="check only kernels with this in their name")
    command.add_argument("--samples", type=int, default=report.SAMPLES, help=f"of every time ({report.SAMPLES})")
    command.set_defaults(run=run_report)
    about = "show on text what the operators are for, how fast and how exact they are; it takes about a minute"
    command = commands.add_parser("demo", help=about, description=about)
    command.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="the folder of the picture, demo.png (demo_output)"
    )
    command.set_defaults(run=run_demo)
    return parser


def run_check(options: argparse.Namespace, console: Console) -> int:
    """Check the kernels, and print a table or JSON."""
    started = time.perf_counter(), time.process_time()
    # With --json nothing but JSON may be printed.
    rows = check_all(options.kernel, options.interpret, options.quick, Console(quiet=True) if options.json else console)
    failed = [row for row in rows if not row.passed]
    if options.json:
        about = {"jax": jax.__version__, "backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
        print(json.dumps(about | {"failed": len(failed), "rows": [as_json(row) for row in rows]}, indent=1))
        return int(bool(failed))
    console.print(
        f"{len(rows) - len(failed)} of {len(rows)} passed on {jax.devices()[0].device_kind}, jax {jax.__version__}, in "
        f"{tables.took(*started)}, compilation included.\n"
        "Error: RMS against float64 over RMS, of the result nearest to its tolerance. Time: median of 3 runs, without "
        "compilation; of interpreted kernels it means nothing."
    )
    return int(bool(failed))


def check_all(kernel: str, interpret: bool, quick: bool, lines: Console) -> list[check.Row]:
    """Check the kernels with `kernel` in their name, and print a line for each as it is ready; return the rows.

    Off TPU a quick check compiles without most optimisations, which takes half the time.
    """
    checks = [x for x in check.plan(interpret, quick) if kernel in x.kernel.name]
    if not checks:
        raise SystemExit(f"`--kernel` must be part of the name of a kernel; got {kernel!r}.")
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, before or (quick and jax.default_backend() != "tpu"))
    try:
        return list(measure_all(checks, lines))
    finally:
        jax.config.update(name, before)


def measure_all(checks: list[check.Check], lines: Console) -> Iterator[check.Row]:
    """Yield the rows of checks, and print a line for each as it is ready."""
    lines.print(f"{LINE.format(*HEADINGS)}  verdict", style="bold")
    with tables.make_progress(lines) as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        task = progress.add_task("", total=len(checks))
        try:
            for batch in batched(checks, max(BATCH, os.cpu_count() or 1)):
                names = list(dict.fromkeys(f"{x.kernel.name}, {x.implementation}" for x in batch))
                label = names[0] + (f", and {len(names) - 1} more" if names[1:] else "")
                tables.announce(f"compiling {label}", progress, task)
                programs = [program for one in batch for program in one.start(pool)]
                # Compute the exact results while the pool compiles, so that the runs, which are timed, have the
                # processor alone.
                for program in programs:
                    program.expected()
                wait([program.compiling for program in programs])
                tables.announce(f"running {label}", progress, task)
                for program in programs:
                    row = program.measure()
                    lines.print(*as_lines(row), sep="\n")
                    yield row
                progress.advance(task, len(batch))
        finally:  # an interrupt does not wait for programs that are still to be compiled
            pool.shutdown(cancel_futures=True)


def run_report(options: argparse.Namespace, console: Console) -> int:
    """Check the kernels quickly, time the models, and write the results of both."""
    if options.samples < 1:
        raise SystemExit(f"`--samples` must be at least 1; got {options.samples}.")
    check_output(options.output, options.output.parent)
    small = jax.default_backend() == "cpu" if options.small is None else options.small
    started = time.perf_counter(), time.process_time()
    checked = [as_json(row) for row in check_all(options.kernel, interpret=False, quick=True, lines=console)]
    code = report.run(checked, options.case or list(models.MODELS), small, options.samples, options.output, console)
    console.print(f"It took {tables.took(*started)}.")
    return code


def run_demo(options: argparse.Namespace, console: Console) -> int:
    """Run the demo, and draw its picture into a folder."""
    check_output(options.output / "demo.png", options.output)
    return demo.run(options.output, console)


def check_output(file: Path, folder: Path) -> None:
    """Make the folder of a file, and exit where the file cannot be written, before minutes are spent on its content."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SystemExit(f"`--output` must be a path that can be written; got {file}: {error.strerror}.") from None


def batched(checks: list[check.Check], size: int) -> Iterator[list[check.Check]]:
    """Yield the checks, `size` at a time."""
    for start in range(0, len(checks), size):
        yield checks[start : start + size]


def as_json(row: check.Row) -> dict:
    """Return a row for JSON, which has no infinity."""
    values = row._asdict() | {"passed": row.passed}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


# One line of the table; every name fits the widths.
LINE = "{:30} {:8} {:9} {:17} {:12} {:>8} {:>7} {:>10}"
HEADINGS = ("kernel", "how", "type", "case", "result", "error", "limit", "time, ms")


def as_lines(row: check.Row) -> list[str]:
    """Return a row as a line of the table, and a second line if there was an exception."""
    numbers = ("",) * 3 if row.message else (f"{row.error:.1e}", f"{row.tolerance:.0e}", f"{1e3 * row.seconds:.2f}")
    cells = LINE.format(row.kernel, row.implementation, row.dtype, row.case, row.worst, *numbers)
    name = f"{row.kernel}, {row.implementation}, {row.dtype}, {row.case}"
    return tables.as_lines(cells, row.passed, name, row.message)


def run_info(options: argparse.Namespace, console: Console) -> int:
    """Print the installed packages, the devices, and the implementations that None selects."""
    about = info.gather()
    if options.json:
        print(json.dumps(about, indent=1))
        return 0
    libraries = tables.make_table(console, ("distribution", "version"))
    for name, version in (about["packages"] | about["libraries"]).items():
        missing = "source tree" if name in info.importable() else "not installed"
        libraries.add_row(name, version or f"[dim]{missing}[/]")
    kernels = tables.make_table(console, ("function", "implementation=None is"))
    for name, chosen in about["implementation"].items():
        kernels.add_row(name, f"[green]{chosen}[/]")
    console.print(libraries)
    console.print(f"Backend {about['backend']}, {len(about['devices'])} devices: {', '.join(about['devices'])}.")
    console.print(kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
