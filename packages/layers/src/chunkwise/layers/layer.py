"""The record of a layer, and the functions for users that are made from it."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from chunkwise.layers import caches, config
from chunkwise.layers.checkpoint import parameters, table
from chunkwise.layers.mixer import running
from chunkwise.shared.call import checks, unknown_arguments
from chunkwise.shared.kernels import chunking

# What to do instead of an argument that layers of transformers and of flash-linear-attention have.
INSTEAD = {
    "attention_mask": "give it as `segment_ids`, int32, with `padding_id=0`; a serving step takes only real tokens.",
    "hidden_states": "call it `x`.",
    "past_key_values": "give the cache of this layer alone as `cache`.",
    "cache_params": "give the cache of this layer alone as `cache`.",
    "use_cache": "call it `output_cache`.",
}

Config = TypeVar("Config", bound=config.LayerConfig)
Weights = TypeVar("Weights")


class OverSequences(Protocol[Config, Weights]):
    """The signature of a layer over whole sequences, such as `gated_delta_net`."""

    def __call__(
        self, x: jax.Array, weights: Weights, config: Config, cache: caches.Cache | None = None,
        output_cache: bool = False, *, cu_seqlens: jax.Array | None = None, segment_ids: jax.Array | None = None,
        padding_id: int = -1, implementation: str | None = None, sharding: checks.Sharding | None = None,
        context_axis: str | tuple[str, ...] | None = None,
    ) -> tuple[jax.Array, caches.Cache | None]:  # fmt: skip
        """Run the layer over whole sequences.

        Shapes: x, y [B, T, D]::

            y, cache = {layer}(x, weights, config, output_cache=True)

        Dims: B batch, T tokens, D size of the hidden states, N sequences: B, or len(cu_seqlens) - 1; `config` has the
          rest.

        Args:
          x: hidden states [B, T, D], float32, bfloat16 or float16. Products with weights are in this type; gates, the
            norm, and the parts of the operator that its docstring names are float32.
          weights: the weights of the layer, of these types.
          config: sizes of the layer; static.
          cache: the cache of N sequences, from a call with the tokens before; None to start from zeros. With a cache
            and one token in each row the operator decodes. Under jit, donate the cache, and it is updated in place.
          output_cache: whether to return the cache; static.
          cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1.
          segment_ids: int32 [B, T], traced, instead of cu_seqlens: a sequence begins where the id changes, and tokens
            with an id below 0 are padding, which may hold any number. A cache then has a state for each row.
          padding_id: an id whose tokens are padding, too, such as MaxText's 0; static. With cu_seqlens it is not read,
            because padding follows the last boundary.
          implementation: the implementation of the operator, "xla", "staged" or "fused", which also decides for the
            convolution and the norm; None for the best.
          sharding: how v [B, T, HV, V] is split over the devices of a mesh with automatic axes, as `shardings` returns
            it; static. With explicit axes the types of x and of the weights say it.
          context_axis: the axes of a mesh, inside a `shard_map`, over which T is split.

        Returns:
          y [B, T, D] in the type of x, and the cache, None unless asked for, in the types of the cache that came in. x,
          the weights and the cache have gradients.

        Raises:
          ValueError: an argument has the wrong rank, shape or type.
        """


class OverStep(Protocol[Config, Weights]):
    """The signature of a layer over a serving step, such as `ragged_gated_delta_net`."""

    def __call__(
        self, x: jax.Array, weights: Weights, config: Config, pool: caches.Cache, step: running.Step, *,
        block_size: int | None = None, decode_tokens: int | None = None, implementation: str | None = None,
        sharding: checks.Sharding | None = None,
    ) -> tuple[jax.Array, caches.Cache]:  # fmt: skip
        """Run the layer over a serving step.

        Shapes: x, y [1, T, D]::

            y, pool = {layer}(x, weights, config, pool, step)

        The tokens of all sequences follow one another in one row, and their states are in slots of the pool. Under jit,
        donate the pool: it is updated in place.

        Args:
          x: hidden states [1, T, D].
          weights, config, implementation, sharding: as over whole sequences.
          pool: a cache with slots in the place of sequences, whose types the new pool has, too; see
            `empty_cache`, and `empty_pool` for states in 8 bits and for rings.
          step: which tokens belong to which sequence, and where the state of a sequence is. All of these arrays are
            traced, so one program serves every step of the same sizes.
          block_size: tokens of a block for `step.block_state_indices`; static.
          decode_tokens: over a pool with a ring, the most tokens of a decode, as given to `empty_pool`; static, None
            for 1.

        Returns:
          y [1, T, D] in the type of x, and the pool.

        Raises:
          ValueError: an argument has the wrong rank, shape or type.
        """


class Init(Protocol[Config, Weights]):
    """The signature of random weights of a layer, such as `init_gated_delta_net`."""

    def __call__(self, key: jax.Array, config: Config, dtype=jnp.float32) -> Weights:
        """Return random weights.

        The call is::

            weights = {layer}(jax.random.key(0), config)

        Args:
          key: a key of `jax.random`.
          config: sizes of the layer.
          dtype: the type of all weights except A_log, dt_bias and skip, which are float32.
        """


class Load(Protocol[Config, Weights]):
    """The signature of weights of a checkpoint, such as `load_gated_delta_net`."""

    def __call__(self, named: Mapping[str, Any], config: Config, prefix: str = "") -> Weights:
        """Return the weights of a checkpoint.

        The call is::

            weights = {layer}(open_checkpoint(directory), config, "model.layers.0.linear_attn.")

        Args:
          named: arrays by their names in the checkpoint, numpy's, torch's or JAX's; arrays of 8 bits with their scales.
          config: sizes of the layer.
          prefix: the start of this layer's names, such as "model.layers.0.linear_attn."; other names are ignored.

        Raises:
          ValueError: a name is missing, an array has another shape than `config` asks for, or the checkpoint has
            further weights under the prefix.
        """


class Save(Protocol[Config, Weights]):
    """The signature of the way back to a checkpoint, such as `save_gated_delta_net`."""

    def __call__(
        self, weights: Weights, config: Config, prefix: str = "", model: str | None = None
    ) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint.

        The call is::

            named = {layer}(weights, config, "model.layers.0.linear_attn.")

        It undoes the function that loads weights, to the bit: the result has the names and layouts in which
        transformers saves the model, so that transformers, vLLM and SGLang read it too. The arrays have the types of
        the weights, with A_log and dt_bias in float32.

        Args:
          weights: the weights of the layer, whole on this host.
          config: sizes of the layer.
          prefix: the start of this layer's names, such as "model.layers.0.linear_attn.".
          model: `model_type` of the model's config.json, which has the names and the layout; None for the first of the
            models that the error names.

        Raises:
          ValueError: a weight has another shape than `config` asks for, or no such model has this layer.
        """


@dataclass(frozen=True)
class Definition(Generic[Config, Weights]):
    """A layer, as its file defines it; the properties are its functions for users.

    Attributes:
      name: the name of the function over whole sequences.
      config: the class of its sizes.
      weights: the class of its weights.
      tabulate: returns the table of the weights, which says their names, shapes, divisions and first numbers.
      models: types of models whose checkpoints have this layer.
      mix: returns the output for x [B, T, D], and the cache after its tokens.
      read: gives the arrays of a checkpoint the names of the table, and divides arrays of several weights.
      write: returns the arrays of a checkpoint of one of `models` from those with the names of the table.
      hands_on: the name of an argument of `mix` with values [B, T, HV, V] that it returns, too, for the next layers of
        a model; None for none.
    """

    name: str
    config: type[Config]
    weights: type[Weights]
    tabulate: Callable[[Config], dict[str, Any]]
    models: tuple[str, ...]
    mix: Callable[..., tuple[Any, ...]]
    read: Callable[[parameters.Checkpoint, Any, Config], None] | None = None
    write: Callable[[dict[str, Any], Config, str], dict[str, Any]] | None = None
    hands_on: str | None = None

    def _each(self, config: Config, function: Callable[[table.Weight], Any]) -> Any:
        """Return what a function makes of every weight, in their structure."""
        return jax.tree.map(function, self.weights(**self.tabulate(config)))

    def split(self, config: Config) -> Any:
        """Return how each of the weights is split over devices, in the letters of `division.Letters`."""
        return self._each(config, lambda x: x.letters)

    @functools.cached_property
    def over_sequences(self) -> OverSequences[Config, Weights]:
        """The layer over whole sequences, from a cache or from zeros."""

        def run(
            x, weights, config, cache=None, output_cache=False, *, cu_seqlens=None, segment_ids=None, padding_id=-1,
            implementation=None, sharding=None, context_axis=None, **others,
        ):  # fmt: skip
            handed = self._handed(call, others)
            over = running.Sequences(
                cache, output_cache, cu_seqlens, segment_ids, padding_id, implementation, sharding, context_axis
            )
            x, valid = self._checked(x, weights, config, over)
            y, cache, *more = self.mix(x, weights, config, over, **handed)
            return chunking.select_tokens(valid, y), cache if output_cache else None, *more

        call = self._named("", run, OverSequences.__call__, self.mix.__doc__)
        return call

    @functools.cached_property
    def over_step(self) -> OverStep[Config, Weights]:
        """The layer over a serving step, from a pool and into it."""

        def run(
            x, weights, config, pool, step, *, block_size=None, decode_tokens=None, implementation=None, sharding=None,
            **others,
        ):  # fmt: skip
            handed = self._handed(call, others)
            over = running.Serving(pool, step, block_size, decode_tokens, implementation, sharding)
            x, valid = self._checked(x, weights, config, over)
            y, pool, *more = self.mix(x, weights, config, over, **handed)
            return chunking.select_tokens(valid, y), pool, *more

        first = (self.mix.__doc__ or "").partition("\n")[0]
        first = first.replace(
            "hidden states, and its cache after them", "the tokens of a serving step, and its pool after it"
        )
        call = self._named("ragged_", run, OverStep.__call__, f"{first}\n\n`{self.name}` has the equations.")
        return call

    @functools.cached_property
    def random_weights(self) -> Init[Config, Weights]:
        """The function that returns random weights."""

        def init(key, config, dtype=jnp.float32):
            self.config.check(config)
            new = parameters.Initial(key, dtype)
            return self._each(config, lambda x: x.init(new, *x.shape))

        first = "Return random weights of a layer that is to be trained."
        return self._named("init_", init, Init.__call__, _continued(first, self.tabulate))

    @functools.cached_property
    def loaded_weights(self) -> Load[Config, Weights]:
        """The function that returns the weights of a checkpoint."""

        def load(named, config, prefix=""):
            self.config.check(config)
            found, weights = parameters.Checkpoint(named, prefix), self._each(config, lambda x: x)
            if self.read is not None:
                self.read(found, weights, config)
            table.divide(found, weights, {**table.QKV, **table.CONVOLUTIONS})
            weights = jax.tree.map(lambda x: x.load(found), weights)
            found.end()
            return weights

        first = "Return the weights of a layer of a checkpoint, in its types, with numbers of heads in float32."
        return self._named("load_", load, Load.__call__, _continued(first, self.read))

    @functools.cached_property
    def saved_weights(self) -> Save[Config, Weights]:
        """The function that returns the arrays of a checkpoint."""

        def save(weights, config, prefix="", model=None):
            self.config.check(config)
            parameters.check_weights(weights, self.random_weights, config)
            kind = self.models[0] if model is None else str(model).removesuffix("_text")
            checks.check(kind in self.models, f"`model` must be None or one of {self.models}; got {model!r}.")
            pairs = zip(jax.tree.leaves(self._each(config, lambda x: x)), jax.tree.leaves(weights), strict=True)
            found = {x.name + x.end: x.save(np.asarray(y)) for x, y in pairs}
            found = found if self.write is None else self.write(found, config, kind)
            return {prefix + name: np.ascontiguousarray(x) for name, x in found.items()}

        first = f"Return the arrays of a layer for a checkpoint of {', '.join(self.models)}."
        return self._named("save_", save, Save.__call__, _continued(first, self.write))

    def _handed(self, function: Callable, others: dict[str, Any]) -> dict[str, Any]:
        """Return the argument that layers hand on; raise TypeError for arguments that a function does not have."""
        handed = {} if self.hands_on is None else {self.hands_on: others.pop(self.hands_on, None)}
        _refuse(function, others)
        return handed

    def _checked(self, x, weights, config, over: running.Run) -> tuple[jax.Array, jax.Array | None]:
        """Check the arguments; return hidden states in which padding may hold anything, and which tokens are none."""
        self.config.check(config)
        parameters.check_input(x, config, over)
        parameters.check_weights(weights, self.random_weights, config)
        valid = over.valid_tokens(x)
        if valid is None:
            return x, None
        # Gradients of weights in functions cannot be seen here.
        seen = not any(map(callable, jax.tree.leaves(weights)))
        return (_without_padding(x, valid, weights) if seen else chunking.select_tokens(valid, x)), valid

    def _named(self, prefix: str, function: Any, signature: object, doc: str | None) -> Any:
        """Return a function with its name for users, and with the types and the documentation of its signature."""
        function.__name__ = function.__qualname__ = prefix + self.name
        function.__module__ = __package__
        classes = {Config: self.config, Weights: self.weights}
        kinds = signature.__annotations__
        function.__annotations__ = {name: classes.get(kind, kind) for name, kind in kinds.items()}
        equations, label, figures = inspect.cleandoc(doc or "").partition("Accuracy:")
        arguments = inspect.cleandoc(signature.__doc__ or "").partition("\n\n")[2]
        whole = "\n\n".join(filter(None, (equations.strip(), arguments, label + figures)))
        function.__doc__ = whole.replace("{layer}", function.__name__)
        # Without the names that the function only refuses.
        known = [x for x in inspect.signature(function).parameters.values() if x.kind != x.VAR_KEYWORD]
        if self.hands_on is not None and prefix in ("", "ragged_"):
            kind = jax.Array | None
            known.append(
                inspect.Parameter(self.hands_on, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            )
            results = types.GenericAlias(tuple, (*typing.get_args(function.__annotations__["return"]), jax.Array))
            function.__annotations__ |= {self.hands_on: kind, "return": results}
        function.__signature__ = inspect.Signature(known, return_annotation=function.__annotations__["return"])
        return function


def _continued(first: str, function: Callable | None) -> str:
    """Return a documentation that begins with a line, and goes on as that of a function after its first paragraph."""
    rest = inspect.cleandoc(getattr(function, "__doc__", None) or "").partition("\n\n")[2]
    return f"{first}\n\n{rest}".strip()


def _refuse(function: Callable, unknown: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that a function does not have; it calls this itself, without a wrapper."""
    name = function.__qualname__
    unknown_arguments.check(name, [*unknown], inspect.signature(function).parameters, INSTEAD)
    if unknown:
        raise TypeError(f"{name}() got an unexpected keyword argument '{next(iter(unknown))}'")


@jax.custom_jvp
def _without_padding(x: jax.Array, valid: jax.Array, weights: object) -> jax.Array:
    """Return hidden states with zeros for padding if gradients are asked for: there weights meet 0 times NaN.

    Without gradients what padding holds reaches no other token, and a selection before every projection costs time.
    """
    return x


def _without_padding_jvp(primals, tangents) -> tuple[jax.Array, Any]:
    (x, valid, _), (dx, *_) = primals, tangents
    return chunking.select_tokens(valid, x), dx if isinstance(dx, SymbolicZero) else chunking.select_tokens(valid, dx)


_without_padding.defjvp(_without_padding_jvp, symbolic_zeros=True)
