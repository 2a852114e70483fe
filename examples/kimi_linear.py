"""Kimi-Linear's language model: three blocks of Kimi delta attention to one of multi-head latent attention.

    python -m pip install ./packages/layers
    python examples/kimi_linear.py --random
    python examples/kimi_linear.py DIRECTORY --prompt-tokens 760 6511 314 9338 369

DIRECTORY holds a checkpoint as published; --random needs none. With D the size of the hidden states x, every
block computes

    x = x + mixer(norm(x))      Kimi delta attention, or latent attention in some blocks
    x = x + mlp(norm(x))        a perceptron in the first block, then mixtures of experts

Nothing tells positions but the delta attention.

Source: Kimi Team, Kimi Linear (2025); DeepSeek-AI, DeepSeek-V2 (2024), section 2.1, for the latent attention; the names
are those of the published checkpoint and of transformers.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from blocks import (
    Block,
    Experts,
    Mlp,
    Model,
    Past,
    Places,
    Routing,
    attend,
    empty_past,
    mixture_of_experts,
    mlp,
    remember,
    rms_norm,
    take_places,
)
from chunkwise.layers import (
    KimiDeltaAttentionConfig,
    config_from,
    empty_cache,
    init_kimi_delta_attention,
    kimi_delta_attention,
    load_kimi_delta_attention,
)
from generation import (
    Draw,
    Settings,
    are_attention,
    main,
    matrix,
    part,
    read_checkpoint,
    require,
    take,
    whole_model,
)


@dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      attention, sparse: of every block, whether it has latent attention, and whether it has experts.
      delta: sizes of Kimi delta attention.
      H: heads of the latent attention.
      K, shared, V: channels of a head's keys of its own, of the keys that all heads share, and of a head's values.
      R: channels of the latent that keys and values are made of.
      routing: how tokens are sent to so many experts.
      experts: in a mixture.
      eps: of the norms.
    """

    attention: tuple[bool, ...]
    sparse: tuple[bool, ...]
    delta: KimiDeltaAttentionConfig
    H: int
    K: int
    shared: int
    V: int
    R: int
    routing: Routing
    experts: int
    eps: float


class LatentAttention(NamedTuple):
    """The weights of multi-head latent attention.

    Attributes:
      q: [D, H (K + shared)].
      down: [D, R + shared], to the latent and to the shared keys.
      norm: [R].
      k, v: [H, R, K] and [H, R, V], from the latent to keys and values.
      out: [H V, D].
    """

    q: jax.Array
    down: jax.Array
    norm: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array


def run(weights: Model, config: Config, tokens, past: Past, segment_ids=None, implementation: str | None = None):
    """Return the hidden states [B, T, D] of tokens [B, T] after the last norm, and the past after them.

    The arguments are those of `qwen3_5.run`.
    """
    x, caches = weights.embedding[tokens], []
    places, past = take_places(past, tokens, segment_ids)
    for block, cache in zip(weights.blocks, past.layers, strict=True):
        y = rms_norm(x, block.norm, config.eps)
        if isinstance(block.mixer, LatentAttention):
            y, cache = latent_attention(y, block.mixer, config, cache, places)
        else:
            y, cache = kimi_delta_attention(
                y, block.mixer, config.delta, cache, True, segment_ids=segment_ids, implementation=implementation
            )
        x = x + y
        y = rms_norm(x, block.mlp_norm, config.eps)
        sparse = isinstance(block.mlp, Experts)
        x = x + (mixture_of_experts(y, block.mlp, config.routing) if sparse else mlp(y, block.mlp))
        caches.append(cache)
    return rms_norm(x, weights.norm, config.eps), past._replace(layers=tuple(caches))


def latent_attention(x, w: LatentAttention, config: Config, cache, places: Places):
    """Return what multi-head latent attention makes of x [B, T, D], and its cache [B, S, 1, R + shared].

    The equations are, with a latent c and keys r that all heads share::

        c, r = norm(W_c x), W_r x
        k, v = [W_k c, r], W_v c                            of each head
        y    = W_out softmax(q k^T / sqrt(K + shared)) v

    W_k and W_v are moved from the tokens that are seen to the one that sees: q k^T = (W_k^T q) c^T + q_r r^T. So the
    heads share [c, r] as their one key, and c as their value, and only [c, r] is kept.
    """
    c = config
    q, kept = (x @ w.q).reshape(*x.shape[:2], c.H, -1), x @ w.down
    own, shared = jnp.split(q, [c.K], axis=-1)
    q = jnp.concatenate([jnp.einsum("bthk,hrk->bthr", own, w.k), shared], axis=-1)
    # The epsilon of this norm is in no config.
    latent, r = jnp.split(kept, [c.R], axis=-1)
    kept = jnp.concatenate([rms_norm(latent, w.norm, 1e-6), r], axis=-1)
    cache = remember(cache, kept[:, :, None], places)
    # The values are given the shared keys too, and lose them again: attention wants as many channels of both.
    o = attend(q, cache, cache, places, (c.K + c.shared) ** -0.5)[..., : c.R]
    return jnp.einsum("bthr,hrv->bthv", o, w.v).reshape(*x.shape[:2], -1) @ w.out, cache


def start(config: Config, B: int, S: int, dtype) -> Past:
    """Return the past of B rows before their first token, with places for S tokens."""
    latents = lambda: jnp.zeros((B, S, 1, config.R + config.shared), dtype)
    return empty_past((latents() if own else empty_cache(config.delta, B, dtype) for own in config.attention), B, S)


def load(directory) -> tuple[Config, Model]:
    """Return the sizes and the weights of a checkpoint."""
    # Published, a perceptron is "mlp" and experts are "block_sparse_moe". transformers saves both as the latter.
    found, named = read_checkpoint(directory, {"block_sparse_moe": "mlp"})
    config = read_config(found)
    norm = lambda name: take(named, f"{name}.weight")
    embedding = norm("model.embed_tokens")

    def perceptron(at: str, names=("gate_proj", "up_proj", "down_proj")) -> Mlp:
        return Mlp(*(matrix(named, f"{at}.{name}") for name in names))

    def block(i: int) -> Block:
        at, c = f"model.layers.{i}", config
        if c.attention[i]:
            q, down, both, out = (
                matrix(named, f"{at}.self_attn.{name}")
                for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
            )
            k, v = jnp.split(both.reshape(c.R, c.H, -1).swapaxes(0, 1), [c.K], axis=-1)
            mixer = LatentAttention(q, down, norm(f"{at}.self_attn.kv_a_layernorm"), k, v, out)
        else:
            mixer = load_kimi_delta_attention(part(named, f"{at}.self_attn."), c.delta)
        if c.sparse[i]:
            experts = [perceptron(f"{at}.mlp.experts.{e}", ("w1", "w3", "w2")) for e in range(c.experts)]
            router = matrix(named, f"{at}.mlp.gate").astype(jnp.float32)
            bias = take(named, f"{at}.mlp.gate.e_score_correction_bias").astype(jnp.float32)
            after = Experts(
                router, bias, *map(jnp.stack, zip(*experts, strict=True)), perceptron(f"{at}.mlp.shared_experts")
            )
        else:
            after = perceptron(f"{at}.mlp")
        return Block(norm(f"{at}.input_layernorm"), mixer, norm(f"{at}.post_attention_layernorm"), after)

    blocks = tuple(block(i) for i in range(len(config.attention)))
    return config, whole_model(found, named, embedding, blocks, norm("model.norm"))


def read_config(found: dict) -> Config:
    """Return the sizes that a config.json has, one as published or one of transformers."""
    f = Settings(found)
    layers = range(f["num_hidden_layers"])
    for name, values in dict(
        hidden_act=("silu", "swish"), mla_use_nope=(True,), mla_use_output_gate=(False,), q_lora_rank=(),
        attention_bias=(False,), moe_router_activation_func=("sigmoid",), moe_layer_freq=(1,), num_shared_experts=(1,),
        use_grouped_topk=(True,), topk_method=("noaux_tc",), routed_expert_hidden_size=(), attn_res_block_size=(),
    ).items():  # fmt: skip
        require(f, name, *values)
    # These count blocks from 1.
    full = (f.get("linear_attn_config") or {}).get("full_attn_layers")
    attention = are_attention(f, lambda i: i > 0 and i % 4 == 0 if full is None else i + 1 in full)
    if f.get("mlp_layer_types") is not None:
        sparse = tuple(kind == "sparse" for kind in f["mlp_layer_types"])
    else:
        sparse = tuple(i >= f["first_k_dense_replace"] for i in layers)
    routing = Routing(
        f["num_experts_per_token"], f["num_expert_group"], f["topk_group"], f["moe_renormalize"],
        f["routed_scaling_factor"],
    )  # fmt: skip
    return Config(
        attention=attention, sparse=sparse, delta=config_from({"model_type": "kimi_linear"} | f),
        H=f["num_attention_heads"], K=f["qk_nope_head_dim"], shared=f["qk_rope_head_dim"], V=f["v_head_dim"],
        R=f["kv_lora_rank"], routing=routing, experts=f["num_experts"], eps=f["rms_norm_eps"],
    )  # fmt: skip


def random_model(vocabulary: int) -> tuple[Config, Model]:
    """Return the sizes and the random weights of a tiny model."""
    delta = KimiDeltaAttentionConfig(D=64, H=2, HV=2, K=16, V=16, R=16)
    c = Config(
        attention=(False, True), sparse=(False, True), delta=delta, H=2, K=16, shared=8, V=16, R=32,
        routing=Routing(experts=2), experts=4, eps=1e-5,
    )  # fmt: skip
    new, D, ones = Draw(), delta.D, jnp.ones(delta.D)

    def perceptron(*experts: int) -> tuple[jax.Array, ...]:
        return tuple(new.matrix(*experts, *shape) for shape in ((D, 2 * D), (D, 2 * D), (2 * D, D)))

    def block(attention: bool, sparse: bool) -> Block:
        if attention:
            q, down = new.matrix(D, c.H * (c.K + c.shared)), new.matrix(D, c.R + c.shared)
            k, v = new.matrix(c.H, c.R, c.K), new.matrix(c.H, c.R, c.V)
            mixer = LatentAttention(q, down, jnp.ones(c.R), k, v, new.matrix(c.H * c.V, D))
        else:
            mixer = init_kimi_delta_attention(new.key(), delta)
        after = Mlp(*perceptron())
        if sparse:
            after = Experts(new.matrix(D, c.experts), jnp.zeros(c.experts), *perceptron(c.experts), shared=after)
        return Block(ones, mixer, ones, after)

    blocks = tuple(map(block, c.attention, c.sparse))
    return c, Model(new.normal(vocabulary, D), blocks, ones, new.matrix(D, vocabulary))


if __name__ == "__main__":
    main(sys.modules[__name__])
