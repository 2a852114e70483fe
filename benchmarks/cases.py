"""The shapes of real models, by name, and what a case costs: flops and bytes, the same for every implementation."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from chunkwise import pipeline
from chunkwise.shared.testing import make_inputs


@dataclass(frozen=True)
class Case:
    """A layer of a model.

    Attributes:
      operator: operator without its prefix `chunk_`.
      H, HV, K, V: heads and head dimensions.
      T: tokens, unless the command line says otherwise.
      sequences: packed sequences; 0 for one that is not packed.
      ragged: whether the n-th of them is n + 1 times as long as the first, instead of all equally long.
    """

    operator: str
    H: int
    HV: int
    K: int = 128
    V: int = 128
    T: int = 8192
    sequences: int = 0
    ragged: bool = False

    @property
    def per_channel(self) -> bool:
        """Whether the gate is per channel of the key."""
        return self.operator in ("kda", "gla")

    @property
    def delta(self) -> bool:
        """Whether it takes beta."""
        return self.operator in ("gated_delta_rule", "kda")

    def function(self, implementation: str) -> Callable:
        """Return the function from the inputs by name, and cu_seqlens or None, to a dict of o."""
        operator = getattr(pipeline, f"chunk_{self.operator}")
        return lambda x, cu_seqlens: {"o": operator(**x, cu_seqlens=cu_seqlens, implementation=implementation)[0]}

    def inputs(self, T: int, dtype) -> dict:
        """Return seeded inputs by argument name."""
        x = make_inputs(1, T, self.H, self.HV, self.K, self.V, dtype=dtype, per_channel=self.per_channel)
        return {name: y for name, y in x.items() if self.delta or name != "beta"}

    def specs(self, T: int, dtype) -> dict:
        """Return the shapes and types of the inputs without data."""
        gate = (self.HV, self.K) if self.per_channel else (self.HV,)
        shapes = {"q": (self.H, self.K), "k": (self.H, self.K), "v": (self.HV, self.V), "g": gate}
        shapes |= {"beta": (self.HV,)} if self.delta else {}
        return {
            name: jax.ShapeDtypeStruct((1, T, *tail), jnp.float32 if name == "g" else dtype)
            for name, tail in shapes.items()
        }

    def boundaries(self, T: int):
        """Return cu_seqlens int32 [sequences + 1], or None."""
        if not self.sequences:
            return None
        n = jnp.arange(self.sequences + 1, dtype=jnp.int32)
        if self.ragged:
            return T * (n * (n + 1)) // (self.sequences * (self.sequences + 1))
        return n * (T // self.sequences)

    def flops(self, T: int, backward: bool, C: int = 64) -> int:
        """Return the flops of chunks of C: scores, states, outputs, and for the delta rule its solve.

        Triangles count half. The backward counts twice the forward. The same for every implementation, whatever it
        really does, so that their rates compare.
        """
        count = C * (self.K + self.V) + 4 * self.K * self.V
        if self.delta:
            count += C * self.K + C * (self.K + self.V) + 2 * self.K * self.V + C * C // 3
        return T * self.HV * count * (3 if backward else 1)

    def bytes(self, T: int, dtype, backward: bool) -> int:
        """Return the bytes of all arguments and results, each moved once: no implementation moves less."""
        inputs = sum(x.size * x.dtype.itemsize for x in self.specs(T, dtype).values())
        o = T * self.HV * self.V * jnp.dtype(dtype).itemsize
        return 2 * inputs + o if backward else inputs + o


CASES = {
    "qwen3-next-80b": Case("gated_delta_rule", H=16, HV=32),
    "qwen3-next-80b-ragged": Case("gated_delta_rule", H=16, HV=32, sequences=16, ragged=True),
    "qwen3.5-397b": Case("gated_delta_rule", H=16, HV=64),
    "kimi-linear-48b": Case("kda", H=32, HV=32),
    "minimax-text-01": Case("simple_gla", H=64, HV=64),
    "gla": Case("gla", H=16, HV=16),
    "gdn-16": Case("gated_delta_rule", H=16, HV=16, T=2048),
    "packed-16x16384": Case("gated_delta_rule", H=16, HV=16, T=16 * 16384, sequences=16),
}
