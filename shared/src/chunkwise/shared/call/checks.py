"""Argument checks: one sentence, before anything is computed."""

import itertools
import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise.shared import compat, tuning
from chunkwise.shared.kernels import activations

# The implementations of operators: plain JAX, a chain with one kernel for every stage, one kernel for every direction.
_IMPLEMENTATIONS = ("xla", "staged", "fused")
# How an array is split over the devices of a mesh.
Sharding = NamedSharding | PartitionSpec
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
# Tokens, chunks and slots are counted in int32.
MOST_COUNTED = 2**31 - 1
_OTHER_LIBRARIES = ("torch", "tensorflow", "mlx", "cupy", "paddle")


def check(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`."""
    if not condition:
        raise ValueError(message)


def check_library(name: str, x) -> None:
    """Check that x is not an array of a library whose arrays JAX does not take; a value that is no array passes."""
    kind = type(x)
    check(
        kind.__module__.split(".")[0] not in _OTHER_LIBRARIES,
        f"`{name}` must be an array of JAX or numpy, which `jnp.from_dlpack` makes of others; got "
        f"{kind.__module__}.{kind.__qualname__}.",
    )


def as_int32(x) -> Any:
    """Return a numpy array of integers as int32 if its values fit, and anything else as it is.

    numpy counts in int64, and so do the schedulers and collators that are written in it.
    """
    if not isinstance(x, np.ndarray) or not np.issubdtype(x.dtype, np.integer):
        return x
    range_ = np.iinfo(np.int32)
    fits = x.size == 0 or (x.min() >= range_.min and x.max() <= range_.max)
    return x.astype(np.int32) if fits else x


def check_floating(name: str, x, label: str) -> tuple[int, ...]:
    """Check that x is an array of floating type and return its shape; `label` names its dimensions."""
    check_library(name, x)
    check(hasattr(x, "shape") and hasattr(x, "dtype"), f"`{name}` must be an array {label}; got {type(x).__name__}.")
    check(any(x.dtype == t for t in _FLOATS), f"`{name}` must be float32, bfloat16 or float16; got {x.dtype}.")
    return tuple(x.shape)


def check_type(name: str, dtype, known: Iterable[Any] = _FLOATS) -> Any:
    """Return the type of numbers that an argument names, which must be one of those that are known."""
    names = tuple(jnp.dtype(t).name for t in known)
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    check(found is not None and found.name in names, f"`{name}` must be one of {names}; got {dtype!r}.")
    return found


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number that is known when the program is built."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_size(name: str, size) -> None:
    """Check that an argument that is known when the program is built is a whole number above 0."""
    check(
        is_whole(size) and int(size) > 0,
        f"`{name}` must be a whole number above 0{when_built(size)}; got {shown(size)}.",
    )


def check_activation(activation) -> None:
    """Check the name of an activation; None is the identity."""
    known = activation is None or (isinstance(activation, str) and activation in activations.ACTIVATIONS)
    check(known, f"`activation` must be one of {activations.ACTIVATIONS}; got {activation!r}.")


def check_array(name: str, x, dims: str, shape: tuple[int | None, ...] | None = None) -> tuple[int, ...]:
    """Check that x is a floating array with one dimension per name in `dims` and return its shape.

    Args:
      name: the argument's name.
      x: the argument.
      dims: names of the dimensions, "B T H K".
      shape: required sizes; None leaves a dimension free.
    """
    label = "[" + ", ".join(dims.split()) + "]"
    check_floating(name, x, label)
    check(len(x.shape) == len(dims.split()), f"`{name}` must have shape {label}; got {tuple(x.shape)}.")
    check(all(x.shape), f"`{name}` must not be empty; got {tuple(x.shape)}.")
    check_countable(name, x.shape, dims)
    if shape is not None:
        fits = all(want is None or want == got for want, got in zip(shape, x.shape, strict=True))
        wanted = "(" + ", ".join("any" if want is None else str(want) for want in shape) + ")"
        check(fits, f"`{name}` must have shape {label} = {wanted}; got {tuple(x.shape)}.")
    return tuple(x.shape)


def check_countable(name: str, shape: Iterable[Any], dims: str) -> None:
    """Check that int32 counts the entries of every dimension, and the tokens of all rows."""
    sizes = {dim: n for dim, n in zip(dims.split(), shape, strict=True) if isinstance(n, int)}
    if "B" in sizes and "T" in sizes:
        sizes["B T"] = sizes["B"] * sizes["T"]
    for dim, n in sizes.items():
        check(
            n <= MOST_COUNTED,
            f"`{name}` must have {dim} of at most {MOST_COUNTED}, which int32 counts; got {dim} = {n}.",
        )


def check_heads(H: int, HV: int, name: str = "v") -> None:
    """Check that the HV value heads of the argument of this name can share H query and key heads evenly."""
    check(HV % H == 0, f"`{name}` must have a multiple of the heads of `k`; got {HV} value heads for {H} key heads.")


def check_value_heads(v, keys: tuple[int, ...]) -> tuple[int, int]:
    """Check the values [B, T, HV, V] that belong to keys of shape (B, T, H, K), and return HV and V."""
    (B, T, H, _), shape = keys, tuple(getattr(v, "shape", ()))
    # Keys and values whose heads come first seem to have as many heads, and other tokens.
    swapped = len(shape) == 4 and shape[0] == B and shape[2] == H and shape[1] > T and shape[1] % T == 0
    wanted = f"[B, T, HV, V] = ({B}, {T}, any, any)"
    instead = "head-first tensors, [B, H, T, K] and [B, HV, T, V], need `jnp.swapaxes(x, 1, 2)`"
    check(not swapped, f"`v` must have shape {wanted}; got {shape}: {instead}.")
    HV, V = check_array("v", v, "B T HV V", (B, T, None, None))[2:]
    check_heads(H, HV)
    return HV, V


def check_gates(name: str, g, shape: tuple[int, int, int], K: int) -> None:
    """Check gates per head, of `shape` (B, T, HV), or gates per channel, of shape (B, T, HV, K); None passes."""
    if g is not None:
        channels = getattr(g, "ndim", 3) == 4
        _check_gate(name, g, (*shape, K) if channels else shape)


def _check_gate(name: str, g, shape: tuple[int, ...]) -> None:
    """Check gates of `shape` (B, T, HV) or (B, T, HV, K), beside which tensors may be head-first."""
    dims, (B, T, HV), got = "B T HV K" if len(shape) == 4 else "B T HV", shape[:3], tuple(getattr(g, "shape", ()))
    swapped = T != HV and got == (B, HV, T, *shape[3:])
    check(
        not swapped,
        f"`{name}` must have shape [{', '.join(dims.split())}] = {shape}; got {got}: `q`, `k` and `v`, or `{name}`, "
        f"seem to be head-first, and need `jnp.swapaxes(x, 1, 2)`.",
    )
    check_array(name, g, dims, shape)


def check_scale(scale) -> None:
    """Check that the scale of the output is one number, traced or not; None passes."""
    check_library("scale", scale)
    number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    scalar = getattr(scale, "shape", None) == () and any(
        jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer)
    )
    check(
        scale is None or number or scalar,
        f"`scale` must be None, a number or a scalar array; got {getattr(scale, 'shape', scale)!r}.",
    )
    check(not number or (math.isfinite(scale) and scale != 0), f"`scale` must be finite and not 0; got {scale!r}.")


def check_flags(**flags) -> None:
    """Check that static arguments, given by their names, are True or False: they cannot be traced, nor be strings."""
    for name, value in flags.items():
        check(
            isinstance(value, bool | np.bool_),
            f"`{name}` must be True or False, known when the program is built; got {shown(value)}.",
        )


def _is_array(value) -> bool:
    """Return whether a value is an array, traced or not; a numpy scalar is no array."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def _kind(value) -> str:
    """Return the type and the shape of an array, or the type of another value."""
    array = hasattr(value, "shape") and hasattr(value, "dtype")
    return f"{value.dtype} {tuple(value.shape)}" if array else type(value).__name__


def shown(value) -> str:
    """Return a value as an error message shows it: an array, traced or not, by its type and shape."""
    if _is_array(value):
        return f"an array {_kind(value)}"
    return f"a {type(value).__name__} with arrays" if any(map(_is_array, jax.tree.leaves(value))) else repr(value)


def when_built(value) -> str:
    """Return a part of the error for a static number if it got an array: that its value must be known."""
    return ", known when the program is built" if _is_array(value) else ""


def check_chunk_size(chunk_size) -> None:
    """Check that the chunk size is one that the kernels are built for."""
    check(
        is_whole(chunk_size) and chunk_size in tuning.CHUNK_SIZES,
        f"`chunk_size` must be one of {tuning.CHUNK_SIZES}{when_built(chunk_size)}; got {shown(chunk_size)}.",
    )


def choose_chunk_size(chunk_size: int | None, implementation="", T: int = tuning.CHUNK_SIZE, **kind: int) -> int:
    """Return the chunk size that was asked for, checked; for None the result of `tuning.best_chunk_size`."""
    if chunk_size is None:
        return tuning.best_chunk_size(implementation, T, **kind)
    check_chunk_size(chunk_size)
    return int(chunk_size)


def choose_implementation(implementation: str | None, known: tuple[str, ...], on_tpu: str) -> str:
    """Return the implementation to run; None means `on_tpu` where the default backend is a TPU and "xla" elsewhere.

    Raises:
      ValueError: there is no implementation of this name.
      NotImplementedError: there is, but not of this operator.
    """
    if implementation in _IMPLEMENTATIONS and implementation not in known:
        raise NotImplementedError(
            f"`implementation` must be None or one of {known} for this operator; got {implementation!r}."
        )
    pallas = implementation in ("pallas", "mosaic") and "fused" in known
    kernels = '; the kernels of Pallas are "fused"' if pallas else ""
    check(
        implementation is None or implementation in known,
        f"`implementation` must be None or one of {known}{kernels}; got {implementation!r}.",
    )
    return implementation or (on_tpu if jax.default_backend() == "tpu" else "xla")


def check_packed(cu_seqlens, B: int) -> None:
    """Check the shape and the type of the boundaries of a packed batch; None passes."""
    if cu_seqlens is None:
        return
    check_library("cu_seqlens", cu_seqlens)
    cu_seqlens = as_int32(cu_seqlens)
    kind = type(cu_seqlens).__name__
    instead = ", of which `jnp.array(cu_seqlens, jnp.int32)` makes one" if isinstance(cu_seqlens, list | tuple) else ""
    check(hasattr(cu_seqlens, "dtype"), f"`cu_seqlens` must be an int32 array [N + 1]; got {kind}{instead}.")
    check(
        cu_seqlens.ndim == 1 and cu_seqlens.dtype == jnp.int32 and cu_seqlens.shape[0] >= 2,
        f"`cu_seqlens` must be int32 of shape [N + 1] with N >= 1; got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}.",
    )
    check(B == 1, f"`cu_seqlens` must come with a batch of 1; got B = {B}.")


def check_cu_seqlens(cu_seqlens, B: int, T: int) -> Any:
    """Check the boundaries of a packed batch, and return them as int32.

    Their values are checked only when they are concrete, outside of jit.
    """
    check_packed(cu_seqlens, B)
    cu_seqlens = as_int32(cu_seqlens)
    if cu_seqlens is None or isinstance(cu_seqlens, jax.core.Tracer):
        return cu_seqlens
    values = [int(x) for x in jax.device_get(cu_seqlens)]
    rising = all(a <= b for a, b in itertools.pairwise(values))
    shown = values if len(values) < 9 else [*values[:8], "..."]
    check(
        values[0] == 0 and rising and values[-1] <= T,
        f"`cu_seqlens` must rise from 0 to at most T = {T}; got {shown}.",
    )
    return cu_seqlens


def _check_typed(name: str, x, shape: tuple[int, ...], dtype) -> None:
    """Check that x is an array of this shape and type; None passes."""
    if x is None:
        return
    check_library(name, x)
    x = as_int32(x)
    fits = tuple(getattr(x, "shape", ())) == shape and getattr(x, "dtype", None) == dtype
    check(fits, f"`{name}` must be {jnp.dtype(dtype).name} of shape {shape}; got {_kind(x)}.")


def check_segment_ids(segment_ids, B: int, T: int, cu_seqlens) -> None:
    """Check the ids of segments, one for every token, which exclude the boundaries of a packed batch."""
    both = segment_ids is not None and cu_seqlens is not None
    check(not both, "`segment_ids` must be None if `cu_seqlens` is given; got both.")
    _check_typed("segment_ids", segment_ids, (B, T), jnp.int32)


def check_slots(state_indices, has_initial_state, N: int) -> None:
    """Check which slot of a pool N sequences have, and whether they have a state at all."""
    _check_typed("state_indices", state_indices, (N,), jnp.int32)
    _check_typed("has_initial_state", has_initial_state, (N,), bool)


def check_slot_values(state_indices, pool: str, count: int) -> None:
    """Check that the slots exist in a pool of `count` slots, and that no two are the same; `pool` names the argument.

    Only values that are known, outside of jit or as constants inside, and that this process can read, are checked.
    """
    slots = _readable(state_indices)
    past = slots[slots >= count].tolist()
    check(not past, f"`state_indices` must be below {count}, the number of slots of `{pool}`; got {[*past, None][0]}.")
    check_named_once("state_indices", state_indices, count)


def _readable(slots) -> np.ndarray:
    """Return the values of slots, if they are known and this process can read them; otherwise an empty array."""
    known = isinstance(slots, np.ndarray | jax.Array) and not isinstance(slots, jax.core.Tracer)
    if not known or (isinstance(slots, jax.Array) and not (slots.is_fully_addressable or slots.is_fully_replicated)):
        return np.zeros(0, np.int32)
    return np.asarray(slots)


def check_named_once(name: str, slots, count: int) -> None:
    """Check that no two slots of a pool of `count` slots are the same, if their values are known."""
    read = _readable(slots)
    named, times = np.unique(read[(read >= 0) & (read < count)], return_counts=True)
    twice = named[times > 1].tolist()
    check(not twice, f"`{name}` must name a slot only once, but for negative ones; got {[*twice, None][0]} twice.")


def check_array_of_slots(name: str, x) -> Any:
    """Return an array of one dimension as int32, checked."""
    check_library(name, x)
    x = as_int32(x)
    one = len(getattr(x, "shape", ())) == 1 and getattr(x, "dtype", None) == jnp.int32
    check(one, f"`{name}` must be int32 of shape [n]; got {_kind(x)}.")
    return x


def check_decode_tokens(decode_tokens, indices, replay: int) -> None:
    """Check the most tokens of a decode over a pool with a ring of `replay` tokens; 0 for a pool without a ring."""
    if not replay:
        check(
            decode_tokens is None,
            f"`decode_tokens` must be None without a ring; got {shown(decode_tokens)}: `state_indices` [N, W] says it.",
        )
        return
    check(
        decode_tokens is None or (is_whole(decode_tokens) and 1 <= int(decode_tokens) <= replay),
        f"`decode_tokens` must be from 1 to {replay}, the tokens of the ring{when_built(decode_tokens)}; got "
        f"{shown(decode_tokens)}.",
    )
    check(
        indices.ndim == 1,
        f"`state_indices` must be int32 of shape [N] with a ring, which holds all tokens of a decode; got "
        f"{tuple(indices.shape)}.",
    )


def _check_count(name: str, value, most: int) -> None:
    """Check a number of sequences, which may be traced; None passes."""
    if is_whole(value):
        check(0 <= int(value) <= most, f"`{name}` must be from 0 to {most}; got {value}.")
    elif value is not None:
        # Under jax_enable_x64 jit turns a Python int into an int64 array with a weak type.
        weak = getattr(value, "weak_type", False) and jnp.issubdtype(value.dtype, jnp.integer)
        _check_typed(name, value, (), value.dtype if weak else jnp.int32)


def check_step_types(slots, N: int, block_size, chunk_size=None) -> None:
    """Check the shapes and types of the arrays that name the slots of the N sequences of a serving step.

    Blocks of tokens hold whole chunks; `chunk_size` is None where there are no chunks.
    """
    if chunk_size is not None:
        check_chunk_size(chunk_size)
    indices, name = as_int32(slots.state_indices), "state_indices"
    check_library(name, indices)
    shape: tuple[int, ...] = getattr(indices, "shape", ())
    fits = len(shape) in (1, 2) and shape[0] == N and all(shape) and getattr(indices, "dtype", None) == jnp.int32
    check(fits, f"`{name}` must be int32 of shape [N] or [N, W] with N = {N}; got {_kind(indices)}.")
    _check_typed("has_initial_state", slots.has_initial_state, (N,), bool)
    _check_typed("read_indices", slots.read_indices, (N,), jnp.int32)
    _check_typed("num_accepted_tokens", slots.num_accepted_tokens, (N,), jnp.int32)
    _check_count("num_decodes", slots.num_decodes, N)
    _check_count("num_sequences", slots.num_sequences, N)
    blocks = slots.block_state_indices
    check(
        (blocks is None) == (block_size is None),
        "`block_size` and `block_state_indices` must come together; got one of them.",
    )
    if blocks is None:
        return
    # Any number of columns but none is right.
    _check_typed("block_state_indices", blocks, (N, *(getattr(blocks, "shape", ())[1:2] or (1,))), jnp.int32)
    rule = "a positive number of tokens" if chunk_size is None else f"a multiple of the chunk size {chunk_size}"
    check(
        is_whole(block_size) and int(block_size) > 0 and int(block_size) % (chunk_size or 1) == 0,
        f"`block_size` must be {rule}{when_built(block_size)}; got {shown(block_size)}.",
    )


def check_sharding(sharding: object) -> None:
    """Check the type of a user's `sharding`."""
    check(
        sharding is None or isinstance(sharding, Sharding),
        f"`sharding` must be None, a NamedSharding or a PartitionSpec; got {type(sharding).__name__}.",
    )


def check_context_axis(context_axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return a user's `context_axis` as a tuple, checked: it names axes of the `shard_map` around the call."""
    axes = () if context_axis is None else (context_axis,) if isinstance(context_axis, str) else context_axis
    names = isinstance(axes, tuple) and all(isinstance(name, str) for name in axes)
    check(names, f"`context_axis` must be None, the name of a mesh axis or a tuple of names; got {context_axis!r}.")
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    held = tuple(name for name in mesh.axis_names if compat.axis_type(mesh, name) == manual)
    check(
        all(name in held for name in axes),
        f"`context_axis` must name axes of the `shard_map` around the call, which has {held}; got {context_axis!r}.",
    )
    return axes


def check_initial_state(initial_state, shape: tuple[int | None, ...]) -> None:
    """Check that the initial state is [N, HV, K, V]."""
    if initial_state is not None:
        check_array("initial_state", initial_state, "N HV K V", shape)


def check_delta_rule(q, k, v, g, beta, cu_seqlens, per_channel: bool = False) -> tuple[int, int, int, int, int, int]:
    """Check the tensors of a delta rule, its gates per head or per channel, and return B, T, H, HV, K, V."""
    sizes = B, T, _, HV, _, _ = check_gated(q, k, v, g, per_channel)
    check_array("beta", beta, "B T HV", (B, T, HV))
    check_packed(cu_seqlens, B)
    return sizes


def check_gated(q, k, v, g, per_channel: bool) -> tuple[int, int, int, int, int, int]:
    """Check queries, keys, values and gates per head or per channel, and return B, T, H, HV, K, V."""
    B, T, H, K = check_array("q", q, "B T H K")
    check_array("k", k, "B T H K", (B, T, H, K))
    HV, V = check_value_heads(v, (B, T, H, K))
    if g is not None:
        _check_gate("g", g, (B, T, HV, K) if per_channel else (B, T, HV))
    return B, T, H, HV, K, V
