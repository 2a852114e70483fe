"""xLSTM's language model: nothing but mLSTM layers and perceptrons, and states of one size after every text.

    python -m pip install ./packages/layers
    python examples/xlstm_7b.py --random
    python examples/xlstm_7b.py DIRECTORY --prompt-tokens 760 6511 314 9338 369

DIRECTORY holds a checkpoint that transformers can read, such as xLSTM-7B; --random needs none. Every block computes

    x = x + mlstm_layer(norm(x))
    x = x + mlp(norm(x))

Source: Beck et al., xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference (2025); the names are those of
transformers.
"""

import sys
from dataclasses import dataclass

import jax.numpy as jnp

from blocks import Block, Mlp, Model, Past, empty_past, mlp, rms_norm, take_places
from chunkwise.layers import (
    MlstmLayerConfig,
    config_from,
    empty_cache,
    init_mlstm_layer,
    load_mlstm_layer,
    mlstm_layer,
)
from generation import Draw, Settings, main, matrix, part, read_checkpoint, require, take, whole_model


@dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      blocks: how many there are.
      layer: sizes of the mLSTM layers.
      cap: what the logits stay below; None for any.
    """

    blocks: int
    layer: MlstmLayerConfig
    cap: float | None


def run(weights: Model, config: Config, tokens, past: Past, segment_ids=None, implementation: str | None = None):
    """Return the hidden states [B, T, D] of tokens [B, T] after the last norm, and the past after them.

    The arguments are those of `qwen3_5.run`.
    """
    x, caches, eps = weights.embedding[tokens], [], config.layer.eps
    _, past = take_places(past, tokens, segment_ids)
    for block, cache in zip(weights.blocks, past.layers, strict=True):
        y, cache = mlstm_layer(
            rms_norm(x, block.norm, eps), block.mixer, config.layer, cache, True, segment_ids=segment_ids,
            implementation=implementation,
        )  # fmt: skip
        x = x + y
        x = x + mlp(rms_norm(x, block.mlp_norm, eps), block.mlp)
        caches.append(cache)
    return rms_norm(x, weights.norm, eps), past._replace(layers=tuple(caches))


def start(config: Config, B: int, S: int, dtype) -> Past:
    """Return the past of B rows before their first token."""
    # Without attention nobody looks at the places, and a state has no inputs of another type.
    return empty_past((empty_cache(config.layer, B) for _ in range(config.blocks)), B, S)


def load(directory) -> tuple[Config, Model]:
    """Return the sizes and the weights of a checkpoint."""
    found, named = read_checkpoint(directory, {})
    config = read_config(found)
    embedding = take(named, "backbone.embeddings.weight")
    blocks = []
    for i in range(config.blocks):
        at = f"backbone.blocks.{i}"
        layer = load_mlstm_layer(part(named, f"{at}.mlstm_layer."), config.layer)
        inner = Mlp(*(matrix(named, f"{at}.ffn.proj_{name}") for name in ("up_gate", "up", "down")))
        norms = [take(named, f"{at}.norm_{name}.weight") for name in ("mlstm", "ffn")]
        blocks.append(Block(norms[0], layer, norms[1], inner))
    return config, whole_model(found, named, embedding, blocks, take(named, "backbone.out_norm.weight"))


def read_config(found: dict) -> Config:
    """Return the sizes that a config.json has."""
    f = Settings(found)
    require(f, "weight_mode", "single")
    require(f, "add_out_norm", True)
    # The file of xLSTM-7B has one name, and files that transformers writes have the other.
    blocks = f["num_blocks" if "num_blocks" in f else "num_hidden_layers"]
    return Config(blocks, config_from({"model_type": "xlstm"} | f), f.get("output_logit_soft_cap", 30.0))


def random_model(vocabulary: int) -> tuple[Config, Model]:
    """Return the sizes and the random weights of a tiny model."""
    c = Config(blocks=2, layer=MlstmLayerConfig(D=64, H=2, HV=2, K=16, V=32), cap=30.0)
    new, D, ones = Draw(), c.layer.D, jnp.ones(c.layer.D)
    perceptron = lambda: Mlp(new.matrix(D, 2 * D), new.matrix(D, 2 * D), new.matrix(2 * D, D))
    blocks = tuple(Block(ones, init_mlstm_layer(new.key(), c.layer), ones, perceptron()) for _ in range(c.blocks))
    return c, Model(new.normal(vocabulary, D), blocks, ones, new.matrix(D, vocabulary))


if __name__ == "__main__":
    main(sys.modules[__name__])
