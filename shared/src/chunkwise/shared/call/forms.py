"""The keyword arguments of the forms of an operator: the names that another form has, and others.

A form gives its arrays and `**options`; `with_options` completes its signature by those of the form over whole
sequences, and the signature of this form by those of another operator that it is like. A static checker takes every
name that some operator has, and a call takes those of its operator.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypedDict

import jax

from chunkwise.shared.call.checks import Sharding


class _OfAllForms(TypedDict, total=False):
    implementation: str | None
    sharding: Sharding | None


class _OfGates(_OfAllForms, total=False):
    use_qk_l2norm_in_kernel: bool
    min_gate: float | None
    use_gate_in_kernel: bool | str
    A_log: jax.Array | None
    dt_bias: jax.Array | None
    lower_bound: float | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool


class _OfAllGates(_OfGates, total=False):
    use_erase_sigmoid_in_kernel: bool
    use_write_sigmoid_in_kernel: bool


class Whole(_OfAllForms, total=False):
    """The keyword arguments of the form over whole sequences of a recipe."""

    cu_seqlens: jax.Array | None
    segment_ids: jax.Array | None
    chunk_size: int | None


class Linear(Whole, total=False):
    """The keyword arguments of the form over whole sequences of an operator without options for its gates."""

    context_axis: str | tuple[str, ...] | None
    config: Any


class Delta(Linear, _OfGates, total=False):
    """The keyword arguments of the form over whole sequences of a delta rule."""

    disable_recompute: bool


class FewTokens(_OfAllForms, total=False):
    """The keyword arguments of the form for a few tokens of a recipe."""

    cu_seqlens: jax.Array | None


class Recurrent(_OfAllGates, total=False):
    """The keyword arguments of the form for a few tokens."""

    cu_seqlens: jax.Array | None
    state_indices: jax.Array | None
    has_initial_state: jax.Array | None
    context_axis: str | tuple[str, ...] | None


class Ragged(_OfAllGates, total=False):
    """The keyword arguments of the form for a serving step."""

    has_initial_state: jax.Array | None
    num_decodes: int | jax.Array
    num_sequences: int | jax.Array | None
    read_indices: jax.Array | None
    num_accepted_tokens: jax.Array | None
    decode_tokens: int | None
    block_state_indices: jax.Array | None
    block_size: int | None
    scale: float | None
    chunk_size: int | None


# The arguments that an operator has if the form that it is like has them.
_OF_WHOLE = frozenset({*Delta.__annotations__, *_OfAllGates.__annotations__, "scale"})
# The arguments that say what an array is; an operator without the array does not have them.
_OF_ARRAYS = {
    "g": ("use_gate_in_kernel", "A_log", "dt_bias", "lower_bound"),
    "beta": ("use_beta_sigmoid_in_kernel",),
}
# The default of an argument that no such form has is None, but for these.
_DEFAULTS = {"num_decodes": 0}


def with_options(function: Callable, like: Callable | None) -> inspect.Signature:
    """Return the signature of a function with the names of its `**options` in their place.

    These are the names of the TypedDict of `options` that `like`, a form over whole sequences, has too or that no such
    form has, but for what belongs to an array that the function lacks. A function without `**options` keeps its
    signature.
    """
    own = inspect.signature(function)
    *parameters, last = own.parameters.values()
    if last.kind is not inspect.Parameter.VAR_KEYWORD:
        return own
    (form,) = typing.get_args(last.annotation)
    known: dict[str, Any] = {} if like is None else {**inspect.signature(like).parameters}
    without = {name for y, names in _OF_ARRAYS.items() if y in known and y not in own.parameters for name in names}
    names = [name for name in form.__annotations__ if name not in known and name not in _OF_WHOLE]
    names += [name for name in known if name in form.__annotations__ and name not in without]
    parameters += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY,
            annotation=known[name].annotation if name in known else form.__annotations__[name],
            default=known[name].default if name in known else _DEFAULTS.get(name),
        )
        for name in names
    ]  # fmt: skip
    return own.replace(parameters=parameters)
