"""Weights: random ones for a layer that is to be trained, and the weights of a checkpoint."""

import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.layers import caches
from chunkwise.layers.checkpoint import arrays
from chunkwise.layers.mixer import running
from chunkwise.shared.call import checks
from chunkwise.shared.serving import state_pool


class Initial:
    """Draws weights, each with a new key.

    Args:
      key: a key of `jax.random`.
      dtype: the type of the weights that multiply activations; other weights are float32.
    """

    def __init__(self, key: jax.Array, dtype):
        kind = type(key).__name__
        checks.check(hasattr(key, "dtype"), f"`key` must be a key of `jax.random`, as `jax.random.key(0)`; got {kind}.")
        self.key, self.dtype = key, checks.check_type("dtype", dtype)

    def _next(self) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        return key

    def matrix(self, rows: int, columns: int) -> jax.Array:
        """Return a projection of variance 1 / rows, so that its output is as large as its input."""
        return (jax.random.normal(self._next(), (rows, columns), jnp.float32) * rows**-0.5).astype(self.dtype)

    def convolution(self, channels: int, W: int) -> jax.Array:
        """Return the weights of a convolution, uniform up to W ** -0.5."""
        return self.uniform((channels, W), -(W**-0.5), W**-0.5).astype(self.dtype)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> jax.Array:
        """Return uniform numbers in float32."""
        return jax.random.uniform(self._next(), shape, jnp.float32, low, high)

    def log_decay(self, *shape: int, least: float = 1.0, most: float = 16.0) -> jax.Array:
        """Return A_log: the logarithm of a uniform rate."""
        return jnp.log(self.uniform(shape, least, most))

    def step_bias(self, *shape: int, least: float = 1e-3, most: float = 0.1) -> jax.Array:
        """Return dt_bias: the logarithm of softplus(dt_bias), the step, is uniform."""
        step = jnp.exp(self.uniform(shape, np.log(least), np.log(most)))
        return step + jnp.log(-jnp.expm1(-step))

    def full(self, *shape: int, value: float = 0.0) -> jax.Array:
        """Return a number in all places, in the type of the weights."""
        return jnp.full(shape, value, self.dtype)


def check_input(x, config, run: running.Run) -> None:
    """Check hidden states, and the caches and the name of the implementation in `run`."""
    B = checks.check_array("x", x, "B T D", (None, None, config.D))[0]
    names = tuple(name for name in running.AROUND if name)
    known = run.implementation in running.AROUND
    checks.check(known, f"`implementation` must be None or one of {names}; got {run.implementation!r}.")
    name, cache = run.own_cache
    if cache is None and isinstance(run, running.Sequences):
        return
    cache = caches.check_is_cache(name, cache)
    # The operator checks a StatePool. The convolutions check their pools, which may have more slots than the states.
    pool = state_pool.as_pool(cache.state)
    pooled = pool is cache.state
    caches.check_ring(config, pool.replay)
    have_states = pool.states.shape[0] if pooled else config.check_state(f"{name}.state", cache.state)
    wanted = run.num_states(B)
    fits = wanted in (None, have_states)
    checks.check(fits, f"`{name}` must be of {wanted} sequences, as `x` is; got one of {have_states}.")
    N = None if pooled else have_states
    caches.check_conv(f"{name}.conv", cache.conv, [(N, config.W - 1, channels) for channels in config.channels])
    if isinstance(run, running.Serving) and pool.replay:
        caches.check_conv_slots(cache, run.decode_tokens or 1)


@functools.cache
def _shapes(init: Callable, config):
    return jax.eval_shape(lambda: init(jax.random.key(0), config))


def check_weights(weights, init: Callable, config) -> None:
    """Check that weights are floating arrays of the shapes that `init` gives them for a config."""
    wanted = _shapes(init, config)
    kind = type(wanted)
    checks.check(isinstance(weights, kind), f"`weights` must be {kind.__name__}; got {type(weights).__name__}.")
    for name, want, have in zip(kind._fields, wanted, weights, strict=True):
        want, arrays = tuple(jnp.shape(x) for x in jax.tree.leaves(want)), jax.tree.leaves(have)
        have = tuple(checks.check_floating(f"weights.{name}", x, f"of shape {_shown(want)}") for x in arrays)
        checks.check(want == have, f"`weights.{name}` must have shape {_shown(want)}; got {_shown(have)}.")


def _shown(shapes: tuple) -> str:
    return str(shapes[0] if len(shapes) == 1 else shapes or None)


def _near(name: str, known: Mapping[str, str]) -> str:
    """Return a part of an error: the known names that are most like the missing one, or the first of them."""
    near = difflib.get_close_matches(name, known, cutoff=0.75) or sorted(known)[:20]
    return f", but {[known[each] for each in near]}"


def split(x: jax.Array, sizes: Sequence[int], axis: int = -1) -> list[jax.Array]:
    """Return the parts of x along an axis, which have these sizes."""
    return jnp.split(x, np.cumsum(sizes)[:-1], axis=axis)


def called(name: str, names: Mapping[str, str]) -> str:
    """Return the name of a weight where the parts of names before a dot are others."""
    first, dot, rest = name.partition(".")
    return names.get(first, first) + dot + rest


class Checkpoint:
    """The arrays of one layer of a checkpoint, by the names that transformers has for them.

    Every name must be read, so that a checkpoint whose layer has more weights raises an error.

    Args:
      named: arrays by name, numpy's, torch's or JAX's; arrays of 8 bits with their scales.
      prefix: the start of the layer's names, such as "model.layers.0.linear_attn."; other names are not read.
    """

    def __init__(self, named: Mapping[str, Any], prefix: str):
        mapping = isinstance(named, Mapping)
        checks.check(mapping, f"`named` must be a mapping from names to arrays; got {type(named).__name__}.")
        checks.check(isinstance(prefix, str), f"`prefix` must be a string; got {type(prefix).__name__}.")
        named = arrays.Numbers.of(named)
        self.arrays, self.prefix, names = named, prefix, [name for name in named if name.startswith(prefix)]
        self.full = {name.removeprefix(prefix).removesuffix(".weight"): name for name in names}
        # The names that are still to be read. An array of a file is in memory once it has been read.
        self.left = dict(self.full)
        # The names that the checkpoint has for weights, and the weights that it has as parts of an array.
        self.names: dict[str, str] = {}
        self.parts: dict[str, jax.Array] = {}
        if not names:
            starts = {name[: match.end()]: name[: match.end()] for name in named for match in re.finditer(r"\.", name)}
            raise ValueError(f"`named` must have names that start with {prefix!r}; got none{_near(prefix, starts)}.")

    def rename(self, start: str, other: str) -> None:
        """Replace the start of names."""
        self.left = {
            other + name.removeprefix(start) if name.startswith(start) else name: x for name, x in self.left.items()
        }

    def ignore(self, *names: str) -> None:
        """Drop names, if there are such names."""
        self.left = {name: x for name, x in self.left.items() if name not in names}

    def __contains__(self, name: str) -> bool:
        return name in self.parts or called(name, self.names) in self.left

    def read(self, name: str, *shape: int, dims: bool = True, padded: bool = False) -> jax.Array:
        """Return an array of floating numbers, which must have this shape.

        Without `dims` it must only have as many entries. With `padded`, zeros may follow them.
        """
        known, part, name = name in self, self.parts.pop(name, None), called(name, self.names)
        full = self.prefix + name
        either = f"{full!r} or {full + '.weight'!r}"
        checks.check(known, f"`named` must have {either}; got neither{'' if known else _near(name, self.full)}.")
        x = jnp.asarray(self.arrays[self.left.pop(name)]) if part is None else part
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        checks.check(floating, f"`named` must have {full!r} of floating numbers, or with its scales; got {x.dtype}.")
        if padded and x.size > math.prod(shape):
            x, rest = jnp.split(x.ravel(), [math.prod(shape)])
            checks.check(not np.any(rest), f"`named` must have {full!r} with zeros after {x.size} entries; got others.")
        fits = x.shape == shape or (not dims and x.size == math.prod(shape))
        checks.check(fits, f"`named` must have {full!r} of shape {shape}, as `config` asks for; got {x.shape}.")
        return x.reshape(shape)

    def rows(self, name: str) -> int | None:
        """Return the first dimension of an array that is still to be read; None if there is no such array."""
        shape = jnp.shape(self.arrays[self.left[name]]) if name in self.left else ()
        return shape[0] if shape else None

    def end(self) -> None:
        """Check that every name was read."""
        checks.check(not self.left, f"`named` must have no weights that the layer lacks; got {sorted(self.left)}.")
