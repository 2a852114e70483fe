"""Gated DeltaProduct, the layer whose tokens take several steps of the delta rule each; DeltaNet with one step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters
from chunkwise.layers.mixer import norm, running
from chunkwise.pipeline import chunk_gated_delta_product, ragged_gated_delta_product, recurrent_gated_delta_product
from chunkwise.shared import composition

_OPERATORS = running.Operators(chunk_gated_delta_product, recurrent_gated_delta_product, ragged_gated_delta_product)


class GatedDeltaProductWeights(NamedTuple):
    """The weights of `gated_delta_product`, with n = num_householder.

    Attributes:
      q: projection [D, H K], head after head.
      k, v, b: projections of each of the n steps, [D, H K], [D, HV V] and [D, HV]; b are the step sizes.
      z: projection [D, HV V], of the norm's gate; nothing without it.
      a: projection [D, HV], of the decay; nothing without a forget gate.
      conv: weights of the convolutions of q, of n keys and of n values, [H K, W] and [HV V, W], the oldest token first.
      A_log, dt_bias: [HV], float32; nothing without a forget gate.
      norm: [V].
      out: [HV V, D].
    """

    q: jax.Array
    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    b: tuple[jax.Array, ...]
    z: jax.Array | tuple[()]
    a: jax.Array | tuple[()]
    conv: tuple[jax.Array, ...]
    A_log: jax.Array | tuple[()]
    dt_bias: jax.Array | tuple[()]
    norm: jax.Array
    out: jax.Array


def _split(config: config.GatedDeltaProductConfig) -> dict[str, Any]:
    n, gated = config.num_householder, config.forget_gate
    return dict(
        q=".h", k=(".h",) * n, v=(".n",) * n, b=(".n",) * n, z=".n" if config.output_gate else (),
        a=".n" if gated else (), conv=("h.",) * (1 + n) + ("n.",) * n, A_log="n" if gated else (),
        dt_bias="n" if gated else (), norm=".", out="n.",
    )  # fmt: skip


def _init(new: parameters.Initial, c: config.GatedDeltaProductConfig) -> GatedDeltaProductWeights:
    """Return random weights of a layer that is to be trained.

    A projection keeps the size of its input; the rate exp(A_log) is uniform from 0 to 16, and steps are from 0.001 to
    0.1, as in flash-linear-attention.
    """
    q, v, n = c.H * c.K, c.HV * c.V, c.num_householder
    several = lambda columns: tuple(new.matrix(c.D, columns) for _ in range(n))
    return GatedDeltaProductWeights(
        q=new.matrix(c.D, q), k=several(q), v=several(v), b=several(c.HV),
        z=new.matrix(c.D, v) if c.output_gate else (),
        a=new.matrix(c.D, c.HV) if c.forget_gate else (), conv=tuple(new.convolution(size, c.W) for size in c.channels),
        A_log=new.log_decay(c.HV, least=1e-4) if c.forget_gate else (),
        dt_bias=new.step_bias(c.HV) if c.forget_gate else (), norm=new.ones(c.V), out=new.matrix(v, c.D),
    )  # fmt: skip


def _load(found: parameters.Checkpoint, c: config.GatedDeltaProductConfig) -> GatedDeltaProductWeights:
    """Return the weights of a layer of a checkpoint, in its types, with A_log and dt_bias in float32.

    The layer GatedDeltaProduct of flash-linear-attention has these names. Its matrices have the n steps of a token one
    after the other.
    """
    q, v, n = c.H * c.K, c.HV * c.V, c.num_householder
    several = lambda name, columns: tuple(jnp.split(found.matrix(f"{name}_proj", c.D, n * columns), n, axis=1))
    convolution = lambda name, m, size: jnp.split(found.read(f"{name}_conv1d", m * size, 1, c.W)[:, 0], m)
    return GatedDeltaProductWeights(
        q=found.matrix("q_proj", c.D, q), k=several("k", q), v=several("v", v), b=several("b", c.HV),
        z=found.matrix("g_proj", c.D, v) if c.output_gate else (),
        a=found.matrix("a_proj", c.D, c.HV) if c.forget_gate else (),
        conv=(*convolution("q", 1, q), *convolution("k", n, q), *convolution("v", n, v)),
        A_log=found.float32("A_log", c.HV) if c.forget_gate else (),
        dt_bias=found.float32("dt_bias", c.HV) if c.forget_gate else (), norm=found.read("o_norm", c.V),
        out=found.matrix("o_proj", v, c.D),
    )  # fmt: skip


def _save(w: GatedDeltaProductWeights, c: config.GatedDeltaProductConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a layer for a checkpoint of flash-linear-attention."""
    n = c.num_householder
    matrices = dict(q=(w.q,), k=w.k, v=w.v, b=w.b, o=(w.out,)) | (dict(a=(w.a,)) if c.forget_gate else {})
    matrices |= dict(g=(w.z,)) if c.output_gate else {}
    named: dict[str, Any] = {f"{name}_proj.weight": np.concatenate(x, axis=1).T for name, x in matrices.items()}
    parts = w.conv[:1], w.conv[1 : 1 + n], w.conv[1 + n :]
    named |= parameters.named_convolutions("qkv", map(np.concatenate, parts))
    named["o_norm.weight"] = w.norm
    return named | (dict(A_log=w.A_log, dt_bias=w.dt_bias) if c.forget_gate else {})


def _mix(
    x, w: GatedDeltaProductWeights, config: config.GatedDeltaProductConfig, run: running.Run
) -> tuple[jax.Array, caches.Cache]:
    """Return the output of Gated DeltaProduct for hidden states, and its cache after them.

    For training, prefill and decode. In every value head, for the n steps i of a token::

        q, k_i, v_i = silu(conv(W_q x)), silu(conv(W_k,i x)), silu(conv(W_v,i x))    over the last W tokens
        g       = -exp(A_log) softplus(W_a x + dt_bias), or no decay
        beta_i  = sigmoid(W_b,i x), or twice that
        o       = gated delta product(q, k, v, g, beta), with q and k of unit length
        y       = W_out (rms_norm(o) silu(W_z x)), or without the gate

    Accuracy: with random weights 1e-5 relative to the same equations in float64.
    Cost: 2 B T D ((1 + n) H K + (2 + n) HV V + (1 + n) HV) flops for the projections, and the cost of the operator.
    Source: Siems et al., DeltaProduct (2025), as in flash-linear-attention.
    """
    n = config.num_householder
    projected = [running.project(x, weight) for weight in (w.q, *w.k, *w.v)]
    heads = (config.H,) * (1 + n) + (config.HV,) * n
    (q, *steps), conv = running.convolve_heads(run, heads, projected, w.conv)
    b = [running.project(x, weight) for weight in w.b]
    k, v, beta = (composition.interleave(*y) for y in (steps[:n], steps[n:], b))
    gate = dict(use_gate_in_kernel=True, A_log=w.A_log, dt_bias=w.dt_bias) if config.forget_gate else {}
    o, state = run.operate(
        _OPERATORS, q, k, v, running.project(x, w.a) if config.forget_gate else None, beta, n,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=config.allow_neg_eigval, **gate,
    )  # fmt: skip
    z = running.project(x, w.z) if config.output_gate else None
    y = norm.norm_heads(run, o, z, w.norm, activation="silu", eps=config.eps)
    return running.project_out(y, w.out, x), caches.Cache(conv, state)


LAYER = layer.Definition(
    "gated_delta_product", config.GatedDeltaProductConfig, GatedDeltaProductWeights, _split, _init, _load, _save,
    ("gated_deltaproduct", "delta_net"), _mix,
)  # fmt: skip
