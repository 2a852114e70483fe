"""Kimi delta attention, the layer of Kimi-Linear, Kimi-K3 and Ling 3.0."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters
from chunkwise.layers.mixer import mixing, running
from chunkwise.pipeline import chunk_kda, ragged_kda, recurrent_kda

_OPERATORS = running.Operators(chunk_kda, recurrent_kda, ragged_kda)


class KimiDeltaAttentionWeights(NamedTuple):
    """The weights of `kimi_delta_attention`.

    Attributes:
      q, k, v: projections [D, H K], [D, H K], [D, HV V], head after head.
      f, z: projections of the decay and of the norm's gate, as tuples of factors: [D, HV K] and [D, HV V]; or with a
        rank [D, R], [R, HV K] and [D, R], [R, HV V], where z may still be [D, HV V].
      b: projection [D, HV], of beta.
      conv: weights of the convolutions of q, k and v, [H K, W], [H K, W], [HV V, W], the oldest token first.
      A_log, dt_bias: [HV], [HV, K], float32.
      norm: [V].
      out: [HV V, D].
      z_bias: [HV V]; nothing without a bias.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    f: tuple[jax.Array, ...]
    z: tuple[jax.Array, ...]
    b: jax.Array
    conv: tuple[jax.Array, ...]
    A_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: jax.Array
    z_bias: jax.Array | tuple[()] = ()


def _ranks(config: config.KimiDeltaAttentionConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the projections of the decay and of the norm's gate: one each, or none for one matrix."""
    ranks = () if config.R is None else (config.R,)
    return ranks, () if config.full_rank_gate else ranks


# What flash-linear-attention's names of factors are in Kimi-Linear.
_OF_FLA = {(name, i): end for name in "fg" for i, end in enumerate("ab")}


def _names(name: str, ranks: tuple[int, ...]) -> list[str]:
    """Return the names of the factors of a projection in a checkpoint."""
    return [f"{name}_{end}" for end in (("a_proj", "b_proj") if ranks else ("proj",))]


def _split(config: config.KimiDeltaAttentionConfig) -> dict[str, Any]:
    f, z = (("..",) * len(ranks) + (".n",) for ranks in _ranks(config))
    return dict(
        q=".h", k=".h", v=".n", f=f, z=z, b=".n", conv=("h.", "h.", "n."), A_log="n", dt_bias="n.",
        norm=".", out="n.", z_bias="n" if config.gate_bias else (),
    )  # fmt: skip


def _init(new: parameters.Initial, c: config.KimiDeltaAttentionConfig) -> KimiDeltaAttentionWeights:
    """Return random weights of a layer that is to be trained.

    A projection keeps the size of its input; the rate exp(A_log) is uniform from 1 to 16, and steps are from 0.001 to
    0.1, as in flash-linear-attention.
    """
    q, k, v = c.channels
    decay, gate = _ranks(c)
    return KimiDeltaAttentionWeights(
        q=new.matrix(c.D, q), k=new.matrix(c.D, k), v=new.matrix(c.D, v), f=new.factors(c.D, *decay, c.HV * c.K),
        z=new.factors(c.D, *gate, v), b=new.matrix(c.D, c.HV), conv=tuple(new.convolution(n, c.W) for n in c.channels),
        A_log=new.log_decay(c.HV), dt_bias=new.step_bias(c.HV, c.K), norm=new.ones(c.V), out=new.matrix(v, c.D),
        z_bias=jnp.zeros(v, new.dtype) if c.gate_bias else (),
    )  # fmt: skip


def _load(found: parameters.Checkpoint, c: config.KimiDeltaAttentionConfig) -> KimiDeltaAttentionWeights:
    """Return the weights of a layer of a checkpoint, in its types, with A_log and dt_bias in float32.

    The names are the names of Kimi-Linear and Kimi-K3, which have a rank, and of Ling 3.0, which has none, both as
    published and as transformers saves them; or those of flash-linear-attention. A_log may be [1, 1, HV, 1], and may be
    padded with zeros, as in Kimi-K3.
    The projections q, k and v may be one matrix, "qkv_proj".
    """
    found.rename("forget_gate.", "")
    found.rename("dense", "o_proj")
    for (name, i), end in _OF_FLA.items():
        found.rename(f"{name}_proj.{i}", f"{name}_{end}_proj")
    v = c.channels[2]
    decay, gate = _ranks(c)
    return KimiDeltaAttentionWeights(
        *found.matrices(("q", "k", "v"), c.D, c.channels),
        f=found.factors(_names("f", decay), c.D, *decay, c.HV * c.K),
        z=found.factors(_names("g", gate), c.D, *gate, v),
        b=found.matrix("b_proj", c.D, c.HV), conv=found.convolutions(("q", "k", "v"), c.channels, c.W),
        A_log=found.float32("A_log", c.HV, padded=True), dt_bias=found.float32("dt_bias", c.HV, c.K),
        norm=found.read("o_norm", c.V), out=found.matrix("o_proj", v, c.D),
        z_bias=found.read(f"{_names('g', gate)[-1]}.bias", v) if c.gate_bias else (),
    )  # fmt: skip


def _save(w: KimiDeltaAttentionWeights, c: config.KimiDeltaAttentionConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a layer for a checkpoint of Kimi-Linear, Kimi-K3, Ling 3.0 or GLM-5-next."""
    ling = model.startswith("bailing")
    matrices = {"q_proj": w.q, "k_proj": w.k, "v_proj": w.v, "b_proj": w.b, "dense" if ling else "o_proj": w.out}
    decay, gate = _ranks(c)
    for names, factors in ((_names("f", decay), w.f), (_names("g", gate), w.z)):
        matrices |= dict(zip(names, factors, strict=True))
    named: dict[str, Any] = {f"{name}.weight": x.T for name, x in matrices.items()}
    named |= parameters.named_convolutions("qkv", w.conv)
    named |= {f"{_names('g', gate)[-1]}.bias": w.z_bias} if c.gate_bias else {}
    if model == "kda":
        of_fla = {f"{name}_{end}_proj": f"{name}_proj.{i}" for (name, i), end in _OF_FLA.items()}
        named = {
            of_fla.get(name.partition(".")[0], name.partition(".")[0]) + name[name.index(".") :]: y
            for name, y in named.items()
        }
    A_log = w.A_log.reshape(1, 1, -1, 1) if model.startswith("kimi") else w.A_log
    return named | {"A_log": A_log, "dt_bias": w.dt_bias.reshape(-1), "o_norm.weight": w.norm}


def _mix(
    x, w: KimiDeltaAttentionWeights, config: config.KimiDeltaAttentionConfig, run: running.Run
) -> tuple[jax.Array, caches.Cache]:
    """Return the output of Kimi delta attention for hidden states, and its cache after them.

    For training, prefill and decode. In every value head::

        q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))      channel by channel over the last W tokens
        g       = -exp(A_log) softplus(W_f x + dt_bias), or lower_bound sigmoid(exp(A_log) (W_f x + dt_bias))
        beta    = sigmoid(W_b x), or twice that
        o       = KDA(q, k, v, g, beta), with q and k of unit length
        y       = W_out (rms_norm(o) sigmoid(W_z x))

    Accuracy: with random weights 1e-5 relative to transformers' layers in float32.
    Cost: 2 B T D (2 H K + 2 HV V + HV) flops for the projections, with more for factors, and the cost of the operator.
    Source: Kimi Team, Kimi Linear (2025); Ling 3.0 has the second formula for g.
    """
    projected = tuple(running.project(x, weight) for weight in (w.q, w.k, w.v))
    f, z, b = (running.project(x, *factors) for factors in (w.f, w.z, (w.b,)))
    z = running.with_bias(z, w.z_bias)
    mixer = mixing.delta_rule(
        _OPERATORS, activation="sigmoid", eps=config.eps, lower_bound=config.lower_bound,
        allow_neg_eigval=config.allow_neg_eigval,
    )  # fmt: skip
    y, cache = mixing.way(run, mixer, x)(run, config, (projected, w.conv, f, b, z, w.norm, w.A_log, w.dt_bias))
    return running.project_out(y, w.out, x), cache


LAYER = layer.Definition(
    "kimi_delta_attention", config.KimiDeltaAttentionConfig, KimiDeltaAttentionWeights, _split, _init, _load, _save,
    ("kimi_linear", "kimi_k3", "bailing_hybrid", "bailing_moe_v3", "bailing_moe_v3_vl", "glm5_next", "kda"), _mix,
)  # fmt: skip
