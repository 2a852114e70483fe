"""The files of a checkpoint, of which an array is read when a layer asks for it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chunkwise.shared.operators import checks

# What transformers and others call the files of a checkpoint.
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Arrays(Mapping):
    """Arrays by name; each access reads one."""

    def __init__(self, files: list[Path]):
        from safetensors import safe_open

        opened = [safe_open(file, "np") for file in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Any:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_checkpoint(directory: str | Path) -> Mapping[str, Any]:
    """Return the arrays of a checkpoint by name, none of which is read yet.

    An access reads an array, as one of numpy's, and keeps nothing. So `load_gated_delta_net(named, config, prefix)` and
    the others read the arrays of one layer. It needs the package safetensors.

    Args:
      directory: with model.safetensors, or with several files and model.safetensors.index.json.

    Raises:
      ValueError: the directory has neither of them.
    """
    directory = Path(directory)
    if (index := directory / _INDEX).exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = [_ONE]
    found = (directory / files[0]).exists()
    checks.check(found, f"`directory` must have {_ONE} or {_INDEX}, and what they name; got {str(directory)!r}.")
    return _Arrays([directory / file for file in files])
