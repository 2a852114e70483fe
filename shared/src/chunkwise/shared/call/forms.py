"""The keyword arguments of the forms of an operator: the names that its form over whole sequences has, and others.

A form gives its arrays and `**options`; `with_options` completes its signature. A static checker takes every name that
some operator has, and a call takes those of its operator.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypedDict

import jax

from chunkwise.shared.call.checks import Sharding


class _OfAllForms(TypedDict, total=False):
    use_qk_l2norm_in_kernel: bool
    min_gate: float | None
    use_gate_in_kernel: bool | str
    A_log: jax.Array | None
    dt_bias: jax.Array | None
    lower_bound: float | None
    use_beta_sigmoid_in_kernel: bool
    use_erase_sigmoid_in_kernel: bool
    use_write_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    implementation: str | None
    sharding: Sharding | None


class Whole(_OfAllForms, total=False):
    """The keyword arguments of the form over whole sequences of a recipe."""

    cu_seqlens: jax.Array | None
    segment_ids: jax.Array | None
    chunk_size: int | None


class FewTokens(_OfAllForms, total=False):
    """The keyword arguments of the form for a few tokens of a recipe."""

    cu_seqlens: jax.Array | None


class Recurrent(_OfAllForms, total=False):
    """The keyword arguments of the form for a few tokens."""

    cu_seqlens: jax.Array | None
    state_indices: jax.Array | None
    has_initial_state: jax.Array | None
    context_axis: str | tuple[str, ...] | None


class Ragged(_OfAllForms, total=False):
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


# The arguments of forms that the form over whole sequences has, too, unless the operator has no use for them.
_OF_WHOLE = frozenset({"cu_seqlens", "context_axis", "scale", "chunk_size"})
# The default of an argument that the form over whole sequences does not have is None, but for these.
_DEFAULTS = {"num_decodes": 0}


def with_options(function: Callable, whole: Callable | None) -> inspect.Signature:
    """Return the signature of a function with the names of its `**options` in their place.

    These are the names of the TypedDict of `options` that `whole`, the form over whole sequences, has too or that no
    such form has. A function without `**options` keeps its signature.
    """
    own = inspect.signature(function)
    *parameters, last = own.parameters.values()
    if last.kind is not inspect.Parameter.VAR_KEYWORD:
        return own
    (form,) = typing.get_args(last.annotation)
    known: dict[str, Any] = {} if whole is None else {**inspect.signature(whole).parameters}
    of_form = [name for name in form.__annotations__ if name not in _OfAllForms.__annotations__]
    names = [name for name in of_form if name in known or name not in _OF_WHOLE]
    names += [name for name in known if name in _OfAllForms.__annotations__]
    parameters += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=form.__annotations__[name],
            default=known[name].default if name in known else _DEFAULTS.get(name),
        )
        for name in names
    ]  # fmt: skip
    return own.replace(parameters=parameters)
