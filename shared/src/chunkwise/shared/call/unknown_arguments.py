"""The errors for arguments that the called function does not have, but other libraries or functions beside it do."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable)

_LAYOUT = (
    "leave it out; states are [K, V] here, so saved states that are [V, K] need `jnp.swapaxes(states, -1, -2)` before "
    "and after the call."
)
_HOST = "leave it out; `cu_seqlens` is an array of the device here, and nothing is found from it on the host."
_MASK = (
    "`segment_ids=attention_mask - 1` of the functions over whole sequences says it for integers: 0 at tokens, and "
    "below 0 at padding."
)
_SLOTS = "name the slots of a pool by `state_indices`, which the recurrent and ragged functions take."
_GRAPH = "leave it out; a jitted program serves all boundaries of the same shape."
_CONSTANT = "give the constant gates of the layer as `g_gamma`, [HV]."

INSTEAD = {
    "safe_gate": "leave it out; gates of any strength are safe here, and `lower_bound`, where a function has it, alone "
    "selects the bounded law.",
    "state_v_first": _LAYOUT,
    "transpose_state_layout": _LAYOUT,
    "disable_recompute": "leave it out; only `jax.checkpoint` makes the backward compute something again.",
    "cu_seqlens_cpu": _HOST,
    "chunk_indices": _HOST,
    "chunk_offsets": _HOST,
    "offsets": "call it `cu_seqlens`.",
    "head_first": "leave it out; heads follow tokens here, as in [B, T, H, K], so head-first tensors need "
    "`jnp.swapaxes(x, 1, 2)`.",
    "cp_context": "split the tokens over a mesh, or name the axis of a `shard_map` by `context_axis`.",
    "return_intermediate_states": "use the ragged function of the operator, which writes states between chunks into a "
    "pool, by `block_state_indices`.",
    "gk": "call it `g`; chunk_gla, chunk_kda and the functions beside them take gates [B, T, HV, K].",
    "gv": "leave it out; there are no gates of value channels here.",
    "reverse": "flip the tokens of every sequence before the call, as `jnp.flip(x, 1)` does for rows, and the output "
    "after it.",
    "ssm_state_indices": _SLOTS,
    "initial_state_indices": _SLOTS,
    "inplace_final_state": "leave it out; with `state_indices` the final states are the new pool, and jit with "
    "`donate_argnames` updates it in place.",
    "output_dtype": "leave it out, and cast the result.",
    "state_indices": "the recurrent and ragged functions of operators whose state is one array take it; elsewhere "
    "gather the states of the slots before the call, and scatter them after it.",
    "use_graph": _GRAPH,
    "max_num_seqs": _GRAPH,
    "backend": "leave it out, or name an `implementation`.",
    "layer_idx": _CONSTANT,
    "num_layers": _CONSTANT,
    "prenorm": "leave it out, and add the residual to `x` before the call.",
    "residual_in_fp32": "leave it out, and add the residual to `x` before the call.",
    "residual": "leave it out, and add it to the result of a convolution, or to `x` before a norm.",
    "cache": "call it `states`, without the oldest of its W inputs and with channels last: "
    "`jnp.swapaxes(cache, -1, -2)[:, 1:]`.",
    "attention_mask": _MASK,
    "padding_mask": _MASK,
    "seq_idx": "call it `segment_ids`, which the functions over whole sequences take.",
    "segment_ids": "the functions over whole sequences take it; here `cu_seqlens` has the boundaries of sequences.",
    "initial_state": "call it `states`, the pool with the states of all sequences.",
    "states": "call it `initial_state`.",
    "output_final_state": "leave it out; a serving step always returns the pool with the final states.",
    "softmax_scale": "call it `scale`.",
    "sm_scale": "call it `scale`.",
}
"""What to do instead, by the name of the argument. Some functions here do have one of these arguments."""


def explained(function: Function, instead: Mapping[str, str] = INSTEAD) -> Function:
    """Return a function whose TypeError for unknown arguments says what to do instead, by the texts of `instead`."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args, **kwargs):
        check(function.__qualname__, [name for name in kwargs if name not in known], known, instead)
        return function(*args, **kwargs)

    return cast("Function", call)


def bind(function: str, known: inspect.Signature, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, or raise TypeError as `explained` does."""
    check(function, [name for name in kwargs if name not in known.parameters], known.parameters, INSTEAD)
    try:
        return known.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{function}() {error}") from None


def check(function: str, unknown: Sequence[str], known: Iterable[str], instead: Mapping[str, str]) -> None:
    """Raise TypeError for names that are no arguments of a function, if there is something to say about one of them.

    A name that has no text, but is nearly the name of an argument of the function, is taken for a slip of the pen.
    """
    ends = [_end(name, known, instead) for name in unknown]
    if any(ends):
        begin = f"{function}() got an unexpected keyword argument"
        raise TypeError("\n".join(f"{begin} '{name}'{end}" for name, end in zip(unknown, ends, strict=True)))


def _end(name: str, known: Iterable[str], instead: Mapping[str, str]) -> str:
    """Return the end of the error for an unknown argument; empty if there is nothing to say."""
    if name in instead:
        return f": {instead[name]}"
    near = difflib.get_close_matches(name, known, 1)
    return f". Did you mean '{near[0]}'?" if near else ""
