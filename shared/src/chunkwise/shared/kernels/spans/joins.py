"""How a launch puts the tokens of an `Interleaved` together in fast memory, and takes those of its outputs apart.

The arrays of an operand or output x are the operands or outputs x.0, x.1, ... of the launch; a buffer has the tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared.kernels import interleaved, matmul, packed
from chunkwise.shared.kernels.spans import layout


def split_interleaved(named: Mapping[str, tuple[Any, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arrays by name, each with its spec, with the arrays of interleaved ones; and buffers by name.

    The buffer of the same name is for the tokens, and `name.tiles` is for the registers of `join`, if it needs them.
    """
    flat, buffers = {}, {}
    for name, (x, spec) in named.items():
        if not isinstance(x, interleaved.KINDS):
            flat[name] = x, spec
            continue
        (*outer, C, lanes), n = spec.block_shape, len(x.arrays)
        # The blocks of lanes before those of the next kind, if one array has the tokens of all kinds.
        blocks = x.shape[2] // lanes if isinstance(x, interleaved.InLanes) else 0
        if _in_one_block(x):
            flat[f"{name}.0"] = x.first, _part(spec, (*outer, C // n, n * lanes), 0)
        else:
            for i, y in enumerate(x.arrays):
                if y is not None:
                    flat[f"{name}.{i}"] = y, _part(spec, (*outer, C // n, lanes), i * blocks)
        buffers[name] = pltpu.VMEM((C, lanes), x.dtype)
        narrow = x.dtype == jnp.bfloat16
        if not narrow or n > 2:
            tiles = packed.pad_lanes(lanes) // packed.LANES, C // (1 + narrow), packed.LANES
            buffers[f"{name}.tiles"] = pltpu.VMEM(tiles, jnp.uint32 if narrow else x.dtype)
    return flat, buffers


def _in_one_block(x: Any) -> bool:
    """Return whether a block has the tokens of all kinds, because those of a kind begin inside a register."""
    return isinstance(x, interleaved.InLanes) and x.shape[2] % packed.LANES > 0


def _part(spec: pl.BlockSpec, block: tuple, first: int) -> pl.BlockSpec:
    """Return the spec of the tokens of one kind, whose lanes begin with the block `first`."""
    index_map: Any = spec.index_map

    def index(*ids):
        *outer, lanes = index_map(*ids)
        return *outer, lanes + first

    return pl.BlockSpec(block, index)


def take_arrays(named: dict[str, Any], name: str, n: int) -> list[Any]:
    """Remove the arrays of n kinds of tokens from a dict, and return them; None where it has none."""
    return [named.pop(f"{name}.{i}", None) for i in range(n)]


def refs_of(named: dict[str, Any], name: str, x: Any) -> tuple[Any, list[Any], Any]:
    """Return the arguments of `join` and `separate` from the Refs of a launch, which keep the tokens of x alone."""
    arrays, lanes = take_arrays(named, name, len(x.arrays)), x.shape[2]
    if _in_one_block(x):
        arrays = [arrays[0][:, i : i + lanes] for i in range(0, len(arrays) * lanes, lanes)]
    return named[name], arrays, named.pop(f"{name}.tiles", None)


def join(ref: Any, arrays: Sequence[Any], tiles: jax.Ref | None) -> None:
    """Store the rows of Refs, or arrays, [C / n, lanes] in turn in a Ref [C, lanes]; None is zeros.

    A row of registers holds one float32 or two bfloat16. Stores with a stride put them in turn, in `tiles`, a Ref
    [registers, words, 128], because they need rows of one register. The last register may have fewer lanes.
    """
    zeros = jnp.zeros((ref.shape[0] // len(arrays), ref.shape[1]), ref.dtype)
    rows = [zeros if y is None else y[...] for y in arrays]
    if matmul.is_interpreted():
        layout.store_every(ref, rows)
        return
    words = [pair(*rows[i : i + 2]) for i in range(0, len(rows), 2)] if ref.dtype == jnp.bfloat16 else rows
    if tiles is None:
        ref.bitcast(jnp.uint32)[...] = words[0]
        return
    for i, lanes in _registers(ref):
        layout.store_every(tiles.at[i], [_whole(y[:, lanes]) for y in words])
        ref[:, lanes] = pltpu.bitcast(tiles[i], ref.dtype)[:, : lanes.stop - lanes.start]


def separate(ref: Any, arrays: Sequence[Any], tiles: jax.Ref | None) -> None:
    """Store the rows of a Ref [C, lanes] in Refs [C / n, lanes] in turn, the inverse of `join`."""
    if matmul.is_interpreted():
        rows = layout.load_every(ref, len(arrays))
    elif tiles is None:
        rows = halves(ref.bitcast(jnp.uint32)[...])
    else:
        for i, lanes in _registers(ref):
            tiles[i] = _whole(pltpu.bitcast(ref[:, lanes], tiles.dtype))
        n = len(arrays) * tiles.shape[1] // ref.shape[0]
        each = [layout.load_every(tiles.at[i], n) for i, _ in _registers(ref)]
        words = [jnp.concatenate(y, axis=1)[:, : ref.shape[1]] for y in zip(*each, strict=True)]
        rows = [y for x in words for y in halves(x)] if ref.dtype == jnp.bfloat16 else words
    for array, y in zip(arrays, rows, strict=True):
        if array is not None:
            array[...] = y


def _registers(ref: jax.Ref) -> Iterator[tuple[int, slice]]:
    """Give the numbers of the registers of a row, and their lanes."""
    for i, first in enumerate(range(0, ref.shape[1], packed.LANES)):
        yield i, slice(first, min(first + packed.LANES, ref.shape[1]))


def _whole(x: jax.Array) -> jax.Array:
    """Return rows [n, lanes] of a whole register, with zeros behind."""
    missing = packed.LANES - x.shape[1]
    return jnp.concatenate([x, jnp.zeros((x.shape[0], missing), x.dtype)], axis=1) if missing else x


def pair(low: jax.Array, high: jax.Array) -> jax.Array:
    """Return two bfloat16 arrays as one of uint32, which is how a register holds two rows."""
    low, high = (lax.bitcast_convert_type(y.astype(jnp.float32), jnp.uint32) for y in (low, high))
    return lax.shift_right_logical(low, jnp.uint32(16)) | high


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the two bfloat16 arrays of `pair`."""
    parts = lax.shift_left(x, jnp.uint32(16)), x & jnp.uint32(0xFFFF0000)
    low, high = (lax.bitcast_convert_type(y, jnp.float32).astype(jnp.bfloat16) for y in parts)
    return low, high
