"""What the runs of whole hosts found, for docs/data: `nox -s host-maxtext -- --json docs/data/hosts.json`."""

import json
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--json", type=Path, help="a file whose rows of the same host and run are renewed")


@pytest.fixture(scope="session")
def record(request):
    """Take rows, print each of them, and write each at once to the file of `--json`.

    A row is of a distribution, which has a version, and of a run; it may name its host and its versions otherwise.
    """
    path = request.config.getoption("--json")

    def take(distribution: str, run: str, version: str | None = None, **row):
        about = dict(host=distribution, version=version or metadata.version(distribution), jax=metadata.version("jax"))
        row = about | dict(run=run) | row
        print(f"\n{row}")
        if path is None:
            return
        before = json.loads(path.read_text())["rows"] if path.exists() else []
        rows = {(row["host"], row["run"]): row for row in before}
        rows[row["host"], row["run"]] = row | {"measured": date.today().isoformat()}
        saved = dict(command="nox -s host-NAME -- --json docs/data/hosts.json", rows=list(rows.values()))
        # Whatever ends the session, the file is whole.
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(saved, indent=1) + "\n")
        unfinished.replace(path)

    return take
