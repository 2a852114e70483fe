"""Comba, the layer whose delta rule erases by a key of its own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters
from chunkwise.layers.mixer import norm, running
from chunkwise.pipeline import chunk_comba, ragged_comba, recurrent_comba

_OPERATORS = running.Operators(chunk_comba, recurrent_comba, ragged_comba)


class CombaWeights(NamedTuple):
    """The weights of `comba_layer`.

    Attributes:
      q, k, v: projections [D, H K], [D, H K], [D, HV V], head after head.
      z: projection [D, HV V], of the norm's gate; nothing without it.
      a, b: projections [D, HV], of the decay and of beta.
      conv: weights of the convolutions of q, k and v, [H K, W], [H K, W], [HV V, W], the oldest token first.
      decay, skip: [H], float32: the sigmoid of `decay` multiplies erase keys, and `skip` times these leaves queries.
      A_log, dt_bias: [HV], float32.
      norm: [V].
      out: [HV V, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array | tuple[()]
    a: jax.Array
    b: jax.Array
    conv: tuple[jax.Array, ...]
    decay: jax.Array
    skip: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: jax.Array


def _split(config: config.CombaConfig) -> dict[str, Any]:
    return dict(
        q=".h", k=".h", v=".n", z=".n" if config.output_gate else (), a=".n", b=".n", conv=("h.", "h.", "n."),
        decay="h", skip="h", A_log="n", dt_bias="n", norm=".", out="n.",
    )  # fmt: skip


def _init(new: parameters.Initial, c: config.CombaConfig) -> CombaWeights:
    """Return random weights of a layer that is to be trained.

    A projection keeps the size of its input; the rate exp(A_log) is uniform up to 16, steps are from 0.001 to 0.1, and
    `decay` and `skip` are 1, as in flash-linear-attention.
    """
    q, k, v = c.channels
    return CombaWeights(
        q=new.matrix(c.D, q), k=new.matrix(c.D, k), v=new.matrix(c.D, v), z=new.matrix(c.D, v) if c.output_gate else (),
        a=new.matrix(c.D, c.HV), b=new.matrix(c.D, c.HV), conv=tuple(new.convolution(n, c.W) for n in c.channels),
        decay=jnp.ones(c.H), skip=jnp.ones(c.H), A_log=new.log_decay(c.HV, least=1e-3), dt_bias=new.step_bias(c.HV),
        norm=new.ones(c.V), out=new.matrix(v, c.D),
    )  # fmt: skip


def _load(found: parameters.Checkpoint, c: config.CombaConfig) -> CombaWeights:
    """Return the weights of a layer of a checkpoint, in its types, with vectors of heads in float32."""
    v = c.channels[2]
    return CombaWeights(
        *found.matrices(("q", "k", "v"), c.D, c.channels), z=found.matrix("g_proj", c.D, v) if c.output_gate else (),
        a=found.matrix("a_proj", c.D, c.HV), b=found.matrix("b_proj", c.D, c.HV),
        conv=found.convolutions(("q", "k", "v"), c.channels, c.W), decay=found.float32("decay", c.H),
        skip=found.float32("D", c.H), A_log=found.float32("A_log", c.HV), dt_bias=found.float32("dt_bias", c.HV),
        norm=found.read("o_norm", c.V), out=found.matrix("o_proj", v, c.D),
    )  # fmt: skip


def _save(w: CombaWeights, c: config.CombaConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a layer for a checkpoint of flash-linear-attention."""
    matrices: dict[str, Any] = dict(q=w.q, k=w.k, v=w.v, a=w.a, b=w.b, o=w.out) | (dict(g=w.z) if c.output_gate else {})
    named: dict[str, Any] = {f"{name}_proj.weight": x.T for name, x in matrices.items()}
    named |= parameters.named_convolutions("qkv", w.conv)
    named |= {"o_norm.weight": w.norm, "decay": w.decay, "D": w.skip}
    return named | {"A_log": w.A_log, "dt_bias": w.dt_bias}


def _mix(x, w: CombaWeights, config: config.CombaConfig, run: running.Run) -> tuple[jax.Array, caches.Cache]:
    """Return the output of Comba for hidden states, and its cache after them.

    For training, prefill and decode. In every value head::

        q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))      channel by channel over the last W tokens
        p       = sigmoid(decay) k
        g, beta = -exp(A_log) softplus(W_a x + dt_bias), sigmoid(W_b x)
        o       = Comba(q - skip p, k, v, p, g, beta), with queries, keys and erase keys of unit length
        y       = W_out (rms_norm(o) sigmoid(W_z x)), or without the gate

    Accuracy: with random weights 1e-5 relative to the same equations in float64.
    Cost: 2 B T D (2 H K + 3 HV V + 2 HV) flops for the projections, and the cost of the operator.
    Source: Hu et al., Comba (2025), as in flash-linear-attention.
    """
    projected = [running.project(x, weight) for weight in (w.q, w.k, w.v)]
    (q, k, v), conv = running.convolve_heads(run, config.heads, projected, w.conv)
    by_key_head = lambda y: y.astype(jnp.float32)[None, None, :, None]
    p = by_key_head(jax.nn.sigmoid(w.decay)) * k.astype(jnp.float32)
    q = (q.astype(jnp.float32) - by_key_head(w.skip) * p).astype(q.dtype)
    o, state = run.operate(
        _OPERATORS, q, k, v, p.astype(k.dtype), running.project(x, w.a), running.project(x, w.b),
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=w.A_log, dt_bias=w.dt_bias,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    z = running.project(x, w.z) if config.output_gate else None
    y = norm.norm_heads(run, o, z, w.norm, activation="sigmoid", eps=config.eps)
    return running.project_out(y, w.out, x), caches.Cache(conv, state)


LAYER = layer.Definition("comba_layer", config.CombaConfig, CombaWeights, _split, _init, _load, _save, ("comba",), _mix)
