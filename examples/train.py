"""A byte-level language model of Python's standard library: three delta layers to one of attention, as in Qwen3.5.

    python -m pip install ".[flax]" optax orbax-checkpoint matplotlib
    python examples/train.py                                      # in a few minutes on 2 cores
    python examples/train.py --mesh data=2,sequence=2,heads=2

Files follow one another in rows, and segment_ids keep layers from looking into the file before. Some are held out, to
measure on. Checkpoints, results, a curve and a sample of text go to the folder --output. The program goes on after the
last checkpoint in there, if there is one.
"""

import argparse
import functools
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from blocks import rotate
from chunkwise.integrations.nnx import GatedDeltaNet, named
from chunkwise.layers import GatedDeltaNetConfig, decayed, shardings
from library import read_library, report

AXES = {"data": "batch", "sequence": "tokens", "heads": "heads"}  # of the mesh, and what they divide


def linear(rows, columns, spec, rngs):
    """Return a matrix without a bias, which lies on the mesh as a PartitionSpec says."""
    return nnx.Linear(rows, columns, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": spec})


class Attention(nnx.Module):
    """Gated attention with HV heads of queries and H heads of keys and values, all of size V."""

    def __init__(self, config, on, rngs):
        self.config, self.on, c = config, on, config
        self.q = linear(c.D, 2 * c.HV * c.V, on.weights.v, rngs)
        self.k, self.v = (linear(c.D, c.H * c.V, on.weights.q, rngs) for _ in range(2))
        self.out = linear(c.HV * c.V, c.D, on.weights.out, rngs)
        self.q_norm, self.k_norm = (nnx.RMSNorm(c.V, rngs=rngs) for _ in range(2))

    def __call__(self, x, segment_ids):
        c, (B, T, _), t = self.config, x.shape, jnp.arange(x.shape[1])
        q, gate = jnp.split(self.q(x).reshape(B, T, c.HV, 2 * c.V), 2, axis=3)
        k, v = (layer(x).reshape(B, T, c.H, c.V) for layer in (self.k, self.v))
        # A quarter of every head is turned by its position.
        q, k = (rotate(y, t, 10_000.0, c.V // 4) for y in (self.q_norm(q), self.k_norm(k)))
        # A device has the queries of its own tokens, and the keys and values of all.
        k, v = jax.lax.with_sharding_constraint((k, v), PartitionSpec(self.on.x[0], None, self.on.weights.q[1]))
        mask = (t[:, None] >= t) & (segment_ids[:, :, None] == segment_ids[:, None, :])
        o = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return self.out((o * jax.nn.sigmoid(gate)).reshape(B, T, -1))


class Block(nnx.Module):
    """A layer that mixes tokens, and an MLP for each token."""

    def __init__(self, mixer, config, on, rngs):
        D, inner, self.mixer = config.D, 2 * config.D, mixer(rngs)
        self.gate, self.up = (linear(D, inner, on.weights.v, rngs) for _ in range(2))
        self.down = linear(inner, D, on.weights.out, rngs)
        self.norms = nnx.List(nnx.RMSNorm(D, rngs=rngs) for _ in range(2))

    def __call__(self, x, segment_ids):
        x = x + self.mixer(self.norms[0](x), segment_ids=segment_ids)
        y = self.norms[1](x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Model(nnx.Module):
    """A language model over bytes. Byte 0 begins a file."""

    def __init__(self, config, mesh, rngs):
        axes = {AXES[axis]: axis for axis in mesh.axis_names}
        self.on = on = shardings(config, axes, mesh)
        delta = lambda rngs: GatedDeltaNet(config, rngs=rngs, mesh_axes=axes)
        attention = lambda rngs: Attention(config, on, rngs)
        self.embedding = nnx.Embed(256, config.D, rngs=rngs)
        self.blocks = nnx.List(Block(mixer, config, on, rngs) for mixer in (delta, delta, delta, attention))
        self.norm, self.head = nnx.RMSNorm(config.D, rngs=rngs), linear(config.D, 256, None, rngs)

    def __call__(self, tokens):
        """Return logits [B, T, 256] of what follows each of the tokens [B, T]."""
        x = jax.lax.with_sharding_constraint(self.embedding(tokens), self.on.x)
        segment_ids = jnp.cumsum(tokens == 0, axis=1)
        for block in self.blocks:
            x = block(x, segment_ids)
        return self.head(self.norm(x))


def new_model(width, mesh):
    """Return a model before its training, whose hidden states have so many channels."""
    config = GatedDeltaNetConfig(D=width, H=2, HV=2, K=width // 2, V=width // 2)
    return Model(config, mesh, nnx.Rngs(0))


@jax.jit
def loss_of(model, inputs, targets):
    """Return the mean of -log p(target), in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean()


def decayed_weights(model):
    """Return which weights take weight decay: of a delta layer those that it says, else matrices and not vectors."""
    mask = jax.tree.map(lambda x: x.ndim > 1, model)
    for block in mask.blocks:
        if isinstance(block.mixer, GatedDeltaNet):
            for name, flag in named(decayed(block.mixer.config)).items():
                getattr(block.mixer, name).set_value(flag)
    return mask


@functools.cache
def make_optimizer(steps, rate):
    """Return AdamW."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps, rate / 20)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed_weights)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames=("model", "moments"))
def train_step(model, moments, inputs, targets, optimizer):
    """Return the model and the moments after a step, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(model, inputs, targets)
    updates, moments = optimizer.update(gradients, moments, model)
    return optax.apply_updates(model, updates), moments, loss


def rows_of(stream, T):
    """Return inputs and targets [rows, T] of a stream of bytes."""
    count = (len(stream) - 1) // T
    return [stream[i : i + count * T].reshape(count, T).astype(np.int32) for i in (0, 1)]


def batch_of(rows, n, B):
    """Return batch n of inputs and targets [B, T]. After the last row comes the first one."""
    return [x.take(range(n * B, (n + 1) * B), axis=0, mode="wrap") for x in rows]


def measure(model, rows, B):
    """Return the mean loss over inputs and targets, of which B rows are read at once."""
    return np.mean([loss_of(model, *batch_of(rows, n, B)) for n in range(len(rows[0]) // B)])


def train(model, rows, held_out, o):
    """Run the steps that are left, over rows in a random order.

    Args:
      model: at its beginning, even if a checkpoint takes its place.
      rows: inputs and targets to train on.
      held_out: inputs and targets to measure on.
      o: options of the program.

    Returns:
      The model, the losses of all steps, and the losses over `held_out` by the number of steps before them.
    """
    rows = [x[np.random.default_rng(0).permutation(len(x))] for x in rows]
    points = [*range(0, o.steps, o.measure_every), o.steps]
    optimizer, losses = make_optimizer(o.steps, o.rate), np.zeros(o.steps, np.float32)
    measured = np.zeros(len(points), np.float32)
    state, structure = jax.tree.flatten((model, optimizer.init(model), losses, measured))
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    kept = ocp.CheckpointManagerOptions(max_to_keep=2)
    with (
        ocp.CheckpointManager(o.output.absolute() / "checkpoints", options=kept) as checkpoints,
        Progress(*columns, disable=not Console().is_terminal) as progress,
    ):
        bar = not progress.disable
        if last := checkpoints.latest_step() or 0:
            state = checkpoints.restore(last, args=ocp.args.StandardRestore(state))
        model, moments, losses, measured = jax.tree.unflatten(structure, state)
        task = progress.add_task(begins := f"begins after step {last}", total=o.steps, completed=last)
        if not bar:
            print(f"{begins}, and compiles", flush=True)
        for n in range(last, o.steps):
            if n in points:
                measured[points.index(n)] = measure(model, held_out, o.batch)
            model, moments, loss = train_step(model, moments, *batch_of(rows, n, o.batch), optimizer)
            losses[n] = loss
            speed = (progress.tasks[task].speed or 0) * o.batch * o.length
            text = f"loss {loss:.3f}, {loss / math.log(2):.2f} bits per byte, {speed:,.0f} tokens/s"
            progress.update(task, advance=1, description=text)
            if not bar and (n == last or (n + 1) % o.print_every == 0 or n + 1 == o.steps):
                print(f"step {n + 1} of {o.steps}: {text}", flush=True)
            if (n + 1) % o.save_every == 0 or n + 1 == o.steps:
                # It is written while training goes on.
                state = jax.tree.leaves((model, moments, losses.copy(), measured.copy()))
                checkpoints.save(n + 1, args=ocp.args.StandardSave(state))
    measured[-1] = measure(model, held_out, o.batch)
    return model, losses, dict(zip(points, measured.tolist(), strict=True))


def load(output, model):
    """Return a model with the weights of the last checkpoint of a training, instead of its own.

    Args:
      output: the folder of the training.
      model: of the same width.
    """
    weights, structure = jax.tree.flatten(model)
    with ocp.CheckpointManager(output.absolute() / "checkpoints") as checkpoints:
        # The weights come first: moments of the optimizer, losses and measurements follow.
        state = checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore())
    return jax.tree.unflatten(structure, map(jnp.asarray, state[: len(weights)]))


@jax.jit
def write(model, text):
    """Return text [B, T] with all bytes but the first drawn from the model, a little colder than it is."""
    step = lambda t, text: text.at[:, t].set(jax.random.categorical(jax.random.key(t), model(text)[:, t - 1] / 0.8))
    return jax.lax.fori_loop(1, text.shape[1], step, text)


OPTIONS = dict(
    steps=(800, "steps of training"),
    batch=(4, "rows of a step"),
    length=(256, "bytes of a row"),
    width=(128, "channels of the hidden states, an even number"),
    rate=(3e-3, "the highest learning rate: it rises to it over a twentieth of the steps, then falls to a twentieth"),
    save_every=(300, "steps between checkpoints"),
    print_every=(50, "steps between lines, where the output is no terminal with a bar"),
    measure_every=(100, "steps between measurements on the files held out"),
    held_out=(2**17, "bytes of files that training never reads, to measure on"),
    mesh=("data=1", "devices of each axis, such as data=2,sequence=2,heads=2; a CPU is divided into so many"),
    output=(Path("train_output"), "folder for checkpoints, results.json and pictures"),
)


def mesh_sizes(text):
    """Return the devices of each axis of a mesh."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(axis in AXES and size.isdecimal() and int(size) for axis, _, size in pairs):
        raise argparse.ArgumentTypeError(f"must be pairs AXIS=DEVICES with the axes {', '.join(AXES)}; got {text!r}.")
    return {axis: int(size) for axis, _, size in pairs}


def main():
    """Train a model, measure it on files that it has not seen, and let it write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, meaning) in OPTIONS.items():
        kind = mesh_sizes if name == "mesh" else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=f"{meaning} (%(default)s)")
    o = parser.parse_args()
    sizes = o.mesh
    if math.prod(sizes.values()) > 1:
        # A CPU becomes several devices. They wait for one another in threads, more of them than it may have cores.
        os.environ.setdefault("NPROC", "16")
        jax.config.update("jax_num_cpu_devices", math.prod(sizes.values()))
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    print("reading the standard library of Python", flush=True)
    stream, held_out = read_library(o.held_out)
    seen, rows = stream[: o.steps * o.batch * o.length + 1], rows_of(held_out, o.length)
    with jax.set_mesh(mesh):
        model, losses, measured = train(new_model(o.width, mesh), rows_of(seen, o.length), rows, o)
        sample = bytes(write(model, jnp.zeros((sizes.get("data", 1), o.length), jnp.int32))[0].tolist())
    text = held_out[1 : len(rows[0]) // o.batch * o.batch * o.length + 1]
    report(o.output, losses, measured, seen, text, sample)


if __name__ == "__main__":
    main()
