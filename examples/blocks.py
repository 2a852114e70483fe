"""What the models of these examples have in common: norms, rotary positions, attention, perceptrons, experts.

This file is a library, which the models import.

Dims: B rows, T tokens, S places of a cache, D size of the hidden states, H heads, HK heads of keys and values, K size
of a head, F size of a perceptron, E experts, N experts that a token goes to.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Past(NamedTuple):
    """What the tokens so far leave to the next ones.

    Attributes:
      layers: of each block, a `chunkwise.layers.Cache` or `KeyValues`, or what else the block has.
      segments: int32 [B, S], the segment of the token in each place, below 0 for padding.
      used: int32, the places that are taken, as many in every row.
    """

    layers: tuple[Any, ...]
    segments: jax.Array
    used: jax.Array


class Places(NamedTuple):
    """Where new tokens are put: the places [T], which places each of them sees [B, T, S], and whether all exist."""

    positions: jax.Array
    visible: jax.Array
    exist: jax.Array


def empty_past(layers, B: int, S: int) -> Past:
    """Return the past of B rows without a token, with S places."""
    return Past(tuple(layers), jnp.full((B, S), -1, jnp.int32), jnp.int32(0))


def take_places(past: Past, tokens, segment_ids=None) -> tuple[Places, Past]:
    """Return the places of the next tokens [B, T], and the past with these taken and the old layers.

    A token sees itself and those before it of its own segment. Padding is of a segment below 0, and sees nothing.

    Args:
      past: what was before.
      tokens: [B, T].
      segment_ids: int32 [B, T]; None is 0 everywhere.

    Raises:
      ValueError: there are not so many places. Under jit, where no value can raise, `attend` returns NaN instead.
    """
    T, S = tokens.shape[1], past.segments.shape[1]
    exist = past.used + T <= S
    if not isinstance(exist, jax.core.Tracer) and not exist:
        raise ValueError(
            f"`past` must have places for {past.used + T} tokens of a row, as `start` makes them; got {S}."
        )
    ids = jnp.zeros(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
    segments = jax.lax.dynamic_update_slice_in_dim(past.segments, ids, past.used, axis=1)
    positions = past.used + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    before = jnp.arange(segments.shape[1], dtype=jnp.int32) <= positions[:, None]
    visible = before & (segments[:, None] == ids[..., None]) & (ids[..., None] >= 0)
    return Places(positions, visible, exist), Past(past.layers, segments, past.used + tokens.shape[1])


def rms_norm(x, weight, eps: float):
    """Return x with an RMS of 1 in its last dimension, times a weight, in the type of x."""
    u = x.astype(jnp.float32)
    return (u * jax.lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + eps) * weight).astype(x.dtype)


def rotate(x, positions, theta: float, size: int):
    """Return x [B, T, H, K] with the first `size` channels of each head turned by their position.

    Channels i and i + size / 2 are a plane, which turns by position / theta^(2 i / size).

    Source: Su et al., RoFormer (2021).
    """
    speed = np.float32(theta ** (-np.arange(0, size, 2) / size))
    angle = (positions[:, None] * speed)[:, None]  # [T, 1, size / 2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b, rest = jnp.split(x.astype(jnp.float32), [size // 2, size], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


class KeyValues(NamedTuple):
    """The cache of an attention: keys and values [B, S, HK, K]."""

    keys: jax.Array
    values: jax.Array


def empty_key_values(B: int, S: int, HK: int, K: int, dtype) -> KeyValues:
    """Return a cache without a token."""
    return KeyValues(jnp.zeros((B, S, HK, K), dtype), jnp.zeros((B, S, HK, K), dtype))


def remember(cache, new, places: Places):
    """Return a cache [B, S, ...] with the values of new tokens [B, T, ...] in their places."""
    return jax.lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), places.positions[0], axis=1)


def attend(q, keys, values, places: Places, scale: float):
    """Return softmax(scale q keys^T) values [B, T, H, K] over the places that a token sees; NaN beyond all places.

    Args:
      q: [B, T, H, K].
      keys, values: [B, S, HK, K], where HK divides H.
      places: of the tokens of q.
      scale: of the products, mostly K^(-1/2).

    Source: Vaswani et al., Attention Is All You Need (2017); with shared heads Ainslie et al., GQA (2023).
    """
    o = jax.nn.dot_product_attention(q, keys, values, mask=places.visible[:, None], scale=scale)
    return jnp.where(places.exist, o, jnp.nan)


class Mlp(NamedTuple):
    """The weights of a perceptron: gate and up [D, F], down [F, D]."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


def mlp(x, w: Mlp):
    """Return down(silu(gate x) * up x). Source: Shazeer, GLU Variants Improve Transformer (2020)."""
    return (jax.nn.silu(x @ w.gate) * (x @ w.up)) @ w.down


class Block(NamedTuple):
    """The weights of a block: norms [D] before or after the mixer and the perceptron or experts, and these."""

    norm: jax.Array
    mixer: Any
    mlp_norm: jax.Array
    mlp: Any


class Model(NamedTuple):
    """The weights of a model: embedding [vocabulary, D], blocks, norm [D], head [D, vocabulary].

    The head is None where it is the embedding: one array then has the gradients of both.
    """

    embedding: jax.Array
    blocks: tuple[Any, ...]
    norm: jax.Array
    head: jax.Array | None


class Experts(NamedTuple):
    """The weights of a mixture of experts.

    Attributes:
      router: [D, E], float32.
      bias: [E], float32, which is added to choose experts, but not to weight them.
      gate, up, down: [E, D, F], [E, D, F], [E, F, D].
      shared: of the expert that every token goes to.
    """

    router: jax.Array
    bias: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    shared: Mlp


class Routing(NamedTuple):
    """How tokens are sent to experts.

    Attributes:
      experts: that a token goes to.
      groups, chosen: into how many groups experts are divided, and in how many of these a token chooses its own.
      normalise: whether the weights of a token's experts sum up to 1.
      scale: of the weights.
    """

    experts: int
    groups: int = 1
    chosen: int = 1
    normalise: bool = True
    scale: float = 1.0


def route(x, w: Experts, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Return the experts [tokens, N] of tokens [tokens, D], and their weights [tokens, N] in float32.

    Source: DeepSeek-AI, DeepSeek-V3 (2024), sections 2.1.2 and 3.5.
    """
    scores = jax.nn.sigmoid(x.astype(jnp.float32) @ w.router)
    grouped = (scores + w.bias).reshape(len(x), routing.groups, -1)
    # A group is as good as its two best experts together.
    _, best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), routing.chosen)
    open_groups = jax.nn.one_hot(best, routing.groups, dtype=bool).any(1)
    grouped = jnp.where(open_groups[..., None], grouped, -jnp.inf)
    _, experts = jax.lax.top_k(grouped.reshape(scores.shape), routing.experts)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if routing.normalise:
        weights /= weights.sum(1, keepdims=True) + 1e-20
    return experts, weights * routing.scale


def mixture_of_experts(x, w: Experts, routing: Routing):
    """Return the weighted sum over each token's experts, and the shared expert, of x [B, T, D].

    Rows are sorted by expert, so that a token is multiplied by the weights of its own experts only.
    """
    tokens = x.reshape(-1, x.shape[-1])
    experts, weights = route(tokens, w, routing)
    order = jnp.argsort(experts.ravel())
    owner, sizes = order // routing.experts, jnp.bincount(experts.ravel(), length=len(w.bias))
    rows = tokens[owner]
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, w.gate, sizes)) * jax.lax.ragged_dot(rows, w.up, sizes)
    outer = jax.lax.ragged_dot(inner, w.down, sizes) * weights.ravel()[order, None]
    summed = jnp.zeros(tokens.shape, jnp.float32).at[owner].add(outer)
    return summed.astype(x.dtype).reshape(x.shape) + mlp(x, w.shared)
