"""The command `chunkwise report`, on one small model."""

import dataclasses
import json
import re

import numpy as np
import pytest

from chunkwise.command import cli, models, report
from chunkwise.shared.chips import CHIPS

ARGUMENTS = ["--kernel", "chunk_local_cumsum", "--samples", "2"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A model of nothing in place of the others, and a step that decodes two sequences."""
    monkeypatch.setattr(report, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(report, "SMALL_DECODES", 2)
    monkeypatch.setattr(report, "JUDGED", 12)
    monkeypatch.setattr(models, "MODELS", {"tiny": models.Layer("simple_gla", H=1, HV=2, K=8, V=8, T=24)})
    monkeypatch.setattr(report, "smaller", lambda case: dataclasses.replace(case, T=20))


def written(tmp_path, *arguments) -> tuple[int, dict]:
    path = tmp_path / "folder" / "report.json"
    code = cli.main(["report", "--output", str(path), *ARGUMENTS, *arguments])
    return code, json.loads(path.read_text())


def test_report(tmp_path, capsys):
    code, found = written(tmp_path)
    assert code == 0
    assert found["schema"] == report.SCHEMA == report.read_schema()["properties"]["schema"]["const"]
    count = found["device"]["count"]
    about = {"backend": "cpu", "kind": "cpu", "count": count, "chip": None, "step_us": None, "clock_ghz": None}
    assert found["device"] == about
    assert found["host"].keys() == {"system", "architecture", "cores"}
    assert found.keys() == {"schema", "created", "device", "host", "versions", "small", "check", "times"}
    assert found["small"] is True
    assert {row["kernel"] for row in found["check"]} == {"chunk_local_cumsum"}
    assert [(row["pass"], row["tokens"]) for row in found["times"]] == [
        ("forward", 20), ("forward+backward", 20), ("decode", 2)
    ]  # fmt: skip
    for row in found["times"]:
        assert row["passed"], row
        assert row["least_ms"] <= row["median_ms"]
        assert row["quartiles_ms"][0] <= row["median_ms"] <= row["quartiles_ms"][1]
        assert row["compile_s"] > 0
        # A CPU is no chip.
        assert row["estimate_ms"] is None
        assert row["floor_ms"] is None
        assert row["device_ms"] is None
    printed = capsys.readouterr()
    assert printed.out.isascii()
    assert "1 checks, 3 times, 0 failed" in printed.out
    assert re.search(r"It took \d+ seconds, \d+ seconds of processor time", printed.out)
    assert "timing tiny, forward, xla ..." in printed.err


def test_plan(monkeypatch):
    """Plain JAX alone off a TPU, and beside the kernels on one; smaller layers only where they are wanted."""
    names = [(job.way, job.implementation, job.label()["tokens"]) for job in report.plan(["tiny"], small=False)]
    assert names == [("forward", "xla", 24), ("forward+backward", "xla", 24), ("decode", "xla", report.DECODES)]
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    names = [(job.way, job.implementation) for job in report.plan(["tiny"], small=True)]
    assert names == [(way, how) for way in report.PASSES for how in ("fused", "xla")]


@pytest.mark.parametrize(("options", "small"), [([], True), (["--small"], True), (["--full"], False)])
def test_sizes(options, small, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "plan", lambda names, small: [])
    code, found = written(tmp_path, *options)
    assert code == 0
    assert found["small"] is small


def test_what_fails_is_a_row(tmp_path, monkeypatch, capsys):
    """A wrong result keeps its time, and what was raised its text; the exit code tells both."""
    right = models.Layer.expected
    monkeypatch.setattr(models.Layer, "expected", lambda self, *x: {n: 2 * y for n, y in right(self, *x).items()})

    def refuse(*args):
        raise NotImplementedError("no [such] step")

    monkeypatch.setattr(models, "serving_step", refuse)
    code, found = written(tmp_path)
    assert code == 1
    forward, both, decode = found["times"]
    assert not forward["passed"]
    assert forward["error"] > forward["tolerance"]
    assert forward["median_ms"] > 0
    assert not both["passed"]
    assert (decode["passed"], decode["median_ms"]) == (False, None)
    assert decode["message"] == "NotImplementedError: no [such] step"
    printed = capsys.readouterr().out
    assert printed.count("FAIL") == 2
    assert "tiny, decode: NotImplementedError: no [such] step" in printed


def test_samples_of_nothing(tmp_path):
    with pytest.raises(SystemExit, match="`--samples` must be at least 1; got 0"):
        written(tmp_path, "--samples", "0")


def test_estimates_of_a_chip(monkeypatch):
    """They are of the models' own layers, and scaled to their tokens; where there is none the cell is empty."""
    estimates = [
        {"case": "tiny", "pass": "forward", "implementation": "fused", "chip": "v6e", "tokens": 12}
        | {"estimate_ms": 0.5, "file": "docs/data/some.json"}
    ]
    monkeypatch.setattr(report, "_estimates", lambda: estimates)
    job = report.Job("tiny", models.MODELS["tiny"], "forward", "fused", 2)
    row = report._outlook(job, "v6e")
    assert (row["estimate_ms"], row["estimate_tokens"]) == (1.0, 12)
    assert row["floor_ms"] == job.bytes_moved() / CHIPS["v6e"].bandwidth_tb_s / 1e9 > 0
    for other in (
        dataclasses.replace(job, implementation="xla"),
        dataclasses.replace(job, way="decode"),
        dataclasses.replace(job, case=report.smaller(job.case)),
    ):
        assert report._outlook(other, "v6e")["estimate_ms"] is None
    assert report._outlook(job, "v5e")["estimate_ms"] is None
    assert report._outlook(job, None) == dict.fromkeys(row)


def test_shipped_estimates():
    for row in report._estimates():
        assert row["chip"] in CHIPS
        assert row["pass"] in report.PASSES
        assert row["estimate_ms"] > 0


def test_smaller_layers_keep_their_ratio(monkeypatch):
    monkeypatch.undo()
    for case in models.MODELS.values():
        small = report.smaller(case)
        assert small.HV * case.H == case.HV * small.H
        assert (small.K, small.V, small.T) == (case.K, case.V, report.SMALL_TOKENS)
        assert small.H >= 1


def test_bytes_of_a_decode():
    job = report.Job("tiny", models.Layer("kda", H=1, HV=2, K=8, V=8), "decode", "xla", 3)
    state, token = 2 * 8 * 8 * 4, 2 * 2 * (8 + 16) + 4 * (16 + 2)
    assert job.bytes_moved() == 3 * (2 * state + token)
    assert np.array_equal(job.mixture.step()["cu_seqlens"], [0, 1, 2, 3])
