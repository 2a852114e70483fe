"""The flops of the matrix products of a compiled program, read from its text."""

import functools
import math
import re

_NAME = r"%?([\w.\-]+)"
_RESULT = re.compile(rf"^\s*(?:ROOT )?{_NAME} = \w+\[([\d,]*)\]", re.MULTILINE)
_COMPUTATION = re.compile(rf"^(ENTRY )?{_NAME} \(.*?^}}", re.MULTILINE | re.DOTALL)
_PRODUCT = re.compile(
    rf"^\s*(?:ROOT )?{_NAME} = .* dot\((?:\S+ )?{_NAME},.*lhs_contracting_dims={{([\d,]*)}}", re.MULTILINE
)
_LOOP = re.compile(rf'^.* while\(.*body={_NAME}.*"known_trip_count":{{"n":"(\d+)"', re.MULTILINE)
_CALL = re.compile(rf"(?:calls|to_apply)={_NAME}")


def _sizes(dimensions: str) -> list[int]:
    return [int(size) for size in dimensions.split(",") if size]


def product_flops(text: str) -> int:
    """Return the flops of all matrix products of a program compiled for a CPU; a loop counts once for every iteration.

    `compiled.cost_analysis()` counts a loop once.

    Args:
      text: what `compiled.as_text()` returns.
    """
    computations = {match[2]: match[0] for match in _COMPUTATION.finditer(text)}
    (entry,) = (match[2] for match in _COMPUTATION.finditer(text) if match[1])
    shapes = {match[1]: _sizes(match[2]) for match in _RESULT.finditer(text)}

    @functools.cache
    def count(name: str) -> int:
        lines = computations[name]
        outside = sum(
            2 * math.prod(shapes[result]) * math.prod(shapes[left][i] for i in _sizes(contracted))
            for result, left, contracted in _PRODUCT.findall(lines)
        )
        loops = sum(int(turns) * count(body) for body, turns in _LOOP.findall(lines))
        return outside + loops + sum(count(called) for called in _CALL.findall(lines))

    return count(entry)
