"""Comba, the layer whose delta rule erases by a key of its own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import table
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


def _table(c: config.CombaConfig) -> dict[str, Any]:
    """Return the table of the weights.

    A projection keeps the size of its input; the rate exp(A_log) is uniform up to 16, steps are from 0.001 to 0.1, and
    `decay` and `skip` are 1, as in flash-linear-attention.
    """
    v = c.HV * c.V
    return dict(
        **table.projections(c), z=table.matrix("g_proj", ".n", c.D, v) if c.output_gate else (),
        a=table.matrix("a_proj", ".n", c.D, c.HV), b=table.matrix("b_proj", ".n", c.D, c.HV),
        conv=table.convolutions(c), decay=table.ones("decay", "h", c.H), skip=table.ones("D", "h", c.H),
        **table.rates(1e-3, "n", c.HV), norm=table.norm("o_norm", ".", c.V), out=table.matrix("o_proj", "n.", v, c.D),
    )  # fmt: skip


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


LAYER = layer.Definition("comba_layer", config.CombaConfig, CombaWeights, _table, ("comba",), _mix)
