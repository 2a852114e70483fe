"""Test set-up for every package: the environment that libtpu reads, and how programs are compiled for the CPU."""

import contextlib
import os
import resource
from pathlib import Path

import jax
import pytest

from chunkwise.shared.implementation import platforms
from chunkwise.shared.testing import tpu
from tests import measuring, selection, shown

tpu.setup()
# Programs are small: to cut one into parts that are compiled side by side costs more than it saves.
os.environ["XLA_FLAGS"] = f"--xla_cpu_parallel_codegen_split_count=1 {os.environ.get('XLA_FLAGS', '')}"

# Lines of the source in lowered programs, which no test reads, take a quarter of the time to lower one.
jax.config.update("jax_traceback_in_locations_limit", 0)

# The packages whose plain JAX their tests compile as for a user; the others run the same programs.
WITH_KERNELS = {"causal_conv1d", "fused_gdn", "fused_gla", "kda", "norm_gated"}
# The most that a worker may need before it drops programs: four of them share 16 GB, and Linux gives a process 65,530
# maps of memory, of which every compiled program takes some. Without one more the compiler ends the process.
MEMORY_KB, MAPS = 4_000_000, 15_000
# The generation that every change is compiled for; the others are for the thorough tests.
CHIP = "v6e"
# Operators that run the kernels of another: outside of their own package every test of theirs is a thorough one.
ON_OTHER_KERNELS, THEIR_PACKAGE = ("gdn2", "comba"), "two_keys"


def pytest_addoption(parser):
    parser.addoption("--simulator", action="append", default=[], metavar="NAME=VALUE", help="of the simulated TPU")
    parser.addoption("--times", metavar="PATH", help="write what each test costs")
    parser.addoption("--lines", metavar="PATH", help="write what each test costs, and the lines that it reaches")
    parser.addoption("--shows", type=Path, metavar="FILE", help="docs/data/models.json: add what tests show of models")
    parser.addoption("--gpu-forms", action="store_true", help='take the forms for GPUs of "xla" on every platform')


def pytest_configure(config):
    times, lines = config.getoption("--times"), config.getoption("--lines")
    if times or lines:
        config.pluginmanager.register(measuring.Measuring(times, lines))
    if path := config.getoption("--shows"):
        config.pluginmanager.register(shown.Collector(path))


@pytest.fixture(autouse=True, scope="session")
def _take_gpu_forms(request):
    with platforms.gpu_forms() if request.config.getoption("--gpu-forms") else contextlib.nullcontext():
        yield


def pytest_collection_modifyitems(config, items):
    """Mark thorough cases: by the table THOROUGH of a file, and for all files by TPU generation and `Case.repeats`.

    And those that reach nothing that others do not reach, by tests/quick.txt; they are marked as repeats, too.
    """
    quick = set(measuring.QUICK.read_text().splitlines())
    chosen = {line.partition("[")[0] for line in quick}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        repeats = getattr(parameters.get("case"), "repeats", False) and parameters.get("implementation") == "xla"
        other_chip = parameters.get("chip", CHIP) != CHIP
        named = " ".join(str(getattr(x, "name", x)) for x in parameters.values())
        repeats |= any(name in named for name in ON_OTHER_KERNELS) and THEIR_PACKAGE not in item.path.parts
        if repeats or other_chip or selection.is_thorough(item.cls or item.module, item.originalname, parameters):
            item.add_marker(pytest.mark.thorough)
        elif item.nodeid not in quick and item.nodeid.partition("[")[0] in chosen:
            item.add_marker(pytest.mark.thorough)
            item.add_marker(pytest.mark.repeats)
        if config.getoption("--shows") and not item.cls:
            under = shown.versions(item.get_closest_marker("torch") is not None)
            shows = shown.of_case(item.module, item.originalname, parameters)
            item.user_properties += [("shows", (*each, under)) for each in shows]
    # Workers take one file after another: with new ones and the longest ones first all workers end at the same time.
    seconds = measuring.seconds_of_files()
    items.sort(key=lambda item: seconds.get(item.nodeid.partition("::")[0], float("inf")), reverse=True)


@pytest.fixture(autouse=True, scope="module")
def _drop_compiled_programs():
    """Drop them after a file once the process has needed much memory; until then files share small programs."""
    yield
    maps = Path("/proc/self/maps")  # of Linux
    many_maps = maps.exists() and maps.read_bytes().count(b"\n") > MAPS
    if many_maps or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MEMORY_KB:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _compile_quickly(request):
    """Compile without optimisation, in a half or a third of the time.

    Two kinds of programs compile as for a user: plain JAX whose values and gradients a package of kernels compares with
    its reference, and what is compiled for a TPU.
    """
    item = request.node
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    plain = parameters.get("implementation") == "xla" and item.path.name == "test_reference.py"
    plain = plain and WITH_KERNELS.intersection(item.path.parts)
    jax.config.update("jax_disable_most_optimizations", not (plain or item.get_closest_marker("tpu")))
    yield
    jax.config.update("jax_disable_most_optimizations", False)
