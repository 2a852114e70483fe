"""The program of examples/train.py: beside transformers, killed and continued, and over eight devices."""

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import train
from chunkwise.integrations.nnx import GatedDeltaNet
from chunkwise.integrations.nnx import named as nnx_names
from chunkwise.layers import GatedDeltaNetConfig, load_gated_delta_net
from library import compare, entropy, read_library
from tests.shown import Shown

# All tests of this process share one program.
SIZES = dict(steps=200, batch=8, length=96, width=32, rate=0.01, save_every=50, measure_every=75, print_every=40)
CONFIG = GatedDeltaNetConfig(D=32, H=2, HV=2, K=16, V=16)
STREAM, HELD_OUT = read_library(held_out=2**17)
ROWS = train.rows_of(STREAM[: SIZES["steps"] * SIZES["batch"] * SIZES["length"] + 1], SIZES["length"])
# What the model is measured on while it learns: a few rows, as many as the program is told to.
FEW = 4 * SIZES["batch"] * SIZES["length"]
HELD_OUT_ROWS = train.rows_of(HELD_OUT[: FEW + 1], SIZES["length"])
PROGRAM = Path(train.__file__)
SLOW = "test_learns", "test_killed_while_it_saves", "test_eight_devices", "test_beside_transformers"
THOROUGH = dict.fromkeys(SLOW, True)
SHOWS = dict(test_beside_transformers=[Shown("gated_delta_net", "fine-tuned", "qwen3_5")])
# Dies by SIGKILL just before the arrays of the checkpoint after step 100 get their final name.
KILLED = f"""
import os, runpy, signal, sys

def die(event, arguments):
    if event == "os.rename" and "100.orbax-checkpoint-tmp/default." in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
sys.path.insert(0, {str(PROGRAM.parent)!r})
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""


def run(program: list[str], output: Path, **options):
    """Run the program in a process of its own, with small sizes."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in (SIZES | options).items()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "COLUMNS": "100"}
    command = [sys.executable, *program, *arguments, f"--output={output}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def one_device():
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def train_here(output: Path):
    """Train in this process, and return the model, the losses and what was measured."""
    with jax.set_mesh(one_device()):
        model = train.Model(CONFIG, one_device(), nnx.Rngs(0))
        return train.train(model, ROWS, HELD_OUT_ROWS, argparse.Namespace(**SIZES, output=output))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The model, the losses and the measurements of training that nothing interrupts."""
    return functools.cache(lambda: train_here(tmp_path_factory.mktemp("whole")))


def test_learns(whole):
    """Files held out take fewer bits than any model needs that looks at nothing but single bytes."""
    model, losses, measured = whole()
    assert [*measured] == [0, 75, 150, 200]
    # Before the first step every byte is about as likely as any other.
    assert measured[0] > 5 > measured[75] > measured[200]
    assert losses.shape == (SIZES["steps"],)
    with jax.set_mesh(one_device()):
        rows = train.rows_of(HELD_OUT, SIZES["length"])
        batches = [train.batch_of(rows, 8 * n, SIZES["batch"]) for n in range(20)]
        bits = np.mean([train.loss_of(model, *batch) for batch in batches]) / np.log(2)
    assert bits < entropy(np.concatenate([targets.ravel() for _, targets in batches])) - 0.5


def test_other_models():
    """On text that repeats itself, a context of three bytes beats none, and training bytes help compressors."""
    bits = compare(STREAM[:200_000], HELD_OUT[: 2**14])
    assert 0 < bits["order 3"] < bits["order 0"] < 8
    assert 0 < bits["lzma after training bytes"] < bits["lzma"] < 8


def test_killed_while_it_saves(whole, tmp_path):
    """Training that was killed in the middle of a checkpoint goes on as if nothing had happened, bit by bit."""
    killed = run(["-c", KILLED], tmp_path, held_out=FEW)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "checkpoints/100.orbax-checkpoint-tmp").exists()
    model, losses, measured = train_here(tmp_path)
    np.testing.assert_array_equal(losses, whole()[1])
    assert measured == whole()[2]
    jax.tree.map(np.testing.assert_array_equal, model, whole()[0])
    with jax.set_mesh(one_device()):
        again = train.load(tmp_path, train.Model(CONFIG, one_device(), nnx.Rngs(1)))
    jax.tree.map(np.testing.assert_array_equal, again, model)


def assert_shown(stdout: str, results: dict) -> None:
    """Fail unless the program shows its last loss in nats and bits, tokens/s, a sample and its files."""
    shown = re.search(r"^step 8 of 8: loss (\S+), (\S+) bits per byte, [\d,]+ tokens/s$", stdout, re.MULTILINE)
    assert shown, stdout
    last = results["losses"][-1]
    np.testing.assert_allclose([float(x) for x in shown.groups()], [last, last / np.log(2)], atol=0.006)
    letters = lambda text: re.sub(r"[^a-zA-Z0-9]", "", text)
    sample, _, files = stdout.partition("─ a sample ─")[2].partition("╰")
    assert letters(sample) == letters(results["sample"]) != ""
    assert all(Path(line.rsplit(": ", 1)[0]).exists() for line in files.splitlines()[1:])
    assert len(files.splitlines()) == 5


def test_eight_devices(tmp_path):
    """The same steps over devices of rows, tokens and heads have the same losses; and the program shows all results."""
    losses = []
    for mesh in ("data=1", "data=2,sequence=2,heads=2"):
        output = tmp_path / mesh
        # At a rate of 0.01 the first three losses agree to 1e-6, and the last one differs by 2e-3.
        done = run([str(PROGRAM)], output, mesh=mesh, steps=8, rate=0.001, held_out=2 * 8 * 96)
        assert done.returncode == 0, done.stderr
        results = json.loads((output / "results.json").read_text())
        assert len(results["losses"]) == 8
        assert_shown(done.stdout, results)
        assert all((output / name).stat().st_size > 1000 for name in ("curve.png", "curve-dark.png"))
        assert [step for step, _ in results["held_out"]] == [0, 8]
        losses.append([*results["losses"], results["held_out"][0][1], results["bits_per_byte"]["this model"]])
    np.testing.assert_allclose(*losses, rtol=1e-4)


def copy_weights(model, named: dict) -> None:
    """Give the model the weights of a Qwen3.5 of transformers, by name."""

    def fill(layer, name: str) -> None:
        # A norm of transformers holds what it adds to 1.
        weight = named[f"{name}.weight"]
        scale = getattr(layer, "scale", None)
        layer.kernel.set_value(weight.T) if scale is None else scale.set_value(1 + weight)

    model.embedding.embedding.set_value(named["model.embed_tokens.weight"])
    fill(model.norm, "model.norm")
    fill(model.head, "lm_head")
    for i, block in enumerate(model.blocks):
        prefix, mixer = f"model.layers.{i}.", block.mixer
        for name in ("gate", "up", "down"):
            fill(getattr(block, name), f"{prefix}mlp.{name}_proj")
        for norm, name in zip(block.norms, ("input", "post_attention"), strict=True):
            fill(norm, f"{prefix}{name}_layernorm")
        if isinstance(mixer, GatedDeltaNet):
            for name, weight in nnx_names(load_gated_delta_net(named, CONFIG, f"{prefix}linear_attn.")).items():
                getattr(mixer, name).set_value(weight)
            continue
        for name in ("q", "k", "v"):
            fill(getattr(mixer, name), f"{prefix}self_attn.{name}_proj")
        fill(mixer.out, f"{prefix}self_attn.o_proj")
        fill(mixer.q_norm, f"{prefix}self_attn.q_norm")
        fill(mixer.k_norm, f"{prefix}self_attn.k_norm")


def build_qwen():
    """Return a Qwen3.5 of transformers that has the sizes of our model, and random weights."""
    torch = pytest.importorskip("torch", reason="torch has a CPU build under Python 3.11 only")
    qwen = pytest.importorskip("transformers.models.qwen3_5")
    torch.manual_seed(0)
    c, heads = CONFIG, dict(num_attention_heads=CONFIG.HV, num_key_value_heads=CONFIG.H, head_dim=CONFIG.V)
    config = qwen.Qwen3_5TextConfig(
        vocab_size=256, hidden_size=c.D, intermediate_size=2 * c.D, num_hidden_layers=4, **heads,
        layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=c.H,
        linear_num_value_heads=c.HV, linear_key_head_dim=c.K, linear_value_head_dim=c.V,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
        tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    return torch, qwen.Qwen3_5ForCausalLM(config).train()


@pytest.mark.torch
def test_beside_transformers():
    """Twenty steps of AdamW from the same weights over the same batches have the same losses in torch."""
    torch, theirs = build_qwen()
    rate, weights = 1e-3, [*theirs.parameters()]
    decays = (True, 0.1), (False, 0.0)
    groups = [dict(params=[w for w in weights if (w.ndim > 1) == wide], weight_decay=x) for wide, x in decays]
    adamw, warmup = torch.optim.AdamW(groups, betas=(0.9, 0.95)), SIZES["steps"] // 20
    with jax.set_mesh(one_device()):
        ours = train.Model(CONFIG, one_device(), nnx.Rngs(0))
        copy_weights(ours, {name: jnp.asarray(w.numpy().copy()) for name, w in theirs.state_dict().items()})
        optimizer = train.make_optimizer(SIZES["steps"], rate)
        moments = optimizer.init(ours)
        # A row of transformers is one sequence, so these lie inside of files.
        rows = [x[ROWS[0].all(axis=1)] for x in ROWS]
        for n in range(20):
            inputs, targets = train.batch_of(rows, n, SIZES["batch"])
            ours, moments, loss = train.train_step(ours, moments, inputs, targets, optimizer)

            # The rate rises over the first steps, and then falls like a cosine to its twentieth.
            past = max(n - warmup, 0) / (SIZES["steps"] - warmup)
            scale = min(n / warmup, 0.05 + 0.95 * (1 + np.cos(np.pi * past)) / 2)
            for group in adamw.param_groups:
                group["lr"] = rate * scale
            logits = theirs(torch.tensor(inputs), use_cache=False).logits
            expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).long().flatten())
            adamw.zero_grad()
            expected.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            adamw.step()
            assert abs(float(loss) - expected.item()) < 1e-3, f"step {n}"
    # They have learned something since.
    assert expected.item() < 5.5
