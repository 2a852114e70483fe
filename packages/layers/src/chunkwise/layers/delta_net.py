"""The gated DeltaNet of Qwen3-Next, Qwen3.5 and OLMo-hybrid."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters, table
from chunkwise.layers.mixer import mixing, running
from chunkwise.pipeline import chunk_gated_delta_rule, ragged_gated_delta_rule, recurrent_gated_delta_rule

_OPERATORS = running.Operators(chunk_gated_delta_rule, recurrent_gated_delta_rule, ragged_gated_delta_rule)


class GatedDeltaNetWeights(NamedTuple):
    """The weights of `gated_delta_net`.

    Attributes:
      q, k, v, z: projections [D, H K], [D, H K], [D, HV V], [D, HV V], head after head.
      a, b: projections [D, HV], of the decay and of beta.
      conv: weights of the convolutions of q, k and v, [H K, W], [H K, W], [HV V, W], the oldest token first.
      A_log, dt_bias: [HV], float32.
      norm: [V].
      out: [HV V, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array
    a: jax.Array
    b: jax.Array
    conv: tuple[jax.Array, ...]
    A_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: jax.Array


def _table(c: config.GatedDeltaNetConfig) -> dict[str, Any]:
    """Return the table of the weights, with the names of OLMo-hybrid and flash-linear-attention.

    A projection keeps the size of its input; the rate exp(A_log) is uniform up to 16, and steps are from 0.001 to 0.1,
    as in flash-linear-attention.
    """
    v = c.HV * c.V
    return dict(
        **table.projections(c), z=table.matrix("g_proj", ".n", c.D, v), a=table.matrix("a_proj", ".n", c.D, c.HV),
        b=table.matrix("b_proj", ".n", c.D, c.HV), conv=table.convolutions(c), **table.rates(1e-3, "n", c.HV),
        norm=table.norm("o_norm", ".", c.V), out=table.matrix("o_proj", "n.", v, c.D),
    )  # fmt: skip


# What the other models call the weights, and which of them they have in one array.
_NAMES = dict(a_proj="in_proj_a", b_proj="in_proj_b", g_proj="in_proj_z", o_norm="norm", o_proj="out_proj")
_QKV, _BA = table.QKV["qkv_proj"], {"in_proj_ba": ("b_proj", "a_proj")}
_BY_HEAD = {"in_proj_qkvz": (*_QKV, "g_proj")} | _BA
_LARA, _QWEN = {"in_proj": (*_QKV, "g_proj", "b_proj", "a_proj")}, {"in_proj_qkv": _QKV}


def _read(found: parameters.Checkpoint, weights: Any, c: config.GatedDeltaNetConfig) -> None:
    """Give the arrays of a checkpoint the names of the table.

    Qwen3-Next has q, k, v and z of a key head side by side in one matrix, and b and a in another ("in_proj_qkvz",
    "in_proj_ba"). Qwen3.5 has q, k and v in one matrix, head after head, and Lara-mini has all six in one. OLMo-hybrid
    and flash-linear-attention have a matrix for each of them. Of the matrices that vLLM fuses, "qkv_proj" is read, and
    "in_proj_ba" beside "in_proj_qkv". vLLM's "in_proj_qkvz" of Qwen3.5 is not read, because its order differs from
    Qwen3-Next's.
    """
    found.rename("out_norm", "norm")
    if "out_proj" in found:
        found.names = _NAMES
    if "in_proj_qkvz" in found:
        table.divide(found, weights, _BY_HEAD, c.H)
        found.names = found.names | dict(a_proj="in_proj_ba", b_proj="in_proj_ba")
    table.divide(found, weights, {**_LARA, **_QWEN, **_BA, **table.CONVOLUTIONS})
    # transformers saves three parts of what OLMo-hybrid has, as torch.chunk makes them, whatever channels are queries,
    # keys and values: only the last one may be smaller.
    names, channels = table.CONVOLUTIONS["conv1d"], c.channels
    part = -(-sum(channels) // 3)
    last = sum(channels) - 2 * part
    if found.rows(names[0]) == part != channels[0] and last > 0:
        parts = [found.read(name, n, 1, c.W) for name, n in zip(names, (part, part, last), strict=True)]
        found.parts |= zip(names, parameters.split(jnp.concatenate(parts), channels, axis=0), strict=True)


def _write(named: dict[str, Any], c: config.GatedDeltaNetConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a checkpoint of one of the models."""
    if model in ("olmo_hybrid", "gated_deltanet"):
        return named
    whole, heads = {"qwen3_next": (_BY_HEAD, c.H), "lara_mini": (_LARA, 1)}.get(model, (_QWEN, 1))
    named = table.joined(table.joined(named, whole, heads), table.CONVOLUTIONS)
    return table.renamed(named, _NAMES | (dict(o_norm="out_norm") if model == "lara_mini" else {}))


def _mix(
    x, w: GatedDeltaNetWeights, config: config.GatedDeltaNetConfig, run: running.Run
) -> tuple[jax.Array, caches.Cache]:
    """Return the output of a gated DeltaNet for hidden states, and its cache after them.

    For training, prefill and decode. In every value head::

        q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))      channel by channel over the last W tokens
        g       = -exp(A_log) softplus(W_a x + dt_bias)
        beta    = sigmoid(W_b x), or twice that
        o       = gated delta rule(q, k, v, g, beta), with q and k of unit length
        y       = W_out (rms_norm(o) silu(W_z x)), or sigmoid in the place of the last silu

    Accuracy: with random weights 1e-5 relative to transformers' layers in float32.
    Cost: 2 B T D (2 H K + 3 HV V + 2 HV) flops for the projections, and the cost of the operator.
    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024), as in Qwen3-Next.
    """
    projected = tuple(running.project(x, weight) for weight in (w.q, w.k, w.v))
    z, a, b = (running.project(x, weight) for weight in (w.z, w.a, w.b))
    operators = _OPERATORS
    if config.disable_recompute:
        operators = operators._replace(chunk=functools.partial(operators.chunk, disable_recompute=True))
    mixer = mixing.delta_rule(
        operators, activation=config.activation, eps=config.eps, allow_neg_eigval=config.allow_neg_eigval
    )
    arrays = projected, w.conv, a, b, z, w.norm, w.A_log, w.dt_bias
    y, cache = mixing.way(run, mixer, x)(run, config, arrays)
    return running.project_out(y, w.out, x), cache


LAYER = layer.Definition(
    "gated_delta_net", config.GatedDeltaNetConfig, GatedDeltaNetWeights, _table,
    ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "lara_mini", "olmo_hybrid", "gated_deltanet"), _mix, _read,
    _write,
)  # fmt: skip
