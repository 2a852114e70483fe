"""The figures of the pages are those of docs/data, and pages stay short."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import tables
from chunkwise import pipeline
from chunkwise.shared.serving.decode import launch, records
from chunkwise.shared.testing import compare

ROOT = Path(__file__).parents[2]
DATA = sorted(path.name for path in (ROOT / "docs/data").iterdir())
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MOST_PAGES, MOST_WORDS, MOST_WORDS_OF_A_PAGE, MOST_WORDS_OF_THE_README = 30, 28_000, 1_500, 1_200


def test_figures(capsys):
    assert figures.main(write=False) == 0, capsys.readouterr().out


def test_a_page_that_differs(tmp_path, monkeypatch, capsys):
    """It is named, and written on demand; text around the figures stays."""
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- figures: cpu -->\n| old |\n\nAfter.\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "pages", lambda: [page])
    monkeypatch.setitem(tables.BLOCKS, "cpu", lambda: "| new |")
    assert figures.main(write=False) == 1
    assert "page.md: differs from docs/data" in capsys.readouterr().out
    assert figures.main(write=True) == 0
    assert page.read_text() == "Before.\n\n<!-- figures: cpu -->\n| new |\n\nAfter.\n"
    assert figures.main(write=False) == 0


def test_figures_that_do_not_exist():
    with pytest.raises(ValueError, match=r"A page must name figures of .*; got 'speed'"):
        figures.filled("<!-- figures: speed -->\n")


def test_a_figure_of_one_row_has_one_row():
    with pytest.raises(ValueError, match="too many values"):
        tables.only([{"T": 1}, {"T": 1}, {"T": 2}], T=1)


def test_pages_are_few_and_short():
    """Whoever opens a page reads it; a table, an example and the text of a picture count too."""
    words = {path.relative_to(ROOT).as_posix(): len(path.read_text().split()) for path in PAGES}
    assert len(words) <= MOST_PAGES
    assert sum(words.values()) <= MOST_WORDS
    assert {page: n for page, n in words.items() if n > MOST_WORDS_OF_A_PAGE} == {}
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS_OF_THE_README


def test_no_figure_is_typed_into_the_page_of_performance():
    """Outside of tables that are written, numbers are sizes and versions: no decimals of a time, no share, no count."""
    text = (ROOT / "docs/performance.md").read_text()
    text = re.sub(r"^<!-- figures: .*\n(.+\n)*|^```sh\n(.*\n)*?```$", "", text, flags=re.M)
    text = re.sub(r"\b\w+ = [\d,]+|Qwen3\.5|\]\(\S+\)", "", text)
    assert re.findall(r"\b\d+\.\d+\b|\b\d+ %|\b\d{4,}\b", text) == []


@pytest.mark.parametrize("path", figures.pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_time_is_typed(path):
    """Times, cycles and memory come from docs/data, but for what others publish.

    Memory without decimals is a size that a reader computes.
    """
    text = re.sub(r"^<!-- figures: .*\n(.+\n)*|^```\w*\n(.*\n)*?```$", "", path.read_text(), flags=re.M)
    sentences = re.split(r"(?<=[.:|])\s", text)
    typed = [x for x in sentences if re.search(r"\b\d[\d,.]*\s(?:ms|us|cycles|bundles)\b|\d\.\d+\s[MG]iB\b", x)]
    assert [x for x in typed if not re.search("publish", x)] == []


def test_the_tolerances_of_the_tests_are_those_of_the_page():
    """Of outputs and states, of gradients, and of the gradients of gates."""
    text = (ROOT / "docs/numerics.md").read_text()
    for dtype in ("float32", "bfloat16"):
        (row,) = re.findall(rf"^\| {dtype} \| (\S+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
        columns = compare.TOLERANCE, compare.GRADIENT_TOLERANCE, compare.GATE_GRADIENT_TOLERANCE
        assert [float(x) for x in row] == [column[dtype] for column in columns]


def test_launches_of_a_gpu():
    """A page for those who choose a library says them as a round number."""
    rows = json.loads((ROOT / "docs/data/gpu-h100.json").read_text())["rows"]
    row = next(x for x in rows if (x["program"], x["pass"], x["T"], x["HV"]) == ("gdn", "forward", 8192, 32))
    assert round(row["launches"], -2) == 200
    assert "about 200 launches of a forward" in (ROOT / "docs/which-library.md").read_text()


def test_the_page_on_serving_names_every_step():
    text = (ROOT / "docs/serving.md").read_text()
    assert [name for name in pipeline.__all__ if name.startswith("ragged_") and f"`{name}`" not in text] == []


def test_the_drawing_of_decodes_names_who_asks():
    """Every module that asks which kernel decodes, and every module that the drawing names exists."""
    text = (ROOT / "docs/maintain/architecture.md").read_text()
    drawing = text.split("Who decodes what:\n\n```\n")[1].partition("```")[0]
    rooms = ROOT / "shared/src/chunkwise/shared", ROOT / "packages/layers/src/chunkwise"
    sources = {path.relative_to(room).as_posix(): path for room in rooms for path in room.rglob("*.py")}
    asking = {name for name, path in sources.items() if "choose.by_kernel(" in path.read_text()}
    named = set(re.findall(r"\w[\w/]*\.py", drawing))
    assert asking <= named <= set(sources)


def test_the_limits_of_decodes_are_those_of_the_kernel():
    text = (ROOT / "docs/serving-layers.md").read_text()
    assert f"| value heads | up to {launch.MOST_HEADS}, " in text
    assert f"| tokens of a decode | up to {records.MOST_TOKENS} at once, each with a slot |" in text


def test_data_is_shown(monkeypatch):
    """Every file of docs/data is read for a page, or a page links to it."""
    texts, read, rows_of = [path.read_text() for path in figures.pages()], set(), tables.rows_of
    monkeypatch.setattr(tables, "rows_of", lambda name: read.add(f"{name}.json") or rows_of(name))
    linked = {name for text in texts for name in re.findall(r"data/([\w.-]+)", figures.filled(text))}
    assert set(DATA) - read - linked == set()


@pytest.mark.parametrize("name", [name for name in DATA if name.endswith(".json")])
def test_data_says_how_it_was_made(name):
    """By a command that wrote it, or by a note and the day of the measurement."""
    saved = json.loads((ROOT / "docs/data" / name).read_text())
    assert saved["rows"]
    assert saved["command"] is not None or {"note", "measured"} <= saved.keys()


def test_what_shows_a_model_is_a_test():
    """The tests that docs/data/models.json names exist, and the tables of their files say that they show something."""
    for test in {row["test"] for row in tables.rows_of("models")}:
        path, name = test.split("::")
        text = (ROOT / path).read_text()
        assert f"def {name}(" in text, test
        assert name in text.split("SHOWS = ")[1], test
