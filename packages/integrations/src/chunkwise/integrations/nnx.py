"""The layers as modules of flax.nnx, and weights on a mesh."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from chunkwise import layers
from chunkwise.integrations import mesh, quantized
from chunkwise.layers import layer, place
from chunkwise.layers.checkpoint import parameters
from chunkwise.layers.devices import sharding
from chunkwise.shared.call import checks, unknown_arguments

__all__ = [
    "Comba",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LightningAttention",
    "Mamba2Mixer",
    "MlstmLayer",
    "Rwkv7Attention",
    "named",
    "place",
]


def named(weights: Any) -> dict[str, Any]:
    """Return what a tuple of weights has under the names of a module's attributes.

    The parts of a tuple inside get numbers: `conv` becomes `conv_0`, `conv_1` and `conv_2`.

    Args:
      weights: weights of a layer, such as `GatedDeltaNetWeights`, or another tree of its class, such as
        `shardings(...).weights` and `decayed(config)`.
    """
    found = {}
    for name, part in weights._asdict().items():
        found |= {f"{name}_{i}": x for i, x in enumerate(part)} if type(part) is tuple else {name: part}
    return found


def _projections(config: layers.LayerConfig) -> list[str]:
    """Return the names of the matrices of products with hidden states: those that decay, and factors of low rank."""
    definition = sharding.LAYERS[type(config)]
    split, decays = definition.split(config), named(layers.decayed(config))
    factor = lambda name, letters: len(letters) == 2 and name not in split._fields
    return [
        name for name, letters in named(split).items()
        if not name.startswith("conv") and (decays[name] or factor(name, letters))
    ]  # fmt: skip


class _Layer(nnx.Module):
    """A layer as a module, with its weights and, for decoding, its cache.

    Args:
      config: sizes of the layer, such as `GatedDeltaNetConfig`.
      weights: the weights of a checkpoint, or others; None for new ones.
      rngs: the random numbers, whose stream `params` draws new weights; None if `weights` are given.
      param_dtype: type of new weights, but A_log, dt_bias and skip are float32. Products are in the type of the hidden
        states.
      mesh_axes: which axes of a mesh divide the rows, the tokens and the heads, under the names "batch", "tokens" and
        "heads"; a value is an axis or a tuple of axes. It counts for automatic and explicit axes of a mesh that
        `jax.set_mesh` has set, and for axes of tokens inside a `shard_map`. Without a mesh it is not read.
      implementation: the implementation of the operator, "xla", "staged" or "fused"; None for the best.

    Attributes:
      q, k, v, out, ...: the weights, each an nnx.Param under its name in the weights of the layer, such as
        `GatedDeltaNetWeights`. The arrays of a tuple there have numbers: `conv_0`, `conv_1`, `conv_2`.
      weights: all of them as the layer of `chunkwise.layers` takes them, arrays without nnx.Param.
      cache: what the layer remembers of the tokens so far, a `Cache` of nnx.Cache; None until `init_cache`.
    """

    init: ClassVar[Callable]
    run: ClassVar[Callable]

    def __init__(
        self, config: layers.LayerConfig, weights: Any = None, *, rngs: nnx.Rngs | None = None, param_dtype=jnp.float32,
        mesh_axes: Mapping[str, Any] | None = None, implementation: str | None = None,
    ):  # fmt: skip
        checks.check(
            (weights is None) != (rngs is None), "`rngs` must be given where `weights` is not, and only there."
        )
        if weights is not None:
            parameters.check_weights(weights, type(self).init, config)
        self.config, self.implementation = config, implementation
        # flax hashes attributes that are no arrays.
        self.mesh_axes = None if mesh_axes is None else tuple(mesh_axes.items())
        tree = weights if rngs is None else type(self).init(rngs.params(), config, param_dtype)
        for name, weight in named(self._variables(nnx.Param, tree, "weights")).items():
            setattr(self, name, weight)
        self.cache = nnx.data(None)

    @property
    def weights(self) -> Any:
        """The weights as the layer of `chunkwise.layers` takes them."""
        return self._with_weights(self._read)

    def _read(self, name: str) -> Any:
        return nnx.as_pure(getattr(self, name))

    def _read_projection(self, name: str) -> Any:
        """Return a weight, and a projection as a function."""
        projections = _projections(self.config)
        return quantized.Projection(self, name, projections) if name in projections else self._read(name)

    def _with_weights(self, read: Callable[[str], Any]) -> Any:
        """Return the weights of the layer, given a function that reads an attribute."""
        definition = sharding.LAYERS[type(self.config)]
        parts = definition.split(self.config)._asdict().items()
        several = lambda name, part: tuple(read(f"{name}_{i}") for i in range(len(part)))
        return definition.weights(**{
            name: several(name, part) if type(part) is tuple else read(name) for name, part in parts
        })  # fmt: skip

    def _variables(self, kind: Callable, tree: Any, name: str) -> Any:
        """Return arrays as variables, which flax lays on the mesh that is set."""
        on = mesh.shardings_on(self.config, self.mesh_axes)
        if on is None:
            return jax.tree.map(kind, tree)
        return jax.tree.map(lambda x, spec: kind(x, out_sharding=spec), tree, getattr(on, name))

    def init_cache(self, N: int, dtype=jnp.float32) -> None:
        """Make an empty cache, which a call with `decode=True` reads and writes; an old cache is dropped.

        Args:
          N: sequences: the rows of the hidden states, or the sequences of `cu_seqlens`.
          dtype: type of the hidden states. The state is float32 for every type.
        """
        self.cache = nnx.data(self._variables(nnx.Cache, layers.empty_cache(self.config, N, dtype), "cache"))

    def __call__(
        self, x: jax.Array, *, decode: bool = False, cu_seqlens: jax.Array | None = None,
        segment_ids: jax.Array | None = None, padding_id: int = -1,
    ) -> jax.Array:  # fmt: skip
        """Run the layer over hidden states.

        Args:
          x: hidden states [B, T, D], float32, bfloat16 or float16.
          decode: whether these tokens, one or many, continue the cache, which is updated; static.
          cu_seqlens: boundaries of the sequences of a packed row, int32 [N + 1]; B must be 1.
          segment_ids: int32 [B, T], instead of `cu_seqlens`: a sequence begins where the id changes, and a token with
            an id below 0 is padding: it may hold any number, its output is zeros, and it does not change the cache.
          padding_id: another id whose tokens are padding; static.

        Returns:
          y [B, T, D] in the type of x.

        Raises:
          ValueError: an argument has the wrong shape or type, or `decode` comes before `init_cache`.
        """
        return self._run(x, decode, cu_seqlens=cu_seqlens, segment_ids=segment_ids, padding_id=padding_id)[0]

    def _run(self, x: jax.Array, decode: bool, **options: jax.Array | int | None) -> tuple[jax.Array, ...]:
        """Run the layer, put the cache where it belongs, and return the other results."""
        checks.check(not decode or self.cache is not None, "`decode` must be False before `init_cache`; got True.")
        cache = nnx.as_pure(self.cache)
        weights = self._with_weights(self._read_projection) if quantized.is_wrapped(self) else self.weights
        y, after, *more = type(self).run(
            x, weights, self.config, cache if decode else None, decode, **options, implementation=self.implementation,
            **mesh.division(self.config, self.mesh_axes),
        )  # fmt: skip
        if decode:
            is_variable = lambda x: isinstance(x, nnx.Variable)
            jax.tree.map(lambda kept, new: kept.set_value(new), self.cache, after, is_leaf=is_variable)
        return y, *more


Kind = TypeVar("Kind", bound=type[_Layer])


def _module(config: type[layers.LayerConfig]) -> Callable[[Kind], Kind]:
    """Return a decorator that makes a class the module of the layer of a config, with its documentation."""
    definition = sharding.LAYERS[config]

    def decorate(cls: Kind) -> Kind:
        cls.init, cls.run = staticmethod(definition.random_weights), staticmethod(definition.over_sequences)
        # All layers have the same arguments and attributes, and a reader looks for them in the class of a layer.
        common = inspect.cleandoc(_Layer.__doc__ or "").partition("\n\n")[2]
        equations = (
            f"`chunkwise.layers.{definition.name}` has the equations. The calls for hidden states x [B, T, D] are::"
        )
        result = "y, v_first" if "v_first" in inspect.signature(cls.__call__).parameters else "y"
        calls = f"    layer = {cls.__name__}(config, rngs=nnx.Rngs(0))\n    {result} = layer(x)"
        cls.__doc__ = "\n\n".join((inspect.cleandoc(cls.__doc__ or ""), equations, calls, common))
        # Python's errors name a method with the class in which it is written.
        for name in ("__init__", "__call__", "init_cache"):
            f = vars(cls).get(name, vars(_Layer)[name])
            copy = types.FunctionType(f.__code__, f.__globals__, name, f.__defaults__, f.__closure__)
            copy.__kwdefaults__, copy.__doc__, copy.__annotations__ = f.__kwdefaults__, f.__doc__, f.__annotations__
            copy.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, unknown_arguments.explained(copy, layer.INSTEAD))
        # The metaclass of flax has a call with any arguments, which hides the signature.
        signature = inspect.signature(cls.__init__)
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        return cls

    return decorate


@_module(layers.CombaConfig)
class Comba(_Layer):
    """Comba, whose delta rule erases by a key of its own, as a module."""


@_module(layers.GatedDeltaNetConfig)
class GatedDeltaNet(_Layer):
    """The gated DeltaNet of Qwen3-Next, Qwen3.5 and OLMo-hybrid, as a module."""


@_module(layers.GatedDeltaNet2Config)
class GatedDeltaNet2(_Layer):
    """Gated DeltaNet 2, whose delta rule has erase and write gates, as a module."""


@_module(layers.GatedLinearAttentionConfig)
class GatedLinearAttention(_Layer):
    """Gated linear attention, the layer of GLA, as a module."""


@_module(layers.KimiDeltaAttentionConfig)
class KimiDeltaAttention(_Layer):
    """Kimi delta attention, the layer of Kimi-Linear, Kimi-K3 and Ling 3.0, as a module."""


@_module(layers.Mamba2Config)
class Mamba2Mixer(_Layer):
    """The mixer of Mamba-2, as a module."""


@_module(layers.LightningAttentionConfig)
class LightningAttention(_Layer):
    """Lightning attention, the layer of MiniMax, Ling 2.x and MiniCPM-SALA, as a module."""


@_module(layers.MlstmLayerConfig)
class MlstmLayer(_Layer):
    """The mLSTM layer of xLSTM, as a module."""


@_module(layers.GatedDeltaProductConfig)
class GatedDeltaProduct(_Layer):
    """Gated DeltaProduct, whose tokens take several steps of the delta rule each, as a module."""


@_module(layers.Rwkv7AttentionConfig)
class Rwkv7Attention(_Layer):
    """The attention of RWKV-7, as a module, which hands the values of the first layer of a model on."""

    def __call__(
        self, x: jax.Array, v_first: jax.Array | None = None, *, decode: bool = False,
        cu_seqlens: jax.Array | None = None, segment_ids: jax.Array | None = None, padding_id: int = -1,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Run the layer over hidden states.

        Args:
          x: hidden states [B, T, D], float32, bfloat16 or float16.
          v_first: the values of the first layer at the same tokens [B, T, H, V], which that layer returned; None for
            the first layer, whose config has no R_first.
          decode, cu_seqlens, segment_ids, padding_id: as in the other modules.

        Returns:
          y [B, T, D] in the type of x, and v_first for the next layers.

        Raises:
          ValueError: an argument has the wrong shape or type, or `decode` comes before `init_cache`.
        """
        packing = dict(cu_seqlens=cu_seqlens, segment_ids=segment_ids, padding_id=padding_id)
        y, v_first = self._run(x, decode, v_first=v_first, **packing)
        return y, v_first
