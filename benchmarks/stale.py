"""Rows of docs/data whose programs have changed since the TPU compiler estimated them.

A row keeps a digest of its program as JAX traces it, with the bodies of its kernels, so that comments and the places of
lines do not change it. To trace a program takes seconds; nothing is compiled.
"""

import json
from pathlib import Path

import jax

from benchmarks import cases, decode_mixer, scale, step, tpu
from benchmarks.tpu_peers import PEERS
from chunkwise.shared.testing import tpu as compiler

DATA = Path(__file__).parents[1] / "docs/data"


def trace(command: str, row: dict):
    """Return the program of a row, traced for its chip as it was for the estimate."""
    if command == "decodes":
        return decode_mixer.trace_mixer(
            decode_mixer.MIXERS[row["case"]], step.MIXTURES[row["mixture"]], row["chip"], known=True
        )
    compiler.setup()
    case, backward = cases.case(row["case"]), row.get("pass") == "forward+backward"
    if command == "step":
        return step.trace_step(case, step.MIXTURES[row["mixture"]], row["chip"])
    if command == "scale":
        where = row["topology"], row["tokens_each"], backward, row["devices"] > 1
        return scale.trace(case, row["implementation"], *where)
    with tpu.building(case, row["implementation"], row["T"], backward) as build:
        fn, specs = build()
        return compiler.trace_for(fn, *specs, chip=row["chip"], auto_layout=True)


def measure(path: Path) -> list[dict]:
    """Return the rows of a file whose programs are others today, and how many rows have no digest to tell.

    JAX writes programs in its own way in every version, so a file of another version tells nothing.
    """
    saved = json.loads(path.read_text())
    if saved["command"] not in ("tpu", "scale", "step", "decodes"):
        return []
    tpu.require_compiler()
    rows = [row for row in saved["rows"] if row.get("implementation") not in PEERS]
    known = [row for row in rows if "traced" in row] if saved["jax"] == jax.__version__ else []
    stale = [row for row in known if tpu.digest(trace(saved["command"], row)) != row["traced"]]
    names = ("case", "pass", "mixture", "topology", "devices", "chip", "implementation")
    found = [{name: row[name] for name in names if name in row} | {"current": False} for row in stale]
    return [*found, {"rows": len(rows), "without_digest": len(rows) - len(known)}]
