"""The order in which interleaved stages run."""

import json

from chunkwise.shared import chips
from chunkwise.shared.kernels.schedule import find_order, injected_orders, interleave, software_pipeline


def stage(name, length, log):
    for i in range(length):
        log.append(f"{name}{i}")
        yield


def test_stages_start_one_after_the_other_the_latest_first():
    log = []
    for _ in software_pipeline(stage(name, 2, log) for name in "abc"):
        log.append("|")
    # A stage ends in a turn too.
    assert " ".join(log) == "a0 | b0 a1 | c0 b1 | c1 | |"


def test_what_the_caller_does_stands_between_two_turns():
    log = []
    turns = software_pipeline([stage("a", 1, log)])
    next(turns)
    log.append("mine")
    assert list(turns) == [None]
    assert log == ["a0", "mine"]


def test_stages_of_different_lengths_and_none():
    log = []
    list(software_pipeline([stage("a", 3, log), stage("b", 0, log), stage("c", 1, log)]))
    assert log == ["a0", "a1", "c0", "a2"]
    assert list(software_pipeline([])) == []


def test_results_are_there_when_the_stages_end():
    results = {}

    def work(n):
        yield
        results[n] = n * n

    list(software_pipeline(work(n) for n in range(3)))
    assert results == {0: 0, 1: 1, 2: 4}


def test_an_order_leaves_the_rest_to_the_caller():
    log = []
    a, b = (stage(name, 3, log) for name in "ab")
    interleave("abbbbb", a=a, b=b)
    assert log == ["a0", "b0", "b1", "b2"]
    assert next(b, "past the end") == "past the end"
    list(a)
    assert log == ["a0", "b0", "b1", "b2", "a1", "a2"]


def test_searched_orders(tmp_path, monkeypatch):
    """The order of a package for its kernel, size and TPU; the plain one where there is none; one that is tried."""
    (tmp_path / "ordered").mkdir()
    (tmp_path / "ordered" / "__init__.py").touch()
    orders = {"fwd": {"8": {"v6e": "ppm"}, "16": {"v5e": "mmp"}}}
    (tmp_path / "ordered" / "orders.json").write_text(json.dumps(orders))
    monkeypatch.syspath_prepend(tmp_path)
    assert find_order("ordered", "fwd", 8, "pm") == "ppm"
    assert find_order("ordered", "fwd", 16, "pm") == find_order("ordered", "bwd", 8, "pm") == "pm"
    monkeypatch.setattr(chips, "current", lambda: "v5e")
    assert find_order("ordered", "fwd", 8, "pm") == "ppm"
    assert find_order("ordered", "fwd", 16, "pm") == "mmp"
    with injected_orders("ordered", fwd="mp"):
        assert find_order("ordered", "fwd", 8, "pm") == find_order("ordered", "fwd", 4, "pm") == "mp"
    assert find_order("ordered", "fwd", 8, "pm") == "ppm"
