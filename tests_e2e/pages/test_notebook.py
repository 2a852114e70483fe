"""The notebook runs from its first to its last cell on a CPU, at small sizes and without the installation."""

import json
import os
import re
import sys
from pathlib import Path

import jsonschema
import nbclient
import nbformat
import pytest

from chunkwise.command import report

# The quick test of a report computes what the notebook shows.
THOROUGH = dict(test_it_runs=True)


NOTEBOOK = Path(__file__).parents[2] / "notebooks/tpu.ipynb"


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def test_it_names_no_address_and_holds_no_output():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in tags(cell))
    assert 'REPOSITORY = ""\n' in parameters.source
    assert all(not cell.get("outputs") for cell in notebook.cells)


# Of the libraries that run a kernel of Jupyter.
@pytest.mark.filterwarnings("ignore")
def test_it_runs(tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    installs = [cell for cell in notebook.cells if "install" in tags(cell)]
    assert len(installs) == 1
    notebook.cells = [cell for cell in notebook.cells if cell not in installs]
    (parameters,) = (cell for cell in notebook.cells if "parameters" in tags(cell))
    some = "--kernel chunk_local_cumsum"
    parameters.source = f"CHECK, REPORT = {some!r}, {f'{some} --samples 2 --case gla'!r}"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # The command of this environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    printed = re.sub(r"\x1b\[[\d;?]*\w", "", printed)  # colours
    assert "1 of 1 passed on cpu" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    found = json.loads((tmp_path / "report.json").read_text())
    jsonschema.validate(found, report.read_schema())
    assert f"{len(found['times'])} times, 0 failed" in printed
    assert {row["case"] for row in found["times"]} == {"gla"}
