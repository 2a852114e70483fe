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
    """Shows docstrings as they are meant: plain text with a few signs of Markdown."""

    def on_function(self, *, func: griffe.Function, **_):
        """Take the docstring that a decorator made, as those of the pipeline's operators."""
        if func.decorators and (text := inspect.getdoc(runtime(func))):
            func.docstring = griffe.Docstring(text, parent=func)

    def on_object(self, *, obj: griffe.Object, **_):
        """Give our own sections a paragraph each, and keep signs of mathematics from being read as Markdown."""
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
