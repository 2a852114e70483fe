"""The errors for arguments that flash-linear-attention or its copies have, and the called function does not."""

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable)

_LAYOUT = (
    "leave it out; states are [K, V] here, so saved states that are [V, K] need `jnp.swapaxes(states, -1, -2)` before "
    "and after the call."
)
_HOST = "leave it out; `cu_seqlens` is an array of the device here, and nothing is found from it on the host."
_SLOTS = "name the slots of a pool by `state_indices`, which the recurrent and ragged functions take."

INSTEAD = {
    "safe_gate": "leave it out; gates of any strength are safe here, and `lower_bound`, where a function has it, alone "
    "selects the bounded law.",
    "state_v_first": _LAYOUT,
    "transpose_state_layout": _LAYOUT,
    "disable_recompute": "leave it out; `jax.checkpoint` and its policies decide what the backward computes again.",
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
    "residual": "leave it out, and add it to the result of a convolution, or to `x` before a norm.",
    "cache": "call it `states`, without the oldest of its W inputs and with channels last: "
    "`jnp.swapaxes(cache, -1, -2)[:, 1:]`.",
}
"""What to do instead, by the name of the argument. Some functions here do have one of these arguments."""


def explained(function: Function) -> Function:
    """Return a function whose TypeError for such an argument says what to do instead."""
    known = inspect.signature(function).parameters
    instead = {name: text for name, text in INSTEAD.items() if name not in known}

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not instead.keys().isdisjoint(kwargs):
            begin = f"{function.__qualname__}() got an unexpected keyword argument"
            raise TypeError("\n".join(f"{begin} '{name}': {instead[name]}" for name in kwargs if name in instead))
        return function(*args, **kwargs)

    return cast("Function", call)
