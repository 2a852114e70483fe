"""Lightning attention, the layer of MiniMax."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import config, norm, parameters, running
from chunkwise.pipeline import chunk_simple_gla, ragged_simple_gla, recurrent_simple_gla
from chunkwise.shared.operators import arguments

_CONFIG = config.LightningAttentionConfig
_OPERATORS = running.Operators(chunk_simple_gla, recurrent_simple_gla, ragged_simple_gla)


class LightningAttentionWeights(NamedTuple):
    """The weights of `lightning_attention`.

    Attributes:
      q, k, v, z: projections [D, H K], [D, H K], [D, HV V], [D, HV V], head after head.
      norm: [HV V].
      out: [HV V, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array
    norm: jax.Array
    out: jax.Array


def split_weights(config: config.LightningAttentionConfig) -> dict[str, Any]:
    """Return how each of the weights is split over devices, in the letters of `division.Letters`."""
    return dict(q=".h", k=".h", v=".n", z=".n", norm="n", out="n.")


def init_lightning_attention(
    key: jax.Array, config: config.LightningAttentionConfig, dtype=jnp.float32
) -> LightningAttentionWeights:
    """Return random weights of a layer that is to be trained: projections keep the size of what they multiply.

    Args:
      key: of JAX's random numbers.
      config: sizes of the layer.
      dtype: of all weights.
    """
    _CONFIG.check(config)
    c, new = config, parameters.Initial(key, dtype)
    q, v = c.H * c.K, c.HV * c.V
    return LightningAttentionWeights(
        q=new.matrix(c.D, q), k=new.matrix(c.D, q), v=new.matrix(c.D, v), z=new.matrix(c.D, v), norm=new.ones(v),
        out=new.matrix(v, c.D),
    )  # fmt: skip


def load_lightning_attention(
    named: Mapping[str, Any], config: config.LightningAttentionConfig, prefix: str = ""
) -> LightningAttentionWeights:
    """Return the weights of a layer of a checkpoint of MiniMax, in its types.

    Args:
      named: arrays by their names in the checkpoint, numpy's, torch's or JAX's; those of 8 bits with their scales.
      config: sizes of the layer, with H = HV.
      prefix: what the names of this layer start with, such as "model.layers.0.self_attn."; other names are ignored.

    Raises:
      ValueError: a name is missing, an array has another shape than `config` asks for, or the layer has weights that
        `lightning_attention` does not.
    """
    _CONFIG.check(config)
    c, found = config, parameters.Checkpoint(named, prefix)
    sizes = (c.K, c.K, c.V)
    # Queries, keys and values of a head lie together.
    parts = found.read("qkv_proj", c.H * sum(sizes), c.D).reshape(c.H, sum(sizes), c.D)
    q, k, v = (x.reshape(-1, c.D).T for x in jnp.split(parts, [c.K, 2 * c.K], axis=1))
    # transformers saves these besides the weights; the layer computes its decay from the config.
    found.ignore("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    weights = LightningAttentionWeights(
        q, k, v, z=found.matrix("output_gate", c.D, c.HV * c.V), norm=found.read("norm", c.HV * c.V),
        out=found.matrix("out_proj", c.HV * c.V, c.D),
    )  # fmt: skip
    found.end()
    return weights


def lightning_attention(
    x: jax.Array,
    weights: LightningAttentionWeights,
    config: config.LightningAttentionConfig,
    cache: running.Cache | None = None,
    output_cache: bool = False,
    *,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    padding_id: int = -1,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, running.Cache | None]:
    """Return what lightning attention makes of hidden states, and its cache after them.

    For training, prefill and decode. In value head h, counted from 0::

        q, k, v = silu(W_q x), silu(W_k x), silu(W_v x)
        g_gamma = -2^(-8 (h + 1) / HV) (1 - layer / (layers - 1 + 1e-5) + 1e-5)
        o       = simple GLA(q, k, v, g_gamma)
        y       = W_out (rms_norm(o) sigmoid(W_z x))                            all heads are normed as one

    Args:
      x, weights, config, cache, output_cache: as in `gated_delta_net`, and so are all others. The cache has no inputs
        of convolutions.

    Returns:
      y [B, T, D] in the type of x, and the cache, None unless asked for. Differentiable in x, the weights and the
      cache.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.

    Accuracy: with random weights 1e-5 relative to transformers' layer in float32.
    Cost: 2 B T D (2 H K + 3 HV V) flops for the projections, and those of the operator.
    Source: Qin and others, Lightning Attention-2 (2024), as in MiniMax-01 (2025).
    """
    run = running.Sequences(
        cache, output_cache, cu_seqlens, segment_ids, padding_id, implementation, sharding, context_axis
    )
    y, cache = _mix(x, weights, config, run)
    return y, cache if output_cache else None


def ragged_lightning_attention(
    x: jax.Array,
    weights: LightningAttentionWeights,
    config: config.LightningAttentionConfig,
    pool: running.Cache,
    step: running.Step,
    *,
    block_size: int | None = None,
    decode_tokens: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
) -> tuple[jax.Array, running.Cache]:
    """Return what lightning attention makes of the tokens of a serving step, and its pool after the step.

    The equations are those of `lightning_attention`, and the arguments those of `ragged_gated_delta_net`.
    """
    return _mix(x, weights, config, running.Serving(pool, step, block_size, decode_tokens, implementation, sharding))


def _decay(config: config.LightningAttentionConfig) -> jax.Array:
    """Return the log decay of every head [HV], in nats."""
    head = jnp.arange(1, config.HV + 1, dtype=jnp.float32)
    return -(2.0 ** (-8.0 * head / config.HV)) * (1 - config.layer / (config.layers - 1 + 1e-5) + 1e-5)


def _mix(
    x, w: LightningAttentionWeights, config: config.LightningAttentionConfig, run: running.Run
) -> tuple[jax.Array, running.Cache]:
    _CONFIG.check(config)
    parameters.check_input(x, config, run)
    parameters.check_weights(w, init_lightning_attention, config)
    heads = (config.H, config.H, config.HV)
    q, k, v = (
        running.by_head(jax.nn.silu(running.project(x, weight)), count)
        for weight, count in zip((w.q, w.k, w.v), heads, strict=True)
    )
    z = running.project(x, w.z)
    o, state = run.operate(_OPERATORS, q, k, v, None, g_gamma=_decay(config), scale=1.0)
    y = norm.norm_groups(run, o, z, w.norm, 1, activation="sigmoid", norm_before_gate=True, eps=config.eps)
    return running.project_out(y, w.out, x), running.Cache((), state)
