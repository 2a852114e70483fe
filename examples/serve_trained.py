"""The language model of train.py under the engine of serving.py: gated DeltaNets and attention, out of one checkpoint.

    python -m pip install ./packages/layers flax optax orbax-checkpoint matplotlib
    python examples/train.py
    python examples/serve_trained.py                              # what it writes after a few beginnings of files

The model is trained as modules of flax. To serve it, its weights go into the tuples of qwen3_5.py, which is the same
model as a function. A gated DeltaNet leaves one state of a text, and attention leaves keys and values of every token,
so that a slot of the engine has room for a text of some length.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import qwen3_5
import train
from blocks import Mlp, mlp, rms_norm, rotate
from chunkwise.layers import Step, empty_pool, ragged_gated_delta_net
from serving import Engine, Request


class KeyValuePool(NamedTuple):
    """What attention keeps of texts: keys and values [slots, S, HK, K], and how many tokens each slot has, [slots]."""

    keys: jax.Array
    values: jax.Array
    used: jax.Array


def weights_of(model: train.Model) -> tuple[qwen3_5.Config, qwen3_5.Model]:
    """Return the sizes and the weights of a model of flax, as qwen3_5.py has them."""
    c = model.blocks[0].mixer.config
    attention = tuple(isinstance(block.mixer, train.Attention) for block in model.blocks)
    config = qwen3_5.Config(attention, c, H=c.HV, HK=c.H, K=c.V, rotated=c.V // 4, theta=10_000.0, eps=1e-6)
    kernel, scale = (lambda layer: layer.kernel.get_value()), (lambda layer: layer.scale.get_value())

    def block(found: train.Block) -> qwen3_5.Block:
        mixer = found.mixer
        if isinstance(mixer, train.Attention):
            # Every head has its queries, then its gates.
            q, gate = jnp.split(kernel(mixer.q).reshape(c.D, c.HV, 2 * c.V), 2, axis=2)
            weights = qwen3_5.Attention(
                q.reshape(c.D, -1), gate.reshape(c.D, -1), kernel(mixer.k), kernel(mixer.v), scale(mixer.q_norm),
                scale(mixer.k_norm), kernel(mixer.out),
            )  # fmt: skip
        else:
            weights = mixer.weights
        perceptron = Mlp(*(kernel(layer) for layer in (found.gate, found.up, found.down)))
        return qwen3_5.Block(scale(found.norms[0]), weights, scale(found.norms[1]), perceptron)

    blocks = tuple(map(block, model.blocks))
    return config, qwen3_5.Model(model.embedding.embedding.get_value(), blocks, scale(model.norm), kernel(model.head))


def empty_pools(config: qwen3_5.Config, slots: int, S: int) -> tuple:
    """Return a pool for every block, with slots for texts of at most S tokens."""
    shape = (slots, S, config.HK, config.K)
    key_values = lambda: KeyValuePool(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(slots, jnp.int32))
    return tuple(key_values() if own else empty_pool(config.delta, slots) for own in config.attention)


def ragged_attention(x, w: qwen3_5.Attention, config: qwen3_5.Config, pool: KeyValuePool, step: Step):
    """Return what gated attention makes of the tokens of a step [1, T, D], and the pool after them."""
    (slots, S), N, c = pool.keys.shape[:2], len(step.state_indices), config
    t = jnp.arange(x.shape[1], dtype=jnp.int32)
    # Tokens after the last request are of a request N, which has a slot that does not exist, as other padding has.
    request = jnp.searchsorted(step.cu_seqlens[1:], t, side="right")
    slot = jnp.where(step.state_indices < 0, slots, step.state_indices)
    before = jnp.where(step.has_initial_state, pool.used.at[slot].get(mode="clip"), 0)
    position = before.at[request].get(mode="clip") + t - step.cu_seqlens.at[request].get(mode="clip")
    at = jnp.where(request < N, slot.at[request].get(mode="clip"), slots)

    q, k, v = ((x[0] @ weight).reshape(len(t), -1, c.K) for weight in (w.q, w.k, w.v))
    q, k = (rms_norm(y, norm, c.eps) for y, norm in ((q, w.q_norm), (k, w.k_norm)))
    q, k = (rotate(y, position, c.theta, c.rotated) for y in (q, k))
    put = lambda cache, new: cache.at[at, position].set(new, mode="drop")
    used = pool.used.at[slot].set(before + jnp.diff(step.cu_seqlens), mode="drop")
    pool = KeyValuePool(put(pool.keys, k), put(pool.values, v), used)
    # Every token is a row of its own, with the places of its text up to itself.
    keys, values = (cache.at[at].get(mode="clip") for cache in pool[:2])
    visible = (jnp.arange(S) <= position[:, None])[:, None, None]
    o = jax.nn.dot_product_attention(q[:, None], keys, values, mask=visible, scale=c.K**-0.5)
    return (o.reshape(len(t), -1) * jax.nn.sigmoid(x[0] @ w.gate) @ w.out)[None], pool


def run_step(config: qwen3_5.Config, weights: qwen3_5.Model, pools: tuple, tokens, step: Step):
    """Return logits for what follows each of the tokens [1, T], and the pools of all blocks after the step."""
    x, after = weights.embedding[tokens], []
    for block, pool in zip(weights.blocks, pools, strict=True):
        y = rms_norm(x, block.norm, config.eps)
        if isinstance(block.mixer, qwen3_5.Attention):
            y, pool = ragged_attention(y, block.mixer, config, pool, step)
        else:
            y, pool = ragged_gated_delta_net(y, block.mixer, config.delta, pool, step)
        x = x + y
        x = x + mlp(rms_norm(x, block.mlp_norm, config.eps), block.mlp)
        after.append(pool)
    return rms_norm(x, weights.norm, config.eps) @ weights.head, tuple(after)


def serve(model: train.Model, requests: list[Request], slots: int, budget: int) -> Engine:
    """Generate greedily for all requests, and return the engine."""
    config, weights = weights_of(model)
    S = max(len(r.prompt) + r.wanted for r in requests)
    run = lambda *arrays: run_step(config, *arrays)
    engine = Engine(weights, empty_pools(config, slots, S), budget, run)
    engine.serve(requests)
    return engine


BEGINNINGS = ('"""Support for ', "import os\nimport ", "class TestCase(unittest.", "def __init__(self, ")


def main(arguments: list[str]) -> list[Request]:
    """Serve the model of a checkpoint, and print what it writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", default=Path("train_output"), help="of train.py (%(default)s)")
    parser.add_argument("--width", type=int, default=train.OPTIONS["width"][0], help="of the model (%(default)s)")
    parser.add_argument("--count", type=int, default=64, help="bytes that it writes after each text (%(default)s)")
    o = parser.parse_args(arguments)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = train.load(o.output, train.new_model(o.width, mesh))
    prompts = [[0, *text.encode()] for text in BEGINNINGS]
    requests = [Request(i, prompt, o.count, arrival=2 * i) for i, prompt in enumerate(prompts)]
    engine = serve(model, requests, slots=2, budget=32)
    for r in requests:
        print(f"{bytes(r.prompt[1:]).decode()!r} goes on with {bytes(r.generated).decode(errors='replace')!r}")
    print(f"{engine.steps} steps of one compiled program")
    return requests


if __name__ == "__main__":
    main(sys.argv[1:])
