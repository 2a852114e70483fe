"""Copies release/metadata.toml into every pyproject.toml, CITATION.cff and the pages; with --check it only compares.

A pyproject.toml holds the copy between a comment and the next empty line, a page between two comments of HTML.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MARK = "# Out of release/metadata.toml, by `nox -s metadata`:"
MANIFEST = re.compile(rf"^({re.escape(MARK)}\n)(?:.+\n)*", re.MULTILINE)
PAGE = re.compile(r"^(<!-- from git -->\n)(?:.*\n)*?(?=<!-- end -->$)", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


class Metadata(NamedTuple):
    """The content of metadata.toml."""

    version: str
    requires_python: str
    license: str
    authors: list[str]
    repository: str
    keywords: list[str]
    classifiers: list[str]


def read() -> Metadata:
    """Return the content of metadata.toml; a key too many or too few raises a TypeError."""
    table = tomllib.loads((ROOT / "release/metadata.toml").read_text())
    return Metadata(**{name.replace("-", "_"): value for name, value in table.items()})


def manifest_lines(about: Metadata) -> str:
    """Return the lines of a pyproject.toml that every distribution has."""
    lines = [
        f"version = {json.dumps(about.version)}",
        f"requires-python = {json.dumps(about.requires_python)}",
        f"license = {json.dumps(about.license)}",
        "authors = [" + ", ".join(f"{{ name = {json.dumps(name)} }}" for name in about.authors) + "]",
        f"keywords = {json.dumps(about.keywords)}",
        "classifiers = [",
        *(f"  {json.dumps(line)}," for line in about.classifiers),
        "]",
    ]
    if about.repository:
        lines.append(f"urls = {{ Repository = {json.dumps(about.repository)} }}")
    return "\n".join(lines) + "\n"


def page_lines(about: Metadata) -> str:
    """Return the lines of a page that say how to install without a clone; none without an address."""
    if not about.repository:
        return ""
    source = f"git+{about.repository}"
    return (
        "\nWithout a clone, pip takes the repository itself, whole or one package of it:\n\n```sh\n"
        f'python -m pip install "{source}"\n'
        f'python -m pip install "{source}#subdirectory=packages/kkt"\n```\n\n'
    )


def citation(about: Metadata) -> str:
    """Return CITATION.cff."""
    lines = [
        "# Out of release/metadata.toml, by `nox -s metadata`.",
        "cff-version: 1.2.0",
        "message: If you use chunkwise in your work, please cite it.",
        "type: software",
        "title: chunkwise",
        "abstract: Linear attention in chunks for JAX, as Pallas kernels for TPUs and in plain JAX.",
        "authors:",
        *(f"  - name: {name}" for name in about.authors),
        f"version: {about.version}",
        f"license: {about.license}",
        "keywords:",
        *(f"  - {word}" for word in about.keywords),
    ]
    if about.repository:
        lines.append(f"repository-code: {about.repository}")
    return "\n".join(lines) + "\n"


def copies(about: Metadata) -> Iterator[tuple[Path, str]]:
    """Yield (path, text) of every file that holds a copy, as it must be."""
    folders = [ROOT, ROOT / "shared", *sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))]
    manifests = [folder / "pyproject.toml" for folder in folders]
    pages = [ROOT / "README.md", ROOT / "docs/packages.md"]
    for pattern, paths, lines in ((MANIFEST, manifests, manifest_lines(about)), (PAGE, pages, page_lines(about))):
        for path in paths:
            text, count = pattern.subn(lambda match, lines=lines: match[1] + lines, path.read_text())
            if count != 1:
                raise SystemExit(f"{path.relative_to(ROOT)} must have one place for metadata.toml; got {count}.")
            yield path, text
    yield ROOT / "CITATION.cff", citation(about)


def with_addresses(markdown: str, folder: str, about: Metadata) -> str:
    """Return a page of a folder with links to the repository in place of links to files, for readers elsewhere.

    Without an address the page stays as it is.
    """
    if not about.repository:
        return markdown

    def link(match):
        picture, text, target = match.groups()
        path = (ROOT / folder / target).resolve().relative_to(ROOT).as_posix()
        return f"{picture}[{text}]({about.repository}/{'raw' if picture else 'blob'}/v{about.version}/{path})"

    return LINK.sub(link, markdown)


def main(arguments: list[str]) -> int:
    """Write all copies, or with --check return 1 if one differs."""
    stale = [(path, text) for path, text in copies(read()) if not path.exists() or path.read_text() != text]
    if arguments == ["--check"]:
        for path, _ in stale:
            print(f"{path.relative_to(ROOT)} must agree with metadata.toml: `python -m nox -s metadata` writes it.")
        return int(bool(stale))
    for path, text in stale:
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
