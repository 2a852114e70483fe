"""Operators by composition for the TPU compiler's estimate: cases with the copies around their kernels."""

from dataclasses import dataclass

import jax

from chunkwise.command.models import Layer
from chunkwise.pipeline.operators import COMPOSED, Entry


@dataclass(frozen=True)
class Composed(Layer):
    """A case of an operator of `COMPOSED`, as a `Layer` is one of `OPERATORS`.

    Attributes:
      base: the operator whose kernels run, and `tokens` of it for a token.
    """

    base: str = ""
    tokens: int = 2

    def runs(self, T: int) -> Layer:
        """Return the layer whose kernels run for T tokens."""
        return Layer(self.base, self.H, self.HV, self.K, self.V, T * self.tokens)

    @property
    def table(self) -> Entry:
        """The operator's line in the table."""
        return COMPOSED[f"chunk_{self.operator}"]

    @property
    def _options(self) -> dict:
        return dict(self.table.static)

    def specs(self, T: int, dtype) -> dict:
        """Return the shapes and types of the inputs without data; they have several entries for a token, or one."""
        few = self.table.source.inputs(1, 2, self.H, self.HV, self.K, self.V, dtype=dtype)
        return {name: jax.ShapeDtypeStruct((1, y.shape[1] * T // 2, *y.shape[2:]), y.dtype) for name, y in few.items()}


# 32 heads, as the operators that run, and the heads of RWKV-7's largest model.
CASES = {
    "delta-product-2": Composed("gated_delta_product", H=32, HV=32, base="gated_delta_rule"),
    "dplr": Composed("dplr_delta_rule", H=32, HV=32, base="kda"),
    "rwkv7": Composed("dplr_delta_rule", H=64, HV=64, K=64, V=64, base="kda"),
    "gdn-32": Layer("gated_delta_rule", H=32, HV=32),
    "kda-64x64": Layer("kda", H=64, HV=64, K=64, V=64),
}
