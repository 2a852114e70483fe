"""Gated linear attention, the layer of GLA."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters
from chunkwise.layers.mixer import norm, running
from chunkwise.pipeline import chunk_gla, ragged_gla, recurrent_gla

_OPERATORS = running.Operators(chunk_gla, recurrent_gla, ragged_gla)


class GatedLinearAttentionWeights(NamedTuple):
    """The weights of `gated_linear_attention`.

    Attributes:
      q, k, v, z: projections [D, H K], [D, H K], [D, HV V], [D, HV V], head after head.
      f: projection of the decay, as factors [D, R], [R, HV K].
      f_bias: [HV K].
      norm: [V].
      out: [HV V, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array
    f: tuple[jax.Array, ...]
    f_bias: jax.Array
    norm: jax.Array
    out: jax.Array


def _split(config: config.GatedLinearAttentionConfig) -> dict[str, Any]:
    return dict(q=".h", k=".h", v=".n", z=".n", f=("..", ".n"), f_bias="n", norm=".", out="n.")


def _init(new: parameters.Initial, c: config.GatedLinearAttentionConfig) -> GatedLinearAttentionWeights:
    """Return random weights of a layer that is to be trained; a projection keeps the size of its input."""
    q, v = c.H * c.K, c.HV * c.V
    return GatedLinearAttentionWeights(
        q=new.matrix(c.D, q), k=new.matrix(c.D, q), v=new.matrix(c.D, v), z=new.matrix(c.D, v),
        f=new.factors(c.D, c.R, c.HV * c.K), f_bias=jnp.zeros(c.HV * c.K, new.dtype), norm=new.ones(c.V),
        out=new.matrix(v, c.D),
    )  # fmt: skip


def _load(found: parameters.Checkpoint, c: config.GatedLinearAttentionConfig) -> GatedLinearAttentionWeights:
    """Return the weights of a layer of a checkpoint of flash-linear-attention, in its types."""
    found.rename("g_norm_swish_gate", "g_norm")
    q, v, decay = c.H * c.K, c.HV * c.V, c.HV * c.K
    return GatedLinearAttentionWeights(
        *found.matrices(("q", "k", "v"), c.D, (q, q, v)), z=found.matrix("g_proj", c.D, v),
        f=found.factors(("gk_proj.0", "gk_proj.1"), c.D, c.R, decay), f_bias=found.read("gk_proj.1.bias", decay),
        norm=found.read("g_norm", c.V), out=found.matrix("o_proj", v, c.D),
    )  # fmt: skip


def _save(w: GatedLinearAttentionWeights, c: config.GatedLinearAttentionConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a layer for a checkpoint of flash-linear-attention, whose `fuse_norm` is true."""
    matrices = dict(q_proj=w.q, k_proj=w.k, v_proj=w.v, g_proj=w.z, o_proj=w.out)
    matrices |= {f"gk_proj.{i}": x for i, x in enumerate(w.f)}
    named: dict[str, Any] = {f"{name}.weight": x.T for name, x in matrices.items()}
    return named | {"gk_proj.1.bias": w.f_bias, "g_norm_swish_gate.weight": w.norm}


def _mix(
    x, w: GatedLinearAttentionWeights, config: config.GatedLinearAttentionConfig, run: running.Run
) -> tuple[jax.Array, caches.Cache]:
    """Return the output of gated linear attention for hidden states, and its cache after them.

    For training, prefill and decode. In every value head::

        q, k, v = W_q x, W_k x, W_v x
        g       = log_sigmoid(W_f2 W_f1 x + f_bias) / normalizer
        o       = GLA(q, k, v, g)
        y       = W_out (rms_norm(o) silu(W_z x))

    The cache has no inputs of convolutions.

    Accuracy: with random weights 1e-5 relative to the same equations in float64.
    Cost: 2 B T D (2 H K + 3 HV V + R) + 2 B T R HV K flops for the projections, and the cost of the operator.
    Source: Yang et al., Gated Linear Attention Transformers (2023), as in flash-linear-attention.
    """
    q, k, v = (
        running.by_head(running.project(x, weight), count)
        for weight, count in zip((w.q, w.k, w.v), config.heads, strict=True)
    )
    f = running.with_bias(running.project(x, *w.f).astype(jnp.float32), w.f_bias)
    g = running.by_head(jax.nn.log_sigmoid(f) / config.normalizer, config.HV)
    o, state = run.operate(_OPERATORS, q, k, v, g)
    y = norm.norm_heads(run, o, running.project(x, w.z), w.norm, activation="silu", eps=config.eps)
    return running.project_out(y, w.out, x), caches.Cache((), state)


LAYER = layer.Definition(
    "gated_linear_attention", config.GatedLinearAttentionConfig, GatedLinearAttentionWeights, _split, _init, _load,
    _save, ("gla",), _mix,
)  # fmt: skip
