"""What docstrings promise, read by tests."""

import re
from collections.abc import Callable


def evaluate(formula: str, **sizes: int) -> float:
    """Return the value of a formula as docstrings write it: "2 B T HV (C K + 3 K V)", a space for every product."""
    tokens = re.findall(r"\d+\.?\d*|log2|[A-Z]+|//|\*\*|[-+*/(),]", formula)
    joined: list[str] = []
    for token in tokens:
        value = token[0].isalnum() or token == "("
        if joined and value and joined[-1] != "log2" and (joined[-1][-1].isalnum() or joined[-1] == ")"):
            joined.append("*")
        joined.append(token)
    from math import log2

    return float(eval(" ".join(joined), {"__builtins__": {}, "log2": log2}, dict(sizes)))


def documented_flops(function: Callable, **sizes: int) -> float:
    """Return the flops that the line "Cost: <formula> flops" of a docstring promises for these sizes."""
    text = re.sub(r"\s+", " ", function.__doc__ or "")
    found = re.search(r"Cost: (?:about )?([^.;:]*?) flops", text)
    if found is None:
        raise ValueError(f"The docstring of {function.__name__} must say `Cost: <formula> flops`; got none.")
    return evaluate(found[1], **sizes)
