"""The weights of a layer as a table: the name, the shape, the division over devices and the first numbers of each."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.layers import config
from chunkwise.layers.checkpoint.parameters import Checkpoint, Initial, called, split

# Names of arrays, and of the weights that each has.
Whole = Mapping[str, Sequence[str]]
QKV: Whole = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
CONVOLUTIONS: Whole = {"conv1d": ("q_conv1d", "k_conv1d", "v_conv1d")}


@dataclass(frozen=True)
class Weight:
    """One of the weights of a layer, which a checkpoint has as it is.

    Attributes:
      name: its name in a checkpoint, without `end`.
      letters: how it is split over devices, in the letters of `division.Letters`.
      shape: its shape here.
      init: returns it at random, from an `Initial` and the shape.
    """

    end: ClassVar[str] = ""

    name: str
    letters: str
    shape: tuple[int, ...]
    init: Callable[..., jax.Array] = Initial.full

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """The shape that a checkpoint has."""
        return self.save(np.broadcast_to(0.0, self.shape)).shape

    def load(self, found: Checkpoint) -> jax.Array:
        """Return it from a checkpoint."""
        return found.read(self.name, *self.shape)

    def save(self, x: np.ndarray) -> np.ndarray:
        """Return it in the layout of a checkpoint."""
        return x


class Norm(Weight):
    """The weight of a norm."""

    end = ".weight"


class OfHeads(Weight):
    """Numbers of heads, in float32; checkpoints differ in dimensions of size 1."""

    def load(self, found: Checkpoint) -> jax.Array:
        """Return it from a checkpoint."""
        return found.read(self.name, *self.shape, dims=False).astype(jnp.float32)

    def save(self, x: np.ndarray) -> np.ndarray:
        """Return it in the layout of a checkpoint."""
        return x.reshape(-1)


class Matrix(Weight):
    """A projection [rows, columns], which a checkpoint has as [columns, rows]."""

    end = ".weight"

    def load(self, found: Checkpoint) -> jax.Array:
        """Return it from a checkpoint."""
        return found.read(self.name, *self.shape[::-1]).T

    def save(self, x: np.ndarray) -> np.ndarray:
        """Return it in the layout of a checkpoint."""
        return x.T


class Convolution(Weight):
    """The weights of a convolution [channels, W], which a checkpoint has as [channels, 1, W]."""

    end = ".weight"

    def load(self, found: Checkpoint) -> jax.Array:
        """Return it from a checkpoint."""
        return found.read(self.name, self.shape[0], 1, self.shape[1])[:, 0]

    def save(self, x: np.ndarray) -> np.ndarray:
        """Return it in the layout of a checkpoint."""
        return x[:, None]


def matrix(name: str, letters: str, *shape: int) -> Matrix:
    """Return a projection that keeps the size of its input."""
    return Matrix(name, letters, shape, Initial.matrix)


def factors(names: Iterable[str], letters: str, *sizes: int) -> tuple[Matrix, ...]:
    """Return the projections whose product leads from the first of these sizes to the last one, with these letters."""
    pairs = list(itertools.pairwise(sizes))
    all_letters = [".."] * (len(pairs) - 1) + [letters]
    return tuple(matrix(name, x, *pair) for name, x, pair in zip(names, all_letters, pairs, strict=True))


def projections(c: config.LayerConfig) -> dict[str, Matrix]:
    """Return the projections of queries, keys and values."""
    names, columns = QKV["qkv_proj"], (c.H * c.K, c.H * c.K, c.HV * c.V)
    each = zip("qkv", names, (".h", ".h", ".n"), columns, strict=True)
    return {key: matrix(name, letters, c.D, n) for key, name, letters, n in each}


def convolutions(c: config.LayerConfig, names: Iterable[str] = CONVOLUTIONS["conv1d"]) -> tuple[Convolution, ...]:
    """Return the weights of the convolutions whose channels a config has."""
    each = zip(names, c.conv_letters, c.channels, strict=True)
    return tuple(Convolution(name, f"{x[-1]}.", (n, c.W), Initial.convolution) for name, x, n in each)


def norm(name: str, letters: str, size: int) -> Norm:
    """Return the weight of a norm, which begins with ones."""
    return Norm(name, letters, (size,), functools.partial(Initial.full, value=1.0))


def bias(of: Weight, init: Callable[..., jax.Array] = Initial.full) -> Weight:
    """Return the bias of a projection or a convolution, which begins with zeros."""
    return Weight(f"{of.name}.bias", of.letters.replace(".", ""), of.saved_shape[:1], init)


def ones(name: str, letters: str, heads: int) -> OfHeads:
    """Return numbers of heads that begin with ones."""
    return OfHeads(name, letters, (heads,), lambda new, n: jnp.ones(n, jnp.float32))


def rates(least: float, letter: str, heads: int, *channels: int) -> dict[str, OfHeads]:
    """Return A_log, whose rate is at least this and at most 16, and dt_bias, whose steps are from 0.001 to 0.1."""
    log_decay = functools.partial(Initial.log_decay, least=least)
    return dict(
        A_log=OfHeads("A_log", letter, (heads,), log_decay),
        dt_bias=OfHeads("dt_bias", letter + "." * len(channels), (heads, *channels), Initial.step_bias),
    )


def divide(found: Checkpoint, weights: Any, whole: Whole, heads: int = 1) -> None:
    """Replace arrays that a checkpoint has of several weights by these weights.

    Args:
      found: the checkpoint; it may have none of the arrays.
      weights: the table of the layer.
      whole: the names of arrays, and of the weights whose rows each has one after the other.
      heads: the parts of every weight, where an array has the parts of one head side by side.
    """
    shapes = {x.name: x.saved_shape for x in jax.tree.leaves(weights)}
    for name, parts in whole.items():
        if name in found and all(part in shapes for part in parts):
            rows, rest = [shapes[part][0] for part in parts], shapes[parts[0]][1:]
            x = found.read(name, sum(rows), *rest).reshape(heads, -1, *rest)
            every = (y.reshape(-1, *rest) for y in split(x, [n // heads for n in rows], axis=1))
            found.parts |= zip(parts, every, strict=True)


def name_of_whole(whole: Whole) -> dict[str, str]:
    """Return, by the name of each weight, the array that has it."""
    return {part: name for name, parts in whole.items() for part in parts}


def joined(named: dict[str, Any], whole: Whole, heads: int = 1) -> dict[str, Any]:
    """Return the arrays of a checkpoint by their full names, with those that `divide` divides."""
    named = dict(named)
    for name, parts in whole.items():
        end = "" if name.endswith(".bias") else ".weight"
        every = [named.pop(part + end) for part in parts if part + end in named]
        if every:
            x = np.concatenate([y.reshape(heads, -1, *y.shape[1:]) for y in every], axis=1)
            named[name + end] = x.reshape(-1, *x.shape[2:])
    return named


def renamed(named: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the arrays of a checkpoint by their full names where weights have others."""
    return {called(name, names): x for name, x in named.items()}
