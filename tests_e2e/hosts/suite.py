"""Other people's tests, out of the archives of their releases, with ours in the place of their operators."""

import functools
import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import jax
import pytest

from tests_e2e.hosts.host import result_of

# What the process of the tests is told: the module that puts ours in place, and where the results go.
PLACE, RESULT = "CHUNKWISE_SUITE_PLACE", "CHUNKWISE_SUITE_RESULT"


def folder_of(variable: str, what: str) -> str:
    """Return the folder that a variable of the environment names, or skip the test; `what` is in it."""
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} names {what}.")
    return folder


def find_tests(distribution: str, files: tuple[str, ...], folder: str) -> list[Path]:
    """Return files of tests: of a path of their own, of the wheel of a distribution, or of `tests` in its sources."""
    if all(os.path.isabs(file) for file in files):
        return [*map(Path, files)]
    installed = {str(file): Path(file.locate()) for file in metadata.files(distribution) or ()}
    if all(file in installed for file in files):
        return [installed[file] for file in files]
    source = unpack(distribution, folder)
    return [source / "tests" / file for file in files]


def unpack(distribution: str, folder: str) -> Path:
    """Return the unpacked source archive of the installed version of a distribution."""
    release = f"{distribution}=={metadata.version(distribution)}"
    options = ("--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", folder)
    subprocess.run([sys.executable, "-m", "pip", "download", *options, release], check=True, timeout=600)
    (archive,) = Path(folder).glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return Path(folder, archive.name.removesuffix(".tar.gz"))


def run_suite(distribution: str, place: str | None, files: tuple[str, ...], *, devices: int = 1) -> dict[str, dict]:
    """Return for every test of a distribution its outcome, how often it called ours, and what failed.

    Args:
      distribution: whose tests run, in a process of their own.
      place: the module of this folder whose `install(count)` puts ours in place, and counts the calls of ours; None
        for the distribution as it is.
      files: as `find_tests` has them.
      devices: that are simulated.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, tests = Path(folder, "result.json"), find_tests(distribution, files, folder)
        arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests_e2e.hosts.suite", *map(str, tests)]
        variables = {PLACE: place or "", RESULT: str(result)}
        # Nearly all of the time is compilation.
        flags = "--xla_backend_optimization_level=0"
        return result_of(arguments, result, tests[0].parents[1], variables, devices=devices, flags=flags, timeout=7200)


def check_suite(
    distribution: str, place: str, files: tuple[str, ...], what: str, record: Callable, *, devices: int = 1, **version
) -> None:
    """Run the tests of a distribution with ours in place, and fail if a test that calls ours does.

    A row is kept of the tests that call ours and are not skipped, and of those that pass. `what` says which tests run,
    and how; a distribution that is not installed comes with its `version`. The others are those of `run_suite`.
    """
    found = run_suite(distribution, place, files, devices=devices)
    called = {name: test for name, test in found.items() if test["calls"] and test["outcome"] != "skipped"}
    failed = sorted(name for name, test in called.items() if test["outcome"] != "passed")
    passed = len(called) - len(failed)
    record(distribution, "its tests", what=what, tests=len(called), passed=passed, failed=failed, **version)
    for name in failed:
        print(name, found[name]["why"], sep="\n")
    assert called
    assert not failed


@functools.cache
def compiled(operator: Callable, **options) -> Callable:
    """Return an operator with options that are not arrays, compiled: tests call without `jit`, which takes minutes."""
    return jax.jit(functools.partial(operator, **options))


class _Plugin:
    """Writes down what becomes of each test, in the process of the tests."""

    def __init__(self):
        self.calls, self.found = 0, {}

    def count(self) -> None:
        """Note a call of ours."""
        self.calls += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.calls = 0
        return (yield)

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.split("tests/")[-1]
        if report.when == "call":
            self.found[name] = dict(outcome=report.outcome, calls=self.calls, why=str(report.longrepr or "")[-2000:])
        elif report.outcome != "passed":
            self.found.setdefault(name, dict(outcome=report.outcome, calls=0, why=str(report.longrepr)[-2000:]))
        Path(os.environ[RESULT]).write_text(json.dumps(self.found))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Put ours in place before the tests, and what they share, are imported."""
    if RESULT in os.environ:
        plugin = _Plugin()
        early_config.pluginmanager.register(plugin)
        if os.environ[PLACE]:
            importlib.import_module(f"tests_e2e.hosts.{os.environ[PLACE]}").install(plugin.count)
