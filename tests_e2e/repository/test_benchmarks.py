"""The benchmarks run, on shapes of nothing, and print no ratio for a result that is wrong."""

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accuracy, step
from benchmarks.cases import CASES, COMPOSED, Composed
from benchmarks.step import MIXTURES, Mixture, moved_bytes
from chunkwise.command.models import Layer
from chunkwise.shared.testing import tpu as compiler
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.oracle import reference

THOROUGH = dict(
    test_time=lambda arguments: "--backward" in arguments,
    # One operator with each of the mixtures.
    test_time_of_a_step=lambda case, mixture: STEP_CASES.index(case) != STEPS.index(mixture),
)


@pytest.mark.parametrize("arguments", ["small --backward", "packed --dtype bfloat16"])
def test_time(run, arguments, capsys):
    code, rows = run("time", "--case", *arguments.split(), "--repeats", "1")
    assert code == 0
    assert capsys.readouterr().out.isascii()
    assert [row["implementation"] for row in rows if row["implementation"] != "transformers"] == ["xla", "scan"]
    ours = rows[0]
    assert all(row["correct"] for row in rows)
    assert ours["memory_mib"] > 0
    assert ours["compile_s"] > 0
    assert ours["x scan"] == pytest.approx(rows[-1]["median_ms"] / ours["median_ms"])


def test_time_of_sequences_of_different_lengths(run):
    """The last of them is judged, wherever it begins; the scan, which needs equal lengths, is left out."""
    code, rows = run("time", "--case", "ragged", "--repeats", "1")
    assert code == 0
    assert [(row["implementation"], row["correct"]) for row in rows] == [("xla", True)]


def test_time_of_an_operator_by_composition(run, monkeypatch):
    """Its own definition judges it; a package that has to run beside it must be installed."""
    monkeypatch.setitem(COMPOSED, "tiny", Composed("gated_delta_product", H=1, HV=2, K=8, V=8))
    monkeypatch.setitem(sys.modules, "jla.ops.chunked", None)
    arguments = "time", "--case", "tiny", "--tokens", "32", "--backward", "--repeats", "1"
    code, rows = run(*arguments)
    assert code == 0
    assert [(row["implementation"], row["correct"]) for row in rows] == [("xla", True)]
    with pytest.raises(ValueError, match=r"`--beside` must name packages .*; got jax-linear-attention for gated_delta"):
        run(*arguments, "--beside", "jax-linear-attention")


def test_cost_is_the_packages():
    # 2 T HV (2 C K + 2 C V + 3 K V) flops, and the backward twice as many.
    gdn = Layer("gated_delta_rule", H=1, HV=2, K=8, V=16)
    forward = 2 * 128 * 2 * (2 * 64 * 8 + 2 * 64 * 16 + 3 * 8 * 16)
    assert gdn.cost(128, jnp.bfloat16, backward=False)[0] == forward
    assert gdn.cost(128, jnp.bfloat16, backward=True)[0] == 3 * forward
    for case in CASES.values():
        for one, both in zip(*(case.cost(256, jnp.bfloat16, backward) for backward in (False, True)), strict=True):
            assert 0 < one < both


def test_no_ratio_without_correctness(run, monkeypatch):
    exact = Layer.expected
    monkeypatch.setattr(Layer, "expected", lambda *x: {name: y + 1.0 for name, y in exact(*x).items()})
    code, rows = run("time", "--case", "packed", "--repeats", "1")
    assert code == 1
    assert not any(row["correct"] for row in rows)
    assert rows[0]["x scan"] is None


def test_the_error_that_is_nearest_to_its_limit_is_shown():
    from benchmarks.timing import worst

    ones = np.ones(2)
    results, expected = {"o": 1.1 * ones, "dq": 1.2 * ones}, {"o": ones, "dq": ones}
    assert worst(results, expected, {"o": 1.0, "dq": 1.0}) == (pytest.approx(0.2), True)
    assert worst(results, expected, {"o": 0.05, "dq": 1.0}) == (pytest.approx(0.1), False)


def test_accuracy(run, monkeypatch):
    monkeypatch.setattr(accuracy, "STRENGTHS", (0.1, 5.0))
    code, rows = run("accuracy", "gate", "--operator", "simple_gla", "--implementation", "xla", "--tokens", "64")
    assert code == 0
    errors = {(row["form"], row["dtype"], row["point"]): row["error"] for row in rows}
    assert errors["factored form", "float32", 0.1] < 1e-5
    assert errors["factored form", "float32", 5.0] is None
    assert errors["xla", "float32", 5.0] < 1e-5


def test_forms_of_the_inverse():
    x = accuracy.inputs("gated_delta_rule", 0.01, 0.0, 1.0, jnp.float32, 64, 32)
    forms = accuracy.forms("gated_delta_rule", "repeated keys", ["xla"])
    ours, *others = ((name, jax.jit(fn)(x)) for name, fn in forms.items())
    expected = reference(**x)[0]
    assert_close(*ours, expected, TOLERANCE["float32"])
    # Keys that hardly resemble one another: powers of their products vanish, and every form is right.
    for other in others:
        assert_close(*other, expected, TOLERANCE["float32"])


def test_rows_of_an_earlier_result_are_kept(run, tmp_path, monkeypatch):
    """Those that the run has no newer ones of, if the result is of the same command."""
    errors = itertools.count(1.0)
    measure = lambda operator, *_: [{"operator": operator, "error": next(errors)}]
    monkeypatch.setattr("benchmarks.accuracy.measure", measure)
    found = lambda *arguments: [tuple(row.values()) for row in run("accuracy", "gate", "--operator", *arguments)[1]]
    assert found("simple_gla") == [("simple_gla", 1.0)]
    assert found("kda", "--keep") == [("simple_gla", 1.0), ("kda", 2.0)]
    assert found("simple_gla", "--keep") == [("kda", 2.0), ("simple_gla", 3.0)]
    (tmp_path / "result.json").write_text(json.dumps({"command": "step", "rows": []}))
    with pytest.raises(ValueError, match="`--keep` adds to a result of the same kind; got"):
        found("kda", "--keep")


def test_plot(benchmarks, tmp_path):
    row = {"sweep": "gate strength", "operator": "kda", "form": "xla", "dtype": "float32", "point": 1.0, "error": 1e-7}
    saved, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    saved.write_text(json.dumps({"rows": [row, row | {"form": "factored form", "error": None}]}))
    assert benchmarks.main(["plot", str(saved), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


STEPS = [dict(decodes=3), dict(decodes=2, W=3, pool="bfloat16"), dict(prefills=(5, 70))]
STEP_CASES = "small", "packed", "ragged"


@pytest.mark.parametrize("mixture", STEPS, ids=["0", "1", "2"])
@pytest.mark.parametrize("case", STEP_CASES)
def test_time_of_a_step(run, case, mixture, monkeypatch):
    monkeypatch.setitem(MIXTURES, "some", Mixture(**mixture))
    code, rows = run("step", "--case", case, "--mixture", "some", "--repeats", "1")
    assert code == 0
    assert [(row["implementation"], row["correct"]) for row in rows] == [("xla", True)]
    assert rows[0]["tokens_s"] == pytest.approx(1e3 * rows[0]["tokens"] / rows[0]["median_ms"])


def test_a_wrong_state_of_a_step_is_found(run, monkeypatch):
    exact = step.reference
    monkeypatch.setattr(step, "reference", lambda *x, **y: (exact(*x, **y)[0], exact(*x, **y)[1] + 0.1))
    monkeypatch.setitem(step.MIXTURES, "some", step.Mixture(1, prefills=(9,)))
    code, rows = run("step", "--case", "small", "--mixture", "some", "--repeats", "1")
    assert code == 1
    assert not rows[0]["correct"]


def test_bytes_of_a_step():
    case, state = Layer("gated_delta_rule", H=1, HV=2, K=8, V=16), 2 * 8 * 16
    token = 2 * (2 * 8 + 2 * 2 * 16) + 4 * 2 * 2
    decodes, prefills = moved_bytes(case, Mixture(3, W=2, prefills=(5, 6), pool="float16"))
    assert decodes == 3 * (2 * token + 3 * 2 * state)
    assert prefills == 11 * token + 2 * 2 * 2 * state


@pytest.mark.parametrize("command", ["tpu --case small --chip v6e", "stale"])
def test_no_estimate_without_the_compiler(benchmarks, monkeypatch, capsys, command):
    monkeypatch.setattr(compiler, "has_libtpu", lambda: False)
    with pytest.raises(SystemExit, match="An estimate needs the TPU compiler: `python -m pip install libtpu`"):
        benchmarks.main(command.split())
