"""What the page on flash-linear-attention says of calls by position, beside the functions of its wheel."""

from importlib import metadata
from pathlib import Path

import pytest

from chunkwise.shared.call.unknown_arguments import INSTEAD
from tests_e2e.pages import signatures

LIBRARY = "flash-linear-attention"
# Ours has another name for the gate of a norm, and no bias.
OF_A_NORM = {"g", "bias"}


@pytest.fixture(scope="module")
def paths():
    return [Path(file.locate()) for file in metadata.files("fla-core") or () if file.suffix == ".py"]


def test_every_argument_is_ours_or_answered(paths):
    """A call with an argument that ours lacks says what to do instead, and so does the page."""
    page = signatures.section(LIBRARY)
    pairs = signatures.pairs(LIBRARY) + [(row.theirs, row.ours) for row in signatures.differences(LIBRARY)]
    for theirs, ours in pairs:
        lacking = set(signatures.order_there(theirs, paths)) - signatures.names_here(ours)
        for name in lacking - (OF_A_NORM if ours == "rms_norm_gated" else set()):
            assert name in INSTEAD, (theirs, name)
            assert f"`{name}`" in page, (theirs, name)


def test_by_position(paths):
    rows = signatures.differences(LIBRARY)
    signatures.check(rows, paths)
    others = [pair for pair in signatures.pairs(LIBRARY) if pair[0] not in {row.theirs for row in rows}]
    assert others
    for theirs, ours in others:
        here = signatures.order_here(ours)
        assert signatures.order_there(theirs, paths)[: len(here)] == here, theirs
