"""The way back: arrays become the files of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from chunkwise.layers.checkpoint import arrays, files
from chunkwise.shared.call import checks

# transformers asks for it in files of its own framework.
_METADATA = {"format": "pt"}


def save_checkpoint(directory: str | Path, named: Mapping[str, Any], shard_bytes: int = 5 * 10**9) -> None:
    """Write arrays as the files of a checkpoint, which `open_checkpoint`, transformers, vLLM and SGLang read.

    The arrays go to model.safetensors, or if they have more bytes than a file should have, to several files and
    model.safetensors.index.json. The index, or the one file, gets its name when all is written: a program that ends
    before leaves no checkpoint. Only the arrays of one file are in memory at a time, if `named` reads them one by one.
    config.json and the files of a tokenizer are not written. Take `quantization_config` out of a config.json of
    weights of 8 bits, because the arrays that `open_checkpoint` returned have no scales.

    Args:
      directory: a folder without a checkpoint, or the name of a new folder.
      named: arrays by name, JAX's, numpy's or torch's; a mapping, such as a dict with the results of
        `save_gated_delta_net`.
      shard_bytes: the most bytes of the arrays of a file; an array that has more has a file of its own.

    Raises:
      ValueError: the folder has a checkpoint, there are no arrays, a name is no string, or an array has a type that the
        format lacks.
    """
    mapping = isinstance(named, Mapping) and len(named) > 0
    checks.check(mapping, f"`named` must be a mapping from names to arrays, and not empty; got {type(named).__name__}.")
    wrong = [name for name in named if not isinstance(name, str) or name in ("", "__metadata__")]
    checks.check(not wrong, f"`named` must have names that are strings, and not '__metadata__'; got {wrong[:20]}.")
    whole = isinstance(shard_bytes, int) and not isinstance(shard_bytes, bool) and shard_bytes > 0
    checks.check(whole, f"`shard_bytes` must be a whole number above 0; got {shard_bytes!r}.")
    sizes = {name: _bytes(name, arrays.from_torch(named[name])) for name in named}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    there = sorted(path.name for path in directory.glob("model*.safetensors*"))
    checks.check(not there, f"`directory` must be a folder without a checkpoint; {str(directory)!r} has {there[:20]}.")
    shards = _divide(sizes, shard_bytes)
    if len(shards) == 1:
        _write(directory / files.ONE, named, shards[0])
        return
    places = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write(directory / file, named, names)
        places |= dict.fromkeys(names, file)
    total = sum(sum(part.values()) for part in shards)
    files.write_json(directory / files.INDEX, dict(metadata=dict(total_size=total), weight_map=places))


def _bytes(name: str, x: Any) -> int:
    """Return the bytes of an array of a type that `open_checkpoint` reads."""
    array = isinstance(x, np.ndarray | np.generic | jax.Array)
    kind = str(x.dtype) if array else type(x).__name__
    fits = array and kind in files.KINDS
    checks.check(fits, f"`named` must have arrays of types of the format safetensors; got {kind} for {name!r}.")
    return x.nbytes


def _divide(sizes: dict[str, int], most: int) -> list[dict[str, int]]:
    """Return the names and bytes of the arrays of each file, in their order."""
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + size > most:
            shards.append({})
        shards[-1][name] = size
    return shards


def _write(file: Path, named: Mapping[str, Any], names: Mapping[str, int]) -> None:
    """Write a file with some of the arrays; it gets its name at the end."""
    # np.ascontiguousarray makes a list of a scalar.
    plain = {name: np.asarray(arrays.from_torch(named[name])) for name in names}
    plain = {name: x if x.flags.c_contiguous else np.ascontiguousarray(x) for name, x in plain.items()}
    part = file.with_name(f"{file.name}.part")
    try:
        safetensors_numpy.save_file(plain, part, metadata=_METADATA)
    except safetensors.SafetensorError as error:
        part.unlink(missing_ok=True)
        kinds = sorted({str(x.dtype) for x in plain.values()})
        raise ValueError(
            f"`named` must have arrays of types of the format safetensors; got {kinds}: {error}"
        ) from error
    part.replace(file)
