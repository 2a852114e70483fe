"""The mixer of Mamba-2."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters, table
from chunkwise.layers.mixer import mixing, norm, running
from chunkwise.pipeline import chunk_mamba2, ragged_mamba2, recurrent_mamba2
from chunkwise.shared.serving.decode.records import Decodes, DecodeStatic

_OPERATORS = running.Operators(chunk_mamba2, recurrent_mamba2, ragged_mamba2)


class Mamba2Weights(NamedTuple):
    """The weights of `mamba2_mixer`, under the names of attention: the paper calls q, k and v C, B and x.

    Attributes:
      q, k, v, z: projections [D, H K], [D, H K], [D, HV V], [D, HV V], head after head.
      dt: projection [D, HV].
      conv, bias: weights and biases of the convolutions of q, k and v: [H K, W], [H K, W], [HV V, W], the oldest token
        first, and [H K], [H K], [HV V] or nothing.
      A_log, dt_bias, skip: [HV], float32; the paper calls skip D.
      norm: [HV V], or nothing.
      out: [HV V, D].
      in_bias: biases of the projections q, k, v, z and dt, or nothing.
      out_bias: [D], or nothing.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array
    dt: jax.Array
    conv: tuple[jax.Array, ...]
    bias: tuple[jax.Array, ...]
    A_log: jax.Array
    dt_bias: jax.Array
    skip: jax.Array
    norm: jax.Array | tuple[()]
    out: jax.Array
    in_bias: tuple[jax.Array, ...] = ()
    out_bias: jax.Array | tuple[()] = ()


# The arrays of several weights, in the order of a checkpoint: the gate, then x, B and C, which go through the
# convolution, then the time step.
_WHOLE: dict[str, tuple[str, ...]] = {"in_proj": ("z_proj", "v_proj", "k_proj", "q_proj", "dt_proj")}
_WHOLE["conv1d"] = ("x_conv1d", "B_conv1d", "C_conv1d")
_WHOLE |= {f"{name}.bias": tuple(f"{part}.bias" for part in parts) for name, parts in _WHOLE.items()}


def _table(c: config.Mamba2Config) -> dict[str, Any]:
    """Return the table of the weights.

    A projection keeps the size of its input; the rate exp(A_log) is uniform from 1 to 16, and steps are from 0.001 to
    0.1, as in the mamba_ssm package.
    """
    v = c.HV * c.V
    inside = table.projections(c) | dict(
        z=table.matrix("z_proj", ".n", c.D, v), dt=table.matrix("dt_proj", ".n", c.D, c.HV)
    )
    conv = table.convolutions(c, _WHOLE["conv1d"][::-1])
    return dict(
        **inside, conv=conv, bias=tuple(map(table.bias, conv)) if c.conv_bias else (),
        **table.rates(1.0, "n", c.HV), skip=table.ones("D", "n", c.HV),
        norm=() if c.norm is None else table.norm("norm", "n", v), out=table.matrix("out_proj", "n.", v, c.D),
        in_bias=tuple(map(table.bias, inside.values())) if c.in_bias else (),
        out_bias=table.Weight("out_proj.bias", ".", (c.D,)) if c.out_bias else (),
    )  # fmt: skip


def _read(found: parameters.Checkpoint, weights: Any, c: config.Mamba2Config) -> None:
    """Divide the arrays of a checkpoint."""
    found.names = table.name_of_whole(_WHOLE)
    table.divide(found, weights, _WHOLE)


def _write(named: dict[str, Any], c: config.Mamba2Config, model: str) -> dict[str, Any]:
    """Return the arrays of a checkpoint.

    All models with Mamba-2 have the same names.
    """
    return table.joined(named, _WHOLE)


def _project(x, w: Mamba2Weights, c: config.Mamba2Config) -> list[jax.Array]:
    """Return the projections q, k, v, z and dt of hidden states, with their biases and factors."""
    z, v, k, q, dt = c.multipliers
    projected, biases = [], w.in_bias or ((),) * 5
    for i, factor in enumerate((q, k, v, z, dt)):
        y = running.project(x, (w.q, w.k, w.v, w.z, w.dt)[i])
        if c.in_multiplier == factor == 1:
            projected.append(running.with_bias(y, biases[i]))
            continue
        # A factor in bfloat16 would have an error of its own.
        u = running.with_bias(y.astype(jnp.float32) * c.in_multiplier, biases[i])
        projected.append((u * factor).astype(y.dtype))
    return projected


def _mix(x, w: Mamba2Weights, config: config.Mamba2Config, run: running.Run) -> tuple[jax.Array, caches.Cache]:
    """Return the output of Mamba-2's mixer for hidden states, and its cache after them.

    For training, prefill and decode. In every value head::

        q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))      channel by channel over the last W tokens
        dt      = softplus(W_dt x + dt_bias), at least and at most dt_limit
        o       = simple GLA(q, k, dt v, g = -exp(A_log) dt) + skip v            that is `chunk_mamba2`
        y       = W_out rms_norm(o silu(W_z x))                                 one norm for each of H groups of heads

    or rms_norm(o) silu(W_z x), or no norm, as `config` says; projections may have a bias and factors. The state of
    the cache is [N, HV, K, V]; transformers holds it as [N, HV, V, K].

    Accuracy: with random weights 1e-5 relative to transformers' layer in float32.
    Cost: 2 B T D (2 H K + 3 HV V + HV) flops for the projections, and the cost of the operator.
    Source: Dao and Gu, Transformers are SSMs (2024).
    """
    *projected, z, dt = _project(x, w, config)
    # A norm over heads of several devices comes after all that each of them does alone.
    alone = config.norm is not None and not norm.is_local(run, projected[2], config, config.H)
    inside = ((), ()) if alone else (z, w.norm)
    bias = w.bias or ((), (), ())
    arrays = tuple(projected), w.conv, bias, dt, w.A_log, w.dt_bias, w.skip, *inside
    y, cache = mixing.way(run, _MIXER, x)(run, config, arrays)
    if alone:
        y = _finish(run, config, y, z, w.norm)
    y = running.project_out(y, w.out, x)
    return running.with_bias(y, w.out_bias), cache


def _by_operators(run: running.Run, config: config.Mamba2Config, arrays: mixing.Arrays) -> running.Mixed:
    """Return the output of the mixer before its last projection, and the cache after its tokens."""
    projected, weights, bias, dt, A_log, dt_bias, skip, z, weight = arrays
    biases = tuple(None if isinstance(b, tuple) else b for b in bias)
    (q, k, v), conv = running.convolve_heads(run, config.heads, projected, weights, biases)
    # A rate above e^88 is one of e^88, and a step of 0 forgets nothing.
    A, gate = -jnp.exp(jnp.minimum(A_log, 88.0)), running.by_head(z, config.HV) if config.norm is None else None
    y, state = run.operate(
        _OPERATORS, v, dt, A, k, q, D=skip, z=gate, dt_bias=dt_bias, dt_softplus=True, dt_limit=config.dt_limit
    )
    finished = config.norm is None or isinstance(z, tuple)
    return y if finished else _finish(run, config, y, z, weight), caches.Cache(conv, state)


def _finish(run: running.Run, config: config.Mamba2Config, o, z, weight) -> jax.Array:
    """Return the output of all heads [B, T, HV, V] after the gate and the norm."""
    first = config.norm == "before"
    return norm.norm_groups(run, o, z, weight, config.H, activation="silu", norm_before_gate=first, eps=config.eps)


def _decodes(config: config.Mamba2Config, arrays: mixing.Arrays) -> Decodes:
    """Return the record of all of it for single tokens."""
    projected, weights, bias, dt, A_log, dt_bias, skip, z, weight = arrays
    z, weight = (None if isinstance(y, tuple) else y for y in (z, weight))
    static = DecodeStatic(
        config.H, config.HV, config.K, config.V, 1, True, 1.0, False, "decode_layer_fwd", activation="silu",
        norm_gate="silu", dt_limit=config.dt_limit, norm_heads=config.HV // config.H, gate_first=config.norm == "after",
        eps=None if weight is None else config.eps,
    )  # fmt: skip
    return Decodes(
        static, tuple(map(mixing.rows, projected)), mixing.rows(dt), z=None if z is None else mixing.rows(z),
        weight=tuple(weights), bias=() if isinstance(bias[0], tuple) else tuple(bias), A_log=A_log, dt_bias=dt_bias,
        norm=weight, skip=skip,
    )  # fmt: skip


_MIXER = mixing.Mixer(
    _by_operators, _decodes,
    (mixing.PROJECTED, mixing.OF_CHANNELS, mixing.OF_CHANNELS, "btn", "n", "n", "n", "btn", "n"),
)  # fmt: skip


LAYER = layer.Definition(
    "mamba2_mixer", config.Mamba2Config, Mamba2Weights, _table,
    ("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "zamba2", "falcon_h1"), _mix, _read, _write,
)  # fmt: skip
