"""SGLang-JAX's engine with a tiny random model on a CPU, with its own linear attention or with chunkwise's.

`python -m tests_e2e.hosts.sglang_jax_engine OPTIONS RESULT` writes tokens and log-probabilities to RESULT; OPTIONS is
JSON, as `Options` has it. The process ends itself, because SGLang-JAX's threads do not.
"""

import collections
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chunkwise.integrations import sglang_jax
from chunkwise.integrations.sglang_jax import operators
from tests_e2e.hosts.host import count_calls, count_places


class Options(NamedTuple):
    """What a run is.

    Attributes:
      model: a key of `MODELS`.
      ours: whether `sglang_jax.install` is called first.
      dtype: of weights and hidden states.
      prefixes: whether states of prefixes are kept, and prompts go on from them.
      devices: over which heads are divided.
      processes: whether scheduler and tokenizer are processes.
    """

    model: str
    ours: bool = False
    dtype: str = "float32"
    prefixes: bool = False
    devices: int = 1
    processes: bool = False


VOCABULARY, D, LAYERS, INNER = 512, 128, 4, 256
QWEN3_5 = dict(
    architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", tie_word_embeddings=False,
    text_config=dict(
        model_type="qwen3_5_text", vocab_size=VOCABULARY, hidden_size=D, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=128, intermediate_size=INNER,
        max_position_embeddings=2048, linear_conv_kernel_dim=4, linear_key_head_dim=32, linear_value_head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, full_attention_interval=4, eos_token_id=None,
        rope_parameters=dict(
            rope_type="default", mrope_section=[6, 5, 5], mrope_interleaved=True, rope_theta=1e4,
            partial_rotary_factor=0.25,
        ),
    ),
)  # fmt: skip
KIMI_LINEAR = dict(
    architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", tie_word_embeddings=False,
    vocab_size=VOCABULARY, hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4,
    head_dim=32, intermediate_size=INNER, rms_norm_eps=1e-5, hidden_act="silu", kv_lora_rank=32, q_lora_rank=None,
    qk_nope_head_dim=96, qk_rope_head_dim=32, v_head_dim=128, mla_use_nope=True, num_experts=None,
    model_max_length=2048, rope_theta=1e4, first_k_dense_replace=LAYERS, moe_layer_freq=1,
    linear_attn_config=dict(
        full_attn_layers=[4], kda_layers=[1, 2, 3], head_dim=128, num_heads=2, short_conv_kernel_size=4
    ),
)  # fmt: skip
LING = dict(
    architectures=["BailingMoeV2_5ForCausalLM"], model_type="bailing_hybrid", tie_word_embeddings=False,
    vocab_size=VOCABULARY, hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4,
    head_dim=128, intermediate_size=INNER, rms_norm_eps=1e-6, hidden_act="silu", layer_group_size=4, num_experts=1,
    full_attention_type="gqa", use_qk_norm=True, group_norm_size=2, partial_rotary_factor=0.5, rope_theta=1e4,
    max_position_embeddings=2048,
)  # fmt: skip


class Draw:
    """Random weights, the same in every run."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def matrix(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5

    def near(self, mean, size):
        return mean + 0.1 * self.rng.standard_normal(size).astype(np.float32)

    def between(self, low, high, shape):
        return self.rng.uniform(low, high, shape).astype(np.float32)


def weights_around(draw, root, norms_near):
    """Return embedding, head, norms and perceptrons under the names of a checkpoint."""
    w = {
        f"{root}.embed_tokens.weight": draw.matrix(VOCABULARY, D) * D**0.5,
        f"{root}.norm.weight": draw.near(norms_near, D),
        # Logits that are far apart: rounding changes no token.
        "lm_head.weight": draw.matrix(VOCABULARY, D) * 4,
    }
    for i in range(LAYERS):
        layer = f"{root}.layers.{i}"
        w |= {f"{layer}.{n}_layernorm.weight": draw.near(norms_near, D) for n in ("input", "post_attention")}
        w |= {f"{layer}.mlp.{n}_proj.weight": draw.matrix(INNER, D) for n in ("gate", "up")}
        w |= {f"{layer}.mlp.down_proj.weight": draw.matrix(D, INNER)}
    return w


def weights_qwen3_5(draw):
    """Return random weights under the names of a checkpoint of Qwen3.5."""
    c, w = QWEN3_5["text_config"], weights_around(draw, "model.language_model", 0)
    H, KV, size = (c[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    HV = c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], HV * c["linear_value_head_dim"]
    for i in range(LAYERS):
        layer = f"model.language_model.layers.{i}"
        if (i + 1) % c["full_attention_interval"] == 0:
            a = f"{layer}.self_attn"
            w |= {
                f"{a}.q_proj.weight": draw.matrix(2 * H * size, D), f"{a}.k_proj.weight": draw.matrix(KV * size, D),
                f"{a}.v_proj.weight": draw.matrix(KV * size, D), f"{a}.o_proj.weight": draw.matrix(D, H * size),
                f"{a}.q_norm.weight": draw.near(0, size), f"{a}.k_norm.weight": draw.near(0, size),
            }  # fmt: skip
            continue
        a, channels = f"{layer}.linear_attn", 2 * keys + values
        w |= {
            f"{a}.in_proj_qkv.weight": draw.matrix(channels, D), f"{a}.in_proj_z.weight": draw.matrix(values, D),
            f"{a}.in_proj_b.weight": draw.matrix(HV, D), f"{a}.in_proj_a.weight": draw.matrix(HV, D),
            f"{a}.conv1d.weight": draw.matrix(channels, 1, 4), f"{a}.out_proj.weight": draw.matrix(D, values),
            f"{a}.A_log": np.log(draw.between(1, 16, HV)), f"{a}.dt_bias": draw.between(-5, -1, HV),
            f"{a}.norm.weight": draw.near(1, c["linear_value_head_dim"]),
        }  # fmt: skip
    return w


def weights_kimi_linear(draw):
    """Return random weights under the names of a checkpoint of Kimi-Linear."""
    c, w = KIMI_LINEAR, weights_around(draw, "model", 1)
    H, latent, rope = c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    query, nope_value = c["qk_nope_head_dim"] + rope, c["qk_nope_head_dim"] + c["v_head_dim"]
    linear = c["linear_attn_config"]
    N, size = linear["num_heads"], linear["head_dim"]
    for i in range(LAYERS):
        a = f"model.layers.{i}.self_attn"
        if i + 1 in linear["full_attn_layers"]:
            w |= {
                f"{a}.q_proj.weight": draw.matrix(H * query, D), f"{a}.kv_a_layernorm.weight": draw.near(1, latent),
                f"{a}.kv_a_proj_with_mqa.weight": draw.matrix(latent + rope, D),
                f"{a}.kv_b_proj.weight": draw.matrix(H * nope_value, latent),
                f"{a}.o_proj.weight": draw.matrix(D, H * c["v_head_dim"]),
            }  # fmt: skip
            continue
        for n in "qkv":
            w |= {f"{a}.{n}_proj.weight": draw.matrix(N * size, D)}
            w |= {f"{a}.{n}_conv1d.weight": draw.matrix(N * size, 1, linear["short_conv_kernel_size"])}
        for n in "fg":
            w |= {f"{a}.{n}_a_proj.weight": draw.matrix(size, D), f"{a}.{n}_b_proj.weight": draw.matrix(N * size, size)}
        w |= {
            f"{a}.b_proj.weight": draw.matrix(N, D), f"{a}.o_norm.weight": draw.near(1, size),
            f"{a}.o_proj.weight": draw.matrix(D, N * size), f"{a}.dt_bias": draw.between(-5, -1, N * size),
            f"{a}.A_log": np.log(draw.between(1, 16, (1, 1, N, 1))),
        }  # fmt: skip
    return w


def weights_ling(draw):
    """Return random weights under the names of a checkpoint of Ling 2.5."""
    H, size = LING["num_attention_heads"], LING["head_dim"]
    w = weights_around(draw, "model", 1)
    w["model.word_embeddings.weight"] = w.pop("model.embed_tokens.weight")
    for i in range(LAYERS):
        a, linear = f"model.layers.{i}.attention", (i + 1) % LING["layer_group_size"] > 0
        w |= {
            f"{a}.query_key_value.weight": draw.matrix(3 * H * size, D),
            f"{a}.dense.weight": draw.matrix(D, H * size),
        }
        w |= {f"{a}.{name}_layernorm.weight": draw.near(1, size) for name in ("query", "key")}
        if linear:
            w |= {f"{a}.g_proj.weight": draw.matrix(H * size, D), f"{a}.g_norm.weight": draw.near(1, H * size)}
    return w


MODELS = {
    "qwen3_5": (QWEN3_5, weights_qwen3_5), "kimi_linear": (KIMI_LINEAR, weights_kimi_linear),
    "ling": (LING, weights_ling),
}  # fmt: skip
# Three short prompts, one of a chunk, and two that are read in several chunks; states of prefixes are kept every chunk.
LENGTHS, CHUNK, PAGE, GENERATED = (5, 17, 64, 100, 150, 3), 64, 16, 24


def mend_for_cpus():
    """Give SGLang-JAX's cache of a hybrid model the method that its attention for CPUs calls, which it lacks."""
    from sgl_jax.srt.mem_cache.memory_pool import HybridLinearKVPool

    HybridLinearKVPool.set_kv_buffer_legacy = lambda self, layer_id, *arrays: self.full_kv_pool.set_kv_buffer_legacy(
        self._to_physical(layer_id), *arrays
    )


def scheduler_on_a_cpu(*arguments):
    """Run what `install` has put in the place of SGLang-JAX's scheduler process, and mend that process too."""
    mend_for_cpus()
    sglang_jax.run_scheduler_process(*arguments)


def main(o: Options, result: Path) -> None:
    """Generate greedily for prompts, for the same again, for their second turns, and for other prompts."""
    mend_for_cpus()
    calls, places, replaced = collections.Counter(), collections.Counter(), []
    for name in ("ragged_gated_delta_rule", "ragged_kda", "ragged_simple_gla"):
        key = lambda step, name=name: f"{name}, {'decode' if step['num_decodes'] else 'prefill'}"
        count_calls(operators, name, calls, key)
    if o.ours:
        put_back = sglang_jax.install()
        if not o.processes:  # where a process would have to be sent what counts
            count_places(put_back, places)
        replaced = [place.label for place in put_back.places]
    from sgl_jax.srt.entrypoints import engine as entry

    if o.processes:
        assert entry.run_scheduler_process is sglang_jax.run_scheduler_process
        entry.run_scheduler_process = scheduler_on_a_cpu
    prefixes = dict(enable_recurrent_extra_buffer=True, enable_unified_radix_tree=True)
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.numpy import save_file

        config, weights = MODELS[o.model]
        save_file(weights(Draw()), f"{folder}/model.safetensors")
        Path(folder, "config.json").write_text(json.dumps(config))
        # Overlapped steps are not repeatable on a CPU: SGLang-JAX alone gives other tokens in some runs.
        engine = entry.Engine(
            model_path=folder, skip_tokenizer_init=True, device="cpu", dtype=o.dtype, attention_backend="native",
            enable_single_process=not o.processes, chunked_prefill_size=CHUNK, page_size=PAGE, max_total_tokens=4096,
            max_running_requests=8, max_recurrent_state_size=32, max_prefill_tokens=256, disable_precompile=True,
            random_seed=0, tp_size=o.devices, precompile_token_paddings=[64, 256], precompile_bs_paddings=[8],
            context_length=1024, max_seq_len=1024, disable_overlap_schedule=True, mem_fraction_static=0.3,
            watchdog_timeout=3000, **({} if o.ours else dict(gdn_prefill_impl="chunked_jax")),
            **(prefixes if o.prefixes else dict(disable_radix_cache=True)),
        )  # fmt: skip
    sampling, runs, seconds = dict(temperature=0.0, max_new_tokens=GENERATED, ignore_eos=True), {}, {}

    def generate(name, prompts):
        start = time.perf_counter(), time.process_time()
        found = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        seconds[name] = dict(wall=time.perf_counter() - start[0], processor=time.process_time() - start[1])
        about = [x["meta_info"] for x in found]
        first = lambda pairs: [float(pair[0]) for pair in pairs]
        runs[name] = [
            dict(tokens=x["output_ids"], logprobs=first(m["output_token_logprobs"]), cached=m["cached_tokens"])
            for x, m in zip(found, about, strict=True)
        ]  # fmt: skip

    rng = np.random.default_rng(1)
    prompts, others = ([rng.integers(1, VOCABULARY, n).tolist() for n in LENGTHS] for _ in range(2))
    generate("prompts", prompts)
    generate("the same again", prompts)
    turns = [p + x["tokens"] + [7, 8, 9] for p, x in zip(prompts, runs["prompts"], strict=True)]
    generate("second turns", turns)
    generate("others", others)
    result.write_text(json.dumps(dict(runs=runs, seconds=seconds, calls=calls, places=places, replaced=replaced)))
    sys.stdout.flush()
    engine.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])), Path(sys.argv[2]))
