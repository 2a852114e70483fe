"""What is around a model: its weights, greedy generation of text with caches, and the command line.

This file is a library. A model is a file that imports it, and that has four functions::

    load(directory)                                        config and weights of a checkpoint
    random_model(vocabulary)                               a tiny config, and random weights
    start(config, B, S, dtype)                             the past of B rows before their first token, with S places
    run(weights, config, tokens, past, segment_ids, ...)   hidden states of tokens, and the past after them
"""

import argparse
import functools
import json
import time
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from blocks import Model
from chunkwise.layers import open_checkpoint

# The arrays of a checkpoint by name.
Named = dict[str, np.ndarray]


def read_checkpoint(directory, renamed: dict[str, str], ignored: tuple[str, ...] = ()) -> tuple[dict, Named]:
    """Return the config of a checkpoint, and its arrays by name.

    Args:
      directory: with config.json, and with model.safetensors or several files and an index.
      renamed: parts of names, and what they are replaced by.
      ignored: how the names of arrays start that are of no use here.
    """
    directory = Path(directory)
    # transformers writes infinity as {"__float__": "Infinity"}.
    special = lambda x: float(x["__float__"]) if "__float__" in x else x
    config = json.loads((directory / "config.json").read_text(), object_hook=special)
    named = {}
    for name, x in open_checkpoint(directory).items():
        if not name.startswith(ignored):
            named[functools.reduce(lambda so_far, pair: so_far.replace(*pair), renamed.items(), name)] = x
    # Models of images have one for each part, and say of the whole whether the head is that of the embedding.
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return tied | config["text_config"] if "text_config" in config else config, named


class Settings(dict):
    """The settings of a config.json, of which one that a model reads must be there."""

    def __missing__(self, name: str):
        """Refuse a setting that is not there."""
        raise ValueError(f"config.json must have `{name}` for this example; got only {sorted(self)}.")


def rotary_settings(found: dict, **defaults) -> Settings:
    """Return the settings of rotary positions, which files of transformers 4 have beside others."""
    beside = {name: found[name] for name in ("rope_theta", "partial_rotary_factor") if name in found}
    rope = Settings(defaults | beside | (found.get("rope_parameters") or {}))
    require(found, "rope_scaling")
    require(rope, "rope_type", "default")
    return rope


def are_attention(found: dict, default) -> tuple[bool, ...]:
    """Return of every block whether it has attention, if the file does not say it by a function of its number."""
    if found.get("layer_types") is None:
        return tuple(default(i) for i in range(found["num_hidden_layers"]))
    kinds = ("full_attention", "attention"), ("linear_attention",)
    for kind in found["layer_types"]:
        if kind not in kinds[0] + kinds[1]:
            raise ValueError(
                f"`layer_types` must have entries of {kinds[0] + kinds[1]} for this example; got {kind!r}."
            )
    return tuple(kind in kinds[0] for kind in found["layer_types"])


def require(found: dict, name: str, *values) -> None:
    """Check that a setting of a config.json, if it is there and not null, has one of the values that a model can do."""
    if found.get(name) is not None and found[name] not in values:
        raise ValueError(f"`{name}` must be one of {(None, *values)} for this example; got {found[name]!r}.")


def take(named: Named, name: str) -> jax.Array:
    """Take an array out of a checkpoint."""
    return jnp.asarray(named.pop(name))


def matrix(named: Named, name: str) -> jax.Array:
    """Take a projection out of a checkpoint, which has it as [columns, rows]."""
    return take(named, f"{name}.weight").T


def part(named: Named, prefix: str) -> Named:
    """Take all arrays whose names start with a prefix out of a checkpoint, by the rest of their names."""
    return {name.removeprefix(prefix): named.pop(name) for name in list(named) if name.startswith(prefix)}


def take_head(found: dict, named: Named, embedding: jax.Array) -> jax.Array | None:
    """Take the matrix [D, vocabulary] before the logits out of a checkpoint; None where it is the embedding."""
    head = matrix(named, "lm_head") if "lm_head.weight" in named else None
    tied = found.get("tie_word_embeddings") is True
    if head is None and not tied:
        raise ValueError(
            "the checkpoint must have 'lm_head.weight', unless config.json has a true tie_word_embeddings."
        )
    # A file may have a tied head beside the embedding.
    return None if tied and (head is None or jnp.array_equal(head.T, embedding)) else head


def check_all_taken(named: Named) -> None:
    """Check that a model has taken every array of its checkpoint."""
    if named:
        raise ValueError(f"the checkpoint must have no weights that the model lacks; got {sorted(named)}.")


def whole_model(found: dict, named: Named, embedding: jax.Array, blocks, norm: jax.Array) -> Model:
    """Return a model of weights out of a checkpoint, of which only the head is left.

    Args:
      found: what config.json has.
      named: the arrays that are left.
      embedding, blocks, norm: those that were taken.
    """
    model = Model(embedding, tuple(blocks), norm, take_head(found, named, embedding))
    check_all_taken(named)
    return model


class Draw:
    """Draws random weights of float32, always the same ones."""

    def __init__(self):
        self.random = np.random.default_rng(0)

    def normal(self, *shape: int) -> jax.Array:
        """Return numbers of mean 0 and variance 1."""
        return jnp.asarray(self.random.standard_normal(shape, np.float32))

    def matrix(self, *shape: int) -> jax.Array:
        """Return matrices [..., rows, columns] that keep the size of what they multiply."""
        return self.normal(*shape) * shape[-2] ** -0.5

    def key(self) -> jax.Array:
        """Return a key of JAX's random numbers."""
        return jax.random.key(self.random.integers(2**31))


def compile_run(model: ModuleType, config, implementation: str | None = None):
    """Return the function from weights, past, tokens and segment_ids to hidden states and the past after the tokens.

    It writes into the caches that it is given. It is compiled once for each number of tokens.
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def run(weights, past, tokens, segment_ids=None):
        return model.run(weights, config, tokens, past, segment_ids, implementation)

    return run


def logits(x, weights, cap: float | None = None):
    """Return the logits [B, T, vocabulary] after hidden states; `cap` is what those of xLSTM stay below."""
    tied = weights.head is None
    return _logits(x, weights.embedding if tied else weights.head, tied, cap)


@functools.partial(jax.jit, static_argnames=("tied", "cap"))
def _logits(x, matrix, tied: bool, cap: float | None):
    found = jnp.dot(x, matrix.T if tied else matrix, preferred_element_type=jnp.float32)
    return found if cap is None else cap * jnp.tanh(found / cap)


def next_tokens(x, weights):
    """Return the likeliest tokens [B, 1] after the last hidden states, which are the same ones without a cap."""
    return jnp.argmax(logits(x[:, -1:], weights), axis=-1).astype(jnp.int32)


def pad(prompts: list[list[int]], piece: int) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts in one array, padded at the left to a multiple of `piece`, and their segment_ids: 0, or -1."""
    T = -(-max(map(len, prompts)) // piece) * piece
    tokens, ids = np.zeros((len(prompts), T), np.int32), np.full((len(prompts), T), -1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, T - len(prompt) :], ids[row, T - len(prompt) :] = prompt, 0
    return tokens, ids


def generate(run, weights, past, tokens, segment_ids, count: int, piece: int) -> np.ndarray:
    """Return the `count` likeliest tokens [B, count] after prompts, one after another.

    Prompts are read in pieces of one size, then every step reads a token of each row. So two programs do it all. Rows
    end together, because prompts are padded at the left.

    Args:
      run: what `compile_run` returns.
      weights: of the model.
      past: with places for the prompts and the new tokens; it is used up.
      tokens, segment_ids: what `pad` returns.
      count: new tokens of a row.
      piece: tokens of a row that are read at once.
    """
    places = past.segments.shape[1]
    if tokens.shape[1] + count - 1 > places:
        raise ValueError(f"`past` must have places for {tokens.shape[1] + count - 1} tokens of a row; got {places}.")
    for begin in range(0, tokens.shape[1], piece):
        span = slice(begin, begin + piece)
        x, past = run(weights, past, tokens[:, span], segment_ids[:, span])
    generated = [next_tokens(x, weights)]
    while len(generated) < count:
        # Tokens stay on the device, and nobody waits for a step.
        x, past = run(weights, past, generated[-1])
        generated.append(next_tokens(x, weights))
    return np.concatenate(generated, axis=1)


# What a random model continues if nobody says a prompt.
PROMPTS = ("import this", "chunks of")


def parse(model: ModuleType, arguments=None) -> argparse.Namespace:
    """Return the options of the command line, with all prompts as tokens in `prompts`."""
    parser = argparse.ArgumentParser(description=model.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    repeated = dict(action="append", default=[])
    parser.add_argument("directory", nargs="?", help="a checkpoint: config.json and *.safetensors")
    parser.add_argument("--random", action="store_true", help="no checkpoint: a tiny model of bytes, random weights")
    parser.add_argument("--prompt-tokens", metavar="ID", nargs="+", type=int, **repeated, help="may be repeated")
    parser.add_argument("--prompt", metavar="TEXT", **repeated, help="with --random; may be repeated")
    parser.add_argument("--count", type=int, default=32, help="tokens to generate (%(default)s)")
    parser.add_argument("--piece", type=int, default=256, help="tokens of a prompt to read at once (%(default)s)")
    parser.add_argument("--implementation", choices=["xla", "staged", "fused"], help="of the operators")
    o = parser.parse_args(arguments)
    if o.random == (o.directory is not None):
        parser.error("give the directory of a checkpoint, or --random.")
    if o.prompt and not o.random:
        parser.error("--prompt needs --random; with a checkpoint, give token ids by --prompt-tokens.")
    if o.random and not o.prompt_tokens:
        o.prompt = o.prompt or PROMPTS
    o.prompts = [*o.prompt_tokens, *(list(text.encode()) for text in o.prompt)]
    if not o.prompts or not all(o.prompts):
        parser.error("give --prompt-tokens, or with --random a --prompt that is not empty.")
    if o.count < 1 or o.piece < 1:
        parser.error(f"--count and --piece must be at least 1; got {o.count} and {o.piece}.")
    return o


def main(model: ModuleType, arguments=None) -> np.ndarray:
    """Continue prompts from the command line."""
    o = parse(model, arguments)
    config, weights = model.random_model(256) if o.random else model.load(o.directory)
    tokens, ids = pad(o.prompts, o.piece)
    if tokens.min() < 0 or tokens.max() >= len(weights.embedding):
        raise SystemExit(f"--prompt-tokens must be from 0 to {len(weights.embedding) - 1}; got {o.prompts}.")
    past = model.start(config, len(tokens), tokens.shape[1] + o.count, weights.embedding.dtype)
    start, run = time.perf_counter(), compile_run(model, config, o.implementation)
    generated = generate(run, weights, past, tokens, ids, o.count, o.piece)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    for prompt, row in zip(o.prompts, generated.tolist(), strict=True):
        # A token of a random model is a byte.
        console.print(*([bytes(prompt), "+", bytes(row)] if o.random else row))
    console.print(f"{generated.size} tokens, with compilation in {time.perf_counter() - start:.1f} s")
    if o.random:
        console.print("The weights are random, so the bytes mean nothing: a trained model needs a checkpoint.")
    return generated
