"""Kimi delta attention, the layer of Kimi-Linear, Kimi-K3 and Ling 3.0."""

from typing import Any, NamedTuple

import jax

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters, table
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


# The names of factors in flash-linear-attention, and of the last projection in Ling 3.0.
_OF_FLA = {f"{name}_{end}_proj": f"{name}_proj.{i}" for name in "fg" for i, end in enumerate("ab")}
_OF_LING = {"o_proj": "dense"}


def _names(name: str, ranks: tuple[int, ...]) -> list[str]:
    """Return the names of the factors of a projection in a checkpoint."""
    return [f"{name}_{end}" for end in (("a_proj", "b_proj") if ranks else ("proj",))]


def _table(c: config.KimiDeltaAttentionConfig) -> dict[str, Any]:
    """Return the table of the weights.

    A projection keeps the size of its input; the rate exp(A_log) is uniform from 1 to 16, and steps are from 0.001 to
    0.1, as in flash-linear-attention.
    """
    v = c.HV * c.V
    # The ranks of the projections of the decay and of the norm's gate; a projection without one is a matrix.
    decay = () if c.R is None else (c.R,)
    gate = () if c.full_rank_gate else decay
    z = table.factors(_names("g", gate), ".n", c.D, *gate, v)
    return dict(
        **table.projections(c), f=table.factors(_names("f", decay), ".n", c.D, *decay, c.HV * c.K), z=z,
        b=table.matrix("b_proj", ".n", c.D, c.HV), conv=table.convolutions(c), **table.rates(1.0, "n", c.HV, c.K),
        norm=table.norm("o_norm", ".", c.V), out=table.matrix("o_proj", "n.", v, c.D),
        z_bias=table.bias(z[-1]) if c.gate_bias else (),
    )  # fmt: skip


def _read(found: parameters.Checkpoint, weights: Any, c: config.KimiDeltaAttentionConfig) -> None:
    """Give the arrays of a checkpoint the names of the table.

    The names are the names of Kimi-Linear and Kimi-K3, which have a rank, and of Ling 3.0, which has none, both as
    published and as transformers saves them; or those of flash-linear-attention. A_log may be [1, 1, HV, 1], and may be
    padded with zeros, as in Kimi-K3.
    The projections q, k and v may be one matrix, "qkv_proj".
    """
    found.rename("forget_gate.", "")
    found.names = _OF_LING if _OF_LING["o_proj"] in found else {}
    for name, of_fla in _OF_FLA.items():
        found.rename(of_fla, name)
    A_log: Any = weights.A_log
    found.parts["A_log"] = found.read("A_log", *A_log.shape, dims=False, padded=True)


def _write(named: dict[str, Any], c: config.KimiDeltaAttentionConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a checkpoint of Kimi-Linear, Kimi-K3, Ling 3.0 or GLM-5-next."""
    if model.startswith("kimi"):
        named["A_log"] = named["A_log"].reshape(1, 1, -1, 1)
    return table.renamed(named, _OF_LING if model.startswith("bailing") else _OF_FLA if model == "kda" else {})


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
    "kimi_delta_attention", config.KimiDeltaAttentionConfig, KimiDeltaAttentionWeights, _table,
    ("kimi_linear", "kimi_k3", "bailing_hybrid", "bailing_moe_v3", "bailing_moe_v3_vl", "glm5_next", "kda"), _mix,
    _read, _write,
)  # fmt: skip
