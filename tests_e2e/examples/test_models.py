"""The models of examples/, read from checkpoints that transformers saves, and transformers' own models beside them.

Each model is small and has random weights. Prompts are of different lengths, so a batch of them is padded at the left.
"""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kimi_linear
import mamba2
import olmo_hybrid
import qwen3_5
import xlstm_7b
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from generation import compile_run, generate, logits, pad
from tests_e2e.layers.recording import ATTENTION, SMALL, build, randomise, torch

pytestmark = pytest.mark.torch

# Tokens of a piece of a prompt: a chunk and a part of one. One row of the prompts begins with a piece of padding, and
# the other with almost one: its first piece has fewer tokens than the convolutions take.
PIECE, PROMPTS, COUNT = 70, (100, 142), 32
# Both rows with their padding, which is three pieces.
WHOLE = 3 * PIECE
# Rows and columns of a matrix of 8 bits that share a scale; they divide no matrix.
BLOCK = (24, 20)


class Model(NamedTuple):
    """A model.

    Attributes:
      ours: its module in examples/.
      names: of its module in transformers, its configuration and the class of the model.
      settings: of the configuration.
      ones: parts of the names of the parameters that are ones or zeros at first.
      embedding: size of the embedding, with which the model does not say the same few tokens again and again.
      shards: what save_pretrained takes as max_shard_size; None for one file.
      mask: whether transformers heeds a mask of padding.
    """

    ours: Any
    names: tuple[str, str, str]
    settings: dict
    ones: tuple[str, ...] = ("norm", "dt_bias")
    embedding: float = 1.0
    shards: str | None = None
    mask: bool = True


MODELS = {
    "qwen3_5": Model(
        qwen3_5, ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
        ATTENTION | dict(
            num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=24, rms_norm_eps=1e-3, tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
        ),
    ),
    "mamba2": Model(
        mamba2, ("mamba2", "Mamba2Config", "Mamba2ForCausalLM"),
        dict(
            num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16, n_groups=2, chunk_size=32,
            layer_norm_epsilon=1e-3,
        ),
        ones=("norm", "mixer.D", "conv1d.bias", "dt_bias"), embedding=0.3,
    ),
    "olmo_hybrid": Model(
        olmo_hybrid, ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridForCausalLM"),
        ATTENTION | dict(num_key_value_heads=1, linear_key_head_dim=24, linear_value_head_dim=48, rms_norm_eps=1e-3),
    ),
    "kimi_linear": Model(
        kimi_linear, ("kimi_linear", "KimiLinearConfig", "KimiLinearForCausalLM"),
        ATTENTION | dict(
            num_key_value_heads=2, mlp_layer_types=["dense", "sparse"], kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=12, v_head_dim=20, linear_num_heads=2, linear_head_dim=16, moe_intermediate_size=32,
            num_local_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, rms_norm_eps=1e-3,
        ),
        ones=("norm", "dt_bias", "e_score_correction_bias"), shards="100KB",
    ),
    "xlstm": Model(
        xlstm_7b, ("xlstm", "xLSTMConfig", "xLSTMForCausalLM"),
        dict(
            num_hidden_layers=2, num_heads=2, qk_dim_factor=1.0, v_dim_factor=2.0, gate_soft_cap=4.0, norm_eps=1e-3,
            output_logit_soft_cap=5.0, chunk_size=16, ffn_round_up_to_multiple_of=8, autocast_kernel_dtype="float32",
        ),
        ones=("norm", "preact.bias"), mask=False,
    ),
}  # fmt: skip
# Published, OLMo-hybrid has no rotary positions.
MODELS["olmo_hybrid_published"] = MODELS["olmo_hybrid"]._replace(
    settings=MODELS["olmo_hybrid"].settings | dict(rope_parameters=dict(rope_type="default", rope_theta=None))
)


class Case(NamedTuple):
    """A model, and what transformers makes of prompts.

    Attributes:
      name: of the model.
      config, weights: as our model reads them from the checkpoint.
      directory: of the checkpoint.
      tokens, segment_ids: the prompts as one batch.
      logits: after every token of the prompts.
      generated: the tokens that follow.
    """

    name: str
    config: Any
    weights: Any
    directory: Any
    tokens: np.ndarray
    segment_ids: np.ndarray
    logits: np.ndarray
    generated: np.ndarray


def is_thorough(case, implementation) -> bool:
    """Return whether the model repeats another, or its operator has tests of its own under the implementation."""
    return case in ("olmo_hybrid_published", "olmo_hybrid", "mamba2", "xlstm") or implementation != "xla"


THOROUGH = dict(
    # What is read at once is read in one piece.
    test_logits=lambda case, piece, implementation: is_thorough(case, implementation) or piece == WHOLE,
    test_generation=is_thorough,
)


def outputs(model, prompts, mask, heeded: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return logits of padded prompts, and the tokens that follow; each runs alone if nobody heeds the mask."""
    if not heeded:
        rows = [row[None, real == 1] for row, real in zip(prompts, mask, strict=True)]
        found = [outputs(model, row, torch.ones_like(row), True) for row in rows]
        padded = [np.pad(x, ((0, 0), (prompts.shape[1] - x.shape[1], 0), (0, 0))) for x, _ in found]
        return np.concatenate(padded), np.concatenate([text for _, text in found])
    texts = model.generate(prompts, attention_mask=mask, max_new_tokens=COUNT, do_sample=False, use_cache=True)
    return model(prompts, attention_mask=mask).logits.numpy(), texts[:, prompts.shape[1] :].numpy()


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    m, directory = MODELS[request.param], tmp_path_factory.mktemp(request.param)
    model = build(*m.names, **m.settings)
    randomise(*(x for name, x in model.state_dict().items() if any(part in name for part in m.ones)))
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=m.embedding)
    for name, x in model.state_dict().items():
        # Its chunks add up decays and subtract such sums, which costs 1e-5 where a decay is of several nats a token.
        if "A_log" in name:
            x -= 3
        # Where input gates are strong, the divisor of xLSTM amplifies the rounding of both.
        if "preact.weight" in name:
            torch.nn.init.normal_(x, std=0.05)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory, **({"max_shard_size": m.shards} if m.shards else {}))
    tokens, ids = pad([torch.randint(SMALL["vocab_size"], (length,)).tolist() for length in PROMPTS], PIECE)
    prompts, mask = torch.tensor(tokens, dtype=torch.long), torch.tensor(ids + 1, dtype=torch.long)
    # For so little, more threads wait longer than they compute.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        expected, generated = outputs(model, prompts, mask, m.mask)
    torch.set_num_threads(threads)
    assert all(len(set(row)) > 8 for row in generated.tolist())
    return Case(request.param, *m.ours.load(directory), directory, tokens, ids, expected, generated)


def start(case: Case):
    return MODELS[case.name].ours.start(case.config, len(case.tokens), case.tokens.shape[1] + COUNT, jnp.float32)


_compiled = {}


def compiled(case: Case, implementation, piece=PIECE):
    """The model, compiled once for all of its tests with pieces of one size."""
    key = case.name, implementation, piece
    if key not in _compiled:
        _compiled[key] = compile_run(MODELS[case.name].ours, case.config, implementation)
    return _compiled[key]


implementations = pytest.mark.parametrize("implementation", ["xla", "staged", "fused"])


def check_logits(case, x, begin):
    """Compare the logits after hidden states of the prompts' tokens from `begin` on; padding may have any."""
    span = slice(begin, begin + x.shape[1])
    real = case.segment_ids[:, span] == 0
    found = logits(x, case.weights, getattr(case.config, "cap", None))
    assert_close("logits", found[real], case.logits[:, span][real], TOLERANCE["float32"])


@implementations
@pytest.mark.parametrize("piece", [PIECE, WHOLE])
def test_logits(case, piece, implementation):
    """The padded batch is read in pieces, or at once."""
    run, past = compiled(case, implementation, piece), start(case)
    assert case.tokens.shape[1] == WHOLE
    for begin in range(0, WHOLE, piece):
        span = slice(begin, begin + piece)
        x, past = run(case.weights, past, case.tokens[:, span], case.segment_ids[:, span])
        check_logits(case, x, begin)


@implementations
def test_generation(case, implementation):
    run = compiled(case, implementation)
    tokens = generate(run, case.weights, start(case), case.tokens, case.segment_ids, COUNT, PIECE)
    np.testing.assert_array_equal(tokens, case.generated)
    # One program reads pieces, and another generates.
    assert run._cache_size() == 2


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
def test_checkpoint_of_a_model_of_images_too(case, tmp_path):
    """Published, Qwen3.5 is a part of a larger model."""
    named = load_file(case.directory / "model.safetensors")
    named = {name.replace("model.", "model.language_model."): x for name, x in named.items()}
    save_file(named | {"model.visual.x": np.ones(1), "mtp.x": np.ones(1)}, tmp_path / "model.safetensors")
    config = json.loads((case.directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config, "vision_config": {}}))
    config, weights = qwen3_5.load(tmp_path)
    assert config == case.config
    jax.tree.map(np.testing.assert_array_equal, weights, case.weights)
    save_file(named | {"model.layers.0.other": np.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no weights that the model lacks; got \['model.layers.0.other'\]"):
        qwen3_5.load(tmp_path)


@pytest.mark.parametrize("case", ["qwen3_5"], indirect=True)
def test_checkpoint_of_8_bits(case, tmp_path):
    """Qwen3.5-FP8: matrices in float8 with a scale for each block, but for the embedding and the small projections."""
    from safetensors.torch import save_file as save_tensors

    def wide(scale, shape):
        return np.repeat(np.repeat(scale, BLOCK[0], 0), BLOCK[1], 1)[: shape[0], : shape[1]]

    coded, plain = {}, {}
    for name, x in load_file(case.directory / "model.safetensors").items():
        coded[name] = torch.tensor(x)
        plain[name] = x
        if x.ndim == 2 and not any(part in name for part in ("embed", "lm_head", "in_proj_a", "in_proj_b")):
            rows, columns = (-(-size // width) for size, width in zip(x.shape, BLOCK, strict=True))
            scale = np.exp2(np.random.default_rng(0).integers(-8, -4, (rows, columns))).astype(np.float32)
            coded[name] = torch.tensor(x / wide(scale, x.shape)).to(torch.float8_e4m3fn)
            coded[f"{name}_scale_inv"] = torch.tensor(scale)
            plain[name] = coded[name].float().numpy() * wide(scale, x.shape)
    assert len(coded) > len(plain) + 10
    config = json.loads((case.directory / "config.json").read_text())
    quantization = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=BLOCK)
    for i, (save, named) in enumerate(((save_tensors, coded), (save_file, plain))):
        (tmp_path / str(i)).mkdir()
        save(named, tmp_path / str(i) / "model.safetensors")
        (tmp_path / str(i) / "config.json").write_text(json.dumps(config | dict(quantization_config=quantization)))
    (config, weights), (_, expected) = (qwen3_5.load(tmp_path / str(i)) for i in range(2))
    assert config == case.config
    jax.tree.map(np.testing.assert_array_equal, weights, expected)


def test_config_as_published(tmp_path):
    """transformers changes what Kimi-Linear's config says."""
    from transformers.models.kimi_linear import KimiLinearConfig

    # That of moonshotai/Kimi-Linear-48B-A3B-Instruct, without what is not read.
    published = dict(
        hidden_size=2304, num_hidden_layers=27, num_attention_heads=32, num_key_value_heads=32, q_lora_rank=None,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=1,
        num_experts=256, num_experts_per_token=8, num_expert_group=1, topk_group=1, moe_renormalize=True,
        routed_scaling_factor=2.446, rms_norm_eps=1e-5,
        linear_attn_config=dict(
            full_attn_layers=[4, 8, 12, 16, 20, 24, 27], head_dim=128, num_heads=32, short_conv_kernel_size=4,
            kda_layers=[i for i in range(1, 27) if i % 4],
        ),
    )  # fmt: skip
    KimiLinearConfig(**published).save_pretrained(tmp_path)
    ours = kimi_linear.read_config(json.loads((tmp_path / "config.json").read_text()))
    assert ours == kimi_linear.read_config(published)
    assert sum(ours.attention) == 7
