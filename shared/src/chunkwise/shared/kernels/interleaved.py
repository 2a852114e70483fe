"""Tokens of several kinds in turn, in one array for each kind, which a kernel puts together in fast memory alone.

An operator that runs another one gives it n tokens for each of its own. In HBM they would be copies of all its tensors,
with zeros between them. In bfloat16 two rows share the rows of a register, and XLA takes long to put them together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_pytree_node_class
class Interleaved:
    """The tokens [B, T n, ...] of n arrays [B, T, ...] in turn; None is an array of zeros."""

    def __init__(self, *arrays: jax.Array | None):
        """Take the n arrays, which have one shape and type; at least one of them is not None."""
        self.arrays = arrays

    def tree_flatten(self) -> tuple[tuple, None]:
        """Return the arrays, as JAX asks for."""
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _, arrays: Sequence) -> "Interleaved":
        """Return the tokens of these arrays, as JAX asks for."""
        return cls(*arrays)

    def map(self, function: Callable[[Any], Any]) -> "Interleaved":
        """Return the results of a function of one array."""
        return Interleaved(*(None if y is None else function(y) for y in self.arrays))

    def like(self, y: jax.Array | jax.ShapeDtypeStruct) -> "Interleaved":
        """Return tokens with y in the place of every array."""
        return self.map(lambda _: y)

    @property
    def first(self) -> Any:
        """The first array that is not None."""
        return next(y for y in self.arrays if y is not None)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of all tokens together."""
        B, T, *rest = self.first.shape
        return B, T * len(self.arrays), *rest

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The entries of all arrays, which are what a kernel reads."""
        return sum(y.size for y in self.arrays if y is not None)

    @property
    def dtype(self) -> Any:
        """The type of all arrays."""
        return self.first.dtype

    @property
    def perturbed(self) -> bool:
        """Whether the gradient of an array is requested, in the forward of a custom_vjp with symbolic zeros."""
        return any(getattr(y, "perturbed", False) for y in self.arrays)

    def astype(self, dtype: jax.typing.DTypeLike) -> "Interleaved":
        """Return tokens of this type."""
        return self.map(lambda y: y.astype(dtype))

    def whole(self) -> jax.Array:
        """Return all tokens in one array."""
        if _divided(self.first):
            arrays = [jnp.zeros_like(self.first) if y is None else y for y in self.arrays]
            return jnp.stack(arrays, axis=2).reshape(self.shape)
        n, zero = len(self.arrays), jnp.zeros((), self.dtype)
        # A TPU takes a seventh of the time for padding between rows, and for a slice, that it takes for a stack.
        among = lambda i, y: lax.pad(_flat(y), zero, [(0, 0, 0), (i, n - 1 - i, n - 1), (0, 0, 0)])
        parts = [among(i, y) for i, y in enumerate(self.arrays) if y is not None]
        return functools.reduce(jnp.add, parts).reshape(self.shape)


@jax.tree_util.register_pytree_node_class
class InLanes:
    """Flat tokens [B, T n, lanes] as the array [B, T, n lanes] that a projection makes, n of them in a row.

    In HBM it would take a copy to give every token a row of its own.
    """

    def __init__(self, rows: jax.Array, n: int):
        """Take the array, and n."""
        self.rows, self.n = rows, n

    def tree_flatten(self) -> tuple[tuple, int]:
        """Return the array and n, as JAX asks for."""
        return (self.rows,), self.n

    @classmethod
    def tree_unflatten(cls, n: int, rows: Sequence) -> "InLanes":
        """Return the tokens of an array, as JAX asks for."""
        return cls(*rows, n)

    def of(self, y: jax.Array) -> "InLanes":
        """Return flat tokens [B, T n, lanes] in the lanes."""
        return InLanes(y.reshape(self.rows.shape), self.n)

    @property
    def first(self) -> Any:
        """The array that has the tokens."""
        return self.rows

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The array of every kind of token: a launch takes other lanes of it for each."""
        return (self.rows,) * self.n

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of all tokens."""
        B, T, lanes = self.rows.shape
        return B, T * self.n, lanes // self.n

    @property
    def dtype(self) -> Any:
        """The type of all tokens."""
        return self.rows.dtype

    def astype(self, dtype: jax.typing.DTypeLike) -> "InLanes":
        """Return tokens of this type."""
        return InLanes(self.rows.astype(dtype), self.n)


# Tokens in one array, or in several.
Tokens = jax.Array | Interleaved | InLanes
KINDS = Interleaved, InLanes
"""The operands that a launch reads as several arrays."""


def place(y: jax.Array, n: int, at: int) -> Any:
    """Return [B, T n, ...] with the tokens y [B, T, ...] at this place of every n tokens, and zeros at the others."""
    return in_turn(*(y if i == at else None for i in range(n)))


def in_turn(*arrays: jax.Array | None) -> Any:
    """Return the tokens [B, T n, ...] of n arrays [B, T, ...] in turn; None is an array of zeros."""
    return Interleaved(*arrays) if len(arrays) > 1 else arrays[0]


def whole(tree: object) -> Any:
    """Return a tree with one array in the place of all `Interleaved`."""
    return jax.tree.map(lambda y: y.whole() if _known(y) else y, tree, is_leaf=_known)


def _known(y: object) -> bool:
    return isinstance(y, Interleaved)


def select_queries(q: Tokens, o: jax.Array) -> Any:
    """Return outputs [B, T, ...] of the tokens with queries, from outputs of all tokens or of these alone."""
    if not isinstance(q, Interleaved):
        return o
    n, at = len(q.arrays), next(i for i, y in enumerate(q.arrays) if y is not None)
    if o.shape[1] == q.first.shape[1]:
        return o
    if _divided(o):
        return o.reshape(o.shape[0], -1, n, *o.shape[2:])[:, :, at]
    return _flat(o)[:, at::n].reshape(o.shape[0], -1, *o.shape[2:])


def _flat(y: jax.Array) -> jax.Array:
    """Return rows of one dimension: among rows of heads by channels, a TPU moves tokens by copies."""
    return y.reshape(*y.shape[:2], -1)


def _divided(y: jax.Array) -> bool:
    """Return whether explicit axes of a mesh divide tokens: then JAX neither pads between them nor takes every n-th."""
    return bool((*jax.typeof(y).sharding.spec, None, None)[1])


def first(y: Tokens) -> Any:
    """Return an array that has the tokens of the first kind, or an array as it is."""
    return y.first if isinstance(y, KINDS) else y


def kinds(y: object) -> int:
    """Return how many kinds of tokens there are: 1 for an array."""
    return len(y.arrays) if isinstance(y, Interleaved) else 1


def like(model: object, y: jax.Array) -> Any:
    """Return y where the model has several arrays, or y itself if the model is an array."""
    return model.like(y) if isinstance(model, Interleaved) else y


def unless_fitting(x: object, C: int) -> Any:
    """Return a tree as it is if kernels with chunks of C tokens can put its tokens together, and `whole` otherwise."""
    found = [y for y in jax.tree.leaves(x, is_leaf=_known) if _known(y)]
    fits = all(y.dtype != jnp.float16 and C % (8 * len(y.arrays)) == 0 for y in found)
    return x if fits else whole(x)
