"""Lightning attention, the layer of MiniMax."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters
from chunkwise.layers.mixer import mixing, norm, running
from chunkwise.pipeline import chunk_simple_gla, ragged_simple_gla, recurrent_simple_gla
from chunkwise.shared.serving.decode.records import Decodes, DecodeStatic

_OPERATORS = running.Operators(chunk_simple_gla, recurrent_simple_gla, ragged_simple_gla)


class LightningAttentionWeights(NamedTuple):
    """The weights of `lightning_attention`.

    Attributes:
      q, k, v, z: projections [D, H K], [D, H K], [D, HV V], [D, HV V], head after head.
      norm: [HV V], of one norm over all heads.
      out: [HV V, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array
    norm: jax.Array
    out: jax.Array


def _split(config: config.LightningAttentionConfig) -> dict[str, Any]:
    return dict(q=".h", k=".h", v=".n", z=".n", norm="n", out="n.")


def _init(new: parameters.Initial, c: config.LightningAttentionConfig) -> LightningAttentionWeights:
    """Return random weights of a layer that is to be trained; a projection keeps the size of its input."""
    q, v = c.H * c.K, c.HV * c.V
    return LightningAttentionWeights(
        q=new.matrix(c.D, q), k=new.matrix(c.D, q), v=new.matrix(c.D, v), z=new.matrix(c.D, v), norm=new.ones(v),
        out=new.matrix(v, c.D),
    )  # fmt: skip


def _load(found: parameters.Checkpoint, c: config.LightningAttentionConfig) -> LightningAttentionWeights:
    """Return the weights of a layer of a checkpoint of MiniMax, in its types; the layer has H = HV."""
    sizes = (c.K, c.K, c.V)
    # The matrix has queries, keys and values of a head side by side.
    parts = found.read("qkv_proj", c.H * sum(sizes), c.D).reshape(c.H, sum(sizes), c.D)
    q, k, v = (x.reshape(-1, c.D).T for x in parameters.split(parts, sizes, axis=1))
    # transformers saves these, too; the layer here computes its decay from the config.
    found.ignore("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    return LightningAttentionWeights(
        q, k, v, z=found.matrix("output_gate", c.D, c.HV * c.V), norm=found.read("norm", c.HV * c.V),
        out=found.matrix("out_proj", c.HV * c.V, c.D),
    )  # fmt: skip


def _save(w: LightningAttentionWeights, c: config.LightningAttentionConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a layer for a checkpoint of MiniMax, which has H = HV."""
    parts = [x.T.reshape(c.H, -1, c.D) for x in (w.q, w.k, w.v)]
    named: dict[str, Any] = {"qkv_proj.weight": np.concatenate(parts, axis=1).reshape(-1, c.D), "norm.weight": w.norm}
    return named | {"output_gate.weight": w.z.T, "out_proj.weight": w.out.T}


def _decay(config: config.LightningAttentionConfig) -> jax.Array:
    """Return the log decay of every head [HV], in nats."""
    head = jnp.arange(1, config.HV + 1, dtype=jnp.float32)
    return -(2.0 ** (-8.0 * head / config.HV)) * (1 - config.layer / (config.layers - 1 + 1e-5) + 1e-5)


def _mix(
    x, w: LightningAttentionWeights, config: config.LightningAttentionConfig, run: running.Run
) -> tuple[jax.Array, caches.Cache]:
    """Return the output of lightning attention for hidden states, and its cache after them.

    For training, prefill and decode. In value head h, counted from 0::

        q, k, v = silu(W_q x), silu(W_k x), silu(W_v x)
        g_gamma = -2^(-8 (h + 1) / HV) (1 - layer / (layers - 1 + 1e-5) + 1e-5)
        o       = simple GLA(q, k, v, g_gamma)
        y       = W_out (rms_norm(o) sigmoid(W_z x))                            one norm over all heads

    The cache has no inputs of convolutions.

    Accuracy: with random weights 1e-5 relative to transformers' layer in float32.
    Cost: 2 B T D (2 H K + 3 HV V) flops for the projections, and the cost of the operator.
    Source: Qin and others, Lightning Attention-2 (2024), as in MiniMax-01 (2025).
    """
    projected, z = tuple(running.project(x, weight) for weight in (w.q, w.k, w.v)), running.project(x, w.z)
    # A norm over heads of several devices comes after all that each of them does alone.
    alone = not norm.is_local(run, projected[2], config, 1)
    inside = ((), ()) if alone else (z, w.norm)
    y, cache = mixing.mix(run, config, _MIXER, (projected, _decay(config), *inside))
    return running.project_out(_finish(run, config, y, z, w.norm) if alone else y, w.out, x), cache


def _one_after_the_other(run: running.Run, config: config.LightningAttentionConfig, arrays) -> running.Mixed:
    """Return the output before the last projection, and the cache after the tokens."""
    projected, gamma, z, weight = arrays
    q, k, v = (running.by_head(jax.nn.silu(y), count) for y, count in zip(projected, config.heads, strict=True))
    o, state = run.operate(_OPERATORS, q, k, v, None, g_gamma=gamma, scale=1.0)
    return o if isinstance(z, tuple) else _finish(run, config, o, z, weight), caches.Cache((), state)


def _finish(run: running.Run, config: config.LightningAttentionConfig, o, z, weight) -> jax.Array:
    """Return the output of all heads [B, T, HV, V] after the norm and the gate."""
    return norm.norm_groups(run, o, z, weight, 1, activation="sigmoid", norm_before_gate=True, eps=config.eps)


def _decodes(config: config.LightningAttentionConfig, arrays) -> Decodes:
    """Return the record of all of it for single tokens."""
    projected, gamma, *inside = arrays
    z, weight = (None if isinstance(y, tuple) else y for y in inside)
    static = DecodeStatic(
        config.H, config.HV, config.K, config.V, 1, True, 1.0, False, "decode_layer_fwd", activation="silu",
        norm_gate="sigmoid", eps=None if weight is None else config.eps, norm_heads=config.HV,
    )  # fmt: skip
    z = None if z is None else mixing.rows(z)
    return Decodes(static, tuple(map(mixing.rows, projected)), None, z=z, norm=weight, gamma=gamma)


_MIXER = mixing.Mixer(_one_after_the_other, _decodes, (mixing.PROJECTED, "n", "btn", "n"))


LAYER = layer.Definition(
    "lightning_attention", config.LightningAttentionConfig, LightningAttentionWeights, _split, _init, _load, _save,
    ("minimax", "minimax_text_01", "minimax_m1"), _mix,
)  # fmt: skip
