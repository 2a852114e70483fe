"""Reports of docs/data/hardware fit their schema and are listed; estimates that are shipped are those of docs/data."""

import json
from pathlib import Path

import jsonschema
import pytest

from benchmarks import shipped
from chunkwise.command import report

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/hardware.md").read_text()
REPORTS = sorted((ROOT / "docs/data/hardware").glob("*"))


def test_schema():
    jsonschema.Draft202012Validator.check_schema(report.read_schema())


@pytest.mark.parametrize("path", REPORTS, ids=[path.name for path in REPORTS])
def test_report(path):
    jsonschema.validate(json.loads(path.read_text()), report.read_schema())
    assert f"](data/hardware/{path.name})" in PAGE


def test_page_without_reports():
    assert ("There is none yet" in PAGE) == (not REPORTS)


def test_what_does_not_fit():
    """A field too many, one too few, and another version are refused."""
    schema = report.read_schema()
    about = report.gather(small=True) | {"check": [], "times": []}
    jsonschema.validate(about, schema)
    few = {name: about[name] for name in about if name != "host"}
    for wrong in (about | {"owner": "me"}, few, about | {"schema": report.SCHEMA + 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_shipped_estimates_are_those_of_the_data(capsys):
    assert shipped.main(write=False) == 0, capsys.readouterr().out
