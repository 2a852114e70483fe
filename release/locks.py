"""The lock file: for every package that the sessions install its version, the hashes of its files, and its groups.

An entry is a requirement with hashes, as pip reads it, and a comment with the dependency groups of pyproject.toml that
need the package, themselves or through others.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

LOCK = Path(__file__).with_name("lock.txt")
HEAD = "# What the sessions of noxfile.py install; `nox -s lock` writes this file.\n"
# Its builds differ from machine to machine: a machine without a GPU has one that no public list of files names. So
# there are no hashes for it, and the groups pin its version.
UNHASHED = ("torch",)


class Entry(NamedTuple):
    """A package of the lock file.

    Attributes:
      requirement: its name, version and marker, such as "colorama==0.4.6 ; sys_platform == 'win32'".
      hashes: the hashes of all its files.
      groups: the names of the groups that need it.
    """

    requirement: str
    hashes: tuple[str, ...]
    groups: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the package."""
        return self.requirement.partition("==")[0]

    def __str__(self):
        """Return the lines of the file."""
        lines = " \\\n".join((self.requirement, *(f"    --hash={each}" for each in self.hashes)))
        return f"{lines}\n    # {', '.join(self.groups)}\n"


def read(text: str | None = None) -> list[Entry]:
    """Return the entries of a lock file, which need no groups; those of release/lock.txt for None."""
    entries = []
    for block in re.split(r"\n(?=[a-z0-9])", "\n" + (LOCK.read_text() if text is None else text))[1:]:
        groups = re.search(r"^    # (.*)", block, re.MULTILINE)
        requirement, hashes = re.match(r"[^\\\n]*", block)[0].strip(), re.findall(r"--hash=(\S+)", block)
        entries.append(Entry(requirement, tuple(hashes), tuple(groups[1].split(", ")) if groups else ()))
    return entries


def of_groups(groups: Iterable[str]) -> str:
    """Return the requirements of some groups with their hashes, and with all that they need."""
    return "".join(str(entry) for entry in read() if set(groups).intersection(entry.groups))


def versions(but: tuple[str, ...] = ()) -> str:
    """Return the versions of all packages as constraints of pip, without those whose names begin with one of `but`."""
    return "".join(f"{entry.requirement}\n" for entry in read() if not entry.name.startswith(but))


def is_hashed(requirement: str) -> bool:
    """Return whether the lock file has the hashes of what a group requires."""
    return re.match(r"[\w.-]+", requirement)[0] not in UNHASHED


def with_groups(found: str, needs: Mapping[str, str]) -> str:
    """Return the lock file for what uv found for all groups, with hashes, and for each group, without them."""
    names = {group: {entry.name for entry in read(text)} for group, text in needs.items()}
    entries = (
        entry._replace(groups=tuple(group for group in needs if entry.name in names[group])) for entry in read(found)
    )
    return HEAD + "".join(map(str, entries))


def renew(session, groups: Mapping[str, list[str]], python: str) -> None:
    """Write the lock file: the newest versions that groups allow, from a version of Python on, for every platform."""
    command = ("uv", "pip", "compile", "--quiet", "--universal", "--python-version", python, "--no-header")
    command += ("--no-annotate", "--no-emit-index-url", "--no-emit-find-links")
    found = Path(session.create_tmp(), "found.txt")

    def solve(groups: Iterable[list[str]], *options) -> str:
        wanted = found.with_name("wanted.txt")
        requirements = dict.fromkeys(x for group in groups for x in group)
        wanted.write_text("\n".join(filter(is_hashed, requirements)))
        found.unlink(missing_ok=True)
        session.run(*command, *options, wanted, "-o", found, silent=True)
        return found.read_text()

    text = solve(groups.values(), "--generate-hashes")
    constraints = found.with_name("versions.txt")
    constraints.write_text("\n".join(entry.requirement for entry in read(text)))
    LOCK.write_text(with_groups(text, {name: solve([group], "-c", constraints) for name, group in groups.items()}))
