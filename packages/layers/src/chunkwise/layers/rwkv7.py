"""The attention of RWKV-7, the part of a block that mixes tokens."""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp

from chunkwise.layers import caches, config, layer
from chunkwise.layers.checkpoint import parameters
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


def _split(config: _Config) -> dict[str, Any]:
    later = config.R_first is not None
    return dict(
        mix="..", r=".h", k=".h", v=".n", decay=("..", ".h"), decay_bias="h", rate=("..", ".h"), rate_bias="h",
        first=("..", ".n") if later else (), first_bias="n" if later else (), gate=("..", ".n"), k_k="h", k_a="h",
        r_k="h.", norm="n", norm_bias="n", out="n.",
    )  # fmt: skip


def _init(new: parameters.Initial, c: _Config) -> Rwkv7AttentionWeights:
    """Return random weights of a layer that is to be trained, in the manner of RWKV-7's authors.

    Matrices keep the size of their input, but that of keys makes a tenth of it. The first factors of the other
    projections are zeros. Biases, decays and mixtures rise over the channels, as in the middle of a model: the authors
    change them from layer to layer, and begin with zeros in the place of `out`.
    """
    HK, HVV = c.H * c.K, c.HV * c.V
    rising = lambda n: jnp.arange(n, dtype=jnp.float32) / max(n - 1, 1)
    wide, zigzag = rising(HK), jnp.tile(2 * rising(c.K) - 1, c.H)
    zigzag = zigzag * abs(zigzag)
    exponents = jnp.array([0.2, 0.9, 0.7, 0.7, 0.9, 0.2], jnp.float32) / 2
    channels = jnp.arange(c.D, dtype=jnp.float32) / c.D
    narrow = lambda x: x.astype(new.dtype)
    factors = lambda R, columns: (jnp.zeros((c.D, R), new.dtype), narrow(0.1 * new.matrix(R, columns)))
    later = c.R_first is not None
    return Rwkv7AttentionWeights(
        mix=narrow(1 - channels[None] ** exponents[:, None]), r=new.matrix(c.D, HK),
        k=narrow(0.1 * new.matrix(c.D, HK)), v=new.matrix(c.D, HVV), decay=factors(c.R_decay, HK),
        decay_bias=narrow(6 * wide ** (1 + 0.5**0.3) - 5.5 + 2.5 * zigzag), rate=factors(c.R_rate, HK),
        rate_bias=narrow(0.3 * zigzag + 0.4 * wide - 0.39), first=factors(c.R_first, HVV) if later else (),
        first_bias=narrow(0.93 - 0.4 * rising(HVV)) if later else (),
        gate=factors(c.R_gate, HVV), k_k=narrow(0.76 - 0.1 * wide), k_a=jnp.full(HK, 1.02, new.dtype),
        r_k=jnp.full((c.H, c.K), -0.04, new.dtype), norm=jnp.full(HVV, 0.5**0.7, new.dtype),
        norm_bias=jnp.zeros(HVV, new.dtype), out=new.matrix(HVV, c.D),
    )  # fmt: skip


class _Layout(NamedTuple):
    """What a checkpoint calls its arrays.

    Attributes:
      matrices: r, k, v and out, which are transposed.
      norm: the norm.
      factors, bias: two factors and a bias, with a letter for what they make.
      torch: whether factors are transposed, and named as weights.
    """

    matrices: tuple[str, str, str, str]
    norm: str
    factors: tuple[str, str]
    bias: str
    torch: bool


_LORA = "{}_lora.lora."
_FLA = _Layout(
    ("r_proj", "k_proj", "v_proj", "o_proj"), "g_norm", (f"{_LORA}0", f"{_LORA}2"), f"{_LORA}2.bias", torch=True
)
_RELEASED = _Layout(("receptance", "key", "value", "output"), "ln_x", ("{}1", "{}2"), "{}0", torch=False)


def _load(found: parameters.Checkpoint, c: _Config) -> Rwkv7AttentionWeights:
    """Return the weights of a layer of a checkpoint, in its types.

    The checkpoint is a released file of RWKV-7, one of transformers, or one of flash-linear-attention, whose first
    version is read, too.
    """
    HK, HVV = c.H * c.K, c.HV * c.V
    layout = _RELEASED if "receptance" in found else _FLA
    read = found.matrix if layout.torch else found.read
    vector = lambda name, size: found.read(name, size, dims=False)
    bias = lambda letter, size: vector(layout.bias.format(letter), size)

    def factors(letter: str, R: int, columns: int) -> tuple[jax.Array, ...]:
        low, up = (name.format(letter) for name in layout.factors)
        return read(low, c.D, R), read(up, R, columns)

    if "x_x" in found:
        mix = found.read("x_x", len(_MIXED), c.D, dims=False)
    else:
        mix = jnp.stack([vector(f"x_{name}", c.D) for name in _MIXED])
    first, first_bias = (), ()
    if c.R_first is not None:
        first, first_bias = factors("v", c.R_first, HVV), bias("v", HVV)
    elif not layout.torch:
        # Released files, and transformers, may have them in the first layer, which does not read them.
        found.ignore("v0", "v1", "v2")
    r, k, v, out = layout.matrices
    return Rwkv7AttentionWeights(
        mix, r=found.matrix(r, c.D, HK), k=found.matrix(k, c.D, HK), v=found.matrix(v, c.D, HVV),
        decay=factors("w", c.R_decay, HK), decay_bias=bias("w", HK), rate=factors("a", c.R_rate, HK),
        rate_bias=bias("a", HK), first=first, first_bias=first_bias, gate=factors("g", c.R_gate, HVV),
        k_k=vector("k_k", HK), k_a=vector("k_a", HK), r_k=found.read("r_k", c.H, c.K),
        norm=found.read(layout.norm, HVV), norm_bias=found.read(f"{layout.norm}.bias", HVV),
        out=found.matrix(out, HVV, c.D),
    )  # fmt: skip


def _save(w: Rwkv7AttentionWeights, c: _Config, model: str) -> dict[str, Any]:
    """Return the arrays of a layer for a checkpoint of transformers, "rwkv7", or for a released file, "rwkv_x070".

    They have the same names of arrays; those of flash-linear-attention, "rwkv7_fla", differ.
    """
    layout = _FLA if model == "rwkv7_fla" else _RELEASED
    row = lambda x: x if layout.torch else x[None, None]
    named: dict[str, Any] = {f"x_{letter}": x[None, None] for letter, x in zip(_MIXED, w.mix, strict=True)}
    named |= {"k_k": row(w.k_k), "k_a": row(w.k_a), "r_k": w.r_k}
    named |= {f"{name}.weight": x.T for name, x in zip(layout.matrices, (w.r, w.k, w.v, w.out), strict=True)}
    named |= {f"{layout.norm}.weight": w.norm, f"{layout.norm}.bias": w.norm_bias}
    for letter, factors in dict(w=w.decay, a=w.rate, v=w.first, g=w.gate).items():
        names = (name.format(letter) for name in layout.factors[: len(factors)])
        for name, x in zip(names, factors, strict=True):
            named |= {f"{name}.weight": x.T} if layout.torch else {name: x}
    biases = dict(w=w.decay_bias, a=w.rate_bias) | (dict(v=w.first_bias) if w.first else {})
    return named | {layout.bias.format(letter): row(x) for letter, x in biases.items()}


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
    "rwkv7_attention", config.Rwkv7AttentionConfig, Rwkv7AttentionWeights, _split, _init, _load, _save,
    ("rwkv7", "rwkv_x070", "rwkv7_fla"), _mix, "v_first",
)  # fmt: skip
rwkv7_attention = cast(_OverSequences, LAYER.over_sequences)
ragged_rwkv7_attention = cast(_OverStep, LAYER.over_step)
