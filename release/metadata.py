"""Copies release/metadata.toml into every pyproject.toml, workflow and page; with --check it only compares.

In a pyproject.toml the copy is between a comment and the next empty line, in a page between two comments of HTML, and
in a workflow in the list after a comment. Patterns find the releases of JAX in requirements and in sentences.
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
# The first group of a pattern stays, and the copy replaces the rest of the match.
MANIFEST = re.compile(rf"^({re.escape(MARK)}\n)(?:.+\n)*", re.MULTILINE)
REQUIREMENT = re.compile(r'("jax)>=[^"]*')
WORKFLOW = re.compile(rf"^( *{re.escape(MARK)}\n)(?: *- .+\n)*", re.MULTILINE)
PAGE = re.compile(r"^(<!-- from git -->\n)(?:.*\n)*?(?=<!-- end -->$)", re.MULTILINE)
SENTENCE = re.compile(r"(\bJAX )0\.\d+ to 0\.\d+")
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
    jax: dict[str, str]

    @property
    def pythons(self) -> list[str]:
        """The supported Pythons, oldest first."""
        return re.findall(r"Python :: (3\.\d+)", "\n".join(self.classifiers))

    @property
    def ends(self) -> tuple[str, str]:
        """The oldest and the newest supported release of JAX."""
        return min(self.jax, key=number), max(self.jax, key=number)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of Python and JAX that work."""
        every = ((python, jax) for python in self.pythons for jax in self.jax)
        return [(python, jax) for python, jax in every if number(python) >= number(self.jax[jax])]


def read() -> Metadata:
    """Return the content of metadata.toml; a missing or unknown key raises a TypeError."""
    table = tomllib.loads((ROOT / "release/metadata.toml").read_text())
    return Metadata(**{name.replace("-", "_"): value for name, value in table.items()})


def number(version: str) -> tuple[int, ...]:
    """Return a version as numbers, which compare as versions do."""
    return tuple(int(part) for part in version.split("."))


def jax_range(about: Metadata) -> str:
    """Return the range of JAX in the form of a requirement."""
    oldest, newest = about.ends
    major, minor = number(newest)
    return f">={oldest},<{major}.{minor + 1}"


def pair_lines(about: Metadata) -> str:
    """Return the pairs of Python and JAX in the form of a workflow's matrix."""
    return "".join(f'          - {{python: "{python}", jax: "{jax}"}}\n' for python, jax in about.pairs)


def support_row(about: Metadata) -> tuple[re.Pattern, str]:
    """Return the row of this version in the table of supported versions, and the pattern that finds it."""
    version = re.escape(".".join(about.version.split(".")[:2]))
    row = re.compile(rf"^(\| {version} \|).*", re.MULTILINE)
    return row, f" {', '.join(about.jax)} | {', '.join(about.pythons)} |"


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
    """Yield (path, right text) of every file that has a copy."""
    manifests = [
        ROOT / "pyproject.toml",
        ROOT / "shared/pyproject.toml",
        *sorted(ROOT.glob("packages/*/pyproject.toml")),
    ]
    workflows = [ROOT / f".github/workflows/{name}.yml" for name in ("test", "release")]
    install, jax = (PAGE, page_lines(about)), (SENTENCE, " to ".join(about.ends))
    places = {
        **{path: ((MANIFEST, manifest_lines(about)), (REQUIREMENT, jax_range(about))) for path in manifests},
        **{path: ((WORKFLOW, pair_lines(about)),) for path in workflows},
        ROOT / "README.md": (install, jax),
        ROOT / "docs/packages.md": (install,),
        ROOT / "docs/which-library.md": (jax,),
        ROOT / "docs/stability.md": (support_row(about),),
    }
    for path, patterns in places.items():
        text = path.read_text()
        for pattern, copy in patterns:
            text, count = pattern.subn(lambda match, copy=copy: match[1] + copy, text)
            if not count:
                raise SystemExit(
                    f"{path.relative_to(ROOT)} must have a place of metadata.toml; got no {pattern.pattern}."
                )
        yield path, text
    yield ROOT / "CITATION.cff", citation(about)


def with_addresses(markdown: str, folder: str, about: Metadata) -> str:
    """Return a page of a folder for readers elsewhere: links to files become links to the repository.

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
