"""Mamba-2's language model: nothing but mixers, whose states have the same size after every text.

    python -m pip install ./packages/layers
    python examples/mamba2.py --random
    python examples/mamba2.py DIRECTORY --prompt-tokens 760 6511 314 9338 369

DIRECTORY holds a checkpoint that transformers can read; --random needs none. Every block computes

    x = x + mixer(norm(x))

Source: Dao and Gu, Transformers are SSMs (2024); the names are those of transformers.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from blocks import Model, Past, empty_past, rms_norm, take_places
from chunkwise.layers import (
    Mamba2Config,
    Mamba2Weights,
    config_from,
    empty_cache,
    init_mamba2_mixer,
    load_mamba2_mixer,
    mamba2_mixer,
)
from generation import Draw, Settings, main, part, read_checkpoint, take, whole_model


@dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      blocks: how many there are.
      mixer: sizes of the mixers.
      float32_sums: whether the sum over blocks, x, is float32.
    """

    blocks: int
    mixer: Mamba2Config
    float32_sums: bool


class Block(NamedTuple):
    """The weights of a block: norm [D] and mixer."""

    norm: jax.Array
    mixer: Mamba2Weights


def run(weights: Model, config: Config, tokens, past: Past, segment_ids=None, implementation: str | None = None):
    """Return the hidden states [B, T, D] of tokens [B, T] after the last norm, and the past after them.

    The arguments are those of `qwen3_5.run`.
    """
    x, caches, eps = weights.embedding[tokens], [], config.mixer.eps
    dtype = x.dtype
    x = x.astype(jnp.float32) if config.float32_sums else x
    _, past = take_places(past, tokens, segment_ids)
    for block, cache in zip(weights.blocks, past.layers, strict=True):
        y, cache = mamba2_mixer(
            rms_norm(x, block.norm, eps).astype(dtype), block.mixer, config.mixer, cache, True,
            segment_ids=segment_ids, implementation=implementation,
        )  # fmt: skip
        x = x + y
        caches.append(cache)
    return rms_norm(x, weights.norm, eps).astype(dtype), past._replace(layers=tuple(caches))


def start(config: Config, B: int, S: int, dtype) -> Past:
    """Return the past of B rows before their first token."""
    # Without attention nobody looks at the places.
    return empty_past((empty_cache(config.mixer, B, dtype) for _ in range(config.blocks)), B, S)


def load(directory) -> tuple[Config, Model]:
    """Return the sizes and the weights of a checkpoint."""
    # Older checkpoints have the one name, newer ones the other.
    found, named = read_checkpoint(directory, {"embedding.weight": "embeddings.weight"})
    config = read_config(found)
    embedding = take(named, "backbone.embeddings.weight")
    mixer = lambda at: load_mamba2_mixer(part(named, f"{at}.mixer."), config.mixer)
    names = [f"backbone.layers.{i}" for i in range(config.blocks)]
    blocks = [Block(take(named, f"{at}.norm.weight"), mixer(at)) for at in names]
    return config, whole_model(found, named, embedding, blocks, take(named, "backbone.norm_f.weight"))


def read_config(found: dict) -> Config:
    """Return the sizes that a config.json has."""
    f = Settings(found)
    return Config(f["num_hidden_layers"], config_from({"model_type": "mamba2"} | f), f.get("residual_in_fp32", True))


def random_model(vocabulary: int) -> tuple[Config, Model]:
    """Return the sizes and the random weights of a tiny model."""
    c = Config(blocks=2, mixer=Mamba2Config(D=64, H=2, HV=4, K=16, V=32), float32_sums=True)
    new, D, ones = Draw(), c.mixer.D, jnp.ones(c.mixer.D)
    blocks = tuple(Block(ones, init_mamba2_mixer(new.key(), c.mixer)) for _ in range(c.blocks))
    return c, Model(new.normal(vocabulary, D), blocks, ones, new.matrix(D, vocabulary))


if __name__ == "__main__":
    main(sys.modules[__name__])
