"""Qwen3.5's language model: three blocks of a gated DeltaNet to one of gated attention.

    python -m pip install ./packages/layers
    python examples/qwen3_5.py --random
    python examples/qwen3_5.py DIRECTORY --prompt-tokens 760 6511 314 9338 369

DIRECTORY holds a checkpoint as published; --random needs none. With D the size of the hidden states x, every
block computes

    x = x + mixer(norm(x))      gated DeltaNet, or gated attention in every fourth block
    x = x + mlp(norm(x))

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024); Qiu et al., Gated Attention for Large Language Models
(2025); the names are those of transformers.
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
      rotated: channels of a head that rotary positions turn.
      theta: of rotary positions.
      eps: of the norms.
    """

    attention: tuple[bool, ...]
    delta: GatedDeltaNetConfig
    H: int
    HK: int
    K: int
    rotated: int
    theta: float
    eps: float


class Attention(NamedTuple):
    """The weights of gated attention: q and gate [D, H K], k and v [D, HK K], norms [K], out [H K, D]."""

    q: jax.Array
    gate: jax.Array
    k: jax.Array
    v: jax.Array
    q_norm: jax.Array
    k_norm: jax.Array
    out: jax.Array


def run(weights: Model, config: Config, tokens, past: Past, segment_ids=None, implementation: str | None = None):
    """Return the hidden states [B, T, D] of tokens [B, T] after the last norm, and the past after them.

    Args:
      weights: of the model.
      config: its sizes; static.
      tokens: int32 [B, T].
      past: what the tokens before left; see `start`.
      segment_ids: int32 [B, T]; a new text begins where the id changes, and an id below 0 is padding. A text that later
        calls continue has id 0. None is 0 everywhere.
      implementation: of the gated delta rule; static.
    """
    x, caches = weights.embedding[tokens], []
    places, past = take_places(past, tokens, segment_ids)
    for block, cache in zip(weights.blocks, past.layers, strict=True):
        y = rms_norm(x, block.norm, config.eps)
        if isinstance(block.mixer, Attention):
            y, cache = gated_attention(y, block.mixer, config, cache, places)
        else:
            y, cache = gated_delta_net(
                y, block.mixer, config.delta, cache, True, segment_ids=segment_ids, implementation=implementation
            )
        x = x + y
        x = x + mlp(rms_norm(x, block.mlp_norm, config.eps), block.mlp)
        caches.append(cache)
    return rms_norm(x, weights.norm, config.eps), past._replace(layers=tuple(caches))


def gated_attention(x, w: Attention, config: Config, cache: KeyValues, places: Places):
    """Return what gated attention makes of x [B, T, D], and its cache.

    The equations are::

        q, k, v = rotate(norm(W_q x)), rotate(norm(W_k x)), W_v x
        y       = W_out (softmax(q k^T / sqrt(K)) v * sigmoid(W_gate x))
    """
    c, shape = config, (*x.shape[:2], -1, config.K)
    q, k, v = ((x @ weight).reshape(shape) for weight in (w.q, w.k, w.v))
    q, k = (rms_norm(y, norm, c.eps) for y, norm in ((q, w.q_norm), (k, w.k_norm)))
    q, k = (rotate(y, places.positions, c.theta, c.rotated) for y in (q, k))
    cache = KeyValues(remember(cache.keys, k, places), remember(cache.values, v, places))
    o = attend(q, *cache, places, c.K**-0.5)
    return (o.reshape(*x.shape[:2], -1) * jax.nn.sigmoid(x @ w.gate)) @ w.out, cache


def start(config: Config, B: int, S: int, dtype) -> Past:
    """Return the past of B rows before their first token, with places for S tokens."""
    key_values = lambda: empty_key_values(B, S, config.HK, config.K, dtype)
    layers = (key_values() if own else empty_cache(config.delta, B, dtype) for own in config.attention)
    return empty_past(layers, B, S)


def load(directory) -> tuple[Config, Model]:
    """Return the sizes and the weights of a checkpoint. Those for images and for guessing ahead are left out."""
    names = {"model.language_model.": "model."}
    found, named = read_checkpoint(directory, names, ("model.visual.", "mtp."))
    config = read_config(found)
    # These norms have weights around 0, to which they add 1.
    norm = lambda name: 1 + take(named, f"{name}.weight").astype(jnp.float32)
    embedding = take(named, "model.embed_tokens.weight")

    def block(i: int, attention: bool) -> Block:
        at = f"model.layers.{i}"
        if attention:
            # Every head has its queries, then its gates.
            both = matrix(named, f"{at}.self_attn.q_proj").reshape(-1, config.H, 2, config.K)
            q, gate = (both[:, :, j].reshape(len(both), -1) for j in range(2))
            k, v, out = (matrix(named, f"{at}.self_attn.{name}_proj") for name in "kvo")
            mixer = Attention(q, gate, k, v, norm(f"{at}.self_attn.q_norm"), norm(f"{at}.self_attn.k_norm"), out)
        else:
            mixer = load_gated_delta_net(part(named, f"{at}.linear_attn."), config.delta)
        perceptron = Mlp(*(matrix(named, f"{at}.mlp.{name}_proj") for name in ("gate", "up", "down")))
        return Block(norm(f"{at}.input_layernorm"), mixer, norm(f"{at}.post_attention_layernorm"), perceptron)

    blocks = tuple(block(*each) for each in enumerate(config.attention))
    return config, whole_model(found, named, embedding, blocks, norm("model.norm"))


def read_config(found: dict) -> Config:
    """Return the sizes that a config.json has."""
    f, interval = Settings(found), found.get("full_attention_interval") or 4
    rope = rotary_settings(f, partial_rotary_factor=0.25)
    for name, values in dict(
        hidden_act=("silu", "swish"), attn_output_gate=(True,), attention_bias=(False,),
        use_sliding_window=(False,), num_experts=(0,),
    ).items():  # fmt: skip
        require(f, name, *values)
    return Config(
        attention=are_attention(f, lambda i: (i + 1) % interval == 0),
        delta=config_from({"model_type": "qwen3_5_text"} | f), H=f["num_attention_heads"], HK=f["num_key_value_heads"],
        K=f["head_dim"], rotated=int(f["head_dim"] * rope["partial_rotary_factor"]), theta=rope["rope_theta"],
        eps=f["rms_norm_eps"],
    )  # fmt: skip


def random_model(vocabulary: int) -> tuple[Config, Model]:
    """Return the sizes and the random weights of a tiny model."""
    delta = GatedDeltaNetConfig(D=64, H=2, HV=4, K=16, V=16)
    c = Config((False, True), delta, H=4, HK=2, K=16, rotated=4, theta=1e7, eps=1e-6)
    new, D, ones = Draw(), delta.D, jnp.ones(delta.D)

    def block(attention: bool) -> Block:
        if attention:
            q, gate, k, v = (new.matrix(D, heads * c.K) for heads in (c.H, c.H, c.HK, c.HK))
            mixer = Attention(q, gate, k, v, jnp.ones(c.K), jnp.ones(c.K), new.matrix(c.H * c.K, D))
        else:
            mixer = init_gated_delta_net(new.key(), delta)
        return Block(ones, mixer, ones, Mlp(new.matrix(D, 2 * D), new.matrix(D, 2 * D), new.matrix(2 * D, D)))

    blocks = tuple(map(block, c.attention))
    return c, Model(new.normal(vocabulary, D), blocks, ones, new.matrix(D, vocabulary))


if __name__ == "__main__":
    main(sys.modules[__name__])
