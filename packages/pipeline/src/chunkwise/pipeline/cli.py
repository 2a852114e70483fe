"""The command `chunkwise`: `chunkwise check` and `chunkwise info`."""

import argparse
import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
from rich.console import Console
from rich.markup import escape

from chunkwise.pipeline import check, info
from chunkwise.pipeline.tables import make_console, make_progress, make_table


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="chunkwise", description="Chunked linear attention for JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--json", action="store_true", help="print JSON")
    about = "run every kernel on this machine against float64; exit code 1 on any failure"
    command = commands.add_parser("check", parents=[both], help=about, description=about)
    command.add_argument("--interpret", action="store_true", help="also interpret the Pallas kernels off TPU (slow)")
    command.add_argument("--kernel", default="", metavar="TEXT", help="only kernels with this in their name")
    command.set_defaults(run=run_check)
    about = "print what is installed, what it runs on, and which implementation None selects"
    commands.add_parser("info", parents=[both], help=about, description=about).set_defaults(run=run_info)
    options = parser.parse_args(argv)
    return options.run(options, make_console(width=140))


def run_check(options: argparse.Namespace, console: Console) -> int:
    """Check the kernels and print a table of them."""
    started = time.perf_counter()
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError:
        raise SystemExit("The float64 reference runs on the CPU: add it to JAX_PLATFORMS, as in tpu,cpu.") from None
    checks = [x for x in check.plan(options.interpret) if options.kernel in x.args[0].name]
    if not checks:
        raise SystemExit(f"`--kernel` must be part of the name of a kernel; got {options.kernel!r}.")
    # The progress bar would end up in the JSON.
    with (
        make_progress(Console(quiet=True) if options.json else console) as progress,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        task = progress.add_task("compile", total=None)
        try:
            programs = [program for one in checks for program in one(pool)]
            progress.update(task, total=len(programs))
            # None is timed before the last is compiled: they would share the processor.
            for _ in as_completed([program.compiling for program in programs]):
                progress.advance(task)
        finally:  # an interrupt does not wait for what is still to be compiled
            pool.shutdown(cancel_futures=True)
        progress.update(task, description="run")
        rows = [program.measure() for program in programs]
    failed = [row for row in rows if not row.passed]
    if options.json:
        about = {"jax": jax.__version__, "backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
        print(json.dumps(about | {"failed": len(failed), "rows": [as_json(row) for row in rows]}, indent=1))
        return int(bool(failed))
    console.print(as_table(rows, console))
    for row in failed:
        if row.message:
            console.print(
                escape(f"{row.kernel}, {row.implementation}, {row.dtype}, {row.case}: {row.message}"), style="red"
            )
    console.print(
        f"{len(rows) - len(failed)} of {len(rows)} passed on {jax.devices()[0].device_kind}, jax {jax.__version__}, in "
        f"{time.perf_counter() - started:.0f} seconds, compilation included.\n"
        "Error: RMS against float64 over RMS, of the result nearest to its tolerance. Time: median of 3 runs, without "
        "compilation; of interpreted kernels it means nothing."
    )
    return int(bool(failed))


def as_json(row: check.Row) -> dict:
    """Return a row for JSON, which has no infinity."""
    values = vars(row) | {"passed": row.passed}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def as_table(rows: list[check.Row], console: Console):
    """Return the rows as a table."""
    left = ("kernel", "implementation", "type", "case", "result")
    table = make_table(console, left, ("error", "tolerance", "time, ms", "verdict"))
    for row in rows:
        verdict = "[green]pass[/]" if row.passed else f"[bold red]{'RAISED' if row.message else 'FAIL'}[/]"
        numbers = ("",) * 3 if row.message else (f"{row.error:.1e}", f"{row.tolerance:.0e}", f"{1e3 * row.seconds:.2f}")
        table.add_row(row.kernel, row.implementation, row.dtype, row.case, row.worst, *numbers, verdict)
    return table


def run_info(options: argparse.Namespace, console: Console) -> int:
    """Print what is installed, what it runs on, and what it selects."""
    about = info.gather()
    if options.json:
        print(json.dumps(about, indent=1))
        return 0
    libraries = make_table(console, ("distribution", "version"))
    for name, version in (about["packages"] | about["libraries"]).items():
        missing = "source tree" if name in about["packages"] else "not installed"
        libraries.add_row(name, version or f"[dim]{missing}[/]")
    kernels = make_table(console, ("function", "implementation=None is"))
    for name, chosen in about["implementation"].items():
        kernels.add_row(name, f"[green]{chosen}[/]")
    console.print(libraries)
    console.print(f"Backend {about['backend']}, {len(about['devices'])} devices: {', '.join(about['devices'])}.")
    console.print(kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
