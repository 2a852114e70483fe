"""The flax model of examples/train.py is served by the engine."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import serve_trained
import train
from chunkwise.layers import GatedDeltaNetConfig
from serving import Request

CONFIG = GatedDeltaNetConfig(D=32, H=2, HV=4, K=16, V=16)


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        yield mesh


TEXTS = "import os\n", "def f(self, x):\n    return ", '"""', "class A(B):\n    def "
PROMPTS = [[0, *text.encode()] for text in TEXTS]


def test_served(mesh):
    """The engine's tokens are the likeliest by the model of flax."""
    wanted, model = 6, train.Model(CONFIG, mesh, nnx.Rngs(0))
    requests = [Request(i, prompt, wanted, 2 * i) for i, prompt in enumerate(PROMPTS)]
    engine = serve_trained.serve(model, requests, slots=2, budget=16)
    assert engine.traces == 1
    assert len({r.slot for r in requests}) < len(requests)
    texts = np.full((len(PROMPTS), max(map(len, PROMPTS)) + wanted), 1, np.int32)
    for text, r in zip(texts, requests, strict=True):
        text[: len(r.prompt) + wanted] = r.prompt + r.generated
    likeliest = np.argmax(jax.jit(lambda model: model(texts))(model), axis=-1)
    for row, r in zip(likeliest, requests, strict=True):
        assert r.generated == row[len(r.prompt) - 1 :][:wanted].tolist()
