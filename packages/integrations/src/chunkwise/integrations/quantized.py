"""The projections of a module of flax in a model that qwix quantises, or gives adapters of low rank.

qwix replaces JAX's products while the model runs. It looks for a weight among the attributes of the module that calls a
product, and puts its own arrays in the place of the weight, or beside it.
"""

import contextlib
from collections.abc import Iterator

import jax
from flax import nnx
from jax.sharding import NamedSharding


def is_wrapped(module: nnx.Module) -> bool:
    """Return whether a module belongs to a model of qwix, which writes down its path."""
    return hasattr(module, "qwix_path")


class Projection:
    """A matrix [C, D] of a module as a function of hidden states, whose product qwix may replace.

    Args:
      module: the module.
      name: the attribute with the matrix, an nnx.Param or an array of qwix.
      names: the attributes with all matrices of the module.
    """

    def __init__(self, module: nnx.Module, name: str, names: list[str]):
        self.module, self.name, self.names = module, name, names
        self.weight = getattr(module, name)
        self.shape, self.dtype = self.weight.shape, self.weight.dtype

    def __call__(self, x: jax.Array, *, out_sharding: NamedSharding | None = None) -> jax.Array:
        """Return x [B, T, C] times the matrix, in the type of x."""
        quantized = not isinstance(self.weight, nnx.Variable)
        matrix = self.weight if quantized else self.weight.get_value().astype(x.dtype)
        with self._alone():
            y = jax.lax.dot_general(x, matrix, (((2,), (0,)), ((), ())), out_sharding=out_sharding)
        return y.astype(x.dtype)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hide the other matrices of the module: qwix takes a matrix for another one of the same shape."""
        attributes = vars(self.module)
        others = {name: attributes.pop(name) for name in self.names if name != self.name}
        try:
            yield
        finally:
            attributes.update(others)
