"""What passed tests show of models and layers, for docs/data/models.json: `pytest --shows FILE`.

A test module has a table `SHOWS`. Under the name of a test it has what the test shows, a list of `Shown`, or a function
of some parameters of the test that returns one `Shown`.
"""

import importlib.metadata
import inspect
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

NAMES = ("layer", "model", "test")


class Shown(NamedTuple):
    """What a case of a test shows: of a layer, and of a model of this type if it is one of a model alone.

    Attributes:
      layer: the name of its function.
      columns: of docs/models.md, as "load save".
      model: the `model_type` of its config.
    """

    layer: str
    columns: str
    model: str | None = None


def layer_of(config) -> str:
    """Return the name of the function of a layer's config."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(config).__name__.removesuffix("Config")).lower()
    return "mamba2_mixer" if name == "mamba2" else name


def of_case(module: Any, test: str, parameters: dict) -> list[Shown]:
    """Return what one case of a test shows by the table of its module."""
    rule = vars(module).get("SHOWS", {}).get(test, [])
    return [rule(*(parameters[name] for name in inspect.signature(rule).parameters))] if callable(rule) else rule


class Collector:
    """Writes a row for every model or layer and every test that passed, with the versions that it ran under.

    Rows of tests that did not run stay, and those of tests that failed go.
    """

    def __init__(self, path: Path):
        self.path, self.found, self.failed = path, {}, set()

    def pytest_runtest_logreport(self, report):
        for layer, columns, model, under in (x for name, x in report.user_properties if name == "shows"):
            case = (layer, model, report.nodeid.split("[")[0])
            if report.failed:
                self.failed.add(case)
            if report.when == "call" and report.passed:
                self.found[case] = dict(zip(NAMES, case, strict=True)) | {"shows": columns, "with": under}

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            return
        earlier = json.loads(self.path.read_text())["rows"] if self.path.exists() else []
        rows = {tuple(row[name] for name in NAMES): row for row in earlier} | self.found
        kept = [rows[case] for case in sorted(rows, key=str) if case not in self.failed]
        self.path.write_text(json.dumps({"command": "pytest --shows", "rows": kept}, indent=1) + "\n")


def versions(torch: bool) -> str:
    """Return the versions that a row names."""
    peer = f", transformers {importlib.metadata.version('transformers')}" if torch else ""
    return f"JAX {jax.__version__}{peer}"
