"""Arrays of a checkpoint: torch's become numpy's, and arrays of 8 bits are multiplied by their scales."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call import checks

# The ends of the names of scales, after the name of their array. Both kinds are factors.
_SCALES = ("_scale_inv", "_scale")


class Numbers(Mapping):
    """The arrays of a checkpoint by name, multiplied by their scales at each access; the names of scales are hidden.

    Args:
      named: arrays by name: numpy's, torch's or JAX's.
      block_size: rows and columns of an array that share a scale, if the checkpoint says it.
      described: whether the checkpoint says how its weights are quantized; True also for arrays without a config.
    """

    def __init__(self, named: Mapping[str, Any], block_size: tuple[int, int] | None = None, described: bool = True):
        self._named, self._block_size, self._described = named, block_size, described
        self._scales = {name: name + end for name in named for end in _SCALES if name + end in named}
        # Scales of activations are hidden, too: they are for programs that multiply in 8 bits.
        inputs = {f"{name.removesuffix('weight')}input_scale" for name in self._scales}
        hidden = inputs | set(self._scales.values())
        self._names = [name for name in named if name not in hidden]

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> "Numbers":
        """Return the Numbers of a mapping, which may be Numbers already."""
        return named if isinstance(named, cls) else cls(named)

    def __getitem__(self, name: str) -> Any:
        x = from_torch(self._named[name])
        kind = np.dtype(x.dtype)
        narrow = kind == np.int8 or (jnp.issubdtype(kind, jnp.floating) and kind.itemsize == 1)
        if name not in self._scales:
            unscaled = narrow and kind != np.int8
            either = " or ".join(repr(name + end) for end in _SCALES)
            checks.check(not unscaled, f"`named` must have {either} for {name!r} of {kind}; got neither.")
            return x
        scale = self._scales[name]
        described = self._described or not scale.endswith(_SCALES[0])
        rule = "`directory` must have config.json with a `quantization_config`, whose `weight_block_size` says what"
        checks.check(described, f"{rule} {scale!r} is for; got none, and {name!r} of {kind}.")
        checks.check(narrow, f"`named` must have {name!r} of float8 or int8, as it has {scale!r}; got {kind}.")
        return _multiply(np.asarray(x), from_torch(self._named[scale]), name, self._block_size)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def from_torch(x: object) -> Any:
    """Return a tensor of torch as a numpy array, whose type may be one of JAX's; return anything else as it is."""
    # If x is a tensor, torch is imported already. So torch need not be installed.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return x
    kind = jnp.dtype(str(x.dtype).removeprefix("torch."))
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(kind).reshape(tuple(x.shape))


def _multiply(x: np.ndarray, scale: object, name: str, block_size: tuple[int, int] | None) -> np.ndarray:
    """Return an array times its scales, in the type of the scales, or in bfloat16 if that type has 8 bits."""
    scale = np.asarray(scale)
    kind = scale.dtype if scale.dtype.itemsize > 1 else jnp.dtype(jnp.bfloat16)
    # Scales of type uint8 are exponents of 2, with a bias of 127.
    factors = np.exp2(scale.astype(np.float32) - 127) if scale.dtype == np.uint8 else scale.astype(np.float32)
    return (x.astype(np.float32) * _spread(factors, x.shape, name, block_size)).astype(kind)


def _spread(scale: np.ndarray, shape: tuple[int, ...], name: str, block_size: tuple[int, int] | None) -> np.ndarray:
    """Return scales of an array, of its rows or of its blocks, in a shape by which the array can be multiplied."""
    if scale.size == 1:
        return scale.reshape(())
    rule = f"`named` must have a scale for {name!r}, for each of its rows, or for each of its blocks"
    error = f"{rule}, as it has shape {shape}; got scales of shape {scale.shape}."
    if scale.ndim == 4 and scale.shape[1] == scale.shape[3] == 1:
        scale = scale[:, 0, :, 0]
    if scale.shape == shape[:1]:
        scale = scale.reshape(-1, *(1,) * (len(shape) - 1))
    checks.check(scale.ndim == len(shape) > 1 and scale.shape[:-2] in (shape[:-2], (1,) * (len(shape) - 2)), error)
    for axis, known in zip((-2, -1), block_size or (None, None), strict=True):
        size, blocks = shape[axis], scale.shape[axis]
        if blocks > 1:
            width = _block(size, blocks, known)
            checks.check(width > 0, error)
            scale = np.repeat(scale, width, axis).take(np.arange(size), axis)
    return scale


def _block(size: int, blocks: int, known: int | None) -> int:
    """Return the width of `blocks` blocks: the known one, a power of two, or a divisor of the size; or 0."""
    powers = (2**i for i in range(size.bit_length() + 1))
    widths = (*([known] if known else []), *powers, size // blocks)
    return next((width for width in widths if width and -(-size // width) == blocks), 0)
