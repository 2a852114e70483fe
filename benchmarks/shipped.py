"""The estimates that `chunkwise report` shows, copied into its package from docs/data, which is not installed."""

import json
from collections.abc import Iterator
from pathlib import Path

from chunkwise.command.models import MODELS
from chunkwise.command.report import DECODES

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "packages/command/src/chunkwise/command/estimates.json"


def collect() -> list[dict]:
    """Return a row for every model, pass and chip with an estimate in docs/data, of several the last file's."""
    rows = {}
    for path in sorted((ROOT / "docs/data").glob("*.json")):
        saved = json.loads(path.read_text())
        if saved.get("command") in ("tpu", "step"):
            for row in _rows(saved["rows"]):
                name = tuple(row[key] for key in ("case", "pass", "implementation", "chip"))
                rows[name] = row | {"file": f"docs/data/{path.name}", "jax": saved["jax"]}
    return [rows[name] for name in sorted(rows)]


def _rows(rows: list[dict]) -> Iterator[dict]:
    for row in rows:
        if row.get("case") not in MODELS or "chip" not in row or row.get("implementation", "fused") != "fused":
            continue
        decodes = row.get("mixture") == f"decode-{DECODES}"
        if "mixture" in row and not decodes:
            continue
        label = {"case": row["case"], "pass": "decode" if decodes else row["pass"], "implementation": "fused"}
        label |= {"chip": row["chip"], "tokens": DECODES if decodes else row["T"]}
        # Some results have no grid steps, and so no time by the formula.
        if row.get("estimate_ms") and (row.get("grid_steps") or row.get("decode_steps")):
            yield label | {"estimate_ms": row["estimate_ms"]}


def text() -> str:
    """Return the file that is shipped."""
    return "[\n" + ",\n".join(json.dumps(row) for row in collect()) + "\n]\n"


def main(write: bool) -> int:
    """Return 1 if the file differs from docs/data; with `write`, write the file instead."""
    if SHIPPED.exists() and SHIPPED.read_text() == text():
        return 0
    print(f"{SHIPPED.relative_to(ROOT)}: {'written' if write else 'differs from docs/data'}")
    if write:
        SHIPPED.write_text(text())
    return int(not write)
