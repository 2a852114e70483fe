"""Tasks of lm-eval with a whole model of these examples.

    python -m pip install ./packages/layers lm-eval tokenizers
    python examples/evaluate.py qwen3_5 DIRECTORY --tasks hellaswag lambada_openai
    python examples/evaluate.py qwen3_5 --random --tasks my_task --include MY_TASKS

The directory is that of a checkpoint with its tokenizer.json. With --random a model is tiny, its weights are random,
and its tokens are bytes.
"""

import argparse
import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import lm_eval
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

import generation

MODELS = ("qwen3_5", "kimi_linear", "mamba2", "olmo_hybrid", "xlstm_7b")
PIECE = 64  # tokens of a row whose logits are in memory at once, and of which a row has a multiple


@functools.partial(jax.jit, static_argnames="cap")
def score(x, weights, targets, cap: float | None):
    """Return log p of targets [B, T] after hidden states x [B, T, D], and whether each is the likeliest token.

    The weights are those of a model without its blocks, and its logits stay below `cap`, if it has one.
    """

    def piece(given):
        x, targets = given
        log_p = jax.nn.log_softmax(generation.logits(x, weights, cap))
        return jnp.take_along_axis(log_p, targets[..., None], axis=2)[..., 0], jnp.argmax(log_p, axis=2) == targets

    split = lambda y: jnp.moveaxis(y.reshape(y.shape[0], -1, PIECE, *y.shape[2:]), 1, 0)
    join = lambda y: jnp.moveaxis(y, 0, 1).reshape(targets.shape)
    return jax.tree.map(join, jax.lax.map(piece, (split(x), split(targets))))


class ChunkwiseLM(TemplateLM):
    """A model of chunkwise for lm-eval.

    Args:
      model: one of these examples.
      config, weights: what its `load` or `random_model` returns.
      encode, decode: the tokens of a text, and the text of tokens.
      end: the token that ends a text, which also stands before a text of which every token counts.
      batch: rows that are read at once.
    """

    def __init__(self, model, config, weights, encode: Callable, decode: Callable, end: int, batch: int = 8):
        super().__init__()
        self.weights, self.encode, self.decode, self.end, self.batch = weights, encode, decode, end, batch
        self.run, self.cap = generation.compile_run(model, config), getattr(config, "cap", None)
        self.start = functools.partial(model.start, config, dtype=weights.embedding.dtype)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Return the tokens of a text; none is added."""
        return self.encode(string)

    def in_batches(self, rows: list, length: Callable, run: Callable) -> list:
        """Return what `run` makes of rows, of which rows of about one length are in a batch; all batches are full."""
        order, found = sorted(range(len(rows)), key=lambda i: -length(rows[i])), {}
        for begin in range(0, len(order), self.batch):
            batch = order[begin : begin + self.batch]
            full = batch + batch[-1:] * (self.batch - len(batch))
            found |= dict(zip(full, run([rows[i] for i in full]), strict=True))
        return [found[i] for i in range(len(rows))]

    def _score(self, rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return for tokens and how many of them count: the log-likelihood of these, and whether all are likeliest."""
        # The last token of a row is not read, and what counts ends with it.
        tokens, ids = generation.pad([row[:-1] for row, _ in rows], PIECE)
        x, _ = self.run(self.weights, self.start(len(rows), tokens.shape[1]), tokens, ids)
        scored = -(-max(count for _, count in rows) // PIECE) * PIECE
        targets = np.zeros((len(rows), scored), np.int32)
        for row, (every, count) in zip(targets, rows, strict=True):
            row[scored - count :] = every[-count:]
        found = score(x[:, -scored:], self.weights._replace(blocks=()), targets, self.cap)
        log_p, likeliest = map(np.asarray, found)
        return [
            (float(p[scored - n :].sum()), bool(same[scored - n :].all()))
            for p, same, (_, n) in zip(log_p, likeliest, rows, strict=True)
        ]

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        rows = [(context + continuation, len(continuation)) for _, context, continuation in requests]
        return self.in_batches(rows, lambda row: len(row[0]), self._score)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts."""
        texts = [self.encode(request.args[0]) for request in requests]
        rows = [([self.end, *text], len(text)) for text in texts]
        return [p for p, _ in self.in_batches(rows, lambda row: len(row[0]), self._score)]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the likeliest continuations, up to the first of the texts that end one."""
        rows = [(self.encode(text) or [self.end], options) for text, options in (x.args for x in requests)]
        for _, options in rows:
            if options.get("do_sample"):
                raise ValueError(f"`do_sample` must be False: the likeliest tokens are taken; got {options}.")
        return self.in_batches(rows, lambda row: len(row[0]), self._generate)

    def _generate(self, rows: list[tuple[list[int], dict]]) -> list[str]:
        tokens, ids = generation.pad([prompt for prompt, _ in rows], PIECE)
        counts = [options.get("max_gen_toks", 256) for _, options in rows]
        past = self.start(len(rows), tokens.shape[1] + max(counts))
        found = generation.generate(self.run, self.weights, past, tokens, ids, max(counts), PIECE).tolist()
        said = []
        for row, count, (_, options) in zip(found, counts, rows, strict=True):
            row = row[:count]
            text, until = self.decode(row[: row.index(self.end)] if self.end in row else row), options.get("until", [])
            for stop in filter(None, [until] if isinstance(until, str) else until):
                text = text.partition(stop)[0]
            said.append(text)
        return said


def of_bytes(model, batch: int) -> ChunkwiseLM:
    """Return a model of random weights, whose tokens are bytes."""
    decode = lambda tokens: bytes(tokens).decode(errors="replace")
    return ChunkwiseLM(model, *model.random_model(256), lambda text: list(text.encode()), decode, 0, batch)


def of_checkpoint(model, directory: Path, batch: int) -> ChunkwiseLM:
    """Return a model of a checkpoint, with the tokenizer of its tokenizer.json."""
    from tokenizers import Tokenizer

    found = json.loads((directory / "config.json").read_text())
    end = (found | found.get("text_config", {})).get("eos_token_id")
    if end is None:
        raise ValueError("config.json must have `eos_token_id` for this example.")
    end = end[0] if isinstance(end, list) else end
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return ChunkwiseLM(model, *model.load(directory), encode, tokenizer.decode, end, batch)


def main(arguments=None) -> dict:
    """Run tasks, and print their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS, help="an example")
    parser.add_argument("directory", nargs="?", type=Path, help="a checkpoint: config.json, tokenizer.json, weights")
    parser.add_argument("--random", action="store_true", help="no checkpoint: a tiny model of bytes, random weights")
    parser.add_argument("--tasks", nargs="+", required=True, help="names of tasks of lm-eval")
    parser.add_argument("--include", type=Path, help="a folder with tasks of your own, which alone are known then")
    parser.add_argument("--batch", type=int, default=8, help="rows that are read at once (%(default)s)")
    parser.add_argument("--limit", type=int, help="examples of each task; all if you do not say it")
    parser.add_argument("--few-shot", type=int, help="examples before a question; as many as the task says otherwise")
    o = parser.parse_args(arguments)
    if o.random == (o.directory is not None):
        parser.error("give the directory of a checkpoint, or --random.")
    model = importlib.import_module(o.model)
    lm = of_bytes(model, o.batch) if o.random else of_checkpoint(model, o.directory, o.batch)
    manager = TaskManager(include_path=o.include and str(o.include), include_defaults=o.include is None)
    found = lm_eval.simple_evaluate(
        lm, tasks=o.tasks, task_manager=manager, limit=o.limit, num_fewshot=o.few_shot, bootstrap_iters=0
    )
    print(make_table(found))
    return found["results"]


if __name__ == "__main__":
    main()
