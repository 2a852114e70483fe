"""Docstrings of public functions: paragraphs, sections and entries that functions of one kind share.

The docstring of a function in the source has only the text that is particular to the function; `completed` adds the
rest, so that `help()` and the documentation site show the whole. It opens with the call: a summary, the equation, the
shapes and an example. The text of a kind is the docstring of a module of `texts`. It has `{name}` in the place of an
operator's name, `{function}` of the function's, `{arrays}` and `{shapes}` of the arrays that every call gives, and
`{names}` and `{results}` of what the function returns.
"""

import inspect
import itertools
import re
import textwrap
from collections.abc import Callable
from typing import TypeVar

from chunkwise.shared.call.texts import chunk, ragged, recurrent, stage

Function = TypeVar("Function", bound=Callable)

_text = lambda module: (module.__doc__ or "").partition("\n\n")[2]
KINDS, STAGE = {"chunk": _text(chunk), "recurrent": _text(recurrent), "ragged": _text(ragged)}, _text(stage)

_LABELS = ("Dims", "Args", "Returns", "Raises", "Accuracy", "Cost", "Source")
_LABEL = re.compile(rf"^({'|'.join(_LABELS)}):", re.MULTILINE)
_NAMES = re.compile(r"^  (\w+(?:, \w+)*):", re.MULTILINE)


def completed(kind: str, like: Callable | None = None) -> Callable[[Function], Function]:
    """Return a decorator that completes the docstring of a function by the text of its kind.

    An equation is a block of code after the summary; where the function has none, it has the equation of `like`. The
    paragraphs of the kind follow it, and then the other paragraphs of the function. A section of the kind is added
    where the function has no such section. Args gets an entry for every parameter that the function does not describe:
    the entry of the kind or, where the kind has none, the entry in the docstring of `like`, a function with the same
    argument.
    """

    def decorate(function: Function) -> Function:
        if function.__doc__:
            parameters = inspect.signature(function).parameters
            common = kind.replace("{name}", function.__name__.partition("_")[2])
            others = None if like is None else like.__doc__
            whole = _merge(function.__doc__, common, others or "", tuple(parameters))
            # Without gates a rule forgets nothing, so an example has them.
            arrays = [name for name, x in parameters.items() if x.default is x.empty or name == "g"]
            function.__doc__ = _with_call(whole, function.__name__, arrays)
        return function

    return decorate


def _merge(text: str, kind: str, like: str, parameters: tuple[str, ...]) -> str:
    (first, sections), (second, common), (third, others) = map(_split, (text, kind, like))
    summary, equation, rest = _opening(first)
    merged = common | sections
    for label, names in (("Args", parameters), ("Raises", ("ValueError", "NotImplementedError"))):
        if label in merged:
            entries: dict[str, str] = {}
            for each in (others, common, sections):
                entries |= _entries(each.get(label, ""))
            known = itertools.groupby((name for name in names if name in entries), entries.__getitem__)
            merged[label] = "".join(f"\n  {', '.join(group)}:{entry}" for entry, group in known)
    whole = "\n\n".join(filter(None, (summary, equation or _opening(third)[1], second, rest)))
    for label in (label for label in _LABELS if label in merged):
        # Accuracy, Cost and Source make one block of lines.
        whole += ("\n" if label in ("Cost", "Source") else "\n\n") + f"{label}:{merged[label]}"
    return whole


def _opening(first: str) -> tuple[str, str, str]:
    """Return the summary, the equation after it, and the other paragraphs of the text before the sections."""
    summary, *rest = first.split("\n\n")
    equation = rest.pop(0) if rest and rest[0].startswith("    ") else ""
    return summary, equation, "\n\n".join(rest)


def _with_call(text: str, function: str, arrays: list[str]) -> str:
    """Fill in the call: an array has the first shape in its entry, and Returns names the results with their shapes."""
    if "{shapes}" not in text:
        return text
    sections = _split(text)[1]
    entries = _entries(sections["Args"])
    results = re.findall(r"(\w+) (\[.*?\])", sections["Returns"])
    by_shape = lambda pairs: "; ".join(
        f"{', '.join(name for name, other in pairs if other == shape)} {shape}"
        for shape in dict.fromkeys(shape for _, shape in pairs)
    )
    filled = {
        "function": function,
        "arrays": ", ".join(arrays),
        "shapes": by_shape([(name, shape[0]) for name in arrays if (shape := re.search(r"\[.*?\]", entries[name]))]),
        "names": ", ".join(name for name, _ in results),
        "results": by_shape(results),
    }
    for name, value in filled.items():
        text = text.replace(f"{{{name}}}", value)
    # A line ends after a semicolon, not inside of a shape.
    wrap = lambda line: textwrap.fill(re.sub("(?<!;) ", "\0", line[0]), 120).replace("\0", " ")
    return re.sub(r"^Shapes: .*$", wrap, text, count=1, flags=re.MULTILINE)


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Return the paragraphs of a docstring before its sections, and its sections by their labels."""
    first, *parts = map(str.rstrip, _LABEL.split(inspect.cleandoc(text)))
    return first, dict(zip(parts[::2], parts[1::2], strict=True))


def _entries(section: str) -> dict[str, str]:
    """Return the text of every entry of a section by the name that it describes."""
    parts = _NAMES.split(section)[1:]
    pairs = zip(parts[::2], map(str.rstrip, parts[1::2]), strict=True)
    return {name: entry for names, entry in pairs for name in names.split(", ")}
