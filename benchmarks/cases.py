"""The cases of the benchmarks, by name: layers of real models, operators by composition, and token mixers of models."""

import dataclasses
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from chunkwise import layers
from chunkwise.command.models import MODELS, Layer
from chunkwise.pipeline.operators import COMPOSITIONS

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


@dataclasses.dataclass(frozen=True)
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
_FALCON = (("norm", None), ("in_multiplier", 0.7), ("multipliers", (0.35, 0.25, 0.1, 0.5, 0.3)))
_LING = (("activation", None), ("qk_norm", True), ("groups", 4))
_LING += (("frequencies", tuple(10_000.0 ** (-i / 32) for i in range(32))),)
WHOLE = {
    "mixer-qwen3.5-9b": Whole(_DELTA, H=16, HV=32, layer="delta_net"),
    "mixer-kimi-linear": Whole("kda", H=32, HV=32, layer="kimi", D=2304, options=(("R", 128),)),
    "mixer-minimax": Whole(_MAMBA, H=64, HV=64, layer="lightning", D=6144),
    "mixer-olmo-hybrid": Whole(
        _DELTA, H=30, HV=30, K=96, V=192, layer="delta_net", D=3840, options=(("allow_neg_eigval", True),)
    ),
    "mixer-nemotron-h": Whole(_MAMBA, H=8, HV=128, V=64, layer="mamba2"),
    "mixer-granite-4": Whole(_MAMBA, H=1, HV=128, V=64, layer="mamba2"),
    "mixer-falcon-h1": Whole(_MAMBA, H=2, HV=32, K=256, layer="mamba2", D=5120, options=_FALCON),
    "mixer-ling-2.5": Whole(_MAMBA, H=32, HV=32, layer="lightning", D=3072, options=_LING),
    "mixer-delta-product": Whole("gated_delta_product", H=16, HV=16, layer="delta_product", D=2048),
    "mixer-rwkv7": Whole("dplr_delta_rule", H=64, HV=64, K=64, V=64, layer="rwkv7", options=_RANKS),
}


def case(name: str) -> Layer:
    """Return the case of this name."""
    return (CASES | COMPOSED | WHOLE)[name]
