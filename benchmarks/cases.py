"""The shapes of real models, by name."""

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
      sequences: equally long packed sequences; 0 for one that is not packed.
    """

    operator: str
    H: int
    HV: int
    K: int
    V: int
    T: int = 8192
    sequences: int = 0

    @property
    def per_channel(self) -> bool:
        """Whether the gate is per channel of the key."""
        return self.operator in ("kda", "gla")

    def run(self, implementation: str, x: dict, cu_seqlens=None):
        """Return the output of the operator on inputs by argument name."""
        operator = getattr(pipeline, f"chunk_{self.operator}")
        return operator(**x, cu_seqlens=cu_seqlens, implementation=implementation)[0]

    def inputs(self, T: int, dtype) -> dict:
        """Return seeded inputs by argument name."""
        x = make_inputs(1, T, self.H, self.HV, self.K, self.V, dtype=dtype, per_channel=self.per_channel)
        if self.operator.endswith("gla"):
            del x["beta"]
        return x

    def specs(self, T: int, dtype) -> dict:
        """Return the shapes of the inputs without data."""
        return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, self._zeros(T, dtype)))

    def _zeros(self, T: int, dtype) -> dict:
        head = (1, T, self.HV)
        gate = (*head, self.K) if self.per_channel else head
        x = {"q": jnp.zeros((1, T, self.H, self.K), dtype), "k": jnp.zeros((1, T, self.H, self.K), dtype)}
        x |= {"v": jnp.zeros((*head, self.V), dtype), "g": jnp.zeros(gate, jnp.float32)}
        return x if self.operator.endswith("gla") else x | {"beta": jnp.zeros(head, dtype)}

    def boundaries(self, T: int):
        """Return cu_seqlens int32 [sequences + 1], or None."""
        if not self.sequences:
            return None
        return jnp.arange(self.sequences + 1, dtype=jnp.int32) * (T // self.sequences)

    def flops(self, T: int, C: int = 64) -> int:
        """Return the flops of the forward in chunks of C: scores, states and outputs, and for the delta rule its solve.

        The same count for every implementation, so that their rates compare.
        """
        shared = C * self.K + 2 * self.K * self.V + C * self.V
        delta = 0 if self.operator.endswith("gla") else C * self.K + C * (self.K + self.V) + self.K * self.V + C * C
        return 2 * T * self.HV * (shared + delta)


CASES = {
    "qwen3-next": Case("gated_delta_rule", H=16, HV=32, K=128, V=128),
    "kimi-linear": Case("kda", H=32, HV=32, K=128, V=128),
    "minimax": Case("simple_gla", H=64, HV=64, K=128, V=128),
    "gla": Case("gla", H=16, HV=16, K=128, V=128),
    "gdn-16": Case("gated_delta_rule", H=16, HV=16, K=128, V=128, T=2048),
    "packed-16x16384": Case("gated_delta_rule", H=16, HV=16, K=128, V=128, T=16 * 16384, sequences=16),
}
