"""The command `chunkwise`, on a few kernels."""

import dataclasses
import functools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from chunkwise.command import check, cli
from chunkwise.pipeline.operators import COMPOSED, OPERATORS
from chunkwise.pipeline.stages import PARTS, STAGES

EVERY = (*OPERATORS.values(), *COMPOSED.values())
CUMSUM, SIMPLE_GLA = STAGES[0], OPERATORS["recurrent_simple_gla"]


def raising(*args, **kwargs):
    raise NotImplementedError("no [such] kernel")


def renamed(name, function=CUMSUM.function):
    """Return a stage like CUMSUM, of this name and with this function."""
    other = functools.update_wrapper(lambda *x, **y: function(*x, **y), CUMSUM.function)
    other.__name__ = name
    return dataclasses.replace(CUMSUM, function=other)


def times(factor):
    """Return a stage like CUMSUM, whose results are wrong by a factor."""
    return renamed("wrong", lambda *x, **y: factor * CUMSUM.function(*x, **y))


@pytest.fixture
def kernels(monkeypatch):
    """Set the kernels to check."""

    def choose(stages=(), operators=()):
        monkeypatch.setattr(check.stages, "STAGES", stages)
        monkeypatch.setattr(check.stages, "PARTS", ())
        monkeypatch.setattr(check.operators, "OPERATORS", {operator.name: operator for operator in operators})
        monkeypatch.setattr(check.operators, "COMPOSED", {})

    return choose


def test_check_interprets_kernels(capsys):
    assert cli.main(["check", "--interpret", "--kernel", CUMSUM.name, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["implementation"], row["dtype"], row["case"]) for row in rows} == {
        (i, d, c) for i in ("xla", "pallas") for d in check.DTYPES for c in ("fixed", "packed")
    }
    assert all(row["passed"] and 0 <= row["error"] <= row["tolerance"] for row in rows)


def test_check_covers_packs_without_states():
    """As in training, where chunks go across sequences; what padding holds does not matter."""
    planned = [x for x in check.plan(interpret=True) if not x.states]
    assert len(planned) == sum(len(x.implementations) for x in EVERY if x.chunked) * len(check.DTYPES)
    one = next(x for x in planned if (x.kernel, x.implementation) == (OPERATORS["chunk_gla"], "xla"))
    with ThreadPoolExecutor(1) as pool:
        (row,) = (program.measure() for program in one.start(pool))
    assert row.passed, row
    assert row.case == "stream, gradients"


def test_check_compares_where_there_is_a_derivative():
    """Of the sizes on a TPU, one divisor of mLSTM lies where its derivative jumps: bfloat16 takes the other one."""
    case, lengths = check.ON_TPU
    case = dataclasses.replace(case, dtype="bfloat16", lengths=lengths, gate="spikes")
    with ThreadPoolExecutor(1) as pool:
        (row,) = check.Check(COMPOSED["chunk_mlstm"], "fused", "stream", case, states=False).start(pool)
        row = row.measure()
    assert row.passed, row


def test_check_says_what_it_does_while_it_does_it(kernels, capsys, monkeypatch):
    """Every line is printed before the next check is compiled, what it does on the error stream."""
    kernels(stages=(CUMSUM, renamed("second")))
    monkeypatch.setattr(cli, "BATCH", 4)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    started, seen = check.Check.start, []

    def start(self, pool):
        seen.append((self.kernel.name, capsys.readouterr()))
        return started(self, pool)

    monkeypatch.setattr(check.Check, "start", start)
    assert cli.main(["check"]) == 0
    before = next(printed for name, printed in seen if name == "second")
    assert before.out.count(CUMSUM.name) == before.out.count("pass") == 4
    assert "second" not in before.out
    assert before.err.splitlines() == [f"running {CUMSUM.name}, xla ...", "compiling second, xla ..."]


def test_a_table_stays_whole_where_errors_go_into_the_same_file(kernels, tmp_path, monkeypatch):
    """As after `2>&1`: nothing is said between its lines."""
    kernels(stages=(CUMSUM,))
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr("sys.stdout", log)
        monkeypatch.setattr("sys.stderr", log)
        assert cli.main(["check", "--quick"]) == 0
    printed = (tmp_path / "log").read_text()
    assert CUMSUM.name in printed
    assert "..." not in printed


def test_quick_checks_every_kernel_once(kernels, capsys):
    for interpret in (False, True):
        planned = check.plan(interpret, quick=True)
        names = [(x.kernel.name, x.implementation) for x in planned]
        assert len(names) == len(set(names))
        assert set(names) == {(x.kernel.name, x.implementation) for x in check.plan(interpret)}
    kernels(stages=(CUMSUM,), operators=(SIMPLE_GLA,))
    assert cli.main(["check", "--quick"]) == 0
    assert "2 of 2 passed" in capsys.readouterr().out


def test_the_quickest_come_first():
    planned = check.plan(interpret=True)
    plain = [x.implementation == "xla" for x in planned]
    assert plain == sorted(plain, reverse=True)
    assert planned[0].kernel in STAGES
    assert planned[plain.index(False) - 1].kernel.chunked


def test_the_reference_needs_no_backend(kernels, monkeypatch):
    """JAX may know the TPU alone, as under JAX_PLATFORMS=tpu: numpy runs the reference."""

    def refuse(backend=None):
        raise RuntimeError(f"Unknown backend {backend}")

    kernels(operators=(SIMPLE_GLA,))
    monkeypatch.setattr("jax.local_devices", refuse)
    assert cli.main(["check", "--quick"]) == 0


def test_check_fails_where_a_kernel_is_wrong_or_raises(kernels, capsys):
    kernels(stages=(times(1.01), renamed("raising", raising)))
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
    kernels(stages=(times(float("nan")),))
    assert cli.main(["check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 4


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize("interpret", [False, True])
def test_plan(backend, interpret, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    planned = check.plan(interpret)
    kernels = backend == "tpu" or interpret
    assert {x.kernel.name for x in planned} == {x.name for x in (*STAGES, *PARTS, *EVERY)}
    assert {x.implementation for x in planned} == ({"xla", "pallas", "staged", "fused"} if kernels else {"xla"})
    sizes = {x.case.T for x in planned if x.implementation != "xla"}
    assert sizes == ({200} if backend == "tpu" else {20} if interpret else set())


@pytest.fixture
def x64():
    """Set 64-bit mode for all threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernel", ["kkt", "recurrent_gla"])
def test_check_in_64_bit_mode(kernel, capsys):
    assert cli.main(["check", "--quick", "--interpret", "--kernel", kernel, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == 0


def test_unknown_kernel():
    with pytest.raises(SystemExit, match="`--kernel` must be part of the name of a kernel; got 'softmax'"):
        cli.main(["check", "--kernel", "softmax"])


def test_a_path_that_cannot_be_written(tmp_path):
    """It is an error at once, not after the minutes of a check or a demo."""
    file = tmp_path / "file"
    file.touch()
    for path, arguments in (
        (tmp_path, ["report", "--output", str(tmp_path)]),
        (file / "demo.png", ["demo", "--output", str(file)]),
    ):
        with pytest.raises(SystemExit, match=re.escape(f"`--output` must be a path that can be written; got {path}: ")):
            cli.main(arguments)


def test_info(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert "chunkwise-solve-tril" in printed
    for name in ("chunkwise", "chunkwise-integrations", "flax"):
        assert re.search(rf"^\| {name} +\|", printed, re.MULTILINE), name
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
    assert chosen["chunk_kda"] == chosen["recurrent_gla"] == "fused"
    assert chosen["solve_tril"] == "pallas"


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert re.fullmatch(r"chunkwise [\d.]+, jax [\d.]+, Python [\d.]+\n", capsys.readouterr().out)
