"""A whole block of a model as one program: a gated DeltaNet, a perceptron, and the norms before them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.command.models import Layer
from chunkwise.layers import GatedDeltaNetConfig, GatedDeltaNetWeights, gated_delta_net, init_gated_delta_net
from examples.blocks import Mlp, mlp, rms_norm


class Weights(NamedTuple):
    """The weights of a block."""

    norm: jax.Array
    mixer: GatedDeltaNetWeights
    mlp_norm: jax.Array
    mlp: Mlp


@dataclass(frozen=True)
class Block(Layer):
    """A block of Qwen3.5 in bfloat16, with norms, decays and step biases in float32.

    Attributes:
      D: size of the hidden states.
      F: size of the perceptron.
    """

    D: int = 4096
    F: int = 12288

    @property
    def width(self) -> int:
        """Channels of the output."""
        return self.D

    @property
    def config(self) -> GatedDeltaNetConfig:
        """The sizes of the mixer."""
        return GatedDeltaNetConfig(D=self.D, H=self.H, HV=self.HV, K=self.K, V=self.V)

    def _weights(self, dtype) -> Weights:
        """Return the shapes and types of the weights."""
        mixer = jax.eval_shape(lambda: init_gated_delta_net(jax.random.key(0), self.config, dtype))
        norm, matrix = jax.ShapeDtypeStruct((self.D,), jnp.float32), lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
        return Weights(norm, mixer, norm, Mlp(*(matrix(self.D, self.F),) * 2, matrix(self.F, self.D)))

    def specs(self, T: int, dtype) -> dict:
        """Return the shapes and types of the inputs without data: hidden states, and weights by number."""
        weights = enumerate(jax.tree.leaves(self._weights(dtype)))
        return {"x": jax.ShapeDtypeStruct((1, T, self.D), dtype)} | {f"w{i}": leaf for i, leaf in weights}

    def function(self, implementation: str) -> Callable:
        """Return a function of the inputs by name, and None, to a dict of o, the hidden states after the block."""
        structure = jax.tree.structure(self._weights(jnp.bfloat16))

        def run(inputs, _):
            w = jax.tree.unflatten(structure, [inputs[f"w{i}"] for i in range(structure.num_leaves)])
            x = inputs["x"]
            x = x + gated_delta_net(rms_norm(x, w.norm, 1e-6), w.mixer, self.config, implementation=implementation)[0]
            return {"o": x + mlp(rms_norm(x, w.mlp_norm, 1e-6), w.mlp)}

        return run

    def cost(self, T: int, dtype, backward: bool) -> tuple[int, int]:
        """Return flops and bytes of the operator and of all matrices; a backward has two products for each.

        The bytes are the bytes of weights, hidden states and their gradients, each moved once.
        """
        size, sizes = jnp.dtype(dtype).itemsize, [leaf.size for leaf in jax.tree.leaves(self._weights(dtype))]
        ways = 3 if backward else 1
        flops = super().cost(T, dtype, backward)[0] + ways * 2 * T * sum(sizes)
        return flops, (1 + backward) * size * sum(sizes) + (2 + 2 * backward) * size * T * self.D


BLOCKS = {
    # The defaults of transformers, which are the sizes of Qwen3.5-9B.
    "block-qwen3.5-9b": Block("gated_delta_rule", H=16, HV=32),
}
