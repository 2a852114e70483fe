"""Gated DeltaNet 2, the layer whose delta rule has erase and write gates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters
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


def _split(config: config.GatedDeltaNet2Config) -> dict[str, Any]:
    return dict(
        q=".h", k=".h", v=".n", f=("..", ".h"), z=("..", ".n"), z_bias="n", b=".h", w=".n", conv=("h.", "h.", "n."),
        A_log="h", dt_bias="h.", norm=".", out="n.",
    )  # fmt: skip


def _init(new: parameters.Initial, c: config.GatedDeltaNet2Config) -> GatedDeltaNet2Weights:
    """Return random weights of a layer that is to be trained.

    A projection keeps the size of its input; the rate exp(A_log) is uniform from 1 to 16, and steps are from 0.001 to
    0.1, as in Kimi delta attention.
    """
    q, k, v = c.channels
    return GatedDeltaNet2Weights(
        q=new.matrix(c.D, q), k=new.matrix(c.D, k), v=new.matrix(c.D, v), f=new.factors(c.D, c.V, k),
        z=new.factors(c.D, c.V, v), z_bias=jnp.zeros(v, new.dtype), b=new.matrix(c.D, k), w=new.matrix(c.D, v),
        conv=tuple(new.convolution(n, c.W) for n in c.channels), A_log=new.log_decay(c.H),
        dt_bias=new.step_bias(c.H, c.K), norm=new.ones(c.V), out=new.matrix(v, c.D),
    )  # fmt: skip


def _load(found: parameters.Checkpoint, c: config.GatedDeltaNet2Config) -> GatedDeltaNet2Weights:
    """Return the weights of a layer of a checkpoint, in its types, with A_log and dt_bias in float32.

    The layer GatedDeltaNet2 of flash-linear-attention has the same names.
    """
    q, k, v = c.channels
    return GatedDeltaNet2Weights(
        *found.matrices(("q", "k", "v"), c.D, c.channels),
        f=found.factors(("f_proj.0", "f_proj.1"), c.D, c.V, k), z=found.factors(("g_proj.0", "g_proj.1"), c.D, c.V, v),
        z_bias=found.read("g_proj.1.bias", v), b=found.matrix("b_proj", c.D, k),
        w=found.matrix("w_proj", c.D, v), conv=found.convolutions(("q", "k", "v"), c.channels, c.W),
        A_log=found.float32("A_log", c.H), dt_bias=found.float32("dt_bias", c.H, c.K), norm=found.read("o_norm", c.V),
        out=found.matrix("o_proj", v, c.D),
    )  # fmt: skip


def _save(w: GatedDeltaNet2Weights, c: config.GatedDeltaNet2Config, model: str) -> dict[str, Any]:
    """Return the arrays of a layer for a checkpoint of flash-linear-attention."""
    matrices = dict(q_proj=w.q, k_proj=w.k, v_proj=w.v, b_proj=w.b, w_proj=w.w, o_proj=w.out)
    matrices |= {f"{name}_proj.{i}": x for name, pair in dict(f=w.f, g=w.z).items() for i, x in enumerate(pair)}
    named: dict[str, Any] = {f"{name}.weight": x.T for name, x in matrices.items()}
    named |= parameters.named_convolutions("qkv", w.conv)
    named |= {"g_proj.1.bias": w.z_bias, "o_norm.weight": w.norm}
    return named | {"A_log": w.A_log, "dt_bias": w.dt_bias.reshape(-1)}


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
    "gated_delta_net2", config.GatedDeltaNet2Config, GatedDeltaNet2Weights, _split, _init, _load, _save,
    ("gdn2",), _mix,
)  # fmt: skip
