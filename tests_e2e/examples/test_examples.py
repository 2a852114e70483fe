"""The examples as a user without a checkpoint calls them, what they need, and what their options say."""

import argparse
import ast
import contextlib
import json
import re
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import blocks
import generation
import kimi_linear
import mamba2
import olmo_hybrid
import qwen3_5
import rwkv7
import train
import xlstm_7b

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("[!_]*.py"))}
MODELS = {model.__name__: model for model in (qwen3_5, kimi_linear, mamba2, olmo_hybrid, rwkv7, xlstm_7b)}
LIBRARIES = {"blocks", "generation", "library"}
ROPE = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
DELTA = dict(
    hidden_size=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_conv_kernel_dim=4, rms_norm_eps=1e-6, layer_types=["linear_attention", "full_attention"],
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_parameters=ROPE, rope_scaling=None,
)  # fmt: skip
CONFIGS = {
    qwen3_5: DELTA | dict(hidden_act="silu", attn_output_gate=True, output_gate_type="swish"),
    olmo_hybrid: DELTA | dict(hidden_act="silu", attention_bias=False),
    mamba2: dict(num_hidden_layers=2, hidden_size=64, num_heads=4, head_dim=32, n_groups=2, state_size=16),
    xlstm_7b: dict(num_hidden_layers=2, hidden_size=64, num_heads=2, weight_mode="single", add_out_norm=True),
    kimi_linear: dict(
        num_hidden_layers=2, hidden_size=64, rms_norm_eps=1e-5, first_k_dense_replace=1, num_attention_heads=2,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, kv_lora_rank=16, q_lora_rank=None, num_experts=4,
        num_experts_per_token=2, num_expert_group=1, topk_group=1, moe_renormalize=True, routed_scaling_factor=1.0,
        moe_router_activation_func="sigmoid", mla_use_nope=True,
        linear_attn_config=dict(
            full_attn_layers=[2], kda_layers=[1], num_heads=2, head_dim=16, short_conv_kernel_size=4
        ),
    ),
}  # fmt: skip
# Where a name to install is not the only name to import.
IMPORTS = {
    "orbax-checkpoint": {"orbax"}, "./packages/layers": {"chunkwise"}, "lm-eval": {"lm_eval"},
    '".[flax]"': {"chunkwise", "flax", "matplotlib"},
}  # fmt: skip
# What chunkwise-layers brings.
BROUGHT = {"jax", "numpy", "rich"}


def tokens_after(model, prompt: bytes, count: int) -> bytes:
    """Return the likeliest bytes after a prompt, for each of which the whole text is read anew."""
    config, weights = model.random_model(256)
    run, text = generation.compile_run(model, config), np.zeros((1, len(prompt) + count), np.int32)
    text[0, : len(prompt)] = list(prompt)
    # What follows a token changes nothing before it, so that all texts have one shape.
    for end in range(len(prompt), text.shape[1]):
        x, _ = run(weights, model.start(config, 1, text.shape[1], jnp.float32), text)
        text[0, end] = generation.next_tokens(x[:, :end], weights)[0, 0]
    return bytes(text[0, len(prompt) :].tolist())


# Layers of other examples, in another order.
# One with a delta rule, and one without.
THOROUGH = dict(test_random=lambda name: name != "mamba2")


@pytest.mark.parametrize("name", MODELS)
def test_random(name, monkeypatch, capsys):
    """The program continues two texts as bytes; the caches change nothing of what comes."""
    prompts, count = ("chunks of tokens", "a state"), 6
    options = [f"--prompt={prompt}" for prompt in prompts]
    monkeypatch.setattr(sys, "argv", [name, "--random", *options, f"--count={count}", "--piece=8"])
    runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    for prompt, line in zip(prompts, printed, strict=False):
        before, after = map(ast.literal_eval, line.split(" + "))
        assert before == prompt.encode()
        assert after == tokens_after(MODELS[name], before, count)
    assert printed[2].startswith("12 tokens")
    assert "weights are random" in printed[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the directory of a checkpoint, or --random"),
        (["there", "--random"], "give the directory of a checkpoint, or --random"),
        (["there"], "give --prompt-tokens, or with --random a --prompt that is not empty"),
        (["there", "--prompt", "x"], "--prompt needs --random"),
        (["--random", "--prompt", ""], "give --prompt-tokens, or with --random a --prompt that is not empty"),
        (["--random", "--count", "0"], "--count and --piece must be at least 1; got 0 and 256"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        generation.main(mamba2, arguments)
    assert message in capsys.readouterr().err


def test_token_without_a_byte():
    with pytest.raises(SystemExit, match=r"--prompt-tokens must be from 0 to 255; got \[\[256\]\]"):
        generation.main(mamba2, ["--random", "--prompt-tokens", "256"])


def test_wrong_mesh():
    assert train.mesh_sizes("data=2,heads=2") == {"data": 2, "heads": 2}
    for wrong in ("data", "data=0", "data=2,", "rows=2", "data=two"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"got '{wrong}'"):
            train.mesh_sizes(wrong)


@pytest.mark.parametrize(
    ("model", "setting", "value"),
    [
        (qwen3_5, "rope_type", "yarn"), (qwen3_5, "rope_scaling", dict(type="linear", factor=2.0)),
        (qwen3_5, "attn_output_gate", False), (qwen3_5, "hidden_act", "gelu"), (qwen3_5, "num_experts", 256),
        (qwen3_5, "attention_bias", True), (kimi_linear, "mla_use_nope", False), (kimi_linear, "q_lora_rank", 16),
        (kimi_linear, "moe_router_activation_func", "softmax"), (kimi_linear, "hidden_act", "situ"),
        (kimi_linear, "mla_use_output_gate", True), (kimi_linear, "attn_res_block_size", 12),
        (olmo_hybrid, "rope_type", "yarn"), (olmo_hybrid, "hidden_act", "gelu"), (olmo_hybrid, "attention_bias", True),
        (mamba2, "hidden_act", "gelu"), (mamba2, "rms_norm", False), (xlstm_7b, "weight_mode", "fused"),
        (xlstm_7b, "add_out_norm", False),
    ],
)  # fmt: skip
def test_settings_that_an_example_cannot_do(model, setting, value):
    found = CONFIGS[model]
    model.read_config(found)
    if setting == "rope_type":
        change = dict(rope_parameters=found["rope_parameters"] | {setting: value, "factor": 4.0})
    else:
        change = {setting: value}
    with pytest.raises(ValueError, match=rf"`(hf_config\.)?{setting}` must be one of .*; got "):
        model.read_config(found | change)


def test_the_file_of_xlstm_7b():
    """It has other names than those that transformers writes."""
    published = json.loads((ROOT / "packages/layers/tests/published.json").read_text())["xLSTM-7B"]
    assert xlstm_7b.read_config(published).blocks == 32


def test_settings_of_the_layers_of_an_example():
    """What changes a layer is in its config."""
    read = lambda model, **change: model.read_config(CONFIGS[model] | change)
    table = CONFIGS[kimi_linear]["linear_attn_config"] | dict(gate_lower_bound=-5.0)
    assert read(kimi_linear, linear_attn_config=table).delta.lower_bound == -5.0
    assert read(qwen3_5, output_gate_type="sigmoid").delta.activation == "sigmoid"
    assert read(mamba2, use_bias=True).mixer.in_bias
    assert not read(olmo_hybrid, linear_allow_neg_eigval=False).delta.allow_neg_eigval
    for model in CONFIGS:
        with pytest.raises(ValueError, match=r"no settings that `config_from` does not know; got \['conv_dilation'\]"):
            read(model, conv_dilation=2)


def without(found: dict, *names: str, **more) -> dict:
    return {name: x for name, x in found.items() if name not in names} | more


def test_forms_of_a_config():
    """Settings as transformers reads them: what follows from others, defaults, and names of transformers 4."""
    found = CONFIGS[qwen3_5]
    rope, count = found["rope_parameters"], len(found["layer_types"])
    four = without(found, "layer_types", num_hidden_layers=8)
    expected = qwen3_5.read_config(found | dict(layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2))
    assert qwen3_5.read_config(four) == qwen3_5.read_config(four | dict(full_attention_interval=4)) == expected
    quarter = found | dict(rope_parameters=rope | dict(partial_rotary_factor=0.25))
    for form in (
        dict(rope_parameters=without(rope, "partial_rotary_factor")),
        dict(rope_parameters=None, rope_theta=rope["rope_theta"], partial_rotary_factor=0.25, rope_scaling=None),
    ):
        assert qwen3_5.read_config(found | form) == qwen3_5.read_config(quarter)
    assert olmo_hybrid.read_config(CONFIGS[olmo_hybrid] | dict(head_dim=48)).K == 48
    with pytest.raises(ValueError, match=r"`layer_types` must have entries of .*; got 'sliding_attention'"):
        qwen3_5.read_config(found | dict(layer_types=["sliding_attention"] * count))


@pytest.mark.parametrize("model", CONFIGS)
def test_a_setting_that_is_missing(model):
    """It is an error with its name, or has a value by default."""
    for name in CONFIGS[model]:
        with contextlib.suppress(ValueError):
            model.read_config(without(CONFIGS[model], name))
    with pytest.raises(ValueError, match=r"config.json must have `num_hidden_layers` for this example"):
        model.read_config(without(CONFIGS[model], "num_hidden_layers", "layer_types"))


def test_a_head_that_is_missing():
    embedding, tied = jnp.ones((3, 2)), dict(tie_word_embeddings=True)
    assert generation.take_head(tied, {}, embedding) is None
    assert generation.take_head(tied, {"lm_head.weight": np.ones((3, 2))}, embedding) is None
    assert generation.take_head(tied, {"lm_head.weight": np.zeros((3, 2))}, embedding).shape == (2, 3)
    model = blocks.Model(embedding, (), embedding[0], None)
    (gradient,) = jax.tree.leaves(jax.grad(lambda model: generation.logits(embedding[None], model).sum())(model))[:1]
    assert jnp.all(gradient == 3)
    for found in ({}, dict(tie_word_embeddings=False)):
        with pytest.raises(ValueError, match=r"the checkpoint must have 'lm_head.weight', unless"):
            generation.take_head(found, {}, embedding)


def test_more_tokens_than_places():
    """A text has an end where `start` made no more places; under jit its logits are NaN from there on."""
    config, weights = qwen3_5.random_model(64)
    tokens, past = jnp.ones((1, 3), jnp.int32), qwen3_5.start(config, 1, 4, jnp.float32)
    run = generation.compile_run(qwen3_5, config, "xla")
    x, past = run(weights, past, tokens)
    assert bool(jnp.isfinite(x).all())
    with pytest.raises(ValueError, match=r"`past` must have places for 6 tokens of a row, .*; got 4"):
        blocks.take_places(past, tokens)
    x, past = run(weights, past, tokens)
    assert bool(jnp.isnan(x).all())
    with pytest.raises(ValueError, match="`past` must have places for 8 tokens of a row; got 4"):
        generation.generate(run, weights, past, np.ones((1, 3)), np.zeros((1, 3)), 6, 3)


def imported(path: Path) -> set[str]:
    """Return the packages that an example imports, itself or through other examples."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else [node.module]
            for name in (x.partition(".")[0] for x in names):
                found |= imported(EXAMPLES[name]) if name in EXAMPLES else {name}
    return found - sys.stdlib_module_names


def head(name: str) -> str:
    """Return the docstring of an example."""
    return ast.get_docstring(ast.parse(EXAMPLES[name].read_text()))


def installed(text: str) -> list[set[str]]:
    """Return what each line of a text installs, by the names to import."""
    lines = re.findall(r"^ *python -m pip install (.*)$", text, re.MULTILINE)
    return [set().union(*(IMPORTS.get(name, {name}) for name in line.split())) for line in lines]


@pytest.mark.parametrize("name", EXAMPLES)
def test_head(name):
    """A program begins with a line that installs what it needs, and a line that runs it; a library says what it is."""
    program = '__name__ == "__main__"' in EXAMPLES[name].read_text()
    assert program == (name not in LIBRARIES)
    if program:
        assert [found | BROUGHT for found in installed(head(name))] == [imported(EXAMPLES[name]) | BROUGHT]
        assert f"\n    python examples/{name}.py" in head(name)
    else:
        assert "This file is a library" in head(name)


def test_page():
    """The page lists every example as a program or as a library, and installs what the programs need."""
    text = (ROOT / "docs/examples.md").read_text()
    programs, libraries = text.split("\nThey import")
    for name, path in EXAMPLES.items():
        assert f"[{path.name}](../examples/{path.name})" in (libraries if name in LIBRARIES else programs)
    for name in EXAMPLES.keys() - LIBRARIES:
        assert any(found | BROUGHT >= imported(EXAMPLES[name]) for found in installed(text)), name


@pytest.mark.parametrize("main", [train.main, lambda: generation.main(mamba2)])
def test_every_option_has_a_help(main, monkeypatch):
    seen = []
    stop = lambda parser, arguments=None: sys.exit(seen.append(parser))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(SystemExit):
        main()
    (parser,) = seen
    assert len(parser._actions) > 5
    assert all(action.help for action in parser._actions)
    assert "python -m pip install" in parser.format_help()
