"""The files of a checkpoint; an array is read from them when a layer asks for it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from chunkwise.layers import arrays
from chunkwise.shared.call import checks

# The names of the files of a checkpoint, as transformers and others have them.
_ONE, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# The types of arrays, by their names in the format safetensors.
_TYPES = dict(
    BOOL="bool", U8="uint8", I8="int8", U16="uint16", I16="int16", U32="uint32", I32="int32", U64="uint64", I64="int64",
    F8_E4M3="float8_e4m3fn", F8_E5M2="float8_e5m2", F8_E8M0="float8_e8m0fnu", F16="float16", BF16="bfloat16",
    F32="float32", F64="float64",
)  # fmt: skip


class _Arrays(Mapping):
    """Arrays by name; each access reads one out of a file of the format safetensors."""

    def __init__(self, files: list[Path]):
        self._places = {name: (file, *place) for file in files for name, place in _header(file).items()}

    def __getitem__(self, name: str) -> Any:
        file, kind, shape, begin, end = self._places[name]
        checks.check(kind in _TYPES, f"`directory` must have {name!r} of one of {[*_TYPES]}; got {kind!r}.")
        read = np.fromfile(file, np.uint8, end - begin, offset=begin)
        checks.check(read.size == end - begin, f"`directory` must have {name!r} whole; {file.name} ends in it.")
        return read.view(jnp.dtype(_TYPES[kind])).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _header(file: Path) -> dict[str, tuple]:
    """Return the type, the shape, the begin and the end of each array of a file, in bytes from its start."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        valid = size <= file.stat().st_size - 8
        checks.check(valid, f"`directory` must have files of the format safetensors; got {str(file)!r}.")
        named = json.loads(opened.read(size))
    named.pop("__metadata__", None)
    place = lambda x: (x["dtype"], tuple(x["shape"]), *(8 + size + offset for offset in x["data_offsets"]))
    return {name: place(x) for name, x in named.items()}


def _quantization(directory: Path) -> Mapping[str, Any] | None:
    """Return the part of a checkpoint's config about weights of 8 bits, or None."""
    if not (file := directory / _CONFIG).exists():
        return None
    found = json.loads(file.read_text())
    return found.get("quantization_config") or (found.get("text_config") or {}).get("quantization_config")


def open_checkpoint(directory: str | Path) -> Mapping[str, Any]:
    """Return the arrays of a checkpoint by name; an array is read at each access.

    The array that an access reads is numpy's, and nothing of it is kept. So `load_gated_delta_net(named, config,
    prefix)`, or the same function of another layer, reads only the arrays of one layer. An array of float8 or int8 is
    multiplied by its scales when it is read: scales of blocks, rows or the whole, under its name and "_scale_inv" or
    "_scale". The array then has the type of the scales, or bfloat16 if their type has 8 bits. The mapping does not have
    the names of scales.

    Args:
      directory: has model.safetensors, or several files and model.safetensors.index.json. If there are scales of
        blocks, it also has config.json, whose `quantization_config` has the size of blocks ("weight_block_size").

    Raises:
      ValueError: the directory has neither file, or lacks a file or an array that the index names; or an access finds
        an array of float8 without scales, or scales of blocks that no config describes.
    """
    directory = Path(directory)
    index: Mapping[str, str] = {}
    files = [_ONE]
    if (file := directory / _INDEX).exists():
        index = json.loads(file.read_text()).get("weight_map") or {}
        checks.check(
            bool(index), f"`directory` must have {_INDEX} with a `weight_map` of names; got {str(directory)!r}."
        )
        files = sorted(set(index.values()))
    missing = [file for file in files if not (directory / file).exists()]
    rule = f"`directory` must have {_ONE} or {_INDEX}, and what they name"
    checks.check(not missing, f"{rule}; {str(directory)!r} lacks {missing[:20]}.")
    named = _Arrays([directory / file for file in files])
    lost = sorted(set(index) - set(named))
    checks.check(not lost, f"`directory` must have the arrays that {_INDEX} names; its files lack {lost[:20]}.")
    quantization = _quantization(directory)
    size = (quantization or {}).get("weight_block_size")
    return arrays.Numbers(named, tuple(size) if size else None, described=quantization is not None)
