"""OLMo-hybrid's language model: three blocks of a gated DeltaNet to one of attention.

    python -m pip install ./packages/layers
    python examples/olmo_hybrid.py --random
    python examples/olmo_hybrid.py DIRECTORY --prompt-tokens 760 6511 314 9338 369

DIRECTORY holds a checkpoint as published; --random needs none. With D the size of the hidden states x, blocks
norm in different places:

    x = x + gated_delta_net(norm(x))       x = x + norm(attention(x))
    x = x + mlp(norm(x))                   x = x + norm(mlp(x))

Its delta rule may take steps beta of up to 2, so that a state can be turned around.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024); Grazzi et al., Unlocking State-Tracking in Linear RNNs
Through Negative Eigenvalues (2024); OLMo Team, 2 OLMo 2 Furious (2024), for the norms; the names are those of
transformers.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from blocks import (
    Block,
    KeyValues,
    Mlp,
    Model,
    Past,
    Places,
    attend,
    empty_key_values,
    empty_past,
    mlp,
    remember,
    rms_norm,
    rotate,
    take_places,
)
from chunkwise.layers import (
    GatedDeltaNetConfig,
    config_from,
    empty_cache,
    gated_delta_net,
    init_gated_delta_net,
    load_gated_delta_net,
)
from generation import (
    Draw,
    Settings,
    are_attention,
    main,
    matrix,
    part,
    read_checkpoint,
    require,
    rotary_settings,
    take,
    whole_model,
)


@dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      attention: of every block, whether it has attention.
      delta: sizes of the gated DeltaNets.
      H, HK, K: heads of queries, heads of keys and values, and the size of a head of the attention.
      theta: of rotary positions; None for none, as in the published models.
      eps: of the norms.
    """

    attention: tuple[bool, ...]
    delta: GatedDeltaNetConfig
    H: int
    HK: int
    K: int
    theta: float | None
    eps: float


class Attention(NamedTuple):
    """The weights of attention: q [D, H K], k and v [D, HK K], norms [H K] and [HK K], out [H K, D]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_norm: jax.Array
    k_norm: jax.Array
    out: jax.Array


def run(weights: Model, config: Config, tokens, past: Past, segment_ids=None, implementation: str | None = None):
    """Return the hidden states [B, T, D] of tokens [B, T] after the last norm, and the past after them.

    The arguments are those of `qwen3_5.run`.
    """
    x, caches, norm = weights.embedding[tokens], [], lambda x, weight: rms_norm(x, weight, config.eps)
    places, past = take_places(past, tokens, segment_ids)
    for block, cache in zip(weights.blocks, past.layers, strict=True):
        if isinstance(block.mixer, Attention):
            y, cache = attention(x, block.mixer, config, cache, places)
            x = x + norm(y, block.norm)
            x = x + norm(mlp(x, block.mlp), block.mlp_norm)
        else:
            y, cache = gated_delta_net(
                norm(x, block.norm), block.mixer, config.delta, cache, True, segment_ids=segment_ids,
                implementation=implementation,
            )  # fmt: skip
            x = x + y
            x = x + mlp(norm(x, block.mlp_norm), block.mlp)
        caches.append(cache)
    return norm(x, weights.norm), past._replace(layers=tuple(caches))


def attention(x, w: Attention, config: Config, cache: KeyValues, places: Places):
    """Return what attention makes of x [B, T, D], and its cache.

    The norms are those of all heads together::

        q, k, v = rotate(norm(W_q x)), rotate(norm(W_k x)), W_v x
        y       = W_out softmax(q k^T / sqrt(K)) v
    """
    c = config
    q, k, v = rms_norm(x @ w.q, w.q_norm, c.eps), rms_norm(x @ w.k, w.k_norm, c.eps), x @ w.v
    q, k, v = (y.reshape(*x.shape[:2], -1, c.K) for y in (q, k, v))
    if c.theta is not None:
        q, k = (rotate(y, places.positions, c.theta, c.K) for y in (q, k))
    cache = KeyValues(remember(cache.keys, k, places), remember(cache.values, v, places))
    return attend(q, *cache, places, c.K**-0.5).reshape(*x.shape[:2], -1) @ w.out, cache


def start(config: Config, B: int, S: int, dtype) -> Past:
    """Return the past of B rows before their first token, with places for S tokens."""
    key_values = lambda: empty_key_values(B, S, config.HK, config.K, dtype)
    layers = (key_values() if own else empty_cache(config.delta, B, dtype) for own in config.attention)
    return empty_past(layers, B, S)


def load(directory) -> tuple[Config, Model]:
    """Return the sizes and the weights of a checkpoint."""
    names = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    found, named = read_checkpoint(directory, names)
    config = read_config(found)
    embedding = take(named, "model.embed_tokens.weight")

    def block(i: int, attention: bool) -> Block:
        at = f"model.layers.{i}"
        if attention:
            q, k, v, out = (matrix(named, f"{at}.self_attn.{name}_proj") for name in "qkvo")
            q_norm, k_norm = (take(named, f"{at}.self_attn.{name}_norm.weight") for name in "qk")
            mixer, norms = Attention(q, k, v, q_norm, k_norm, out), ("post_attention", "post_feedforward")
        else:
            mixer = load_gated_delta_net(part(named, f"{at}.linear_attn."), config.delta)
            norms = "input", "post_attention"
        perceptron = Mlp(*(matrix(named, f"{at}.mlp.{name}_proj") for name in ("gate", "up", "down")))
        norm, mlp_norm = (take(named, f"{at}.{name}_layernorm.weight") for name in norms)
        return Block(norm, mixer, mlp_norm, perceptron)

    blocks = tuple(block(*each) for each in enumerate(config.attention))
    return config, whole_model(found, named, embedding, blocks, take(named, "model.norm.weight"))


def read_config(found: dict) -> Config:
    """Return the sizes that a config.json has."""
    f = Settings(found)
    H, rope = f["num_attention_heads"], rotary_settings(f, rope_theta=None)
    for name, values in dict(hidden_act=("silu", "swish"), attention_bias=(False,)).items():
        require(f, name, *values)
    return Config(
        attention=are_attention(f, lambda i: i % 4 == 3),
        delta=config_from({"model_type": "olmo_hybrid"} | f), H=H, HK=f["num_key_value_heads"],
        K=f.get("head_dim") or f["hidden_size"] // H, theta=rope["rope_theta"], eps=f["rms_norm_eps"],
    )  # fmt: skip


def random_model(vocabulary: int) -> tuple[Config, Model]:
    """Return the sizes and the random weights of a tiny model."""
    delta = GatedDeltaNetConfig(D=64, H=2, HV=2, K=16, V=32, eps=1e-5, allow_neg_eigval=True)
    c = Config((False, True), delta, H=4, HK=2, K=16, theta=None, eps=1e-6)
    new, D, ones = Draw(), delta.D, jnp.ones(delta.D)

    def block(attention: bool) -> Block:
        if attention:
            q, k, v = (new.matrix(D, heads * c.K) for heads in (c.H, c.HK, c.HK))
            mixer = Attention(q, k, v, jnp.ones(c.H * c.K), jnp.ones(c.HK * c.K), new.matrix(c.H * c.K, D))
        else:
            mixer = init_gated_delta_net(new.key(), delta)
        return Block(ones, mixer, ones, Mlp(new.matrix(D, 2 * D), new.matrix(D, 2 * D), new.matrix(2 * D, D)))

    blocks = tuple(map(block, c.attention))
    return c, Model(new.normal(vocabulary, D), blocks, ones, new.matrix(D, vocabulary))


if __name__ == "__main__":
    main(sys.modules[__name__])
