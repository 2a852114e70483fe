"""The files of a checkpoint; an array is read from them when a layer asks for it."""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from chunkwise.layers.checkpoint import arrays
from chunkwise.shared.call import checks

# The names of the files of a checkpoint, as transformers and others have them.
ONE, INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# The types of arrays, by their names in the format safetensors: that of numpy or JAX, and its bits.
_TYPES = dict(
    BOOL=("bool", 8), U8=("uint8", 8), I8=("int8", 8), U16=("uint16", 16), I16=("int16", 16), F16=("float16", 16),
    U32=("uint32", 32), I32=("int32", 32), F32=("float32", 32), U64=("uint64", 64), I64=("int64", 64),
    F64=("float64", 64), BF16=("bfloat16", 16), F8_E4M3=("float8_e4m3fn", 8), F8_E5M2=("float8_e5m2", 8),
    F8_E8M0=("float8_e8m0fnu", 8), F8_E4M3FNUZ=("float8_e4m3fnuz", 8), F8_E5M2FNUZ=("float8_e5m2fnuz", 8),
    F4=("float4_e2m1fn", 4),
)  # fmt: skip
# The types that arrays of a checkpoint may have.
KINDS = frozenset(kind for kind, _ in _TYPES.values())
# The bits of all types, some of which only lie between the arrays that are read.
_BITS = dict(C64=64, F6_E2M3=6, F6_E3M2=6) | {name: bits for name, (_, bits) in _TYPES.items()}


# From the name of an array to the function that reads it.
_Readers = dict[str, Callable[[], np.ndarray]]


class _Arrays(Mapping):
    """Arrays by name; each access reads one out of a file of the format safetensors."""

    def __init__(self, readers: _Readers):
        self._readers = readers

    def __getitem__(self, name: str) -> Any:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def _read(name: str, file: Path, kind: str, shape: tuple[int, ...], begin: int) -> np.ndarray:
    """Return an array out of the bytes where the library has found it: nothing else of the file is read again."""
    rule = f"`directory` must have {name!r} of one of {[*_TYPES]}"
    checks.check(kind in _TYPES, f"{rule}; got {kind!r} in {file.name}.")
    dtype, bits = _TYPES[kind]
    count = math.prod(shape) * bits // 8
    try:
        read = np.fromfile(file, np.uint8, count, offset=begin)
        if read.size != count:
            raise OSError(f"the file ends after {read.size} of {count} bytes")
    except OSError as error:
        rule = f"`directory` must have {name!r} whole in {file.name}"
        raise ValueError(f"{rule}, as it was at the call; got: {error}") from error
    if bits == 4:
        # Two numbers in a byte, the first one in its lower half.
        read = np.stack([read & 15, read >> 4], axis=-1)
    return read.view(jnp.dtype(dtype)).reshape(shape)


def _readers(file: Path) -> _Readers:
    """Return the readers of all arrays of a file, which the library has found without a fault."""
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            found = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            shaped = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in found]
        with file.open("rb") as plain:
            begin = 8 + int.from_bytes(plain.read(8), "little")
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"`directory` must have files of the format safetensors; got {str(file)!r}: {error}"
        ) from error
    readers = {}
    for name, kind, shape in shaped:
        # The arrays of a valid file follow one another without a gap.
        bits = _BITS.get(kind)
        known = f"`directory` must have {name!r} of one of {[*_BITS]}"
        checks.check(bits is not None, f"{known}; got {kind!r} in {file.name}.")
        readers[name] = functools.partial(_read, name, file, kind, shape, begin)
        begin += math.prod(shape) * (bits or 0) // 8
    return readers


def _json(file: Path) -> Mapping[str, Any]:
    """Return the table of a JSON file, in which no name is there twice."""

    def table(pairs):
        twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        checks.check(not twice, f"`directory` must have {file.name} with every name once; got {twice[:20]} again.")
        return dict(pairs)

    try:
        text = file.read_text()
        found = json.loads(text, object_pairs_hook=table)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"`directory` must have {file.name} of JSON; got {str(file)!r}: {error}") from error
    valid = isinstance(found, dict)
    checks.check(valid, f"`directory` must have {file.name} with a table; got {type(found).__name__}.")
    return found


def write_json(file: Path, table: Mapping[str, Any]) -> None:
    """Write a table to a JSON file, which gets its name at the end."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(table, indent=2) + "\n")
    part.replace(file)


def _quantization(directory: Path) -> Mapping[str, Any] | None:
    """Return the part of a checkpoint's config about weights of 8 bits, or None."""
    if not (file := directory / _CONFIG).exists():
        return None
    _check_regular(file)
    found = _json(file)
    text = found.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    quantization = found.get("quantization_config") or nested
    valid = quantization is None or isinstance(quantization, dict)
    checks.check(valid, f"`directory` must have {_CONFIG} with a table `quantization_config`; got {quantization!r}.")
    return quantization


def _block_size(quantization: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Return the rows and columns of a block that has a scale, if a checkpoint says it."""
    size = (quantization or {}).get("weight_block_size")
    pair = isinstance(size, list) and len(size) == 2 and all(type(x) is int and x > 0 for x in size)
    rule = f"`directory` must have {_CONFIG} with two whole numbers as `weight_block_size`"
    checks.check(size is None or pair, f"{rule}; got {size!r}.")
    return None if size is None else (size[0], size[1])


def _check_regular(file: Path) -> None:
    """Check that a file is there, and no pipe or device, which a program would wait for."""
    try:
        found = file.is_file()
    except (OSError, ValueError):
        found = False
    rule = f"`directory` must have {ONE} or {INDEX}, and what they name"
    checks.check(found, f"{rule}; {str(file.parent)!r} lacks {[file.name]}.")


def _shards(directory: Path) -> dict[str, list[str]]:
    """Return the files that the index of a checkpoint names, with the names of the arrays of each."""
    found = _json(directory / INDEX).get("weight_map")
    index = found if isinstance(found, dict) else {}
    checks.check(bool(index), f"`directory` must have {INDEX} with a `weight_map` of names; got {str(directory)!r}.")
    files: dict[str, list[str]] = {}
    for name, file in index.items():
        path = PurePosixPath(file) if isinstance(file, str) else PurePosixPath()
        inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in str(path)
        rule = f"`directory` must have {INDEX} with files inside of it"
        checks.check(inside, f"{rule}; got {file!r} for {name!r}.")
        files.setdefault(file, []).append(name)
    return files


def _sharded(directory: Path) -> _Readers:
    """Return the readers of all arrays that the index names, each in the file that the index has for it."""
    readers: _Readers = {}
    owner: dict[str, str] = {}
    shards = _shards(directory)
    for file in shards:
        _check_regular(directory / file)
    for file, names in sorted(shards.items()):
        found = _readers(directory / file)
        lost = sorted(set(names) - set(found))
        checks.check(not lost, f"`directory` must have the arrays that {INDEX} names; {file} lacks {lost[:20]}.")
        twice = {name: owner[name] for name in found if owner.setdefault(name, file) != file}
        checks.check(not twice, f"`directory` must have every array in one file; {file} has again those of {twice}.")
        readers |= {name: found[name] for name in names}
    return readers


def open_checkpoint(directory: str | Path) -> Mapping[str, Any]:
    """Return the arrays of a checkpoint by name; an array is read at each access.

    The call is::

        weights = load_gated_delta_net(open_checkpoint(directory), config, "model.layers.0.linear_attn.")

    The library safetensors reads the files, and refuses damaged ones. The array that an access reads is numpy's, and
    nothing of it is kept. So `load_gated_delta_net(named, config, prefix)`, or the same function of another layer,
    reads only the arrays of one layer. An array of float8, int8 or 4 bits is multiplied by its scales when it is read:
    scales of blocks, rows or the whole, under its name and "_scale_inv" or "_scale". The array then has the type of the
    scales, or bfloat16 if their type has 8 bits. The mapping does not have the names of scales.

    Args:
      directory: has model.safetensors, or several files and model.safetensors.index.json. Its arrays are those that the
        index names, each in the file of the index. Files may be links to files elsewhere. If there are scales of
        blocks, the directory also has config.json, whose `quantization_config` has the size of blocks
        ("weight_block_size").

    Raises:
      ValueError: the directory has neither file, or lacks a file or an array that the index names; a file is damaged,
        lies outside of the directory, or has an array of another file; or an access finds an array of float8 without
        scales, or scales of blocks that no config describes. The message names the file, and the array if there is one.
    """
    directory = Path(directory)
    if (directory / INDEX).exists():
        _check_regular(directory / INDEX)
        readers = _sharded(directory)
    else:
        _check_regular(directory / ONE)
        readers = _readers(directory / ONE)
    quantization = _quantization(directory)
    return arrays.Numbers(_Arrays(readers), _block_size(quantization), described=quantization is not None)
