"""The command of the benchmarks, on shapes of nothing."""

import json

import pytest

from benchmarks import __main__ as command
from benchmarks.cases import CASES
from chunkwise.command.models import Layer


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The benchmarks have small cases here, packed or not."""
    monkeypatch.setitem(CASES, "small", Layer("gated_delta_rule", H=1, HV=2, K=8, V=8, T=64))
    monkeypatch.setitem(CASES, "ragged", Layer("simple_gla", H=1, HV=1, K=8, V=8, T=48, sequences=3, ragged=True))
    monkeypatch.setitem(CASES, "packed", Layer("kda", H=1, HV=1, K=8, V=8, T=48, sequences=3))
    return command


@pytest.fixture
def run(benchmarks, tmp_path):
    """Run a command; return its exit code and its rows."""

    def run(*arguments):
        path = tmp_path / "result.json"
        code = benchmarks.main([*arguments, "--json", str(path)])
        return code, json.loads(path.read_text())["rows"]

    return run
