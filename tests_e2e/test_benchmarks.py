"""The benchmarks run, and print no ratio for a result that is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[1]


def test_time(tmp_path):
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", "time", "--tokens", "64", "--repeats", "1", "--json", str(rows)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    ours = json.loads(rows.read_text())[0]
    assert ours["correct"]
    assert ours["median_s"] > 0


def test_no_ratio_without_correctness(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    timing = pytest.importorskip("benchmarks.timing")
    case = pytest.importorskip("benchmarks.cases").Case("gated_delta_rule", H=1, HV=1, K=8, V=8)
    exact = timing.reference
    monkeypatch.setattr(timing, "reference", lambda **x: (exact(**x)[0] + 1.0, None))
    rows = timing.measure(case, 16, jnp.float32, ["xla"], backward=False, repeats=1)
    assert not rows[0]["correct"]
    assert all(row["times_peer"] is None for row in rows)
