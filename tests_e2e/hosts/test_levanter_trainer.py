"""levanter's whole trainer with chunkwise in it, beside itself: `nox -s host-levanter`.

Each run is a process of its own, which trains a tiny model for 20 steps and then generates.
"""

from importlib import metadata

import pytest

from tests_e2e.hosts.host import run_whole

RUNS = {
    "GatedDeltaNet, float32": {},
    "GatedDeltaNet, float32, two devices": dict(devices=2),
    "GatedDeltaNet, bfloat16": dict(policy="p=f32,c=bf16"),
}


def row_of(name, theirs, ours):
    """Return what docs/data keeps of a run with chunkwise and one without."""
    losses = {who: [step["loss"] for step in run["steps"]] for who, run in (("theirs", theirs), ("ours", ours))}
    pairs = [pair for rows in zip(theirs["tokens"], ours["tokens"], strict=True) for pair in zip(*rows, strict=True)]
    seconds = lambda run: min(step["seconds"] for step in run["steps"][2:])
    about = dict(host="levanter", version=metadata.version("marin-levanter"), jax=metadata.version("jax"), run=name)
    return about | dict(
        steps=len(losses["ours"]), losses=losses,
        difference=max(abs(a - b) for a, b in zip(losses["theirs"], losses["ours"], strict=True)),
        tokens=len(pairs), same_tokens=sum(a == b for a, b in pairs),
        seconds=dict(theirs=seconds(theirs), ours=seconds(ours)),
    )  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_trainer(name, record):
    theirs, ours = (run_whole("levanter_trainer", RUNS[name] | dict(ours=x)) for x in (False, True))
    row = row_of(name, theirs, ours)
    record(row)
    assert not theirs["calls"]
    assert ours["calls"].keys() == {"chunk_gated_delta_rule", "recurrent_gated_delta_rule"}
    assert row["losses"]["theirs"][-1] < row["losses"]["theirs"][0] - 1
    # At a learning rate of 3e-3 what rounding differs by grows from step to step.
    assert row["difference"] < (0.1 if "bfloat16" in name else 1e-2)
