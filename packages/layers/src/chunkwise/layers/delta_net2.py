"""Gated DeltaNet 2, the layer whose delta rule has erase and write gates."""

from typing import Any, NamedTuple

import jax

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import table
from chunkwise.layers.mixer import norm, running
from chunkwise.pipeline import chunk_gdn2, ragged_gdn2, recurrent_gdn2
from chunkwise.shared.kernels import tiles

_OPERATORS = running.Operators(chunk_gdn2, recurrent_gdn2, ragged_gdn2)


class GatedDeltaNet2Weights(NamedTuple):
    """The weights of `gated_delta_net2`.

    Attributes:
      q, k, v: projections [D, H K], [D, H K], [D, HV V], head after head.
      f, z: projections of the decay and of the norm's gate, as factors [D, V], [V, H K] and [D, V], [V, HV V].
      z_bias: [HV V].
      b, w: projections of the erase gates and of the write gates, [D, H K] and [D, HV V].
      conv: weights of the convolutions of q, k and v, [H K, W], [H K, W], [HV V, W], the oldest token first.
      A_log, dt_bias: [H], [H, K], float32. The value heads that share a key head share decays and erase gates.
      norm: [V].
      out: [HV V, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    f: tuple[jax.Array, ...]
    z: tuple[jax.Array, ...]
    z_bias: jax.Array
    b: jax.Array
    w: jax.Array
    conv: tuple[jax.Array, ...]
    A_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: jax.Array


def _table(c: config.GatedDeltaNet2Config) -> dict[str, Any]:
    """Return the table of the weights.

    A projection keeps the size of its input; the rate exp(A_log) is uniform from 1 to 16, and steps are from 0.001 to
    0.1, as in Kimi delta attention.
    """
    k, v = c.H * c.K, c.HV * c.V
    z = table.factors(("g_proj.0", "g_proj.1"), ".n", c.D, c.V, v)
    return dict(
        **table.projections(c), f=table.factors(("f_proj.0", "f_proj.1"), ".h", c.D, c.V, k), z=z,
        z_bias=table.bias(z[-1]), b=table.matrix("b_proj", ".h", c.D, k), w=table.matrix("w_proj", ".n", c.D, v),
        conv=table.convolutions(c), **table.rates(1.0, "h", c.H, c.K), norm=table.norm("o_norm", ".", c.V),
        out=table.matrix("o_proj", "n.", v, c.D),
    )  # fmt: skip


def _mix(
    x, weights: GatedDeltaNet2Weights, config: config.GatedDeltaNet2Config, run: running.Run
) -> tuple[jax.Array, caches.Cache]:
    """Return the output of Gated DeltaNet 2 for hidden states, and its cache after them.

    For training, prefill and decode. In every value head::

        q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))      channel by channel over the last W tokens
        f       = W_f2 W_f1 x + dt_bias
        g       = -exp(A_log) softplus(f), or lower_bound sigmoid(exp(A_log) f)
        b, w    = sigmoid(W_b x), or 2 sigmoid(W_b x) with allow_neg_eigval, and sigmoid(W_w x)
        o       = GDN-2(q, k, v, g, b, w), with q and k of unit length
        y       = W_out (rms_norm(o) sigmoid(W_z2 W_z1 x + z_bias))

    All value heads of a key head have the same g and b.

    Accuracy: 1e-5 relative to the same equations in float64, with random weights in float32.
    Cost: 2 B T D (3 H K + 3 HV V + 2 V) flops for the projections, with more for the second factors, and the cost
      of the operator.
    Source: Gated DeltaNet-2, Decoupling Erase and Write in Linear Attention; gates, factors, biases, the norm and names
      as in the layer of flash-linear-attention.
    """
    projected = [running.project(x, matrix) for matrix in (weights.q, weights.k, weights.v)]
    f, z, b, w = (running.project(x, *factors) for factors in (weights.f, weights.z, (weights.b,), (weights.w,)))
    (q, k, v), conv = running.convolve_heads(run, config.heads, projected, weights.conv)
    w, z = running.by_head(w, config.HV), running.with_bias(z, weights.z_bias)
    g, b = (tiles.repeat_heads(running.by_head(y, config.H), config.HV, axis=2) for y in (f, b))
    A_log, dt_bias = (tiles.repeat_heads(y, config.HV) for y in (weights.A_log, weights.dt_bias))
    o, state = run.operate(
        _OPERATORS, q, k, v, g, b, w, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log,
        dt_bias=dt_bias, lower_bound=config.lower_bound, use_erase_sigmoid_in_kernel=True,
        use_write_sigmoid_in_kernel=True, allow_neg_eigval=config.allow_neg_eigval,
    )  # fmt: skip
    y = norm.norm_heads(run, o, z, weights.norm, activation="sigmoid", eps=config.eps)
    return running.project_out(y, weights.out, x), caches.Cache(conv, state)


LAYER = layer.Definition(
    "gated_delta_net2", config.GatedDeltaNet2Config, GatedDeltaNet2Weights, _table, ("gdn2",), _mix
)
