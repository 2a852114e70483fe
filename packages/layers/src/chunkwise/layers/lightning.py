"""Lightning attention, the layer of MiniMax, Ling 2.x and MiniCPM-SALA."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters, table
from chunkwise.layers.mixer import mixing, norm, rotary, running
from chunkwise.pipeline import chunk_simple_gla, ragged_simple_gla, recurrent_simple_gla
from chunkwise.shared.call import checks
from chunkwise.shared.serving.decode.records import Decodes, DecodeStatic

_OPERATORS = running.Operators(chunk_simple_gla, recurrent_simple_gla, ragged_simple_gla)
_MINIMAX, _BAILING, _SALA = "minimax", "bailing_moe_linear", "minicpm_sala"


# What models call the weights, where MiniCPM-SALA has other names.
_NAMES: dict[str, dict[str, str]] = {
    _MINIMAX: dict(z_proj="output_gate", o_norm="norm", o_proj="out_proj") | table.name_of_whole(table.QKV),
    _BAILING: dict(
        z_proj="g_proj", o_norm="g_norm", o_proj="dense", q_norm="query_layernorm", k_norm="key_layernorm"
    ),
    _SALA: {},
}  # fmt: skip
_NAMES["bailing_hybrid"] = _NAMES[_BAILING]
_WITH_NORMS = tuple(model for model in _NAMES if model != _MINIMAX)
_WHOLE = {"query_key_value": table.QKV["qkv_proj"]}


class LightningAttentionWeights(NamedTuple):
    """The weights of `lightning_attention`.

    Attributes:
      q, k, v, z: projections [D, H K], [D, H K], [D, HV V], [D, HV V], head after head; z is nothing without a gate.
      norm: [HV V], of the norms of the output; nothing without them.
      out: [HV V, D].
      qk_norm: of the norms of queries and of keys, two of [K]; nothing without them.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array | tuple[()]
    norm: jax.Array | tuple[()]
    out: jax.Array
    qk_norm: tuple[jax.Array, ...] = ()


def _table(c: config.LightningAttentionConfig) -> dict[str, Any]:
    """Return the table of the weights, with the names of MiniCPM-SALA.

    A projection keeps the size of its input.
    """
    v = c.HV * c.V
    return dict(
        **table.projections(c), z=table.matrix("z_proj", ".n", c.D, v) if c.gate else (),
        norm=() if c.groups is None else table.norm("o_norm", "n", v), out=table.matrix("o_proj", "n.", v, c.D),
        qk_norm=tuple(table.norm(f"{x}_norm", ".", c.K) for x in "qk") if c.qk_norm else (),
    )  # fmt: skip


def _read(found: parameters.Checkpoint, weights: Any, c: config.LightningAttentionConfig) -> None:
    """Give the arrays of a checkpoint the names of the table.

    It is one of MiniMax, Ling or MiniCPM-SALA, with H = HV.
    """
    # These programs save what the layer here computes from the config.
    found.ignore("slope_rate", "query_decay", "key_decay", "diagonal_decay", "slope")
    model = _BAILING if "dense" in found or "query_key_value" in found else _SALA if "q_proj" in found else _MINIMAX
    found.names = _NAMES[model]
    if model == _MINIMAX:
        # The matrix has queries, keys and values of a head side by side.
        table.divide(found, weights, table.QKV, c.H)
    table.divide(found, weights, _WHOLE)


def _write(named: dict[str, Any], c: config.LightningAttentionConfig, model: str) -> dict[str, Any]:
    """Return the arrays of a checkpoint of MiniMax, Ling or MiniCPM-SALA, all of which have H = HV."""
    names = _NAMES.get(model, _NAMES[_MINIMAX])
    fits = names is not _NAMES[_MINIMAX] or not c.qk_norm
    checks.check(fits, f"`model` must be one of {_WITH_NORMS}, as queries and keys have norms; got {model!r}.")
    if names is _NAMES[_MINIMAX]:
        named = table.joined(named, table.QKV, c.H)
    elif model != _SALA:
        named = table.joined(named, _WHOLE)
    return table.renamed(named, names)


def _decay(c: config.LightningAttentionConfig) -> jax.Array:
    """Return the log decay of every head [HV], in nats."""
    factor = 1 - c.layer / (c.layers - 1 + 1e-5) + 1e-5 if c.slope_factor is None else c.slope_factor
    return -(2.0 ** (-8.0 * jnp.arange(1, c.HV + 1, dtype=jnp.float32) / c.HV)) * factor


def _mix(
    x, w: LightningAttentionWeights, config: config.LightningAttentionConfig, run: running.Run
) -> tuple[jax.Array, caches.Cache]:
    """Return the output of lightning attention for hidden states, and its cache after them.

    For training, prefill and decode. In value head h, counted from 0, of MiniMax::

        q, k, v = silu(W_q x), silu(W_k x), silu(W_v x)
        g_gamma = -2^(-8 (h + 1) / HV) (1 - layer / (layers - 1 + 1e-5) + 1e-5)
        o       = simple GLA(q, k, v, g_gamma)
        y       = W_out (rms_norm(o) sigmoid(W_z x))                            one norm over all heads

    In Ling 2.x and MiniCPM-SALA queries, keys and values have no activation; queries and keys are normed in each head
    and turned by their positions; and there are several norms, each over a group of heads. Positions begin with 0 in
    every sequence, and a cache or a slot has the count of its tokens, in the place of inputs of a convolution.

    Accuracy: with random weights 1e-5 relative to transformers' layer in float32.
    Cost: 2 B T D (2 H K + 3 HV V) flops for the projections, and the cost of the operator.
    Source: Qin and others, Lightning Attention-2 (2024), as in MiniMax-01 (2025), Ring-linear (2025) and MiniCPM-SALA
      (2026).
    """
    projected = tuple(running.project(x, weight) for weight in (w.q, w.k, w.v))
    z, gamma = running.project(x, w.z) if config.gate else None, _decay(config)
    if config.groups is None or z is None or config.qk_norm or config.frequencies:
        y, cache = _by_operators(run, config, (projected, gamma, z, w.norm), w.qk_norm, x)
        return running.project_out(y, w.out, x), cache
    # A norm over heads of several devices comes after all that each of them does alone.
    alone = not norm.is_local(run, projected[2], config, config.groups)
    inside = ((), ()) if alone else (z, w.norm)
    y, cache = mixing.way(run, _MIXER, x)(run, config, (projected, gamma, *inside))
    return running.project_out(_finish(run, config, y, z, w.norm) if alone else y, w.out, x), cache


def _by_operators(
    run: running.Run, config: config.LightningAttentionConfig, arrays, qk_norm: tuple = (), x: Any = None
) -> running.Mixed:
    """Return the output before the last projection, and the cache after the tokens of the hidden states x."""
    projected, gamma, z, weight = arrays
    act = jax.nn.silu if config.activation else lambda y: y
    q, k, v = (running.by_head(act(y), count) for y, count in zip(projected, config.heads, strict=True))
    if config.qk_norm:
        q, k = (norm.norm_heads(run, y, None, w, eps=config.eps) for y, w in zip((q, k), qk_norm, strict=True))
    conv: tuple[Any, ...] = ()
    if config.frequencies:
        position, count = rotary.positions(run, 0, x)
        q, k = (rotary.turn(run, y, position, config.frequencies, config.rotary_scale) for y in (q, k))
        conv = (count,)
    o, state = run.operate(_OPERATORS, q, k, v, None, g_gamma=gamma, scale=config.scale)
    return o if isinstance(z, tuple) else _finish(run, config, o, z, weight), caches.Cache(conv, state)


def _finish(run: running.Run, config: config.LightningAttentionConfig, o, z, weight) -> jax.Array:
    """Return the output of all heads [B, T, HV, V] after the norm and the gate, of which there may be one alone."""
    if config.groups is None:
        return o if z is None else o * jax.nn.sigmoid(running.by_head(z, config.HV).astype(jnp.float32)).astype(o.dtype)
    return norm.norm_groups(
        run, o, z, weight, config.groups, activation="sigmoid", norm_before_gate=True, eps=config.eps
    )


def _decodes(config: config.LightningAttentionConfig, arrays) -> Decodes:
    """Return the record of all of it for single tokens, with a norm and a gate."""
    projected, gamma, *inside = arrays
    z, weight = (None if isinstance(y, tuple) else y for y in inside)
    static = DecodeStatic(
        config.H, config.HV, config.K, config.V, 1, True, config.scale, False, "decode_layer_fwd",
        activation=config.activation, norm_gate="sigmoid", eps=None if weight is None else config.eps,
        norm_heads=config.HV // (config.groups or 1),
    )  # fmt: skip
    z = None if z is None else mixing.rows(z)
    return Decodes(static, tuple(map(mixing.rows, projected)), None, z=z, norm=weight, gamma=gamma)


_MIXER = mixing.Mixer(_by_operators, _decodes, (mixing.PROJECTED, "n", "btn", "n"))


LAYER = layer.Definition(
    "lightning_attention", config.LightningAttentionConfig, LightningAttentionWeights, _table,
    ("minimax", "minimax_text_01", "minimax_m1", *_WITH_NORMS), _mix, _read, _write,
)  # fmt: skip
