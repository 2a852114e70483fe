"""The mLSTM layer of xLSTM."""

from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters
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


def _split(config: config.MlstmLayerConfig) -> dict[str, Any]:
    return dict(q=".h", k=".h", v=".n", z=".n", i=".n", f=".n", i_bias="n", f_bias="n", norm="n", out="n.")


def _init(new: parameters.Initial, c: config.MlstmLayerConfig) -> MlstmLayerWeights:
    """Return random weights of a layer that is to be trained.

    A projection keeps the size of its input. The projections of gates are zeros; input gates begin at -10, and forget
    gates rise from 3 to 6 over the heads, as in xLSTM.
    """
    q, v = c.H * c.K, c.HV * c.V
    return MlstmLayerWeights(
        q=new.matrix(c.D, q), k=new.matrix(c.D, q), v=new.matrix(c.D, v), z=new.matrix(c.D, v),
        i=jnp.zeros((c.D, c.HV), new.dtype), f=jnp.zeros((c.D, c.HV), new.dtype),
        i_bias=jnp.full(c.HV, -10.0, new.dtype), f_bias=jnp.linspace(3.0, 6.0, c.HV).astype(new.dtype),
        norm=new.ones(v), out=new.matrix(v, c.D),
    )  # fmt: skip


def _load(found: parameters.Checkpoint, c: config.MlstmLayerConfig) -> MlstmLayerWeights:
    """Return the weights of a layer of a checkpoint of xLSTM, in its types, whether its matrices are fused or not."""
    q, v, gates = c.H * c.K, c.HV * c.V, ("igate_preact", "fgate_preact")
    names = dict(q=q, k=q, v=v, ogate_preact=v)
    if "qkv_opreact" in found:
        matrices = parameters.split(found.matrix("qkv_opreact", c.D, 2 * q + 2 * v), [*names.values()])
        projections = jnp.split(found.matrix("ifgate_preact", c.D, 2 * c.HV), 2, axis=1)
        biases = jnp.split(found.read("ifgate_preact.bias", 2 * c.HV), 2)
    else:
        matrices = [found.matrix(name, c.D, n) for name, n in names.items()]
        projections = [found.matrix(name, c.D, c.HV) for name in gates]
        biases = [found.read(f"{name}.bias", c.HV) for name in gates]
    return MlstmLayerWeights(
        *matrices, *projections, *biases, norm=found.read("multihead_norm", v), out=found.matrix("out_proj", v, c.D)
    )


def _save(w: MlstmLayerWeights, c: config.MlstmLayerConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a layer for a checkpoint of xLSTM, whose `weight_mode` is "single"."""
    matrices = dict(q=w.q, k=w.k, v=w.v, ogate_preact=w.z, igate_preact=w.i, fgate_preact=w.f, out_proj=w.out)
    named: dict[str, Any] = {f"{name}.weight": x.T for name, x in matrices.items()}
    return named | {
        "igate_preact.bias": w.i_bias, "fgate_preact.bias": w.f_bias, "multihead_norm.weight": w.norm,
    }  # fmt: skip


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
    "mlstm_layer", config.MlstmLayerConfig, MlstmLayerWeights, _split, _init, _load, _save, ("xlstm",), _mix
)
