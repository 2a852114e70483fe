"""The text of a program that XLA has compiled: its computations, and the operations of each."""

import re
from typing import NamedTuple


class Operation(NamedTuple):
    """An operation.

    Attributes:
      name: its name.
      result: the type of its result, as text.
      kind: what it does, such as "fusion".
      rest: the text of its operands and attributes.
    """

    name: str
    result: str
    kind: str
    rest: str

    def names(self, attribute: str) -> list[str]:
        """Return the computations that an attribute of this name lists."""
        found = re.search(rf"\b{attribute}=(?:\{{([^}}]*)\}}|([^\s,}})]+))", self.rest)
        return [name.strip().lstrip("%") for name in (found[1] or found[2]).split(",")] if found else []

    @property
    def branches(self) -> list[str]:
        """The branches of a condition, by their numbers; nothing for another operation."""
        # The text lists the true one of two branches first.
        return self.names("branch_computations") or self.names("false_computation") + self.names("true_computation")

    @property
    def turns(self) -> int | None:
        """How often a loop turns; None if the text does not say it."""
        told = re.search(r'known_trip_count"?:\{"?n"?:"(\d+)"', self.rest)
        return int(told[1]) if told else None


def computations(text: str) -> tuple[dict[str, list[Operation]], str]:
    """Return the operations of all computations by name, and the name of the first one that runs."""
    found: dict[str, list[Operation]] = {}
    current, entry = "", ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", line):
            current = head[2]
            entry = current if head[1] else entry
            found[current] = []
        elif operation := re.match(r"\s+(?:ROOT )?%?(\S+) = (.+?) ([a-z][\w\-]*)\((.*)$", line):
            found[current].append(Operation(*operation.groups()))
    return found, entry
