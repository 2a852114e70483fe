"""The command `chunkwise`, on a few kernels."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from chunkwise.pipeline import check, cli

CUMSUM, SIMPLE_GLA = check.STAGES[0], check.OPERATORS[-1]


def raising(*args, **kwargs):
    raise NotImplementedError("no [such] kernel")


@pytest.fixture
def kernels(monkeypatch):
    """Set the kernels to check."""

    def choose(stages=(), operators=()):
        monkeypatch.setattr(check, "STAGES", stages)
        monkeypatch.setattr(check, "OPERATORS", operators)

    return choose


def test_check_prints_ascii_text_in_a_pipe(kernels, capsys):
    kernels(stages=(CUMSUM,), operators=(SIMPLE_GLA,))
    assert cli.main(["check"]) == 0
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert "\x1b" not in printed
    assert "8 of 8 passed on cpu" in printed
    lines = [line for line in printed.splitlines() if SIMPLE_GLA.name in line]
    assert [("packed" in line, "bfloat16" in line) for line in lines] == [(x, y) for y in (0, 1) for x in (0, 1)]
    assert all("gradients" in line and "pass" in line for line in lines)


def test_check_interprets_kernels(capsys):
    assert cli.main(["check", "--interpret", "--kernel", CUMSUM.name, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["implementation"], row["dtype"], row["case"]) for row in rows} == {
        (i, d, c) for i in ("xla", "pallas") for d in check.DTYPES for c in ("fixed", "packed")
    }
    assert all(row["passed"] and 0 <= row["error"] <= row["tolerance"] for row in rows)


def test_check_covers_packs_without_states():
    """As in training, where chunks go across sequences; what padding holds does not matter."""
    planned = [x for x in check.plan(interpret=True) if x.keywords]
    chunked = [x for x in check.OPERATORS if x.chunked]
    assert len(planned) == len(chunked) * 3 * len(check.DTYPES)
    one = next(x for x in planned if x.args[:2] == (chunked[0], "xla"))
    with ThreadPoolExecutor(1) as pool:
        (row,) = (program.measure() for program in one(pool))
    assert row.passed, row
    assert row.case == "stream, gradients"


def test_the_reference_needs_the_cpu(monkeypatch):
    def refuse(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr("jax.local_devices", refuse)
    with pytest.raises(SystemExit, match="add it to JAX_PLATFORMS, as in tpu,cpu"):
        cli.main(["check"])


def test_check_fails_where_a_kernel_is_wrong_or_raises(kernels, capsys):
    wrong = dataclasses.replace(CUMSUM, name="wrong", run=lambda *x, **y: 1.01 * CUMSUM.run(*x, **y))
    kernels(stages=(wrong, dataclasses.replace(CUMSUM, name="raising", run=raising)))
    assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAIL") == printed.count("RAISED") == 4
    assert "raising, xla, float32, fixed: NotImplementedError: no [such] kernel" in printed
    assert "0 of 8 passed" in printed
    assert cli.main(["check", "--json", "--kernel", "raising"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == 4
    assert report["rows"][0]["error"] is None


def test_results_that_are_not_numbers_fail(kernels, capsys):
    kernels(stages=(dataclasses.replace(CUMSUM, run=lambda *x, **y: float("nan") * CUMSUM.run(*x, **y)),))
    assert cli.main(["check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 4


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize("interpret", [False, True])
def test_plan(backend, interpret, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    planned = [one.args for one in check.plan(interpret)]
    kernels = backend == "tpu" or interpret
    assert {kernel.name for kernel, *_ in planned} == {x.name for x in (*check.STAGES, *check.OPERATORS)}
    assert {how for _, how, *_ in planned} == ({"xla", "pallas", "staged", "fused"} if kernels else {"xla"})
    sizes = {case.T for _, how, _, case in planned if how != "xla"}
    assert sizes == ({200} if backend == "tpu" else {20} if interpret else set())


def test_unknown_kernel():
    with pytest.raises(SystemExit, match="`--kernel` must be part of the name of a kernel; got 'conv'"):
        cli.main(["check", "--kernel", "conv"])


def test_info(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert "chunkwise-solve-tril" in printed
    assert "Backend cpu" in printed
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "cpu"
    assert set(report["implementation"].values()) == {"xla"}
    assert "chunkwise-pipeline" in report["packages"]


def test_info_on_a_tpu(monkeypatch, capsys):
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    cli.main(["info", "--json"])
    chosen = json.loads(capsys.readouterr().out)["implementation"]
    assert chosen["chunk_kda"] == chosen["recurrent_kda"] == "fused"
    assert chosen["recurrent_gla"] == "xla"
    assert chosen["solve_tril"] == "pallas"
