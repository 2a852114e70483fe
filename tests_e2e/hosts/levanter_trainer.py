"""levanter's trainer with a tiny model of its GatedDeltaNet on a CPU, with its own operator or with chunkwise's.

`python -m tests_e2e.hosts.levanter_trainer OPTIONS RESULT` writes losses and generated tokens to RESULT; OPTIONS is
JSON, as `Options` has it. No model of levanter has this layer, so a model is here; trainer and layer are levanter's.
"""

import collections
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import haliax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from levanter.layers import gated_deltanet
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from chunkwise.integrations import levanter
from tests_e2e.hosts.host import count_calls


class Options(NamedTuple):
    """What a run is.

    Attributes:
      ours: whether `levanter.install` is called first.
      policy: types of parameters and of what is computed, as jmp writes them.
      devices: over which rows are divided.
      steps: of training.
      moved: whether all weights start one unit in the last place higher, to see what rounding grows to.
    """

    ours: bool = False
    policy: str = "f32"
    devices: int = 1
    steps: int = 20
    moved: bool = False


Batch, Position, Embed, Vocabulary, Inner = (
    haliax.Axis(name, size)
    for name, size in (("batch", 4), ("position", 128), ("embed", 128), ("vocab", 512), ("mlp", 256))
)
CONFIG = gated_deltanet.GatedDeltaNetConfig(Embed, num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32)
PROMPT, GENERATED = 70, 16


class Block(eqx.Module):
    """A GatedDeltaNet and a perceptron."""

    norms: list
    mixer: gated_deltanet.GatedDeltaNet
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(key):
        mixer, up, down = jax.random.split(key, 3)
        return Block(
            [hnn.RmsNorm.init(Embed) for _ in range(2)], gated_deltanet.GatedDeltaNet.init(CONFIG, key=mixer),
            hnn.Linear.init(Embed, Inner, key=up), hnn.Linear.init(Inner, Embed, key=down),
        )  # fmt: skip

    def __call__(self, x, state, inference):
        y, state = self.mixer(self.norms[0](x), inference=inference, decode_state=state)
        x = x + y.astype(x.dtype)
        return x + self.down(haliax.nn.silu(self.up(self.norms[1](x)))), state


class Model(eqx.Module):
    """A language model of two blocks."""

    table: hnn.Embedding
    blocks: list
    norm: hnn.RmsNorm
    head: hnn.Linear

    @staticmethod
    def init(key):
        table, head, *blocks = jax.random.split(key, 4)
        return Model(
            hnn.Embedding.init(Vocabulary, Embed, key=table), [Block.init(key) for key in blocks],
            hnn.RmsNorm.init(Embed), hnn.Linear.init(Embed, Vocabulary, key=head),
        )  # fmt: skip

    def __call__(self, tokens, states=(None, None), inference=False):
        x, after = self.table(tokens), []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block(x, state, inference)
            after.append(state)
        return self.head(self.norm(x)), after


def loss_of(model, tokens, key=None):
    """Return the mean loss of all tokens but the last one of each row."""
    logits = model(tokens)[0].astype(jnp.float32)
    targets = haliax.nn.one_hot(haliax.roll(tokens, -1, Position.name), Vocabulary)
    mask = haliax.arange(Position) < Position.size - 1
    return haliax.nn.cross_entropy_loss(logits, Vocabulary, targets, where=mask)


def generate(model, rows):
    """Return the tokens that follow the beginnings of rows, greedily."""
    run = eqx.filter_jit(lambda model, tokens, states: model(tokens, states, inference=True))
    axes = (Batch, Position.resize(PROMPT))
    logits, states = run(model, haliax.named(jnp.asarray(rows[:, :PROMPT], jnp.int32), axes), (None, None))
    last, tokens = logits[Position.name, PROMPT - 1], []
    for _ in range(GENERATED):
        token = haliax.argmax(last, Vocabulary)
        tokens.append(token.array.tolist())
        step = token.broadcast_axis(Position.resize(1)).rearrange((Batch.name, Position.name))
        logits, states = run(model, step, states)
        last = logits[Position.name, 0]
    return np.transpose(tokens).tolist()


def main(o: Options, result: Path) -> None:
    """Train, and generate by the layer's decoding; with the weights of levanter's training by both operators."""
    calls = collections.Counter()
    for name in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"):
        count_calls(levanter.pipeline, name, calls)
    if o.ours:
        levanter.install()
    config = TrainerConfig(
        tracker=NoopConfig(), num_train_steps=o.steps, train_batch_size=Batch.size, mp=jmp.get_policy(o.policy),
        require_accelerator=False, id="tiny",
    )  # fmt: skip
    init = lambda: Model.init(jax.random.key(1))
    higher = lambda: jax.tree.map(lambda x: jnp.nextafter(x, jnp.inf) if eqx.is_inexact_array(x) else x, init())
    trainer = Trainer(config, optax.adamw(3e-3), loss_of, add_default_hooks=False)
    steps, rng = [], np.random.default_rng(0)
    with trainer:
        state = trainer.initial_state(jax.random.key(0), model_init=higher if o.moved else init)
        for _ in range(o.steps):
            # Tokens that can be learned: a row counts up by a stride of its own.
            starts, strides = rng.integers(0, 512, (4, 1)), rng.integers(1, 4, (4, 1))
            rows = (starts + strides * np.arange(Position.size)) % Vocabulary.size
            start = time.process_time()
            info = trainer.train_step(state, haliax.named(jnp.asarray(rows, jnp.int32), (Batch, Position)))
            state = info.state
            steps.append(dict(loss=float(info.loss), seconds=time.process_time() - start))
        tokens = {"ours" if o.ours else "theirs": generate(state.model, rows)}
        found = dict(steps=steps, calls=dict(calls))
        if not o.ours:
            levanter.install()
            tokens["ours"] = generate(state.model, rows)
    result.write_text(json.dumps(found | dict(tokens=tokens)))


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])), Path(sys.argv[2]))
