"""levanter's whole trainer with chunkwise in it, beside itself: `nox -s host-levanter`.

Each run is a process of its own, which trains a tiny model for 20 steps and then generates.
"""

from importlib import metadata

import pytest

from tests_e2e.hosts.host import gap, losses_of, run_whole, seconds_of

RUNS = {
    "GatedDeltaNet, float32": {},
    "GatedDeltaNet, float32, two devices": dict(devices=2),
    "GatedDeltaNet, bfloat16": dict(policy="p=f32,c=bf16"),
}


def row_of(name, theirs, ours, moved):
    """Return what docs/data keeps of a run with chunkwise, one without, and one whose weights start otherwise."""
    rows = zip(theirs["tokens"]["theirs"], theirs["tokens"]["ours"], strict=True)
    pairs = [pair for row in rows for pair in zip(*row, strict=True)]
    about = dict(host="levanter", version=metadata.version("marin-levanter"), jax=metadata.version("jax"), run=name)
    return about | dict(
        steps=len(ours["steps"]),
        losses=dict(theirs=losses_of(theirs), ours=losses_of(ours)),
        difference=gap(theirs, ours), rounding=gap(theirs, moved),
        tokens=len(pairs), same_tokens=sum(a == b for a, b in pairs),
        seconds=dict(theirs=seconds_of(theirs), ours=seconds_of(ours)),
    )  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_trainer(name, record):
    different = dict(ours=False), dict(ours=True), dict(ours=False, moved=True)
    theirs, ours, moved = (run_whole("levanter_trainer", RUNS[name] | x) for x in different)
    row = row_of(name, theirs, ours, moved)
    record(row)
    assert not theirs["calls"]
    assert ours["calls"].keys() == {"chunk_gated_delta_rule", "recurrent_gated_delta_rule"}
    assert row["losses"]["theirs"][-1] < row["losses"]["theirs"][0] - 1
    # At a learning rate of 3e-3 what rounding differs by grows from step to step.
    assert row["difference"] < 3 * row["rounding"]
