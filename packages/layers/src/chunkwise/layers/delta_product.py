"""Gated DeltaProduct, the layer whose tokens take several steps of the delta rule each; DeltaNet with one step."""

from typing import Any, NamedTuple

import jax

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters, table
from chunkwise.layers.mixer import norm, running
from chunkwise.pipeline import chunk_gated_delta_product, ragged_gated_delta_product, recurrent_gated_delta_product
from chunkwise.shared.kernels import interleaved

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


def _table(c: config.GatedDeltaProductConfig) -> dict[str, Any]:
    """Return the table of the weights.

    A projection keeps the size of its input; the rate exp(A_log) is uniform from 0 to 16, and steps are from 0.001 to
    0.1, as in flash-linear-attention.
    """
    v, n, gated = c.HV * c.V, range(c.num_householder), c.forget_gate
    several = lambda name, letters, columns: tuple(table.matrix(f"{name}_{i}", letters, c.D, columns) for i in n)
    return dict(
        q=table.matrix("q_proj", ".h", c.D, c.H * c.K), k=several("k_proj", ".h", c.H * c.K),
        v=several("v_proj", ".n", v), b=several("b_proj", ".n", c.HV),
        z=table.matrix("g_proj", ".n", c.D, v) if c.output_gate else (),
        a=table.matrix("a_proj", ".n", c.D, c.HV) if gated else (),
        conv=table.convolutions(c, ("q_conv1d", *(f"{name}_conv1d_{i}" for name in "kv" for i in n))),
        **(table.rates(1e-4, "n", c.HV) if gated else dict(A_log=(), dt_bias=())), norm=table.norm("o_norm", ".", c.V),
        out=table.matrix("o_proj", "n.", v, c.D),
    )  # fmt: skip


def _whole(n: int) -> dict[str, list[str]]:
    """Return the weights of n steps that one array of a checkpoint has, by its name."""
    names = ("k_proj", "v_proj", "b_proj", "k_conv1d", "v_conv1d")
    return {name: [f"{name}_{i}" for i in range(n)] for name in names}


def _read(found: parameters.Checkpoint, weights: Any, c: config.GatedDeltaProductConfig) -> None:
    """Divide the arrays of a checkpoint.

    The layer GatedDeltaProduct of flash-linear-attention has these names. Its matrices have the n steps of a token one
    after the other.
    """
    whole = _whole(c.num_householder)
    found.names = table.name_of_whole(whole)
    table.divide(found, weights, whole)


def _write(named: dict[str, Any], c: config.GatedDeltaProductConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a checkpoint of flash-linear-attention."""
    return table.joined(named, _whole(c.num_householder))


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
    # An array of all steps would be a copy: the kernels put them together.
    k, v, beta = (interleaved.in_turn(*y) for y in (steps[:n], steps[n:], b))
    gate = dict(use_gate_in_kernel=True, A_log=w.A_log, dt_bias=w.dt_bias) if config.forget_gate else {}
    o, state = run.operate(
        _OPERATORS, q, k, v, running.project(x, w.a) if config.forget_gate else None, beta, n,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=config.allow_neg_eigval, **gate,
    )  # fmt: skip
    z = running.project(x, w.z) if config.output_gate else None
    y = norm.norm_heads(run, o, z, w.norm, activation="silu", eps=config.eps)
    return running.project_out(y, w.out, x), caches.Cache(conv, state)


LAYER = layer.Definition(
    "gated_delta_product", config.GatedDeltaProductConfig, GatedDeltaProductWeights, _table,
    ("gated_deltaproduct", "delta_net"), _mix, _read, _write,
)  # fmt: skip
