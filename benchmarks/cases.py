"""The cases of the benchmarks, by name: the layers of real models, further batches, and operators by composition."""

import dataclasses

import jax

from chunkwise.command.models import MODELS, Layer
from chunkwise.pipeline.operators import COMPOSITIONS
from chunkwise.shared.testing.inputs import NOT_TOKENS

CASES = MODELS | {
    **{
        f"{name}-kept": dataclasses.replace(MODELS[name], disable_recompute=True)
        for name in ("qwen3-next-80b", "qwen3-next-80b-tp8", "qwen3.5-397b-tp8")
    },
    "qwen3-next-80b-ragged": Layer("gated_delta_rule", H=16, HV=32, sequences=16, ragged=True),
    # Some heads of Qwen3-Next; one of eight devices is a model's.
    **{f"qwen3-next-80b-tp{n}": Layer("gated_delta_rule", H=16 // n, HV=32 // n) for n in (2, 4, 16)},
    "olmo-hybrid-7b": Layer("gated_delta_rule", H=30, HV=30, K=96, V=192),
    "gdn-16": Layer("gated_delta_rule", H=16, HV=16, T=2048),
}


@dataclasses.dataclass(frozen=True)
class Composed(Layer):
    """A case of an operator that runs another one."""

    def runs(self, T: int) -> Layer:
        """Return the layer whose kernels run for T tokens."""
        x = self.table.composition
        operator, tokens = (self.operator, 1) if x is None else (x.runs, x.tokens)
        return Layer(operator, self.H, self.HV, self.K, self.V, T * tokens)

    def specs(self, T: int, dtype) -> dict:
        """Return the shapes and types of the inputs without data; they have several entries for a token, or one."""
        few = self.table.source.inputs(1, 2, self.H, self.HV, self.K, self.V, dtype=dtype)
        of = lambda name, y: y.shape if name in NOT_TOKENS else (1, y.shape[1] * T // 2, *y.shape[2:])
        return {name: jax.ShapeDtypeStruct(of(name, y), y.dtype) for name, y in few.items()}


# 32 heads, as the operators that run, and the heads of RWKV-7's largest model and of xLSTM-7B.
COMPOSED = {
    "delta-product-2": Composed("gated_delta_product", H=32, HV=32),
    "dplr": Composed("dplr_delta_rule", H=32, HV=32),
    "rwkv7": Composed("dplr_delta_rule", H=64, HV=64, K=64, V=64),
    "xlstm-7b": Composed("mlstm", H=8, HV=8, K=256, V=512),
    "simple-gla-xlstm-7b": Layer("simple_gla", H=8, HV=8, K=256, V=512),
    # A Mamba-2 with heads of 128 channels.
    "simple-gla-64x128": Layer("simple_gla", H=8, HV=64),
    "gdn-32": Layer("gated_delta_rule", H=32, HV=32),
    "kda-64x64": Layer("kda", H=64, HV=64, K=64, V=64),
}
# An operator without a case of its own has 32 heads.
_OTHERS = {x.chunk.__name__.removeprefix("chunk_") for x in COMPOSITIONS} - {x.operator for x in COMPOSED.values()}
COMPOSED |= {name.replace("_", "-"): Composed(name, H=32, HV=32) for name in sorted(_OTHERS)}
