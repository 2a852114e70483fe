"""How docstrings become pages: an extension of griffe, which reads the sources."""

import importlib
import inspect
import re
from collections.abc import Sequence

import griffe

# Sections of ours that are one paragraph each, and which griffe does not know.
LABEL = re.compile(r"^(Shapes|Dims|Accuracy|Cost|Source):", re.MULTILINE)
# An indented block is code, and so is what stands between backticks.
CODE = re.compile(r"((?:\n\n(?: {4}.*\n?|\n)+)|`[^`\n]+`)")


class PlainText(griffe.Extension):
    """Shows docstrings as they are meant: plain text with a few signs of Markdown.

    Decorators complete the docstrings of operators and stages, so that these docstrings are taken from the functions.
    """

    def on_module_members(self, *, mod: griffe.Module, **_):
        """Show what a module has under a name as a function, if it is one without a `def`, as the layers are."""
        for name, attribute in mod.attributes.items():
            if attribute.is_public and inspect.isfunction(made := runtime(attribute)):
                mod.set_member(name, function_of(name, made))

    def on_object(self, *, obj: griffe.Object, **_):
        """Take the docstring that a decorator or a class above completed, and show it as it is meant."""
        decorated = obj.is_function and bool(obj.decorators)
        made = runtime(obj) if obj.is_class or decorated else None
        if made is not None and (text := inspect.getdoc(made)):
            obj.docstring = griffe.Docstring(text, parent=obj)
            if decorated and any(x.kind is griffe.ParameterKind.var_keyword for x in obj.parameters):
                # A decorator names them, too.
                obj.parameters = function_of(obj.name, made).parameters
        if obj.docstring:
            names = [x.name for x in obj.parameters] if obj.is_function else []
            obj.docstring.value = as_markdown(inspect.cleandoc(obj.docstring.value), names)


def runtime(obj: griffe.Object):
    """Return the function or value itself, or None if it cannot be had by its name."""
    try:
        return getattr(importlib.import_module(obj.module.path), obj.name, None)
    except ImportError:
        # Only these import libraries that are not here.
        if obj.module.path.startswith("chunkwise.integrations."):
            return None
        raise


def function_of(name: str, made) -> griffe.Function:
    """Return what griffe would read of the `def` of a function."""

    def parameter(x: inspect.Parameter) -> griffe.Parameter:
        default = None if x.default is x.empty else getattr(x.default, "__name__", repr(x.default))
        annotation = None if x.annotation is x.empty else inspect.formatannotation(x.annotation).removeprefix("~")
        kind = griffe.ParameterKind[x.kind.name.lower()]
        return griffe.Parameter(x.name, annotation=annotation, kind=kind, default=default)

    parameters = griffe.Parameters(*map(parameter, inspect.signature(made).parameters.values()))
    return griffe.Function(name, parameters=parameters, docstring=griffe.Docstring(inspect.getdoc(made) or ""))


def as_markdown(text: str, names: Sequence[str] = ()) -> str:
    """Return a docstring with its labels bold and everything that only looks like Markdown or HTML escaped.

    The `names` of arguments become code in the text, if an underscore tells them from words.
    """
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    if named := "|".join(name for name in names if "_" in name):
        # What begins an entry of Args is code already.
        name = re.compile(rf"^  \w+(?:, \w+)*:|(?<![\w.])(?:{named})(?!\w)", re.MULTILINE)
        code = lambda match: match[0] if match[0].endswith(":") else f"`{match[0]}`"
        parts = CODE.split(text)
        parts[::2] = [name.sub(code, part) for part in parts[::2]]
        text = "".join(parts)
    parts = CODE.split(text)
    parts[::2] = [re.sub(r"[<*]", lambda sign: {"<": "&lt;", "*": r"\*"}[sign[0]], part) for part in parts[::2]]
    return LABEL.sub(r"\n**\1:**", "".join(parts))
