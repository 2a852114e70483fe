"""RWKV-7 out of a file as its authors release it, and the package `rwkv` beside our layers and our whole model."""

import functools
import importlib
import os
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv7
from chunkwise.layers import Cache, config_from, load_rwkv7_attention, rwkv7_attention, save_checkpoint
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from generation import compile_run, generate, logits, pad
from tests.shown import Shown

torch = pytest.importorskip("torch", reason="torch has a CPU build under Python 3.11 only")
pytestmark = pytest.mark.torch

VOCABULARY, D, H, K, BLOCKS = 50, 64, 4, 16, 2
RANKS = dict(w=8, a=6, g=10, v=4)
# Tokens of a piece of a prompt. One row of the prompts begins with a piece of padding, the other with almost one.
PIECE, PROMPTS, COUNT = 70, (100, 142), 16
# The arguments of the package's functions after the state, by the names of a file.
NAMES = """
    x_r x_w x_k x_v x_a x_g w0 w1 w2 a0 a1 a2 v0 v1 v2 g1 g2 k_k k_a r_k receptance.weight key.weight value.weight
    output.weight ln_x.weight ln_x.bias
""".split()  # noqa: SIM905
THOROUGH = dict(test_model=True, test_layer=lambda implementation: implementation == "fused")
SHOWS = dict(test_layer=[Shown("rwkv7_attention", "config load cache decode", "rwkv_x070")])


def file_of_a_model() -> dict:
    """Return arrays as a file has them, none of them alike, so that one that is not read is found out."""
    torch.manual_seed(0)
    draw = lambda *shape, std=0.2, mean=0.0: torch.randn(*shape) * std + mean
    named = {"emb.weight": draw(VOCABULARY, D, std=1), "head.weight": draw(VOCABULARY, D)}
    norms = ["ln_out", "blocks.0.ln0", *(f"blocks.{i}.ln{j}" for i in range(BLOCKS) for j in (1, 2))]
    for norm in norms + [f"blocks.{i}.att.ln_x" for i in range(BLOCKS)]:
        named |= {f"{norm}.weight": draw(D, mean=1), f"{norm}.bias": draw(D)}
    for i in range(BLOCKS):
        att, ffn = f"blocks.{i}.att.", f"blocks.{i}.ffn."
        named |= {f"{att}x_{letter}": torch.rand(1, 1, D) for letter in "rwkvag"}
        for letter, rank in RANKS.items():
            # The first block has no values of another one to take.
            if i or letter != "v":
                named |= {f"{att}{letter}1": draw(D, rank), f"{att}{letter}2": draw(rank, D)}
                named |= {f"{att}{letter}0": draw(1, 1, D, std=1)} if letter != "g" else {}
        named |= {f"{att}k_k": draw(1, 1, D, mean=0.7), f"{att}k_a": draw(1, 1, D, mean=1), f"{att}r_k": draw(H, K)}
        named |= {f"{att}{name}.weight": draw(D, D) for name in ("receptance", "key", "value", "output")}
        named |= {f"{ffn}x_k": torch.rand(1, 1, D)}
        named |= {f"{ffn}key.weight": draw(4 * D, D), f"{ffn}value.weight": draw(D, 4 * D, std=0.1)}
    return named


class Case(NamedTuple):
    """A file, the module `rwkv.model`, and its model of the file."""

    path: Any
    theirs: Any
    model: Any


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    path = tmp_path_factory.mktemp("rwkv") / "model.pth"
    torch.save(file_of_a_model(), path)
    pytest.importorskip("rwkv")
    # The package reads it when it is imported, and compiles itself in a way that torch advises against.
    os.environ["RWKV_V7_ON"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = importlib.import_module("rwkv.model")
        model = theirs.RWKV_x070(str(path.with_suffix("")), "cpu fp32")
    # For so little, more threads wait longer than they compute.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Case(path, theirs, model)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_layer(case, block, implementation):
    """The first layer and another one, from a state: outputs, states, and the values that layers hand on."""
    named = torch.load(case.path, weights_only=True)
    config = config_from(named, block)
    weights = load_rwkv7_attention(named, config, f"blocks.{block}.att.")
    torch.manual_seed(1)
    T, state, last = 70, torch.randn(H, K, K), torch.randn(D)
    x, v_first = torch.randn(T, D), torch.randn(T, D)
    arrays = [case.model.z[f"blocks.{block}.att.{name}"] for name in NAMES]
    theirs = case.theirs.RWKV_x070_TMix_seq
    y, after, state_after, values = theirs(block, H, K, x, last, v_first, state.clone(), *arrays)
    array = lambda y: jnp.asarray(y.numpy())
    # Its states are [V, K].
    cache = Cache((array(last)[None, None],), array(state.mT)[None])
    first = array(v_first).reshape(1, T, H, K) if block else None
    run = functools.partial(rwkv7_attention, config=config, output_cache=True, implementation=implementation)
    got, kept, handed = jax.jit(run)(array(x)[None], weights, cache=cache, v_first=first)
    assert_close("y", got[0], y.numpy(), TOLERANCE["float32"])
    assert_close("state", kept.state[0], state_after.mT.numpy(), TOLERANCE["float32"])
    assert_close("v_first", handed.reshape(T, D), values.numpy(), TOLERANCE["float32"])
    np.testing.assert_array_equal(kept.conv[0][0, 0], after.numpy())


def test_model(case):
    """Logits of prompts, padded and read in pieces, and the likeliest tokens after them, are those of the package."""
    config, weights = rwkv7.load(case.path)
    prompts = [torch.randint(VOCABULARY, (length,)).tolist() for length in PROMPTS]
    tokens, ids = pad(prompts, PIECE)
    run, past = compile_run(rwkv7, config, "xla"), rwkv7.start(config, 2, tokens.shape[1], jnp.float32)
    pieces = []
    for begin in range(0, tokens.shape[1], PIECE):
        span = slice(begin, begin + PIECE)
        x, past = run(weights, past, tokens[:, span], ids[:, span])
        pieces.append(logits(x, weights))
    ours, texts = np.concatenate(pieces, axis=1), []
    for row, prompt in enumerate(prompts):
        found, state = case.model.forward(prompt, None, full_output=True)
        assert_close("logits", ours[row, ids[row] == 0], found.numpy(), TOLERANCE["float32"])
        texts.append([int(found[-1].argmax())])
        while len(texts[row]) < COUNT:
            found, state = case.model.forward(texts[row][-1:], state)
            texts[row].append(int(found.argmax()))
    assert all(len(set(text)) > 4 for text in texts)
    past = rwkv7.start(config, 2, tokens.shape[1] + COUNT, jnp.float32)
    np.testing.assert_array_equal(generate(run, weights, past, tokens, ids, COUNT, PIECE), texts)


def test_a_folder_of_arrays(case, tmp_path):
    """The same arrays in the format safetensors; what the model does not have is named."""
    named = torch.load(case.path, weights_only=True)
    save_checkpoint(tmp_path / "right", named)
    jax.tree.map(np.testing.assert_array_equal, rwkv7.load(tmp_path / "right"), rwkv7.load(case.path))
    # transformers has the names of blocks, of the embedding and of the last norm below "rwkv7.".
    theirs = {name if name == "head.weight" else f"rwkv7.{name}": x for name, x in named.items()}
    save_checkpoint(tmp_path / "theirs", theirs)
    jax.tree.map(np.testing.assert_array_equal, rwkv7.load(tmp_path / "theirs"), rwkv7.load(case.path))
    assert config_from(theirs, 1) == config_from(named, 1)
    save_checkpoint(tmp_path / "wrong", named | {"blocks.1.ffn.s_emb.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"no weights that the model lacks; got \['blocks.1.ffn.s_emb.weight'\]"):
        rwkv7.load(tmp_path / "wrong")
