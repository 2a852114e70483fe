"""A layer of Qwen3-Next and of Qwen3.5, as transformers runs it, against examples/gated_delta_net.py."""

import functools
import importlib
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from chunkwise.shared.testing import TOLERANCE, assert_close

torch = pytest.importorskip("torch", reason="torch has a CPU build under Python 3.11 only")

SIZES = dict(H=2, HV=4, K=16, V=24)
# Tokens of the calls of the model: a prefill over two chunks, a second one that continues it, and decode steps. Both
# prefills are equally long, because compiling takes most of the time here.
CALLS = (70, 70, 1, 1, 1)
# By module: configuration, model without a head, and what only one of them has.
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextModel", dict(num_experts=2, num_experts_per_tok=1)),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5TextModel", dict()),
}


@functools.cache
def example():
    path = Path(__file__).parents[1] / "examples/gated_delta_net.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def layer_under(implementation):
    """The layer in JAX, compiled once for both models."""
    return jax.jit(functools.partial(example().gated_delta_net, implementation=implementation))


def build(name):
    """Return a small model of random weights whose layers are all gated DeltaNets but the last."""
    config, model, special = MODELS[name]
    package = importlib.import_module(f"transformers.models.{name}")
    torch.manual_seed(0)
    config = getattr(package, config)(
        vocab_size=50, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.3,
        linear_num_key_heads=SIZES["H"], linear_num_value_heads=SIZES["HV"], linear_key_head_dim=SIZES["K"],
        linear_value_head_dim=SIZES["V"], **special,
    )  # fmt: skip
    model = getattr(package, model)(config).eval()
    layer = model.layers[0].linear_attn
    for parameter in (layer.dt_bias, layer.norm.weight):  # ones at first
        torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model, layer


@pytest.fixture(scope="module", params=MODELS)
def recording(request):
    """What the layer reads and writes while the model runs: its weights, and per call x, y and the cache after."""
    pytest.importorskip(f"transformers.models.{request.param}")
    model, layer = build(request.param)
    seen = []
    layer.register_forward_hook(
        lambda module, args, kwargs, y: seen.append((kwargs["hidden_states"], y)), with_kwargs=True
    )
    calls, past = [], None
    with torch.no_grad():
        for tokens in torch.randint(50, (2, sum(CALLS))).split(CALLS, dim=1):
            past = model(tokens, past_key_values=past, use_cache=True).past_key_values
            states = past.layers[0].conv_states[0].transpose(1, 2), past.layers[0].recurrent_states[0]
            calls.append([jnp.asarray(x.numpy().copy()) for x in (*seen[-1], *states)])
    weights = example().load_weights({name: x.numpy() for name, x in layer.state_dict().items()}, **SIZES)
    return weights, calls


def empty_cache(weights, B):
    """Return the cache of B sequences without a token."""
    return example().Cache(
        tuple(jnp.zeros((B, *w.shape)) for w in weights.conv),
        jnp.zeros((B, SIZES["HV"], SIZES["K"], SIZES["V"])),
    )


def check(call, cache, y):
    """Compare the output of a call and the cache after it."""
    assert_close("y", y, call[1], TOLERANCE["float32"])
    conv = jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in cache.conv], axis=2)
    assert_close("convolution's cache", conv, call[2], TOLERANCE["float32"])
    assert_close("state", cache.state, call[3], TOLERANCE["float32"])


implementations = pytest.mark.parametrize("implementation", ["xla", "staged", "fused"])


@implementations
def test_prefill_then_decode(recording, implementation):
    (weights, calls), run = recording, layer_under(implementation)
    # Nothing came before: no cache, or for the kernels one of zeros, so that one program does both prefills.
    cache = None if implementation == "xla" else empty_cache(weights, len(calls[0][0]))
    for call in calls:
        y, cache = run(call[0], weights, cache)
        check(call, cache, y)


@implementations
def test_decode_from_the_first_token(recording, implementation):
    (weights, calls), run = recording, layer_under(implementation)
    cache, outputs = None, []
    for t in range(CALLS[0]):
        y, cache = run(calls[0][0][:, t : t + 1], weights, cache)
        outputs.append(y)
    check(calls[0], cache, jnp.concatenate(outputs, axis=1))
