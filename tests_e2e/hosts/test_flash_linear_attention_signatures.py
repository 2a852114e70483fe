"""What the page on flash-linear-attention says of calls by position, beside the functions of its wheel."""

from importlib import metadata
from pathlib import Path

from tests_e2e.pages import signatures

PAGE = "from-flash-linear-attention"


def test_by_position():
    files = metadata.files("fla-core") or ()
    paths = [Path(file.locate()) for file in files if file.suffix == ".py"]
    rows = signatures.differences(PAGE)
    signatures.check(rows, paths)
    others = [pair for pair in signatures.pairs(PAGE) if pair[0] not in {row.theirs for row in rows}]
    assert others
    for theirs, ours in others:
        here = signatures.order_here(ours)
        assert signatures.order_there(theirs, paths)[: len(here)] == here, theirs
