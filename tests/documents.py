"""The promises of docstrings, for tests that check them."""

import inspect
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

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


def check_call(function: Callable, **sizes: int) -> None:
    """Check that ten lines have the equation, the shapes of all arrays, and an example that runs on such arrays."""
    top = "\n".join((inspect.getdoc(function) or "").splitlines()[:10])
    summary, equation, line, example = top.split("\n\n")[:4]
    assert summary.endswith("."), summary
    assert all(text.startswith("    ") and " = " in text for text in equation.splitlines()), equation
    assert line.startswith("Shapes: "), line
    shapes = {}
    for names, shape in re.findall(r"(\w+(?:, \w+)*) (\[.*?\])", line):
        # A space between two sizes is a product.
        shapes |= dict.fromkeys(names.split(", "), tuple(eval(re.sub(r"(?<=\w) (?=\w)", "*", shape), {}, sizes)))
    arrays = {name: jnp.full(shape, -0.1) for name, shape in shapes.items()}
    arrays |= dict(cu_seqlens=jnp.array([0, sizes["T"]], jnp.int32), state_indices=jnp.array([1], jnp.int32))
    names, _, call = example.strip().partition(" = ")
    assert call.startswith(f"{function.__name__}("), call
    # To trace the call is enough: it has the shapes of the results, and no time is spent on compiling.
    out = jax.eval_shape(lambda x: eval(call, {function.__name__: function, **sizes} | x), arrays)
    results = dict(zip(names.split(", "), out if ", " in names else [out], strict=True))
    for name, x in results.items():
        # The first array of a state of several has the shape that is named.
        assert x is None or jax.tree.leaves(x)[0].shape == shapes[name], name
