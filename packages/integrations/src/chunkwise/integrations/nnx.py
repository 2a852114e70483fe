"""The layers as modules of flax.nnx, and weights on a mesh."""

import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from chunkwise import layers
from chunkwise.integrations import mesh
from chunkwise.layers import parameters, place
from chunkwise.shared.call import checks

__all__ = ["GatedDeltaNet", "GatedDeltaNet2", "KimiDeltaAttention", "LightningAttention", "Mamba2Mixer", "place"]


class _Layer(nnx.Module):
    """What the modules have in common: weights as one nnx.Param for each array, a cache, and the mesh.

    Args:
      config: sizes of the layer.
      weights: such as a checkpoint has; None for new ones out of `rngs`.
      rngs: its stream `params` draws new weights.
      param_dtype: of new weights; A_log, dt_bias and skip are float32. Products are in the type of the hidden states.
      mesh_axes: what `chunkwise.layers.shardings` takes under this name: an axis of the mesh, or several, for "batch",
        "tokens" and "heads". It holds wherever `jax.set_mesh` has set a mesh: along automatic and explicit axes, and
        along axes of tokens inside a `shard_map`. Where none is set it means nothing.
      implementation: "xla", "staged" or "fused"; None for the best.

    Attributes:
      weights: the tree of the layer, such as `GatedDeltaNetWeights`, of nnx.Param.
      cache: what the tokens so far leave, a `Cache` of nnx.Cache, after `init_cache`; else None.
    """

    init: ClassVar[Callable]
    run: ClassVar[Callable]

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        # Python's errors name a function by the class that it was written in.
        for name in ("__init__", "__call__", "init_cache"):
            f: Any = vars(_Layer)[name]
            copy = types.FunctionType(f.__code__, f.__globals__, name, f.__defaults__, f.__closure__)
            copy.__kwdefaults__, copy.__doc__, copy.__annotations__ = f.__kwdefaults__, f.__doc__, f.__annotations__
            copy.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, copy)

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
        # flax hashes what is no array.
        self.mesh_axes = None if mesh_axes is None else tuple(mesh_axes.items())
        tree = weights if rngs is None else type(self).init(rngs.params(), config, param_dtype)
        self.weights = nnx.data(self._variables(nnx.Param, tree, "weights"))
        self.cache = nnx.data(None)

    def _variables(self, kind: Callable, tree: Any, name: str) -> Any:
        """Return variables of arrays, which flax lays on the mesh that is set."""
        on = mesh.shardings_on(self.config, self.mesh_axes)
        if on is None:
            return jax.tree.map(kind, tree)
        return jax.tree.map(lambda x, spec: kind(x, out_sharding=spec), tree, getattr(on, name))

    def init_cache(self, N: int, dtype=jnp.float32) -> None:
        """Begin to keep a cache, of N sequences without a token yet; a call with `decode` reads and writes it.

        Args:
          N: sequences: the rows of the hidden states, or as many as `cu_seqlens` has.
          dtype: of the hidden states; the state is float32.
        """
        self.cache = nnx.data(self._variables(nnx.Cache, layers.empty_cache(self.config, N, dtype), "cache"))

    def __call__(
        self, x: jax.Array, *, decode: bool = False, cu_seqlens: jax.Array | None = None,
        segment_ids: jax.Array | None = None, padding_id: int = -1,
    ) -> jax.Array:  # fmt: skip
        """Return what the layer makes of hidden states.

        Args:
          x: hidden states [B, T, D].
          decode: whether to go on from the cache, over any number of tokens, and to leave there what follows; static.
          cu_seqlens, segment_ids, padding_id: which tokens of a row belong together, as the layer of `chunkwise.layers`
            takes it.

        Returns:
          y [B, T, D] in the type of x.
        """
        checks.check(not decode or self.cache is not None, "`decode` must be False before `init_cache`; got True.")
        weights, cache = nnx.as_pure((self.weights, self.cache))
        y, after = type(self).run(
            x, weights, self.config, cache if decode else None, decode, cu_seqlens=cu_seqlens, segment_ids=segment_ids,
            padding_id=padding_id, implementation=self.implementation, **mesh.division(self.config, self.mesh_axes),
        )  # fmt: skip
        if decode:
            is_variable = lambda x: isinstance(x, nnx.Variable)
            jax.tree.map(lambda kept, new: kept.set_value(new), self.cache, after, is_leaf=is_variable)
        return y


class GatedDeltaNet(_Layer):
    """`chunkwise.layers.gated_delta_net` as a module."""

    init, run = staticmethod(layers.init_gated_delta_net), staticmethod(layers.gated_delta_net)


class GatedDeltaNet2(_Layer):
    """`chunkwise.layers.gated_delta_net2` as a module."""

    init, run = staticmethod(layers.init_gated_delta_net2), staticmethod(layers.gated_delta_net2)


class KimiDeltaAttention(_Layer):
    """`chunkwise.layers.kimi_delta_attention` as a module."""

    init, run = staticmethod(layers.init_kimi_delta_attention), staticmethod(layers.kimi_delta_attention)


class Mamba2Mixer(_Layer):
    """`chunkwise.layers.mamba2_mixer` as a module."""

    init, run = staticmethod(layers.init_mamba2_mixer), staticmethod(layers.mamba2_mixer)


class LightningAttention(_Layer):
    """`chunkwise.layers.lightning_attention` as a module."""

    init, run = staticmethod(layers.init_lightning_attention), staticmethod(layers.lightning_attention)
