"""The command line of the benchmarks."""

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
from rich.progress import track

from benchmarks import timing, tpu
from benchmarks.cases import CASES
from chunkwise.pipeline.tables import make_console, make_table


def _shown(value) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _print(rows: list[dict]) -> None:
    console, columns = make_console(150), list(dict.fromkeys(key for row in rows for key in row))
    table = make_table(console, left=columns)
    for row in rows:
        table.add_row(*(_shown(row.get(key)) for key in columns))
    console.print(table)


def main() -> None:
    """Parse the arguments, measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=["time", "tpu"], help="time on this machine, or the TPU compiler's estimate")
    parser.add_argument("--case", action="append", choices=list(CASES), help="a model's shape; may be repeated")
    parser.add_argument("--implementation", action="append", choices=["xla", "staged", "fused"])
    parser.add_argument("--tokens", type=int, help="tokens instead of the case's own")
    parser.add_argument("--backward", action="store_true", help="forward and backward instead of forward")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="time only; tpu: bfloat16")
    parser.add_argument("--chip", action="append", choices=list(tpu.RATES), help="tpu only")
    parser.add_argument("--repeats", type=int, default=5, help="time only")
    parser.add_argument("--timeout", type=float, default=600, help="tpu only: seconds for one estimate")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows = []
    for name in options.case or ["gdn-16"]:
        case, T = CASES[name], options.tokens or CASES[name].T
        label = {"case": name, "T": T, "pass": "forward+backward" if options.backward else "forward"}
        if options.what == "time":
            implementations = options.implementation or ["xla"]
            results = timing.measure(
                case, T, jnp.dtype(options.dtype), implementations, options.backward, options.repeats
            )
            rows += [label | {"dtype": options.dtype} | row for row in results]
            continue
        jobs = [(i, c) for i in options.implementation or ["fused"] for c in options.chip or ["v6e"]]
        for implementation, chip in track(jobs, description=name, transient=True):
            row = tpu.measure(name, implementation, chip, T, options.backward, options.timeout)
            rows.append(label | {"implementation": implementation, "chip": chip} | row)
    _print(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
