"""RWKV-7's language model: no attention, and a memory that has the same size after every text.

    python -m pip install ./packages/layers torch
    python examples/rwkv7.py --random
    python examples/rwkv7.py RWKV-x070-World-0.1B-v2.8-20241210-ctx4096.pth --prompt-tokens 760 6511 314

The file is one as its authors release it, and torch reads it; a folder with its arrays in the format safetensors, or
one of transformers, needs no torch. --random needs neither. Every block computes

    x = x + rwkv7_attention(norm(x))
    x = x + channel_mix(norm(x))

where a channel mix looks at a token and at the token before. The first block hands its values on to all others.

Source: Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution (2025); the names are those of its files.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from blocks import Past, empty_past, take_places
from chunkwise.causal_conv1d import causal_conv1d
from chunkwise.layers import (
    Rwkv7AttentionConfig,
    Rwkv7AttentionWeights,
    config_from,
    empty_cache,
    init_rwkv7_attention,
    load_rwkv7_attention,
    open_checkpoint,
    rwkv7_attention,
)
from generation import Draw, check_all_taken, main, matrix, part, take


@dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      attention: of every block, the sizes of its attention; those of the first block differ.
      eps: of the norms.
    """

    attention: tuple[Rwkv7AttentionConfig, ...]
    eps: float = 1e-5


class Norm(NamedTuple):
    """The weights of a layer norm: weight [D] and bias [D]."""

    weight: jax.Array
    bias: jax.Array


class Mix(NamedTuple):
    """The weights of a channel mix: how much of the token before it reads [D], key [D, F] and value [F, D]."""

    mix: jax.Array
    key: jax.Array
    value: jax.Array


class Block(NamedTuple):
    """The weights of a block: a norm before each of its two parts."""

    norm: Norm
    attention: Rwkv7AttentionWeights
    mix_norm: Norm
    mix: Mix


class Model(NamedTuple):
    """The weights of the model: embedding [vocabulary, D] and its norm, blocks, norm, head [D, vocabulary]."""

    embedding: jax.Array
    embedding_norm: Norm
    blocks: tuple[Block, ...]
    norm: Norm
    head: jax.Array


def layer_norm(x, w: Norm, eps: float):
    """Return x with a mean of 0 and a variance of 1 in its last dimension, times a weight, plus a bias."""
    u = x.astype(jnp.float32)
    u = u - jnp.mean(u, axis=-1, keepdims=True)
    u = u * jax.lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + eps)
    return (u * w.weight + w.bias).astype(x.dtype)


def channel_mix(x, w: Mix, last, segment_ids=None):
    """Return value(relu(key y)^2), where y is between x [B, T, D] and the tokens before, and the last x [B, 1, D].

    A convolution that reads only the older one of two tokens knows where a segment begins.
    """
    older = jnp.broadcast_to(jnp.array([1.0, 0.0], jnp.float32), (x.shape[2], 2))
    before, last = causal_conv1d(x, older, initial_state=last, output_final_state=True, segment_ids=segment_ids)
    y = x + (before - x) * w.mix.astype(x.dtype)
    return jnp.square(jax.nn.relu(y @ w.key)) @ w.value, last


def run(weights: Model, config: Config, tokens, past: Past, segment_ids=None, implementation: str | None = None):
    """Return the hidden states [B, T, D] of tokens [B, T] after the last norm, and the past after them.

    The arguments are those of `qwen3_5.run`.
    """
    norm = lambda x, w: layer_norm(x, w, config.eps)
    x, layers, v_first = norm(weights.embedding[tokens], weights.embedding_norm), [], None
    _, past = take_places(past, tokens, segment_ids)
    for block, sizes, (cache, last) in zip(weights.blocks, config.attention, past.layers, strict=True):
        y, cache, v_first = rwkv7_attention(
            norm(x, block.norm), block.attention, sizes, cache, True, v_first=v_first, segment_ids=segment_ids,
            implementation=implementation,
        )  # fmt: skip
        x = x + y
        y, last = channel_mix(norm(x, block.mix_norm), block.mix, last, segment_ids)
        x = x + y
        layers.append((cache, last))
    return norm(x, weights.norm), past._replace(layers=tuple(layers))


def start(config: Config, B: int, S: int, dtype) -> Past:
    """Return the past of B rows before their first token."""
    # Without attention nobody looks at the places.
    return empty_past(((empty_cache(c, B, dtype), jnp.zeros((B, 1, c.D), dtype)) for c in config.attention), B, S)


def read(path) -> dict:
    """Return the arrays of a released file, or of a folder with files of the format safetensors, by released names."""
    if Path(path).is_dir():
        return {name.removeprefix("rwkv7."): x for name, x in open_checkpoint(path).items()}
    import torch

    named = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return {name: jnp.from_dlpack(x.contiguous()) for name, x in named.items()}


def load(path) -> tuple[Config, Model]:
    """Return the sizes and the weights of a released file, or of a folder with its arrays."""
    named = read(path)
    count = len({name.split(".")[1] for name in named if name.startswith("blocks.")})
    config = Config(tuple(config_from(named, i) for i in range(count)))
    norm = lambda name: Norm(take(named, f"{name}.weight"), take(named, f"{name}.bias"))
    embedding_norm, blocks = norm("blocks.0.ln0"), []
    for i, sizes in enumerate(config.attention):
        at = f"blocks.{i}"
        attention = load_rwkv7_attention(part(named, f"{at}.att."), sizes)
        shared = take(named, f"{at}.ffn.x_k").reshape(-1)
        mix = Mix(shared, matrix(named, f"{at}.ffn.key"), matrix(named, f"{at}.ffn.value"))
        blocks.append(Block(norm(f"{at}.ln1"), attention, norm(f"{at}.ln2"), mix))
    embedding, last = take(named, "emb.weight"), norm("ln_out")
    model = Model(embedding, embedding_norm, tuple(blocks), last, matrix(named, "head"))
    check_all_taken(named)
    return config, model


def random_model(vocabulary: int) -> tuple[Config, Model]:
    """Return the sizes and the random weights of a tiny model."""
    sizes = dict(D=64, H=4, HV=4, K=16, V=16, R_decay=8, R_rate=8, R_gate=8)
    c, D = Config((Rwkv7AttentionConfig(**sizes), Rwkv7AttentionConfig(**sizes, R_first=8))), 64
    new, norm = Draw(), Norm(jnp.ones(D), jnp.zeros(D))
    blocks = tuple(
        Block(
            norm, init_rwkv7_attention(new.key(), each), norm,
            Mix(jnp.full(D, 0.5), new.matrix(D, 4 * D), new.matrix(4 * D, D)),
        )
        for each in c.attention
    )  # fmt: skip
    return c, Model(new.normal(vocabulary, D), norm, blocks, norm, new.matrix(D, vocabulary))


if __name__ == "__main__":
    main(sys.modules[__name__])
