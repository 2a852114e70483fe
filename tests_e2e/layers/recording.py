"""A layer as transformers runs it: what it reads and writes while a small model runs, and comparisons with that."""

import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.layers import Cache, Mamba2Config
from chunkwise.shared.testing.compare import TOLERANCE, assert_close

torch = pytest.importorskip("torch", reason="torch has a CPU build under Python 3.11 only")

# Tokens of the calls of a model: a prefill over two chunks, a second one that continues it, and decode steps. Both
# prefills are equally long, because compiling takes most of the time here.
CALLS = (70, 70, 1, 1, 1)
# The settings that all models share. Their layers for the test are the first, and most want a full attention too.
SMALL = dict(vocab_size=50, hidden_size=64, initializer_range=0.3, pad_token_id=0, bos_token_id=0, eos_token_id=0)
ATTENTION = dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], intermediate_size=64,
    num_attention_heads=2,
)  # fmt: skip


class Call(NamedTuple):
    """One call of a layer: hidden states x [B, T, D], the output y, and the cache after it as our layers hold it."""

    x: jax.Array
    y: jax.Array
    cache: Cache


class Recording(NamedTuple):
    """The weights of a layer, its calls, and of the first one a cotangent of the output with the gradient of x."""

    weights: NamedTuple
    calls: list[Call]
    gradient: tuple[jax.Array, jax.Array]

    def nothing_before(self) -> Cache:
        """Return the cache of as many sequences without a token."""
        return jax.tree.map(jnp.zeros_like, self.calls[0].cache)


def build(module: str, config: str, model: str, **settings):
    """Return a small model of random weights, without a head; it skips the test if transformers does not have it."""
    package = pytest.importorskip(f"transformers.models.{module}")
    torch.manual_seed(0)
    return getattr(package, model)(getattr(package, config)(**SMALL | settings)).eval()


def randomise(*parameters) -> None:
    """Replace parameters, which are ones or zeros at first, so that a layer which ignores them is found out."""
    for parameter in parameters:
        torch.nn.init.normal_(parameter, 1.0, 0.3)


def conv_and_state(past, transposed=False) -> tuple:
    """Return what the first layer keeps in a cache: the inputs of its convolution [B, W - 1, channels], its state.

    Args:
      past: the cache.
      transposed: whether its states are [B, HV, V, K].
    """
    conv, state = past.layers[0].conv_states[0], past.layers[0].recurrent_states[0]
    # It keeps one input more than the convolution needs.
    return conv[..., 1:].mT, state.mT if transposed else state


def as_parts(conv, config) -> tuple[jax.Array, ...]:
    """Return the channels of q, k and v of a convolution of them all; Mamba-2 has them in the other order."""
    order = -1 if isinstance(config, Mamba2Config) else 1
    return tuple(jnp.split(conv, np.cumsum(config.channels[::order])[:-1], axis=2)[::order])


def record(model, layer, load, config, kept) -> Recording:
    """Return what a layer reads and writes while the model runs over random tokens.

    Args:
      model: the model.
      layer: one of its first block.
      load: makes our weights of the layer's arrays by name, and of a config.
      config: that of our layer.
      kept: what the layer keeps in a cache, as `conv_and_state` returns it.
    """
    seen, calls, past = [], [], None
    # transformers had a name for every kind of model until 5.23.
    names = ("cache", "past_key_values", "cache_params")
    cache = next(name for name in names if name in inspect.signature(model.forward).parameters)

    def see(module, args, kwargs, y):
        # The hidden states come first, by position or by name; some layers return their state too.
        seen.append((next(iter((*args, *kwargs.values()))), y[0] if isinstance(y, tuple) else y))

    layer.register_forward_hook(see, with_kwargs=True)
    array, calls_of_tokens = lambda x: jnp.asarray(x.numpy().copy()), torch.randint(50, (2, sum(CALLS))).split(CALLS, 1)
    model(calls_of_tokens[0], use_cache=False)
    x, y = seen[-1]
    dy = torch.randn_like(y)
    gradient = array(dy), array(torch.autograd.grad(y, x, dy)[0])
    with torch.no_grad():
        for tokens in calls_of_tokens:
            past = model(tokens, use_cache=True, **{cache: past})[cache]
            x, y, conv, state = jax.tree.map(array, (*seen[-1], *kept(past)))
            calls.append(Call(x, y, Cache(() if conv is None else as_parts(conv, config), state)))
    weights = load({name: x.numpy() for name, x in layer.state_dict().items()}, config)
    return Recording(weights, calls, gradient)


def check(call: Call, y, cache: Cache, tolerance: float = TOLERANCE["float32"]) -> None:
    """Compare an output and the cache after it with those of a call."""
    assert_close("y", y, call.y, tolerance)
    for name, have, want in zip("qkv", cache.conv, call.cache.conv, strict=False):
        assert_close(f"convolution of {name}", have, want, tolerance)
    for have, want in zip(jax.tree.leaves(cache.state), jax.tree.leaves(call.cache.state), strict=True):
        assert_close("state", have, want, tolerance)


def check_calls(layer, recording: Recording, cache: Cache | None, tolerance: float = TOLERANCE["float32"]) -> None:
    """Repeat the calls, from a cache without a token or None: prefills, then decode steps."""
    for call in recording.calls:
        y, cache = layer(call.x, recording.weights, cache)
        check(call, y, cache, tolerance)


def check_token_by_token(layer, recording: Recording, cache: Cache | None) -> None:
    """Repeat the first call token by token."""
    call, outputs = recording.calls[0], []
    for t in range(CALLS[0]):
        y, cache = layer(call.x[:, t : t + 1], recording.weights, cache)
        outputs.append(y)
    check(call, jnp.concatenate(outputs, axis=1), cache)
