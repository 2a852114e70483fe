"""The promises of docstrings, for tests that check them."""

import math
import re
from collections.abc import Callable

_TOKEN = r"\d+\.?\d*|log2|[A-Z]+|//|\*\*|[-+*/(),]"


def evaluate(formula: str, **sizes: int) -> float:
    """Return the value of a formula from a docstring, such as "2 B T HV (C K + 3 K V)", where a space is a product.

    Raises:
      ValueError: the formula holds something else than numbers, sizes, log2 and operators.
    """
    if left := re.sub(_TOKEN, "", formula).strip():
        raise ValueError(f"`formula` must hold numbers, sizes, log2 and operators; got {left!r} in {formula!r}.")
    joined: list[str] = []
    for token in re.findall(_TOKEN, formula):
        value = token[0].isalnum() or token == "("
        if joined and value and joined[-1] != "log2" and (joined[-1][-1].isalnum() or joined[-1] == ")"):
            joined.append("*")
        joined.append(token)
    return float(eval(" ".join(joined), {"__builtins__": {}, "log2": math.log2}, dict(sizes)))


def documented_flops(function: Callable, **sizes: int) -> float:
    """Return the flops that the line "Cost: <formula> flops" of a docstring promises for these sizes."""
    text = re.sub(r"\s+", " ", function.__doc__ or "")
    found = re.search(r"Cost: (?:about )?((?:[^.;:]|\.\d)*?) flops", text)
    if found is None:
        raise ValueError(f"The docstring of {function.__name__} must say `Cost: <formula> flops`; got none.")
    return evaluate(found[1], **sizes)
