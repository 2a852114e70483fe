"""The attention of RWKV-7, the part of a block that mixes tokens."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters, table
from chunkwise.layers.mixer import mixing, norm, running
from chunkwise.pipeline import chunk_dplr_delta_rule, ragged_dplr_delta_rule, recurrent_dplr_delta_rule
from chunkwise.shared.call import checks
from chunkwise.shared.kernels import chunking
from chunkwise.shared.serving.decode.records import Decodes, DecodeStatic

_OPERATORS = running.Operators(chunk_dplr_delta_rule, recurrent_dplr_delta_rule, ragged_dplr_delta_rule)
# The log decays are at least this, in nats; the number below it is the promise of the operator.
_LEAST = -math.exp(-0.5)
_PROMISE = -0.61
# The parts of the mixture of a token and the token before, in the order of the weights.
_MIXED = "rwkvag"
_Config = config.Rwkv7AttentionConfig


class Rwkv7AttentionWeights(NamedTuple):
    """The weights of `rwkv7_attention`.

    Attributes:
      mix: how much of the token before the inputs of r, decay, k, v, rate and gate have in each channel, [6, D].
      r, k, v: projections [D, H K], [D, H K], [D, H V], head after head.
      decay, rate: projections of the decays and of the rates of the delta rule, as factors [D, R_decay], [R_decay, H K]
        and [D, R_rate], [R_rate, H K].
      decay_bias, rate_bias: [H K].
      first: projection of the share of the first layer's values, [D, R_first], [R_first, H V]; nothing in that layer.
      first_bias: [H V], or nothing.
      gate: projection of the gates of the output, [D, R_gate], [R_gate, H V].
      k_k: factors of the keys that the delta rule removes, [H K].
      k_a: how much the rates change the keys that are written, [H K].
      r_k: weights of the channels in the product of r and k that keeps a token's own value, [H, K].
      norm, norm_bias: [H V].
      out: [H V, D].
    """

    mix: jax.Array
    r: jax.Array
    k: jax.Array
    v: jax.Array
    decay: tuple[jax.Array, ...]
    decay_bias: jax.Array
    rate: tuple[jax.Array, ...]
    rate_bias: jax.Array
    first: tuple[jax.Array, ...]
    first_bias: jax.Array | tuple[()]
    gate: tuple[jax.Array, ...]
    k_k: jax.Array
    k_a: jax.Array
    r_k: jax.Array
    norm: jax.Array
    norm_bias: jax.Array
    out: jax.Array


class _Row(table.Weight):
    """A row of numbers, of which checkpoints differ in dimensions of size 1."""

    def load(self, found: parameters.Checkpoint) -> jax.Array:
        """Return it from a checkpoint."""
        return found.read(self.name, *self.shape, dims=False)

    def save(self, x: np.ndarray) -> np.ndarray:
        """Return it in the layout of a released file."""
        return x[None, None]


def _table(c: _Config) -> dict[str, Any]:
    """Return the table of the weights, with the names of released files.

    Values are in the manner of RWKV-7's authors. Matrices keep the size of their input, but that of keys makes a tenth
    of it. The first factors of the other projections are zeros. Biases, decays and mixtures rise over the channels, as
    in the middle of a model: the authors change them from layer to layer, and begin with zeros in the place of `out`.
    """
    HK, HVV, later = c.H * c.K, c.HV * c.V, c.R_first is not None
    rising = lambda n: jnp.arange(n, dtype=jnp.float32) / max(n - 1, 1)
    signed = lambda x: x * abs(x)
    zigzag = lambda: signed(jnp.tile(2 * rising(c.K) - 1, c.H))
    small = lambda new, *shape: (0.1 * new.matrix(*shape)).astype(new.dtype)
    equal = lambda value: functools.partial(parameters.Initial.full, value=value)

    def mixtures(new, parts, D):
        exponents = jnp.array([0.2, 0.9, 0.7, 0.7, 0.9, 0.2], jnp.float32) / 2
        channels = jnp.arange(D, dtype=jnp.float32) / D
        return (1 - channels[None] ** exponents[:, None]).astype(new.dtype)

    def row(name, letters, size, of):
        return _Row(name, letters, (size,), lambda new, n: of(rising(n)).astype(new.dtype))

    def factors(letter, letters, R, columns):
        return table.Weight(f"{letter}1", "..", (c.D, R)), table.Weight(f"{letter}2", letters, (R, columns), small)

    return dict(
        mix=_Row("x_x", "..", (len(_MIXED), c.D), mixtures), r=table.matrix("receptance", ".h", c.D, HK),
        k=table.Matrix("key", ".h", (c.D, HK), small), v=table.matrix("value", ".n", c.D, HVV),
        decay=factors("w", ".h", c.R_decay, HK),
        decay_bias=row("w0", "h", HK, lambda x: 6 * x ** (1 + 0.5**0.3) - 5.5 + 2.5 * zigzag()),
        rate=factors("a", ".h", c.R_rate, HK),
        rate_bias=row("a0", "h", HK, lambda x: 0.3 * zigzag() + 0.4 * x - 0.39),
        first=factors("v", ".n", c.R_first, HVV) if later else (),
        first_bias=row("v0", "n", HVV, lambda x: 0.93 - 0.4 * x) if later else (),
        gate=factors("g", ".n", c.R_gate, HVV), k_k=row("k_k", "h", HK, lambda x: 0.76 - 0.1 * x),
        k_a=_Row("k_a", "h", (HK,), equal(1.02)), r_k=table.Weight("r_k", "h.", (c.H, c.K), equal(-0.04)),
        norm=table.Norm("ln_x", "n", (HVV,), equal(0.5**0.7)), norm_bias=table.Weight("ln_x.bias", "n", (HVV,)),
        out=table.matrix("output", "n.", HVV, c.D),
    )  # fmt: skip


# What flash-linear-attention calls the weights, and the letters of the projections of low rank, with a bias or without.
_FLA = dict(receptance="r_proj", key="k_proj", value="v_proj", output="o_proj", ln_x="g_norm")
_FLA |= {f"{x}{i}": f"{x}_lora.lora.{end}" for x in "wavg" for i, end in enumerate(("2.bias", "0", "2"))}


def _read(found: parameters.Checkpoint, weights: Any, c: _Config) -> None:
    """Give the arrays of a checkpoint the names of the table.

    The checkpoint is a released file of RWKV-7, one of transformers, or one of flash-linear-attention, whose first
    version is read, too.
    """
    if "receptance" not in found:
        found.names = _FLA
        for x in jax.tree.leaves((weights.decay, weights.rate, weights.first, weights.gate)):
            found.parts[x.name] = found.read(x.name, *x.shape[::-1]).T
    elif c.R_first is None:
        # Released files, and transformers, may have them in the first layer, which does not read them.
        found.ignore("v0", "v1", "v2")
    if "x_x" not in found:
        found.parts["x_x"] = jnp.stack([found.read(f"x_{name}", c.D, dims=False) for name in _MIXED])


def _write(named: dict[str, Any], c: _Config, model: str) -> dict[str, Any]:
    """Return the arrays of a checkpoint of transformers, "rwkv7", or of a released file, "rwkv_x070".

    They have the same names of arrays; those of flash-linear-attention, "rwkv7_fla", differ.
    """
    mix = named.pop("x_x")[0, 0]
    if model == "rwkv7_fla":
        factors = {name: x for name, x in named.items() if name in _FLA and name[-1] in "12"}
        rows = {name: x.reshape(-1) if x.ndim == 3 else x for name, x in named.items() if name not in factors}
        named = table.renamed(rows | {f"{name}.weight": x.T for name, x in factors.items()}, _FLA)
    return named | {f"x_{letter}": x[None, None] for letter, x in zip(_MIXED, mix, strict=True)}


def _check_first(v_first: object, c: _Config, x: jax.Array) -> None:
    """Check the values of the first layer, which the other layers take."""
    if c.R_first is None:
        rule = "`v_first` must be None for the first layer, whose `R_first` is None"
        checks.check(v_first is None, f"{rule}; got {checks.shown(v_first)}.")
        return
    checks.check(v_first is not None, "`v_first` must be the values that the first layer returned; got None.")
    checks.check_array("v_first", v_first, "B T H V", (*x.shape[:2], c.HV, c.V))


def _mix(
    x, w: Rwkv7AttentionWeights, config: _Config, run: running.Run, v_first: jax.Array | None = None
) -> tuple[jax.Array, caches.Cache, jax.Array]:
    """Return the output of RWKV-7's attention for hidden states, and its cache after them.

    For training, prefill and decode. With x' the hidden states of the token before, zeros before a sequence, in every
    head::

        x_r, x_w, x_k, x_v, x_a, x_g = x + mix (x' - x)                         channel by channel
        r, k, v = W_r x_r, W_k x_k, W_v x_v
        w       = -e^(-1/2) sigmoid(D_2 tanh(D_1 x_w) + decay_bias)             log decays
        a       = sigmoid(A_2 A_1 x_a + rate_bias)                              rates
        v       = v + (v_first - v) sigmoid(V_2 V_1 x_v + first_bias)           not in the first layer of a model
        kappa   = k k_k, of unit length
        k       = k (1 + (a - 1) k_a)
        o       = RWKV-7(r, w, k, v, -kappa, kappa a)
        y       = W_out ((layer_norm(o) + v sum(r k r_k)) G_2 sigmoid(G_1 x_g))

    The third result is v_first [B, T, H, V] for the next layers: in the first layer its own values v, in other layers
    the argument `v_first`, which they need, and which is a keyword. The cache has x of the last token in the place of
    inputs of convolutions.

    Accuracy: with random weights 1e-5 relative to the package `rwkv` in float32.
    Cost: 4 B T D (H K + H V) flops for the large projections, and the cost of the operator.
    Source: Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution (2025).
    """
    _check_first(v_first, config, x)
    valid, flat = run.valid_tokens(x), lambda y: y.reshape(*x.shape[:2], -1)
    before, shifted = running.shift(run, x)
    wide = lambda y: y.astype(jnp.float32)
    added = lambda y, bias: wide(y) + wide(bias)[None, None]
    step = wide(before) - wide(x)
    x_r, x_w, x_k, x_v, x_a, x_g = ((wide(x) + step * mix[None, None]).astype(x.dtype) for mix in wide(w.mix))
    r, k, v = (running.project(y, weight) for y, weight in ((x_r, w.r), (x_k, w.k), (x_v, w.v)))
    low, up = zip(w.decay, w.rate, w.gate, strict=True)
    low = [running.project(y, factor) for y, factor in zip((x_w, x_a, x_g), low, strict=True)]
    low = [jnp.tanh(low[0]), low[1], jax.nn.sigmoid(low[2])]
    decay, rate, gate = (running.project(y, factor) for y, factor in zip(low, up, strict=True))
    decay = _LEAST * jax.nn.sigmoid(added(decay, w.decay_bias))
    rate = jax.nn.sigmoid(added(rate, w.rate_bias))
    if v_first is None:
        first = chunking.select_tokens(valid, v)
    else:
        first = chunking.select_tokens(valid, flat(v_first))
        share = jax.nn.sigmoid(added(running.project(x_v, *w.first), w.first_bias))
        v = (wide(v) + (wide(first) - wide(v)) * share).astype(x.dtype)
    kappa = wide(k) * wide(w.k_k)[None, None]
    # Zeros stay zeros, with a gradient that is finite.
    kappa = kappa * jax.lax.rsqrt(jnp.maximum(norm.sum_heads(run, kappa * kappa, config.H), 1e-24))
    k = wide(k) * (1 + (rate - 1) * wide(w.k_a)[None, None])
    narrow = lambda y: y.astype(x.dtype)
    arrays = (r, k, v), decay, narrow(-kappa), narrow(kappa * rate), gate, w.norm, w.norm_bias, w.r_k
    # The shift is done before the projections.
    name, cache = run.own_cache
    changed: dict[str, Any] = {} if cache is None else {name: cache._replace(conv=())}
    run = dataclasses.replace(run, **changed)
    y, cache = mixing.way(run, _MIXER, x)(run, config, arrays)
    after = caches.Cache((shifted,), cache.state)
    return running.project_out(y, w.out, x), after, running.by_head(first, config.HV)


def _by_operators(run: running.Run, config: _Config, arrays: mixing.Arrays) -> running.Mixed:
    """Return the output before the last projection, and the state after its tokens."""
    (r, k, v), decay, erase, echo, gate, weight, bias, r_k = arrays
    wide = lambda y: y.astype(jnp.float32)
    tokens = (running.by_head(y, config.H) for y in (r, k.astype(v.dtype), v, erase, echo, decay))
    o, state = run.operate(_OPERATORS, *tokens, scale=1.0, min_gate=_PROMISE)
    own = norm.sum_heads(run, wide(r) * k * wide(r_k).reshape(1, 1, -1), config.H, config.V)
    y = norm.layer_norm_heads(run, o.reshape(v.shape), weight, bias, config.HV, config.eps) + own * wide(v)
    return running.by_head((y * wide(gate)).astype(v.dtype), config.HV), caches.Cache((), state)


def _decodes(config: _Config, arrays: mixing.Arrays) -> Decodes:
    """Return the record of all of it for single tokens."""
    projected, decay, erase, echo, gate, weight, bias, r_k = arrays
    static = DecodeStatic(
        config.H, config.HV, config.K, config.V, 1, True, 1.0, False, "decode_layer_fwd", erase_before_decay=True,
        eps=config.eps,
    )  # fmt: skip
    return Decodes(
        static, tuple(map(mixing.rows, projected)), mixing.rows(decay), z=mixing.rows(gate), norm=weight,
        norm_bias=bias, own=r_k.reshape(-1), p=mixing.rows(erase), echo=mixing.rows(echo),
    )  # fmt: skip


_MIXER = mixing.Mixer(
    _by_operators, _decodes, (mixing.PROJECTED, "bth", "bth", "bth", "btn", "n", "n", "h."),
)  # fmt: skip


class _OverSequences(Protocol):
    def __call__(
        self, x: jax.Array, weights: Rwkv7AttentionWeights, config: _Config, cache: caches.Cache | None = None,
        output_cache: bool = False, *, cu_seqlens: jax.Array | None = None, segment_ids: jax.Array | None = None,
        padding_id: int = -1, implementation: str | None = None, sharding: checks.Sharding | None = None,
        context_axis: str | tuple[str, ...] | None = None, v_first: jax.Array | None = None,
    ) -> tuple[jax.Array, caches.Cache | None, jax.Array]:  # fmt: skip
        ...


class _OverStep(Protocol):
    def __call__(
        self, x: jax.Array, weights: Rwkv7AttentionWeights, config: _Config, pool: caches.Cache, step: running.Step, *,
        block_size: int | None = None, decode_tokens: int | None = None, implementation: str | None = None,
        sharding: checks.Sharding | None = None, v_first: jax.Array | None = None,
    ) -> tuple[jax.Array, caches.Cache, jax.Array]:  # fmt: skip
        ...


LAYER = layer.Definition(
    "rwkv7_attention", config.Rwkv7AttentionConfig, Rwkv7AttentionWeights, _table, ("rwkv7", "rwkv_x070", "rwkv7_fla"),
    _mix, _read, _write, "v_first",
)  # fmt: skip
rwkv7_attention = cast(_OverSequences, LAYER.over_sequences)
ragged_rwkv7_attention = cast(_OverStep, LAYER.over_step)
