"""The whole token mixer of a layer as one program: short convolution, gates, operator, gated norm."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from chunkwise.causal_conv1d import causal_conv1d
from chunkwise.causal_conv1d.config import cost as convolution_cost
from chunkwise.command.models import Layer
from chunkwise.norm_gated import rms_norm_gated
from chunkwise.norm_gated.config import cost as norm_cost

_WIDTH = 4
# By the name of a mixer's implementation, the implementation of the operator and the implementation of the parts around
# it. "mixed" is the operator's kernel with the convolution and the norm in plain JAX.
_BUILT = {
    "fused": ("fused", "pallas"),
    "staged": ("staged", "pallas"),
    "mixed": ("fused", "xla"),
    "xla": ("xla", "xla"),
}


@dataclass(frozen=True)
class Mixer(Layer):
    """The work of a layer between its projections; q, k and v go through the convolution, z is the gate of the norm.

    Attributes:
      activation: the activation of the norm's gate.
    """

    activation: str = "silu"

    @property
    def _widths(self) -> dict[str, int]:
        """Return the channels of every tensor of tokens."""
        gate = self.HV * (self.K if self.table.per_channel else 1)
        widths = {"q": self.H * self.K, "k": self.H * self.K, "v": self.HV * self.V, "z": self.HV * self.V}
        return widths | {"g": gate, "beta": self.HV}

    def _weights(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """Return shape and type of every weight."""
        bias = (self.HV, self.K) if self.table.per_channel else (self.HV,)
        convolved = {f"conv_{name}": ((self._widths[name], _WIDTH), jnp.bfloat16) for name in "qkv"}
        return convolved | {
            "A_log": ((self.HV,), jnp.float32), "dt_bias": (bias, jnp.float32), "norm": ((self.V,), jnp.bfloat16),
        }  # fmt: skip

    def specs(self, T: int, dtype) -> dict:
        """Return the shapes and types of the inputs without data: tokens as after the projections, and weights."""
        tokens = {name: jax.ShapeDtypeStruct((1, T, width), dtype) for name, width in self._widths.items()}
        return tokens | {name: jax.ShapeDtypeStruct(*x) for name, x in self._weights().items()}

    def function(self, implementation: str) -> Callable:
        """Return the function from the inputs by name, and cu_seqlens or None, to a dict of o."""
        operator, around = _BUILT[implementation]
        K, V, H, HV = self.K, self.V, self.H, self.HV

        def run(x, cu_seqlens):
            def convolve(name, *shape):
                y, _ = causal_conv1d(
                    x[name], x[f"conv_{name}"], activation="silu", cu_seqlens=cu_seqlens, implementation=around
                )
                return y.reshape(1, -1, *shape)

            gate = (HV, K) if self.table.per_channel else (HV,)
            o, _ = self.table.function(
                convolve("q", H, K), convolve("k", H, K), convolve("v", HV, V), x["g"].reshape(1, -1, *gate), x["beta"],
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=x["A_log"], dt_bias=x["dt_bias"],
                use_beta_sigmoid_in_kernel=True, cu_seqlens=cu_seqlens, implementation=operator,
            )  # fmt: skip
            z = x["z"].reshape(o.shape)
            return {"o": rms_norm_gated(o, z, x["norm"], activation=self.activation, implementation=around)}

        return run

    def cost(self, T: int, dtype, backward: bool) -> tuple[int, int]:
        """Return flops and bytes of operator, convolution and norm, each of which moves its tensors once."""
        flops, moved = super().cost(T, dtype, backward)
        size, channels = jnp.dtype(dtype).itemsize, sum(self._widths[name] for name in "qkv")
        for way in (False, True)[: 1 + backward]:
            for part in (
                convolution_cost(B=1, T=T, D=channels, W=_WIDTH, itemsize=size, backward=way),
                norm_cost(rows=T * self.HV, D=self.V, itemsize=size, backward=way),
            ):
                flops, moved = flops + part.flops, moved + part.bytes_accessed
        return flops, moved


MIXERS = {
    "mixer-qwen3-next": Mixer("gated_delta_rule", H=16, HV=32),
    "mixer-kimi-linear": Mixer("kda", H=32, HV=32, activation="sigmoid"),
}
