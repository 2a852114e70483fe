"""Token mixers with their projections, which are layers of models: a name of chunkwise.layers, and sizes."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.cases import Composed
from chunkwise import layers


@dataclass(frozen=True)
class Whole(Composed):
    """A layer of chunkwise.layers over hidden states.

    Attributes:
      layer: the module of the layer there.
      D: channels of the hidden states.
      options: more fields of the config of the layer, with their values.
    """

    layer: str = ""
    D: int = 4096
    options: tuple[tuple[str, object], ...] = ()

    @property
    def width(self) -> int:
        """Return the channels of o, which are those of the hidden states."""
        return self.D

    def _weights(self, dtype):
        """Return the definition of the layer, its config, and the shapes and types of its weights."""
        definition = importlib.import_module(f"{layers.__name__}.{self.layer}").LAYER
        config = definition.config(D=self.D, H=self.H, HV=self.HV, K=self.K, V=self.V, **dict(self.options))
        init = lambda: definition.random_weights(jax.random.key(0), config, dtype)
        return definition, config, jax.eval_shape(init)

    def specs(self, T: int, dtype) -> dict:
        """Return the shapes and types of the hidden states and of the weights, without data."""
        weights = jax.tree.leaves(self._weights(dtype)[2])
        tokens = {"x": jax.ShapeDtypeStruct((1, T, self.D), dtype)}
        return tokens | {f"weight_{i}": x for i, x in enumerate(weights)}

    def function(self, implementation: str) -> Callable:
        """Return the function from the inputs by name, and cu_seqlens or None, to a dict of o."""

        def run(x, cu_seqlens):
            definition, config, shapes = self._weights(x["x"].dtype)
            structure = jax.tree.structure(shapes)
            weights = jax.tree.unflatten(structure, [x[f"weight_{i}"] for i in range(structure.num_leaves)])
            layer = definition.over_sequences
            return {"o": layer(x["x"], weights, config, cu_seqlens=cu_seqlens, implementation=implementation)[0]}

        return run

    def cost(self, T: int, dtype, backward: bool) -> tuple[int, int]:
        """Return flops and bytes of the operator and of products with weights, whose arrays are moved once.

        The backward has two products for each of the forward, and reads and writes what the forward does.
        """
        operator = self.runs(T)
        flops, moved = operator.cost(operator.T, dtype, backward)
        shapes = self.specs(T, dtype)
        arrays = sum(x.size * x.dtype.itemsize for x in shapes.values()) + T * self.D * jnp.dtype(dtype).itemsize
        products = 2 * T * sum(x.size for x in shapes.values() if x.ndim == 2)
        return flops + products * (1 + 2 * backward), moved + arrays * (1 + backward)


_DELTA, _MAMBA = "gated_delta_rule", "simple_gla"
_RANKS = (("R_decay", 128), ("R_rate", 128), ("R_gate", 480))
WHOLE = {
    "mixer-olmo-hybrid": Whole(
        _DELTA, H=30, HV=30, K=96, V=192, layer="delta_net", D=3840, options=(("allow_neg_eigval", True),)
    ),
    "mixer-nemotron-h": Whole(_MAMBA, H=8, HV=128, V=64, layer="mamba2"),
    "mixer-granite-4": Whole(_MAMBA, H=1, HV=128, V=64, layer="mamba2"),
    "mixer-rwkv7": Whole("dplr_delta_rule", H=64, HV=64, K=64, V=64, layer="rwkv7", options=_RANKS),
}
