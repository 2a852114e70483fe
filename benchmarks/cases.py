"""The shapes of real models, by name, and what a case costs: flops and bytes, the same for every implementation."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.pipeline.check import operator_inputs, tolerance
from chunkwise.pipeline.operators import OPERATORS, Entry
from chunkwise.shared.kernels.chunking import token_owners
from chunkwise.shared.operators.checks import choose_chunk_size
from chunkwise.shared.testing.oracle import reference


@dataclass(frozen=True)
class Case:
    """A layer of a model.

    Attributes:
      operator: operator without its prefix `chunk_`.
      H, HV, K, V: heads and head dimensions.
      T: tokens, unless the command line says otherwise.
      sequences: packed sequences; 0 for one that is not packed.
      ragged: whether the n-th of them is n + 1 times as long as the first, instead of all equally long.
      segments: whether ids of the tokens tell the sequences, instead of boundaries.
      normalise: whether the operator scales queries and keys to unit length.
    """

    operator: str
    H: int
    HV: int
    K: int = 128
    V: int = 128
    T: int = 8192
    sequences: int = 0
    ragged: bool = False
    segments: bool = False
    normalise: bool = False

    @property
    def _options(self) -> dict[str, bool]:
        """What the operator and its oracle are told besides; gated linear attention has no such option."""
        return {"use_qk_l2norm_in_kernel": True} if self.normalise else {}

    @property
    def table(self) -> Entry:
        """The operator's line in the table of operators."""
        return OPERATORS[f"chunk_{self.operator}"]

    @property
    def width(self) -> int:
        """Return the channels of o, of all heads together."""
        return self.HV * self.V

    def function(self, implementation: str, sharding=None) -> Callable:
        """Return the function from the inputs by name, and cu_seqlens or None, to a dict of o.

        `sharding` is of v, over devices; None for one device.
        """
        operator = self.table.function

        def run(x, cu_seqlens):
            told = {"cu_seqlens": cu_seqlens}
            if self.segments:
                told = {"segment_ids": token_owners(x["q"].shape[1], cu_seqlens)[None]}
            return {"o": operator(**x, **told, **self._options, implementation=implementation, sharding=sharding)[0]}

        return run

    def inputs(self, T: int, dtype) -> dict:
        """Return seeded inputs by argument name; the gates are those of the tokens."""
        x = operator_inputs(self.table, 1, T, self.H, self.HV, self.K, self.V, dtype=dtype)
        x.pop("g_gamma", None)
        return x

    def specs(self, T: int, dtype) -> dict:
        """Return the shapes and types of the inputs without data."""
        gate = (self.HV, self.K) if self.table.per_channel else (self.HV,)
        shapes = {"q": (self.H, self.K), "k": (self.H, self.K), "v": (self.HV, self.V), "g": gate}
        shapes |= {"beta": (self.HV,)} if self.table.delta else {}
        return {
            name: jax.ShapeDtypeStruct((1, T, *tail), jnp.float32 if name == "g" else dtype)
            for name, tail in shapes.items()
        }

    def part(self, x: dict, tokens: slice) -> dict:
        """Return some tokens of the last key head with its value heads, of inputs, results or gradients by name.

        Heads do not mix, nor do sequences: if the tokens are a whole one, they give what they give among the others.
        """
        heads = {"q": 1, "k": 1, "dq": 1, "dk": 1}
        return {name: y[:, tokens, -heads.get(name, self.HV // self.H) :] for name, y in x.items()}

    def expected(self, part: dict, do) -> dict[str, np.ndarray]:
        """Return o in float64 of one sequence of such a part, and the gradients of its inputs if there is a do."""
        o, _, *gradients = reference(**part, do=do, **self._options)
        return {"o": o} | ({f"d{name}": y for name, y in gradients[0].items()} if gradients else {})

    def tolerance(self, name: str, dtype: str) -> float:
        """Return the tolerance of a result, or of a gradient, whose name begins with d."""
        return tolerance(name, dtype)

    def boundaries(self, T: int):
        """Return cu_seqlens int32 [sequences + 1], or None."""
        if not self.sequences:
            return None
        n = jnp.arange(self.sequences + 1, dtype=jnp.int32)
        if self.ragged:
            return T * (n * (n + 1)) // (self.sequences * (self.sequences + 1))
        return n * (T // self.sequences)

    def cost(self, T: int, dtype, backward: bool) -> tuple[int, int]:
        """Return flops and bytes: those that the package's `cost` counts, the forward's or both directions' together.

        They are the same for every implementation, whatever it really does, so that their rates compare: the flops of
        the matrix products of whole chunks, and every tensor moved once in each direction. Earlier results counted
        triangles half, the inverse too, and a backward as two forwards: their times compare, their rates do not.
        """
        sizes = dict(B=1, T=T, H=self.H, HV=self.HV, K=self.K, V=self.V, C=choose_chunk_size(None, T=T))
        itemsize = jnp.dtype(dtype).itemsize
        costs = [self.table.cost(**sizes, itemsize=itemsize, backward=way) for way in (False, True)[: 1 + backward]]
        return sum(x.flops for x in costs), sum(x.bytes_accessed for x in costs)


CASES = {
    "qwen3-next-80b": Case("gated_delta_rule", H=16, HV=32),
    "qwen3-next-80b-unit": Case("gated_delta_rule", H=16, HV=32, normalise=True),
    "qwen3-next-80b-ragged": Case("gated_delta_rule", H=16, HV=32, sequences=16, ragged=True),
    "qwen3.5-397b": Case("gated_delta_rule", H=16, HV=64),
    "kimi-linear-48b": Case("kda", H=32, HV=32),
    "minimax-text-01": Case("simple_gla", H=64, HV=64),
    "mamba-codestral-7b": Case("simple_gla", H=8, HV=128, V=64),
    "gla": Case("gla", H=16, HV=16),
    "gdn-16": Case("gated_delta_rule", H=16, HV=16, T=2048),
    **{
        f"{name}-segments": Case(operator, H=H, HV=HV, sequences=16, ragged=True, segments=True)
        for name, operator, H, HV in (
            ("qwen3-next-80b", "gated_delta_rule", 16, 32),
            ("kimi-linear-48b", "kda", 32, 32),
            ("minimax-text-01", "simple_gla", 64, 64),
            ("gla", "gla", 16, 16),
        )
    },
    "packed-16x16384": Case("gated_delta_rule", H=16, HV=16, T=16 * 16384, sequences=16),
}
