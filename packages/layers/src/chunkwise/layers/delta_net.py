"""The gated DeltaNet of Qwen3-Next, Qwen3.5 and OLMo-hybrid."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters
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


def _split(config: config.GatedDeltaNetConfig) -> dict[str, Any]:
    return dict(
        q=".h", k=".h", v=".n", z=".n", a=".n", b=".n", conv=("h.", "h.", "n."), A_log="n", dt_bias="n", norm=".",
        out="n.",
    )  # fmt: skip


def _init(new: parameters.Initial, c: config.GatedDeltaNetConfig) -> GatedDeltaNetWeights:
    """Return random weights of a layer that is to be trained.

    A projection keeps the size of its input; the rate exp(A_log) is uniform up to 16, and steps are from 0.001 to 0.1,
    as in flash-linear-attention.
    """
    q, k, v = c.channels
    return GatedDeltaNetWeights(
        q=new.matrix(c.D, q), k=new.matrix(c.D, k), v=new.matrix(c.D, v), z=new.matrix(c.D, v),
        a=new.matrix(c.D, c.HV), b=new.matrix(c.D, c.HV), conv=tuple(new.convolution(n, c.W) for n in c.channels),
        A_log=new.log_decay(c.HV, least=1e-3), dt_bias=new.step_bias(c.HV), norm=new.ones(c.V), out=new.matrix(v, c.D),
    )  # fmt: skip


def _load(found: parameters.Checkpoint, c: config.GatedDeltaNetConfig) -> GatedDeltaNetWeights:
    """Return the weights of a layer of a checkpoint, in its types, with A_log and dt_bias in float32.

    Qwen3-Next has q, k, v and z of a key head side by side in one matrix, and b and a in another ("in_proj_qkvz",
    "in_proj_ba"). Qwen3.5 has q, k and v in one matrix, head after head, and Lara-mini has all six in one. OLMo-hybrid
    and flash-linear-attention have a matrix for each of them. Of the matrices that vLLM fuses, "qkv_proj" is read, and
    "in_proj_ba" beside "in_proj_qkv". vLLM's "in_proj_qkvz" of Qwen3.5 is not read, because its order differs from
    Qwen3-Next's.
    """
    q, k, v = c.channels
    norm, out = ("norm", "out_proj") if "out_proj" in found else ("o_norm", "o_proj")
    found.rename("out_norm", "norm")
    if "in_proj_qkvz" in found:
        group = c.HV // c.H
        parts = found.read("in_proj_qkvz", 2 * (q + v), c.D).reshape(c.H, -1, c.D)
        parts = parameters.split(parts, (c.K, c.K, group * c.V, group * c.V), axis=1)
        gates = jnp.split(found.read("in_proj_ba", 2 * c.HV, c.D).reshape(c.H, -1, c.D), 2, axis=1)
        projections = [x.reshape(-1, c.D).T for x in (*parts, gates[1], gates[0])]
    elif "in_proj" in found:
        sizes = q, k, v, v, c.HV, c.HV
        *projections, b, a = parameters.split(found.matrix("in_proj", c.D, sum(sizes)), sizes)
        projections += [a, b]
    elif "in_proj_qkv" in found:
        parts = parameters.split(found.matrix("in_proj_qkv", c.D, q + k + v), (q, k, v))
        z = found.matrix("in_proj_z", c.D, v)
        if "in_proj_ba" in found:
            b, a = jnp.split(found.matrix("in_proj_ba", c.D, 2 * c.HV), 2, axis=1)
        else:
            a, b = (found.matrix(f"in_proj_{name}", c.D, c.HV) for name in "ab")
        projections = [*parts, z, a, b]
    else:
        columns = dict(g=v, a=c.HV, b=c.HV)
        projections = [*found.matrices(("q", "k", "v"), c.D, c.channels)]
        projections += [found.matrix(f"{name}_proj", c.D, n) for name, n in columns.items()]
    return GatedDeltaNetWeights(
        *projections, conv=found.convolutions(("q", "k", "v"), c.channels, c.W), A_log=found.float32("A_log", c.HV),
        dt_bias=found.float32("dt_bias", c.HV), norm=found.read(norm, c.V), out=found.matrix(out, v, c.D),
    )  # fmt: skip


def _save(w: GatedDeltaNetWeights, c: config.GatedDeltaNetConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a layer for a checkpoint of one of the models."""
    q, k, v, z, a, b = (x.T for x in w[:6])
    named: dict[str, Any] = {"A_log": w.A_log, "dt_bias": w.dt_bias}
    if model in ("olmo_hybrid", "gated_deltanet"):
        named |= {f"{name}_proj.weight": x for name, x in dict(q=q, k=k, v=v, g=z, a=a, b=b).items()}
        named |= parameters.named_convolutions("qkv", w.conv)
        return named | {"o_norm.weight": w.norm, "o_proj.weight": w.out.T}
    named |= {"conv1d.weight": np.concatenate(w.conv)[:, None], "out_proj.weight": w.out.T}
    if model == "lara_mini":
        return named | {"out_norm.weight": w.norm, "in_proj.weight": np.concatenate([q, k, v, z, b, a])}
    named["norm.weight"] = w.norm
    if model == "qwen3_next":
        # The rows of a key head are side by side.
        by_head = lambda *parts: np.concatenate([x.reshape(c.H, -1, c.D) for x in parts], axis=1).reshape(-1, c.D)
        return named | {"in_proj_qkvz.weight": by_head(q, k, v, z), "in_proj_ba.weight": by_head(b, a)}
    named |= {f"in_proj_{name}.weight": x for name, x in dict(z=z, a=a, b=b).items()}
    return named | {"in_proj_qkv.weight": np.concatenate([q, k, v])}


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
    "gated_delta_net", config.GatedDeltaNetConfig, GatedDeltaNetWeights, _split, _init, _load, _save,
    ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "lara_mini", "olmo_hybrid", "gated_deltanet"), _mix,
)  # fmt: skip
