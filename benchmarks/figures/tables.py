"""Rows of docs/data, and tables of Markdown whose columns are data: a title, and the cell that a row has there."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCKS: dict[str, Callable[[], str]] = {}
NONE = "-"
TITLES = {"gated_delta_rule": "gated delta rule", "kda": "KDA", "gla": "GLA", "simple_gla": "simple GLA"}
PASSES = {"forward": "forward", "forward+backward": "forward and backward"}

Cell = Callable[[dict], str]


def block(function: Callable[[], str]) -> Callable[[], str]:
    """Register a function as the block with its name."""
    BLOCKS[function.__name__.replace("_", "-")] = function
    return function


def rows_of(name: str) -> list[dict]:
    """Return the rows of a result in docs/data."""
    return json.loads((ROOT / f"docs/data/{name}.json").read_text())["rows"]


def select(rows: Iterable[dict], **where) -> list[dict]:
    """Return the rows with these values; `way` is the pass."""
    where = {{"way": "pass"}.get(key, key): value for key, value in where.items()}
    return [row for row in rows if all(row.get(key) == value for key, value in where.items())]


def only(rows: Iterable[dict], **where) -> dict:
    """Return the one row with these values."""
    (row,) = select(rows, **where)
    return row


def values(rows: Iterable[dict], key: str) -> list:
    """Return the values of a key, each once, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def table(rows: Iterable[dict], columns: Mapping[str, str | Cell]) -> str:
    """Return a table of Markdown.

    Args:
      rows: a row for each line.
      columns: by its title, the key of a column's text, or a function from a row to the text.
    """
    cells = [(lambda row, key=x: str(row[key])) if isinstance(x, str) else x for x in columns.values()]
    lines = [list(columns), *([cell(row) for cell in cells] for row in rows)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(columns), *text[1:]])


def whole(number: float | None) -> str:
    """Return a number without decimals."""
    return NONE if number is None else f"{number:,.0f}"


def decimals(number: float | None, places: int = 2) -> str:
    """Return a number with decimals."""
    return NONE if number is None else f"{number:,.{places}f}"


def mebibytes(number: float) -> str:
    """Return MiB, with decimals where they matter."""
    return f"{number:,.0f}" if number == round(number) or number >= 20 else f"{number:.2f}".rstrip("0").rstrip(".")


def fixed(key: str, places: int = 2) -> Cell:
    """Return the cell of a number with decimals."""
    return lambda row: decimals(row[key], places)


def memory(key: str) -> Cell:
    """Return the cell of MiB."""
    return lambda row: mebibytes(row[key])


def of(name: str, cell: str | Cell) -> Cell:
    """Return the cell of the row that lies under a name in a row."""
    return (lambda row: str(row[name][cell])) if isinstance(cell, str) else lambda row: cell(row[name])


def ratio(over: str, under: str, key: str, places: int = 2) -> Cell:
    """Return the cell of the ratio of a number in two rows that lie under names in a row."""
    return lambda row: decimals(row[over][key] / row[under][key], places)


def title(row: dict) -> str:
    """Return the name of the operator of a row."""
    return TITLES[row["operator"]]


def way(row: dict) -> str:
    """Return the pass of a row."""
    return PASSES[row["pass"]]
