"""Gated linear attention, the layer of GLA."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters, table
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


def _table(c: config.GatedLinearAttentionConfig) -> dict[str, Any]:
    """Return the table of the weights.

    A projection keeps the size of its input.
    """
    v, f = c.HV * c.V, table.factors(("gk_proj.0", "gk_proj.1"), ".n", c.D, c.R, c.HV * c.K)
    return dict(
        **table.projections(c), z=table.matrix("g_proj", ".n", c.D, v),
        f=f, f_bias=table.bias(f[-1]), norm=table.norm("g_norm", ".", c.V),
        out=table.matrix("o_proj", "n.", v, c.D),
    )  # fmt: skip


# The name of the norm with its gate, where `fuse_norm` is true.
_FUSED = {"g_norm": "g_norm_swish_gate"}


def _read(found: parameters.Checkpoint, weights: Any, c: config.GatedLinearAttentionConfig) -> None:
    """Give the arrays of a checkpoint the names of the table."""
    found.names = _FUSED if _FUSED["g_norm"] in found else {}


def _write(named: dict[str, Any], c: config.GatedLinearAttentionConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a checkpoint.

    Its `fuse_norm` is true.
    """
    return table.renamed(named, _FUSED)


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
    "gated_linear_attention", config.GatedLinearAttentionConfig, GatedLinearAttentionWeights, _table, ("gla",), _mix,
    _read, _write,
)  # fmt: skip
