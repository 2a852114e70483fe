"""The program of examples/train.py: it learns, and it goes on after a kill."""

import argparse
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import train
from chunkwise.layers import GatedDeltaNetConfig
from library import compare, entropy, read_library

# Compilation is what takes time here. All tests of this process share one program.
pytestmark = pytest.mark.interpreted
SIZES = dict(steps=200, batch=8, length=96, width=32, rate=0.01, save_every=50)
CONFIG = GatedDeltaNetConfig(D=32, H=2, HV=2, K=16, V=16)
STREAM, HELD_OUT = read_library(held_out=2**17)
ROWS = train.rows_of(STREAM[: SIZES["steps"] * SIZES["batch"] * SIZES["length"] + 1], SIZES["length"])
PROGRAM = Path(train.__file__)
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
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run(
        [sys.executable, *program, *arguments, f"--output={output}"], env=environment, capture_output=True, text=True
    )


def one_device():
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def train_here(output: Path):
    """Train in this process, and return the model and the losses."""
    with jax.set_mesh(one_device()):
        model = train.Model(CONFIG, one_device(), nnx.Rngs(0))
        return train.train(model, ROWS, argparse.Namespace(**SIZES, output=output))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The model and the losses of training that nothing interrupts."""
    return functools.cache(lambda: train_here(tmp_path_factory.mktemp("whole")))


@pytest.mark.thorough
def test_learns(whole):
    """Files held out take fewer bits than any model needs that looks at nothing but single bytes."""
    model, losses = whole()
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


@pytest.mark.thorough
def test_killed_while_it_saves(whole, tmp_path):
    """Training that was killed in the middle of a checkpoint goes on as if nothing had happened, bit by bit."""
    killed = run(["-c", KILLED], tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "checkpoints/100.orbax-checkpoint-tmp").exists()
    model, losses = train_here(tmp_path)
    np.testing.assert_array_equal(losses, whole()[1])
    jax.tree.map(np.testing.assert_array_equal, model, whole()[0])
