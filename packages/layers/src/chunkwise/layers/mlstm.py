"""The mLSTM layer of xLSTM."""

from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters, table
from chunkwise.layers.mixer import norm, running
from chunkwise.pipeline import chunk_mlstm, recurrent_mlstm


def _no_step(*arrays: object, **options: object) -> NoReturn:
    raise NotImplementedError("mlstm_layer has no serving step, because a slot of a pool is one array.")


_OPERATORS = running.Operators(chunk_mlstm, recurrent_mlstm, _no_step)


class MlstmLayerWeights(NamedTuple):
    """The weights of `mlstm_layer`.

    Attributes:
      q, k, v, z: projections [D, H K], [D, H K], [D, HV V], [D, HV V], head after head.
      i, f: projections of the input gates and of the forget gates, [D, HV].
      i_bias, f_bias: [HV].
      norm: [HV V], of a layer norm of every head.
      out: [HV V, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array
    i: jax.Array
    f: jax.Array
    i_bias: jax.Array
    f_bias: jax.Array
    norm: jax.Array
    out: jax.Array


def _table(c: config.MlstmLayerConfig) -> dict[str, Any]:
    """Return the table of the weights.

    A projection keeps the size of its input. The projections of gates are zeros; input gates begin at -10, and forget
    gates rise from 3 to 6 over the heads, as in xLSTM.
    """
    q, v = c.H * c.K, c.HV * c.V
    i, f = (table.Matrix(f"{name}_preact", ".n", (c.D, c.HV)) for name in ("igate", "fgate"))
    rising = lambda new, n: jnp.linspace(3.0, 6.0, n).astype(new.dtype)
    return dict(
        q=table.matrix("q", ".h", c.D, q), k=table.matrix("k", ".h", c.D, q), v=table.matrix("v", ".n", c.D, v),
        z=table.matrix("ogate_preact", ".n", c.D, v), i=i, f=f,
        i_bias=table.bias(i, lambda new, n: new.full(n, value=-10.0)), f_bias=table.bias(f, rising),
        norm=table.norm("multihead_norm", "n", v), out=table.matrix("out_proj", "n.", v, c.D),
    )  # fmt: skip


def _read(found: parameters.Checkpoint, weights: Any, c: config.MlstmLayerConfig) -> None:
    """Divide the arrays of a checkpoint.

    The matrices of xLSTM may be fused.
    """
    gates = "igate_preact", "fgate_preact"
    whole = {"qkv_opreact": ("q", "k", "v", "ogate_preact"), "ifgate_preact": gates}
    table.divide(found, weights, whole | {"ifgate_preact.bias": [f"{name}.bias" for name in gates]})


def _write(named: dict[str, Any], c: config.MlstmLayerConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a checkpoint.

    Its `weight_mode` is "single".
    """
    return named


def _mix(
    x, w: MlstmLayerWeights, config: config.MlstmLayerConfig, run: running.Run
) -> tuple[jax.Array, caches.Cache]:  # fmt: skip
    """Return the output of the mLSTM layer for hidden states, and its cache after them.

    For training, prefill and decode. In value head h::

        q, k, v = W_q x, W_k x, W_v x
        i, f    = cap(W_i x + i_bias), cap(W_f x + f_bias)                      cap(a) = c tanh(a / c), in float32
        o       = mLSTM(q, k, v, i, f)
        y       = W_out (layer_norm(o) sigmoid(W_z x))                          one norm for every head

    The state in the cache is an `MlstmState`, and there are no inputs of convolutions.

    Accuracy: with random weights 1e-5 relative to transformers' layer in float32.
    Cost: 2 B T D (2 H K + 3 HV V + 2 HV) flops for the projections, and the cost of the operator.
    Source: Beck et al., xLSTM 7B (2025), as in transformers.
    """
    q, k, v = (
        running.by_head(running.project(x, weight), count)
        for weight, count in zip((w.q, w.k, w.v), config.heads, strict=True)
    )
    z, *gates = (running.project(x, weight) for weight in (w.z, w.i, w.f))
    biases = w.i_bias, w.f_bias
    gates = [running.with_bias(y.astype(jnp.float32), b) for y, b in zip(gates, biases, strict=True)]
    if (cap := config.gate_soft_cap) is not None:
        gates = [cap * jnp.tanh(y / cap) for y in gates]
    o, state = run.operate(_OPERATORS, q, k, v, *gates, eps=config.divisor_eps)
    # A layer norm is the RMSNorm of what is left without the mean.
    centred = o.astype(jnp.float32) - jnp.mean(o.astype(jnp.float32), axis=-1, keepdims=True)
    y = norm.norm_groups(
        run, centred.astype(o.dtype), z, w.norm, config.HV, activation="sigmoid", norm_before_gate=True, eps=config.eps
    )
    return running.project_out(y, w.out, x), caches.Cache((), state)


LAYER = layer.Definition(
    "mlstm_layer", config.MlstmLayerConfig, MlstmLayerWeights, _table, ("xlstm",), _mix, _read, _write
)
