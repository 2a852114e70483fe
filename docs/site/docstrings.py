"""How docstrings become pages: an extension of griffe, which reads the sources."""

import importlib
import inspect
import re

import griffe

# Sections of ours that are one paragraph each, and which griffe does not know.
LABEL = re.compile(r"^(Dims|Accuracy|Cost|Source):", re.MULTILINE)
# An indented block is code, and so is what stands between backticks.
CODE = re.compile(r"((?:\n\n(?: {4}.*\n?|\n)+)|`[^`\n]+`)")


class PlainText(griffe.Extension):
    """Shows docstrings as they are meant: plain text with a few signs of Markdown.

    Those of the pipeline's operators are made by a decorator, so that they are taken from the functions themselves.
    """

    def on_object(self, *, obj: griffe.Object, **_):
        """Take the docstring that a decorator made, and show it as it is meant."""
        if obj.is_function and obj.decorators and (text := inspect.getdoc(runtime(obj))):
            obj.docstring = griffe.Docstring(text, parent=obj)
        if obj.docstring:
            obj.docstring.value = as_markdown(inspect.cleandoc(obj.docstring.value))


def runtime(func: griffe.Function):
    """Return the function itself, or None if it cannot be had by its name."""
    try:
        return getattr(importlib.import_module(func.module.path), func.name, None)
    except ImportError:
        return None


def as_markdown(text: str) -> str:
    """Return a docstring with its labels bold and everything that only looks like Markdown or HTML escaped."""
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    parts = CODE.split(text)
    parts[::2] = [re.sub(r"[<*]", lambda sign: {"<": "&lt;", "*": r"\*"}[sign[0]], part) for part in parts[::2]]
    return LABEL.sub(r"\n**\1:**", "".join(parts))
