"""The order in which interleaved stages run."""

from chunkwise.shared.kernels.spans.schedule import interleave, software_pipeline


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


def test_stages_of_different_lengths_and_none():
    log = []
    list(software_pipeline([stage("a", 3, log), stage("b", 0, log), stage("c", 1, log)]))
    assert log == ["a0", "a1", "c0", "a2"]
    assert list(software_pipeline([])) == []


def test_an_order_leaves_the_rest_to_the_caller():
    log = []
    a, b = (stage(name, 3, log) for name in "ab")
    interleave("abbbbb", a=a, b=b)
    assert log == ["a0", "b0", "b1", "b2"]
    assert next(b, "past the end") == "past the end"
    list(a)
    assert log == ["a0", "b0", "b1", "b2", "a1", "a2"]
