"""Layers of Mamba-2, Kimi-Linear, Ling 3.0 and OLMo-hybrid, as transformers runs them, against ours."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import pytest

from gated_delta_net import gated_delta_net, load_weights
from mixers import kimi_delta_attention, load_kimi_delta_attention, load_mamba2_mixer, mamba2_mixer
from recording import ATTENTION, build, check_calls, check_token_by_token, randomise, record

# The full attention of Kimi-Linear and Ling 3.0, and a norm whose epsilon shows in the result.
LATENT = ATTENTION | dict(
    num_key_value_heads=2, mlp_layer_types=["dense", "dense"], kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, rms_norm_eps=1e-3,
)  # fmt: skip


class Model(NamedTuple):
    """A model of transformers, and our layer.

    Attributes:
      names: of its module, its configuration and the model without a head.
      settings: of the configuration.
      attribute: of its first block, the layer.
      ones: the layer's parameters that are ones or zeros at first.
      function, load, options: our layer, what makes its weights, and what it is called with.
      recorded: how the layer is recorded.
    """

    names: tuple[str, str, str]
    settings: dict
    attribute: str
    ones: tuple[str, ...]
    function: Callable
    load: Callable
    options: dict
    recorded: dict


MODELS = {
    "mamba2": Model(
        ("mamba2", "Mamba2Config", "Mamba2Model"),
        dict(
            num_hidden_layers=1, num_heads=4, head_dim=32, state_size=16, n_groups=2, chunk_size=32,
            layer_norm_epsilon=1e-3,
        ),
        "mixer", ("D", "norm.weight", "conv1d.bias"),
        mamba2_mixer, functools.partial(load_mamba2_mixer, groups=2), dict(eps=1e-3),
        dict(cache="cache_params", transposed=True),
    ),
    "kimi_linear": Model(
        ("kimi_linear", "KimiLinearConfig", "KimiLinearModel"),
        LATENT | dict(linear_num_heads=2, linear_head_dim=16),
        "self_attn", ("o_norm.weight",),
        kimi_delta_attention, load_kimi_delta_attention, dict(eps=1e-3), dict(),
    ),
    "ling": Model(
        ("bailing_hybrid", "BailingHybridConfig", "BailingHybridModel"),
        LATENT | dict(head_dim=16),
        "self_attn", ("o_norm.weight",),
        kimi_delta_attention, load_kimi_delta_attention, dict(eps=1e-3, lower_bound=-5.0), dict(),
    ),
    "olmo_hybrid": Model(
        ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridModel"),
        ATTENTION | dict(num_key_value_heads=2, linear_key_head_dim=96, linear_value_head_dim=192),
        "linear_attn", ("o_norm.weight",),
        gated_delta_net, functools.partial(load_weights, H=2, HV=2, K=96, V=192),
        dict(eps=1e-5, allow_neg_eigval=True), dict(),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """The name of a model, and what its layer reads and writes while it runs."""
    ours = MODELS[request.param]
    model = build(*ours.names, **ours.settings)
    layer = getattr(model.layers[0], ours.attribute)
    randomise(*(layer.get_parameter(name) for name in ours.ones))
    return request.param, record(model, layer, ours.load, **ours.recorded)


@functools.cache
def compiled(name, implementation):
    """Our layer of a model, compiled once for all of its tests."""
    ours = MODELS[name]
    return jax.jit(functools.partial(ours.function, **ours.options, implementation=implementation))


implementations = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("staged", marks=pytest.mark.thorough), "fused"]
)


@implementations
def test_prefill_then_decode(case, implementation):
    name, recording = case
    # Nothing came before: zeros, so that one program does both prefills.
    check_calls(compiled(name, implementation), recording, recording.nothing_before())


@implementations
def test_decode_from_the_first_token(case, implementation):
    name, recording = case
    start = None if implementation == "xla" else recording.nothing_before()
    check_token_by_token(compiled(name, implementation), recording, start)
