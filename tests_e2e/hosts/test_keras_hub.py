"""Ours in the place of keras-hub's functions, in its own models: `nox -s host-keras-hub`."""

import collections
import contextlib
import functools
import os
import time

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras_hub.models import Qwen3_5Backbone, Qwen3_5CausalLM, Qwen3_5MoeBackbone, Qwen3_5MoeCausalLM
from keras_hub.src.models.qwen3_5 import qwen3_5_gated_delta_net as seam

from chunkwise.integrations import keras_hub
from chunkwise.shared.testing.compare import assert_close
from tests_e2e.hosts.host import count_places, gap, losses_of, trained

THEIRS = {name: getattr(seam, f"_{name}") for name in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")}
SIZES = dict(
    vocabulary_size=64, num_layers=2, layer_types=["linear_attention", "full_attention"], num_query_heads=2,
    num_key_value_heads=1, head_dim=32, hidden_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16, dtype="float32",
)  # fmt: skip
MODELS = {
    Qwen3_5CausalLM: lambda: Qwen3_5Backbone(**SIZES, intermediate_dim=32),
    Qwen3_5MoeCausalLM: lambda: Qwen3_5MoeBackbone(
        **SIZES, moe_intermediate_dim=16, shared_expert_intermediate_size=16, num_experts=2, top_k=1
    ),
}


@contextlib.contextmanager
def in_place(ours: bool):
    put_back = keras_hub.install() if ours else lambda: None
    try:
        yield put_back
    finally:
        put_back()


def inputs(B=2, T=70, HV=4, K=16, V=16):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = (B, T, HV, K), (B, T, HV, K), (B, T, HV, V), (B, HV, K, V)
    q, k, v, state = map(jax.random.normal, keys[:4], shapes)
    g, beta = -jax.random.uniform(keys[4], (B, T, HV)), jax.random.uniform(keys[5], (B, T, HV))
    return (q, k, v, g, beta), state


def loss(function, x):
    o, state = function(*x[0], initial_state=x[1], output_final_state=True)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(state)), (o, state)


@pytest.mark.parametrize(("name", "T"), [("chunk_gated_delta_rule", 70), ("recurrent_gated_delta_rule", 3)])
def test_beside(name, T):
    """Outputs, states and all gradients."""
    both = lambda function: jax.jit(jax.grad(functools.partial(loss, function), has_aux=True))(inputs(T=T))
    found = both(getattr(keras_hub, name)), both(THEIRS[name])
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        assert_close("output, state or gradient", ours, np.asarray(theirs, np.float64), 1e-5)


def test_padding_of_one_token():
    """A row of a decode whose token is padding keeps its state."""
    x, state = inputs(T=1)
    mask = jnp.array([[1], [0]])
    _, after = keras_hub.recurrent_gated_delta_rule(*x, state, True, padding_mask=mask)
    _, alone = keras_hub.recurrent_gated_delta_rule(*x, state, True)
    assert_close("state", after[0], np.asarray(alone[0], np.float64), 1e-6)
    np.testing.assert_array_equal(after[1], state[1])


def make_model(kind=Qwen3_5CausalLM):
    """Return a language model with random weights whose layers remember for many tokens."""
    keras.utils.set_random_seed(0)
    model = kind(MODELS[kind](), preprocessor=None)
    for weight in model.weights:
        if weight.name == "dt_bias":
            weight.assign(weight * 0 - 4)
        elif weight.name == "kernel":
            weight.assign(3 * weight)
    return model


def train() -> dict:
    """Return the losses and the processor time of ten steps of Adam."""
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss)
    random, steps = np.random.default_rng(0), []
    for _ in range(10):
        tokens = (random.integers(64, size=(4, 1)) + np.arange(97)) % 64
        x = dict(token_ids=tokens[:, :-1], padding_mask=np.ones((4, 96), "int32"))
        start = time.process_time()
        loss_of_step = float(np.ravel(model.train_on_batch(x, tokens[:, 1:]))[0])
        steps.append(dict(loss=loss_of_step, seconds=time.process_time() - start))
    return dict(steps=steps)


def test_training(record):
    found = {}
    for name in ("theirs", "ours"):
        with in_place(name == "ours"):
            found[name] = train()
    record("keras-hub", "Qwen3.5, float32", **trained(**found))
    assert losses_of(found["theirs"])[-1] < losses_of(found["theirs"])[0]
    assert gap(**found) < 1e-4


def generate(model, length: int, *prompts: range) -> list[list[int]]:
    """Return eight tokens after each prompt, for which keras-hub makes room for `length`, padding at first."""
    tokens, mask = np.zeros((len(prompts), length), "int32"), np.zeros((len(prompts), length), "int32")
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)], mask[i, : len(prompt)] = prompt, 1
    found = np.asarray(model.generate(dict(token_ids=tokens, padding_mask=mask), stop_token_ids=None)["token_ids"])
    return [row[len(prompt) :][:8].tolist() for row, prompt in zip(found, prompts, strict=True)]


def continued(model, prompt: range) -> list[int]:
    """Return the eight tokens that the model without caches finds most likely, one after another."""
    text = [*prompt]
    for _ in range(8):
        tokens, mask = np.zeros((1, 18), "int32"), (np.arange(18) < len(text))[None].astype("int32")
        tokens[0, : len(text)] = text
        x = model.backbone(dict(token_ids=tokens, padding_mask=mask))
        text.append(int(np.argmax(model.backbone.token_embedding(x, reverse=True)[0, len(text) - 1])))
    return text[len(prompt) :]


@pytest.mark.parametrize("kind", MODELS)
def test_answers(kind):
    """They are those of the model without caches, whatever room there is, and beside a shorter prompt.

    In keras-hub alone the room, which is padding when a prompt is read, changes them.
    """
    prompts, answers, calls = (range(3, 13), range(20, 26)), {}, collections.Counter()
    for ours in (False, True):
        with in_place(ours) as put_back:
            if ours:
                count_places(put_back, calls)
            model = make_model(kind)
            model.compile(sampler="greedy")
            answers[ours] = [generate(model, length, prompts[0]) for length in (18, 60)]
            if ours:
                answers["together"] = generate(model, 18, *prompts)
                answers["whole"] = [continued(model, prompt) for prompt in prompts]
    print(f"\n{answers}")
    assert calls.keys() == {place.label for place in put_back.places if place.where not in {*MODELS} - {kind}}
    assert answers[True] == [answers["whole"][:1]] * 2
    assert answers["together"] == answers["whole"]
    assert answers[False][0] != answers[False][1]


def test_experts():
    """Qwen3.5-MoE has the same layer."""
    x = dict(token_ids=np.arange(20)[None], padding_mask=np.ones((1, 20), "int32"))
    found = []
    for ours in (False, True):
        with in_place(ours):
            keras.utils.set_random_seed(0)
            found.append(np.asarray(MODELS[Qwen3_5MoeCausalLM]()(x)))
    assert 0 < np.abs(found[0] - found[1]).max() < 1e-4
