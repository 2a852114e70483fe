"""levanter's whole trainer with chunkwise in it, beside itself: `nox -s host-levanter`.

Each run is a process of its own, which trains a tiny model for 20 steps and then generates.
"""

import pytest

from tests_e2e.hosts.host import gap, losses_of, run_whole, trained

RUNS = {
    "GatedDeltaNet, float32": {},
    "GatedDeltaNet, float32, two devices": dict(devices=2),
    "GatedDeltaNet, bfloat16": dict(policy="p=f32,c=bf16"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_trainer(name, record):
    different = dict(ours=False), dict(ours=True), dict(ours=False, moved=True)
    theirs, ours, moved = (run_whole("levanter_trainer", RUNS[name] | x) for x in different)
    rows = zip(theirs["tokens"]["theirs"], theirs["tokens"]["ours"], strict=True)
    pairs = [pair for row in rows for pair in zip(*row, strict=True)]
    found, rounding = trained(theirs, ours), gap(theirs, moved)
    found |= dict(rounding=rounding, tokens=len(pairs), same_tokens=sum(a == b for a, b in pairs))
    record("marin-levanter", name, host="levanter", **found)
    assert not theirs["calls"]
    assert ours["calls"].keys() == {"chunk_gated_delta_rule", "recurrent_gated_delta_rule"}
    assert losses_of(theirs)[-1] < losses_of(theirs)[0] - 1
    # At a learning rate of 3e-3 what rounding differs by grows from step to step.
    assert gap(theirs, ours) < 3 * rounding
