"""Public functions of operators, made from a signature and a docstring; their arguments become records by name."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from chunkwise.shared import tuning
from chunkwise.shared.call import docstrings, forms, unknown_arguments, untouched
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.call.gates import GateActivation

Function = TypeVar("Function", bound=Callable)

# The names of arguments by their deprecated names; docs/stability.md says how long a call may use the latter.
RENAMED = {"gate_lower_bound": "min_gate"}


def public_function(
    run: Callable[[Arguments, Options, str | None], Any], like: Callable | None = None
) -> Callable[[Function], Function]:
    """Return a decorator for functions without a body: the result calls `run`, which is a method of an `Operator`.

    The docstring of the function is completed by the texts that `docstrings` has for this method, and by entries of
    `like`, a function of the same operator.
    """
    return public_function_by_name(run, run.__name__, like, to_records)


def public_function_by_name(
    run: Callable, kind: str, like: Callable | None = None, split: Callable[[dict[str, Any]], tuple] = lambda x: (x,)
) -> Callable[[Function], Function]:
    """Return a decorator as `public_function` does, for a `run` that takes all arguments by name in one dict.

    `kind` is a key of `docstrings.KINDS`, and `split` makes other arguments of `run` out of the dict.
    """
    complete = docstrings.completed(docstrings.KINDS.get(kind, ""), like)

    def decorate(function: Function) -> Function:
        known = forms.with_options(function, like)
        cast("Any", function).__signature__ = known
        function = complete(function)
        defaults = {name: parameter.default for name, parameter in known.parameters.items()}
        scale = [*defaults].index("scale") if "scale" in defaults else None
        renamed = {old: new for old, new in RENAMED.items() if new in defaults}

        @functools.wraps(function)
        def call(*args, **kwargs):
            for old, new in renamed.items():
                if old in kwargs:
                    kwargs = with_new_name(function.__name__, kwargs, old, new)
            named = defaults | unknown_arguments.bind(function.__name__, known, args, kwargs)
            warn_chunk_size(args[scale] if scale is not None and len(args) > scale else None)
            if untouched.qwix_is_imported():
                return untouched.run(run, *split(named))
            return run(*split(named))

        return cast("Function", call)

    return decorate


def with_new_name(function: str, kwargs: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the arguments of a call with one of them under its new name, and warn the caller of the function."""
    if new in kwargs:
        raise TypeError(f"{function}() got '{new}' and '{old}', which is the old name of the same argument")
    warnings.warn(f"`{old}` is deprecated: call it `{new}`.", DeprecationWarning, stacklevel=3)
    return {new if name == old else name: value for name, value in kwargs.items()}


def warn_chunk_size(scale: object) -> None:
    """Warn the caller of the function of a scale by position that looks like the size of chunks, as elsewhere."""
    if type(scale) is int and scale in tuning.CHUNK_SIZES:
        warnings.warn(
            f"`scale` is {scale} by position, where transformers has `chunk_size`: name the argument that you mean.",
            stacklevel=3,
        )


def to_records(named: dict[str, Any]) -> tuple[Arguments, Options, str | None]:
    """Return the records of the arguments of a call, given by their names, and the name of the implementation."""
    if "states" in named:
        # A serving step, whose states are a pool.
        named: dict[str, Any] = named | dict(initial_state=named["states"], output_final_state=True)
    make = lambda record: record(**{name: named[name] for name in record._fields if name in named})
    x = make(Arguments)._replace(slots=make(Slots) if "state_indices" in named else None)
    # `Options.scale` is chosen later.
    options = make(Options)._replace(activation=make(GateActivation), scale=None)
    return x, options, named.get("implementation")
