"""What tests cost and reach: CPU time by kind, compiled programs, and the lines of the source that they run.

The options of pytest are `--times PATH`, which writes what each test costs, and `--lines PATH`, which keeps for every
test its time and its lines. `python -m tests.measuring` checks the former, and chooses from the latter the
tests that every change must pass.
"""

import collections
import csv
import heapq
import json
import math
import sys
import time
from pathlib import Path

import pytest
from jax import monitoring

ROOT = Path(__file__).parents[1]
# The cases that every change must pass, of functions that have others; `function[]` says that it has none. A function
# that is not there is as its own file says.
QUICK = ROOT / "tests/quick.txt"
# What they cost, by file.
TIMES = ROOT / "docs/data/test-times.json"
# What the tests that every change must pass have at most, of numbers that no machine changes.
# A worker compiles what it has not run before: one run took 9,133 programs, and another 9,331 with one test more.
MOST = {"tests": 2_910, "programs": 9_500}
# What these test is not the source: pages, data and the simulated TPU. Their own files say what is quick.
OTHERS = tuple(f"tests_e2e/{name}/" for name in ("examples", "pages", "repository", "simulated"))
# A test that every change must pass reaches a line, or tests a function, that no other does for every so many seconds.
SECONDS = 1.0
# A test that takes at most so many seconds is always one of them.
FREE = 0.02
# The events of JAX that say how long it traced, lowered and compiled.
KINDS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
# A free number for a tool of `sys.monitoring`.
TOOL = 4


class Measuring:
    """A plugin of pytest, which writes what it measured at the end; of several workers the first process does."""

    def __init__(self, times: str | None, lines: str | None):
        self.times, self.lines = times, lines
        self.tests: dict[str, dict[str, float]] = {}
        self.reached: dict[str, list[str]] = {}
        self._seconds: collections.Counter = collections.Counter()
        self._lines: set[str] = set()
        monitoring.register_event_duration_secs_listener(self._listen)
        if lines:
            self._watch_lines()

    def _listen(self, event: str, seconds: float, **_) -> None:
        kind = KINDS.get(event)
        if kind is not None:
            self._seconds[kind] += seconds
            self._seconds["programs"] += kind == "compile"

    def _watch_lines(self) -> None:
        watch = sys.monitoring
        watch.use_tool_id(TOOL, "chunkwise tests")

        def start(code, _offset):
            path = code.co_filename
            if path and "/src/chunkwise/" in path and not watch.get_local_events(TOOL, code):
                watch.set_local_events(TOOL, code, watch.events.LINE)
            return watch.DISABLE

        def line(code, number):
            self._lines.add(f"{code.co_filename.partition('/src/chunkwise/')[2]}:{number}")
            return watch.DISABLE

        watch.register_callback(TOOL, watch.events.PY_START, start)
        watch.register_callback(TOOL, watch.events.LINE, line)
        watch.set_events(TOOL, watch.events.PY_START)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self._seconds.clear()
        if self.lines:
            self._lines.clear()
            sys.monitoring.restart_events()
        before = time.process_time()
        result = yield
        self.tests[item.nodeid] = {"tests": 1, "cpu": time.process_time() - before, **self._seconds}
        if self.lines:
            self.reached[item.nodeid] = sorted(self._lines)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.lines:
            sys.monitoring.set_events(TOOL, 0)
        worker = getattr(session.config, "workerinput", None)
        if worker is not None:
            session.config.workeroutput["tests"] = self.tests
            if self.lines:
                Path(f"{self.lines}.{worker['workerid']}").write_text(json.dumps(self.reached))
            return
        if self.times:
            Path(self.times).write_text(json.dumps(self.tests))
        if self.lines:
            for part in Path(self.lines).parent.glob(f"{Path(self.lines).name}.*"):
                self.reached |= json.loads(part.read_text())
                part.unlink()
            kept = {test: (self.tests[test]["cpu"], lines) for test, lines in self.reached.items()}
            Path(self.lines).write_text(json.dumps(kept))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.tests |= node.workeroutput["tests"]


def by_file(tests: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return what each file of tests costs: how many there are, seconds by kind, and compiled programs."""
    files: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for test, spent in tests.items():
        files[test.partition("::")[0]].update(spent)
    return {file: {name: round(n, 1) for name, n in files[file].items()} for file in sorted(files)}


def seconds_of_files() -> dict[str, float]:
    """Return the seconds of CPU time that each file of tests took when they were kept."""
    return {row["file"]: row["cpu"] for row in json.loads(TIMES.read_text())["rows"]}


def choose(tests: dict[str, tuple[float, list[str]]], caught: list[list[str]]) -> set[str]:
    """Return the tests that every change must pass: a cover of known mistakes, of lines, and of functions of tests.

    Of lines and functions, what only takes more than `SECONDS` is left out. What is `FREE` stays: tests with the same
    shapes share traces, so that all but the first of them seem to reach few lines.

    Args:
      tests: for every test its seconds, and the lines that it reaches.
      caught: for every known mistake the tests that catch it, of which one stays: cases, or functions, which stand for
        their cheapest case. The functions of a suite of `tests` stay in one class that runs it.
    """
    cases = collections.defaultdict(list)
    for test in sorted(tests, key=lambda test: tests[test][0]):
        cases[test.partition("[")[0]].append(test)
    named = collections.defaultdict(list)
    for function, (cheapest, *_) in cases.items():
        file, _, name = function.rpartition("::")
        for known in (function, f"{file.partition('::')[0]}::{name}", name):
            named[known].append(cheapest)
    catches = collections.defaultdict(set)
    for mistake, names in enumerate(caught):
        for test in names:
            known = named[test.rpartition("::")[2] if test.startswith("tests/") else test]
            for case in [test] if test in tests else sorted(known, key=lambda test: tests[test][0])[:1]:
                catches[case].add(mistake)
    chosen = cover(tests, catches, {test for test, (seconds, _) in tests.items() if seconds <= FREE}, math.inf)
    return cover(tests, {test: {*lines, test.partition("[")[0]} for test, (_, lines) in tests.items()}, chosen, SECONDS)


def cover(tests: dict, reached: dict[str, set], chosen: set[str], most: float) -> set[str]:
    """Return chosen tests and others that reach what these leave, greedy by seconds, one for at most `most` of them."""
    left = set().union(*reached.values()).difference(*(reached[test] for test in chosen))
    seconds_each = lambda test: (0.01 + tests[test][0]) / max(len(reached[test] & left), 1e-9)
    queue = [(seconds_each(test), test) for test in reached if test not in chosen]
    heapq.heapify(queue)
    while queue and left:
        _, test = heapq.heappop(queue)
        now = seconds_each(test)
        if queue and now > queue[0][0]:
            heapq.heappush(queue, (now, test))
        elif now < most:
            chosen = chosen | {test}
            left -= reached[test]
        else:
            break
    return chosen


def choose_quick(paths: list[Path]) -> None:
    """Write tests/quick.txt from the files that `--lines` wrote."""
    measured = [json.loads(path.read_text()) for path in paths]
    tests = {test: spent for each in measured for test, spent in each.items() if not test.startswith(OTHERS)}
    with (ROOT / "docs/data/mutants.csv").open() as file:
        columns = "all quick tests that fail", "the first test that fails"
        caught = [(row[columns[0]] or row[columns[1]]).split() for row in csv.DictReader(file)]
    chosen = choose(tests, caught)
    function = lambda test: test.partition("[")[0]
    listed = {function(test) for test in tests.keys() - chosen}
    lines = {test for test in chosen if function(test) in listed}
    lines |= {f"{name}[]" for name in listed - set(map(function, chosen))}
    QUICK.write_text("".join(f"{line}\n" for line in sorted(lines)))
    seconds = [sum(tests[test][0] for test in each) for each in (chosen, tests)]
    print(f"{len(chosen)} of {len(tests)} tests, {seconds[0]:.0f} of {seconds[1]:.0f} seconds of CPU time")


def check(paths: list[Path], kept: Path | None = None) -> None:
    """Print the sums of the files that `--times` wrote, and keep them in a file; fail where they are beyond `MOST`."""
    tests = {test: spent for path in paths for test, spent in json.loads(path.read_text()).items()}
    files, total = by_file(tests), collections.Counter()
    for spent in files.values():
        total.update(spent)
    total = {name: round(n, 1) for name, n in total.items()}
    print(total)
    if kept:
        rows = [{"file": file, **spent} for file, spent in files.items()]
        data = {"command": "nox -s tests -- --keep", "total": total, "rows": rows}
        kept.write_text(json.dumps(data, indent=1) + "\n")
    if gone := sorted(x for x in QUICK.read_text().splitlines() if not x.endswith("[]") and x not in tests):
        raise SystemExit(f"tests/quick.txt must name tests that run; got {gone}: run `nox -s cover`.")
    if beyond := {name: total[name] for name, most in MOST.items() if total[name] > most}:
        raise SystemExit(f"What every change must pass has at most {MOST}; got {beyond}: see CONTRIBUTING.md.")


if __name__ == "__main__":
    command, *paths = sys.argv[1], *map(Path, sys.argv[2:])
    commands = {
        "choose": choose_quick,
        "check": check,
        "keep": lambda paths: check(paths, TIMES),
    }
    commands[command](paths)
