"""Layers as transformers runs them, in small models of random weights, against those of chunkwise.layers."""

import functools

import jax
import pytest

from chunkwise.layers import config_from
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, TOLERANCE, assert_close
from tests.shown import Shown, layer_of
from tests_e2e.layers.hybrids import MODELS
from tests_e2e.layers.recording import check_calls, check_token_by_token, record

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """The name of a model, and what its layer reads and writes while it runs."""
    ours = MODELS[request.param]
    model, layer = ours.build()
    assert config_from(model.config, layer=0) == ours.config
    return request.param, record(model, layer, ours.functions[1], ours.config, ours.kept)


@functools.cache
def compiled(name, implementation):
    """Our layer of a model, compiled once for all of its tests."""
    ours = MODELS[name]
    layer = functools.partial(ours.functions[0], config=ours.config, output_cache=True, implementation=implementation)
    return jax.jit(lambda x, weights, cache: layer(x, weights, cache=cache))


# Models whose layer is another's, or is another's but for what the plain implementation shows.
REPEATED = ("qwen3_5", "qwen3_5_moe", "qwen4_exp, silu", "lara_mini", "glm5_next, lower bound", "glm5_next, softplus")
REPEATED += ("bamba", "granitemoehybrid", "zamba2", "xlstm, fused")
SETTINGS = ["olmo_hybrid", "qwen4_exp, sigmoid", "nemotron_h", "bailing_hybrid"]
SETTINGS += [name for name in MODELS if name.startswith("falcon_h1")]
implementations = pytest.mark.parametrize("implementation", ["xla", "staged", "fused"])
# What "staged" promises where a chunk holds weak and strong gates at once: see docs/using.md.
STAGED = 5e-5


def is_thorough(case, implementation) -> bool:
    """Return whether nothing new would be seen: the operator has tests of its own under every implementation."""
    return case in REPEATED or implementation != "xla"


THOROUGH = dict(
    # Models of published files have the settings, too. One layer with some has all of them here.
    test_prefill_then_decode=lambda case, implementation: (
        is_thorough(case, implementation) or (case in SETTINGS and case != "falcon_h1, no norm")
    ),
    test_decode_from_the_first_token=lambda case, implementation: is_thorough(case, implementation) or case in SETTINGS,
    test_gradient=lambda case: case not in ("qwen3_next", "falcon_h1, norm before the gate"),
)
SHOWS = dict(
    test_prefill_then_decode=lambda case: Shown(
        layer_of(MODELS[case].config), "config load cache decode", MODELS[case].module
    )
)


@implementations
def test_prefill_then_decode(case, implementation):
    name, recording = case
    # Nothing came before: zeros, so that one program does both prefills.
    tolerance = STAGED if implementation == "staged" else TOLERANCE["float32"]
    check_calls(compiled(name, implementation), recording, recording.nothing_before(), tolerance)


@implementations
def test_decode_from_the_first_token(case, implementation):
    name, recording = case
    check_token_by_token(compiled(name, implementation), recording, recording.nothing_before())


def test_gradient(case):
    """The gradient of the hidden states, for a cotangent of the output."""
    name, recording = case
    ours, call, (dy, dx) = MODELS[name], recording.calls[0], recording.gradient
    run = lambda x, weights: ours.functions[0](x, weights, ours.config)[0]
    got = jax.jit(lambda x, weights, dy: jax.vjp(lambda x: run(x, weights), x)[1](dy)[0])(call.x, recording.weights, dy)
    assert_close("dx", got, dx, GRADIENT_TOLERANCE["float32"])
