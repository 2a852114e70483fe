"""The figures of the pages, which come from docs/data, so that no figure is typed into a page.

A page has them between a comment of HTML, `<!-- figures: NAME -->`, and the next empty line. NAME is a function of a
module of this package. `python -m benchmarks pages` names the pages, and the pictures on them, that differ from
docs/data, and with --write it writes them all.
"""

import re
from pathlib import Path

from benchmarks.figures import evidence, kernels, machine, pictures, serving, tables  # noqa: F401

BLOCK = re.compile(r"^<!-- figures: ([\w-]+) -->\n(?:.+\n)*", re.MULTILINE)


def filled(page: str) -> str:
    """Return a page with the figures of docs/data."""

    def fill(match):
        if match[1] not in tables.BLOCKS:
            raise ValueError(f"A page must name figures of {', '.join(tables.BLOCKS)}; got {match[1]!r}.")
        return f"<!-- figures: {match[1]} -->\n{tables.BLOCKS[match[1]]()}\n"

    return BLOCK.sub(fill, page)


def pages() -> list[Path]:
    """Return the pages that may hold figures."""
    root = tables.ROOT
    return [root / "README.md", *sorted(root.glob("docs/**/*.md")), *sorted(root.glob("packages/*/README.md"))]


def main(write: bool) -> int:
    """Name the pages and pictures that differ from docs/data, and return 1 if there are any; or write all of them."""
    right = {path: filled(path.read_text()) for path in pages()}
    shown = {name for text in right.values() for name in BLOCK.findall(text) if name in pictures.PICTURES}
    right |= {tables.ROOT / path: text for name in sorted(shown) for path, text in pictures.files(name).items()}
    stale = {path: text for path, text in right.items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(tables.ROOT)}: {'written' if write else 'differs from docs/data'}")
        if write:
            path.write_text(text)
    return int(bool(stale) and not write)
