"""A layer of Qwen3-Next and of Qwen3.5, as transformers runs it, against examples/gated_delta_net.py."""

import functools

import jax
import pytest

from gated_delta_net import gated_delta_net, load_weights
from recording import ATTENTION, build, check_calls, check_token_by_token, randomise, record

SIZES = dict(H=2, HV=4, K=16, V=24)
# By module: configuration, model without a head, and what only one of them has.
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextModel", dict(num_experts=2, num_experts_per_tok=1)),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5TextModel", dict()),
}


@functools.cache
def layer_under(implementation):
    """The layer in JAX, compiled once for both models."""
    return jax.jit(functools.partial(gated_delta_net, implementation=implementation))


@pytest.fixture(scope="module", params=MODELS)
def recording(request):
    """What the layer reads and writes while the model runs."""
    config, name, special = MODELS[request.param]
    model = build(
        request.param, config, name, **ATTENTION, num_key_value_heads=1, head_dim=32,
        moe_intermediate_size=32, shared_expert_intermediate_size=32,
        linear_num_key_heads=SIZES["H"], linear_num_value_heads=SIZES["HV"], linear_key_head_dim=SIZES["K"],
        linear_value_head_dim=SIZES["V"], **special,
    )  # fmt: skip
    layer = model.layers[0].linear_attn
    randomise(layer.dt_bias, layer.norm.weight)
    return record(model, layer, functools.partial(load_weights, **SIZES))


implementations = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("staged", marks=pytest.mark.thorough), "fused"]
)


@implementations
def test_prefill_then_decode(recording, implementation):
    # Nothing came before: no cache, or for the kernels one of zeros, so that one program does both prefills.
    cache = None if implementation == "xla" else recording.nothing_before()
    check_calls(layer_under(implementation), recording, cache)


@implementations
def test_decode_from_the_first_token(recording, implementation):
    check_token_by_token(layer_under(implementation), recording, None)
