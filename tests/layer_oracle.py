"""The layers in float64 numpy, from the recurrence of their operators, token by token."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from chunkwise import layers
from chunkwise.mlstm import MlstmState
from chunkwise.shared.testing import conv_norm_oracle, definitions
from chunkwise.shared.testing.oracle import reference
from tests.laws import law_reference

SIZES = dict(D=20, H=2, HV=4, K=12, V=8)


class Layer(NamedTuple):
    """A layer and its sizes."""

    config: object
    init: object
    run: object
    ragged: object


def without_values(function):
    """Return a layer of RWKV-7, the first one, without its third result, the values for other layers."""

    def run(*arguments, **options):
        return function(*arguments, **options)[:2]

    return run


def named(name: str, config: object, result=lambda function: function) -> Layer:
    """Return the layer of this name."""
    init, *runs = (getattr(layers, form + name) for form in ("init_", "", "ragged_"))
    return Layer(config, init, *map(result, runs))


TURNED = layers.LightningAttentionConfig(
    **SIZES, activation=None, scale=0.3, slope_factor=0.7, qk_norm=True, frequencies=(1.0, 0.3, 0.01), rotary_scale=1.1,
    groups=2,
)  # fmt: skip
LAYERS = {
    "gated_delta_net": named("gated_delta_net", layers.GatedDeltaNetConfig(**SIZES, allow_neg_eigval=True)),
    "gated_delta_net2": named("gated_delta_net2", layers.GatedDeltaNet2Config(**SIZES, allow_neg_eigval=True)),
    "kimi_delta_attention": named("kimi_delta_attention", layers.KimiDeltaAttentionConfig(**SIZES, R=6, W=3)),
    "kimi_delta_attention_bounded": named(
        "kimi_delta_attention", layers.KimiDeltaAttentionConfig(**SIZES, lower_bound=-3.0)
    ),
    # As flash-linear-attention has it.
    "kimi_delta_attention_biased": named(
        "kimi_delta_attention",
        layers.KimiDeltaAttentionConfig(**SIZES, R=8, allow_neg_eigval=True, gate_bias=True),
    ),
    "mamba2_mixer": named("mamba2_mixer", layers.Mamba2Config(**SIZES, dt_limit=(1e-3, 0.6))),
    "lightning_attention": named("lightning_attention", layers.LightningAttentionConfig(**SIZES, layer=1, layers=3)),
    "lightning_attention_turned": named("lightning_attention", TURNED),
    "comba_layer": named("comba_layer", layers.CombaConfig(**SIZES)),
    "comba_layer_without_gate": named("comba_layer", layers.CombaConfig(**SIZES, output_gate=False)),
    "gated_linear_attention": named(
        "gated_linear_attention", layers.GatedLinearAttentionConfig(**SIZES, R=5, normalizer=9)
    ),
    "gated_delta_product": named("gated_delta_product", layers.GatedDeltaProductConfig(**SIZES, allow_neg_eigval=True)),
    "delta_net": named(
        "gated_delta_product",
        layers.GatedDeltaProductConfig(**SIZES, num_householder=1, forget_gate=False, output_gate=False),
    ),
    "rwkv7_attention": named(
        "rwkv7_attention",
        layers.Rwkv7AttentionConfig(**SIZES | dict(H=4), R_decay=5, R_rate=6, R_gate=7),
        without_values,
    ),
    # It has no serving step.
    "mlstm_layer": Layer(
        layers.MlstmLayerConfig(**SIZES, eps=1e-3, gate_soft_cap=4.0), layers.init_mlstm_layer, layers.mlstm_layer, None
    ),
}
SERVED = [name for name, layer in LAYERS.items() if layer.ragged]


def silu(x):
    return conv_norm_oracle.activation(x, "silu")


def make(name: str, B=2, T=21, seed=0, dtype=np.float32):
    """Return hidden states [B, T, D] and weights of a layer, none of which are all ones or zeros."""
    layer, rng = LAYERS[name], np.random.default_rng(seed)
    weights = jax.jit(lambda: layer.init(jax.random.key(seed), layer.config))()
    spread = lambda w: (w + 0.2 * rng.standard_normal(w.shape)).astype(np.float32)
    if name == "mlstm_layer":
        # A new layer has input gates that write nearly nothing.
        weights = weights._replace(i_bias=0 * weights.i_bias)
    weights = jax.tree.map(lambda w: spread(np.asarray(w)), weights)
    return rng.standard_normal((B, T, SIZES["D"])).astype(dtype), weights


def make_cache(name: str, N: int, seed=1) -> layers.Cache:
    """Return a random cache of N sequences."""
    rng, empty = np.random.default_rng(seed), layers.empty_cache(LAYERS[name].config, N)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), empty)


def oracle(
    name: str, x, w, cache: layers.Cache | None = None, config=None, **packing
) -> tuple[np.ndarray, layers.Cache]:  # fmt: skip
    """Return y and the cache after a layer, in float64, of the config in `LAYERS` or of another one."""
    c = config or LAYERS[name].config
    x, w = np.asarray(x, np.float64), jax.tree.map(lambda y: np.asarray(y, np.float64), w)
    if name in BY_COMPOSITION:
        return BY_COMPOSITION[name](c, x, w, cache, packing)
    heads, state = (c.H, c.H, c.HV), None if cache is None else cache.state
    by_head = lambda y, count: y.reshape(*x.shape[:2], count, -1)
    projected, conv, options = [x @ w.q, x @ w.k, x @ w.v], [], packing | dict(initial_state=state)
    if name == "mamba2_mixer":
        *projected, z, dt = mamba2_projections(c, x, w)
    for i in range(3):
        projected[i], last = conv_norm_oracle.causal_conv1d(
            projected[i], w.conv[i], w.bias[i] if getattr(w, "bias", ()) else None,
            None if cache is None else cache.conv[i], name="silu", **packing,
        )  # fmt: skip
        conv.append(last)
    q, k, v = (by_head(y, count) for y, count in zip(projected, heads, strict=True))
    delta = dict(use_qk_l2norm_in_kernel=True) | options
    if name == "gated_delta_net":
        laws, _ = law_reference(x @ w.a, x @ w.b, w.A_log, w.dt_bias, allow_neg_eigval=True)
        o, state = reference(q, k, v, laws["g"], laws["beta"], **delta)
        y = conv_norm_oracle.rms_norm_gated(o, by_head(x @ w.z, c.HV), w.norm, eps=c.eps)
    elif name == "gated_delta_net2":
        sigmoid = lambda y: 1 / (1 + np.exp(-y))
        laws, _ = law_reference(by_head(x @ w.f[0] @ w.f[1], c.H), np.zeros(c.H), w.A_log, w.dt_bias)
        b, write = 2 * sigmoid(by_head(x @ w.b, c.H)), sigmoid(by_head(x @ w.w, c.HV))
        g, b = (np.repeat(y, c.HV // c.H, axis=2) for y in (laws["g"], b))
        o, state = reference(q, k, v, g, b=b, w=write, **delta)
        z = by_head(x @ w.z[0] @ w.z[1] + w.z_bias, c.HV)
        y = conv_norm_oracle.rms_norm_gated(o, z, w.norm, name="sigmoid", eps=c.eps)
    elif "comba" in name:
        laws, _ = law_reference(x @ w.a, x @ w.b, w.A_log, w.dt_bias)
        p = k / (1 + np.exp(-w.decay))[:, None]
        q, p = q - w.skip[:, None] * p, p / np.sqrt(np.sum(p**2, axis=-1, keepdims=True) + 1e-6)
        o, state = reference(q, k, v, laws["g"], laws["beta"], p=p, **delta)
        z, gate = (by_head(x @ w.z, c.HV), "sigmoid") if c.output_gate else (np.ones(o.shape), None)
        y = conv_norm_oracle.rms_norm_gated(o, z, w.norm, name=gate, eps=c.eps)
    elif "kimi" in name:
        f, z = x, x
        for factor in w.f:
            f = f @ factor
        for factor in w.z:
            z = z @ factor
        z = z + (w.z_bias if c.gate_bias else 0)
        laws, _ = law_reference(
            by_head(f, c.HV), x @ w.b, w.A_log, w.dt_bias, lower_bound=c.lower_bound,
            allow_neg_eigval=c.allow_neg_eigval,
        )  # fmt: skip
        o, state = reference(q, k, v, laws["g"], laws["beta"], **delta)
        y = conv_norm_oracle.rms_norm_gated(o, by_head(z, c.HV), w.norm, name="sigmoid", eps=c.eps)
    else:
        dt = np.clip(np.logaddexp(dt + w.dt_bias, 0), *c.dt_limit)
        o, state = reference(q, k, dt[..., None] * v, -np.exp(w.A_log) * dt, scale=1.0, **options)
        o, z = by_head(o + w.skip[:, None] * v, c.H), by_head(z, c.H)
        if c.norm is None:
            y = o * silu(z)
        else:
            first, norm = c.norm == "before", w.norm.reshape(c.H, -1)
            y = conv_norm_oracle.rms_norm_gated(o, z, norm, norm_before_gate=first, eps=c.eps)
        y = y.reshape(*x.shape[:2], -1) @ w.out
        return (y + w.out_bias if c.out_bias else y), layers.Cache(tuple(conv), state)
    return y.reshape(*x.shape[:2], -1) @ w.out, layers.Cache(tuple(conv), state)


def mamba2_projections(c: layers.Mamba2Config, x, w) -> list[np.ndarray]:
    """Return q, k, v, z and dt with their biases and factors, which the config has in the order of a file."""
    z, v, k, q, dt = c.multipliers
    of = zip((w.q, w.k, w.v, w.z, w.dt), w.in_bias or (0.0,) * 5, (q, k, v, z, dt), strict=True)
    return [(x @ weight * c.in_multiplier + bias) * factor for weight, bias, factor in of]


def convolve(projected: list, weights, cache: layers.Cache | None, packing: dict, name: str | None = "silu"):
    """Return convolutions, and what a cache keeps of them."""
    before = (None,) * len(projected) if cache is None else cache.conv
    run = conv_norm_oracle.causal_conv1d
    pairs = [run(y, w, None, y0, name=name, **packing) for y, w, y0 in zip(projected, weights, before, strict=True)]
    return [y for y, _ in pairs], tuple(last for _, last in pairs)


def define(step, x: dict, cache: layers.Cache | None, packing: dict, **options):
    """Return the output and the states of an operator by its definition."""
    states = {} if cache is None else dict(initial_state=cache.state)
    return definitions.reference(step, x | states, **options, **packing)[:2]


def gated_delta_product_oracle(c: layers.GatedDeltaProductConfig, x, w, cache: layers.Cache | None, packing: dict):
    """Gated DeltaProduct: the n keys, values and step sizes of a token follow one another."""
    (B, T, _), n = x.shape, c.num_householder
    steps = lambda arrays, *size: np.stack(arrays, axis=2).reshape(B, T * n, *size)
    (q, *others), conv = convolve([x @ y for y in (w.q, *w.k, *w.v)], w.conv, cache, packing)
    a = x @ w.a if c.forget_gate else np.zeros((B, T, c.HV))
    law, b = (w.A_log, w.dt_bias) if c.forget_gate else (np.zeros(c.HV),) * 2, steps([x @ y for y in w.b], c.HV)
    decays = law_reference(a, np.zeros_like(a), *law)[0]["g"] if c.forget_gate else a
    rates = law_reference(b, b, np.zeros(c.HV), np.zeros(c.HV), allow_neg_eigval=c.allow_neg_eigval)[0]["beta"]
    named = dict(q=q.reshape(B, T, c.H, c.K), k=steps(others[:n], c.H, c.K), v=steps(others[n:], c.HV, c.V))
    o, state = define(
        definitions.GATED_DELTA_PRODUCT,
        named | dict(g=decays, beta=rates),
        cache,
        packing,
        use_qk_l2norm_in_kernel=True,
    )
    z, name = ((x @ w.z).reshape(o.shape), "silu") if c.output_gate else (np.ones(o.shape), None)
    y = conv_norm_oracle.rms_norm_gated(o, z, w.norm, name=name, eps=c.eps)
    return y.reshape(B, T, -1) @ w.out, layers.Cache(conv, state)


def rwkv7_oracle(c: layers.Rwkv7AttentionConfig, x, w, cache: layers.Cache | None, packing: dict, v_first=None):
    """RWKV-7, whose first layer takes no values of another."""
    (B, T, D), sigmoid = x.shape, lambda y: 1 / (1 + np.exp(-y))
    heads = lambda y: y.reshape(*y.shape[:-1], c.H, -1)
    (before,), conv = convolve([x], [np.array([[1.0, 0.0]] * D)], cache, packing, None)
    xr, xw, xk, xv, xa, xg = (x + (before - x) * mix for mix in w.mix)
    gk = -np.exp(-0.5) * sigmoid(np.tanh(xw @ w.decay[0]) @ w.decay[1] + w.decay_bias)
    rate = sigmoid(xa @ w.rate[0] @ w.rate[1] + w.rate_bias)
    k, v = xk @ w.k, heads(xv @ w.v)
    if v_first is not None:
        v = v + (v_first - v) * heads(sigmoid(xv @ w.first[0] @ w.first[1] + w.first_bias))
    removed = heads(k * w.k_k)
    removed = removed / np.linalg.norm(removed, axis=-1, keepdims=True)
    named = dict(q=heads(xr @ w.r), k=heads(k * (1 + (rate - 1) * w.k_a)), v=v, a=-removed, b=removed * heads(rate))
    o, state = define(definitions.DPLR_DELTA_RULE, named | dict(gk=heads(gk)), cache, packing, scale=1.0)
    o = (o - o.mean(-1, keepdims=True)) / np.sqrt(o.var(-1, keepdims=True) + c.eps)
    y = o * heads(w.norm) + heads(w.norm_bias)
    y = y + np.sum(named["q"] * named["k"] * w.r_k, axis=-1, keepdims=True) * v
    y = y.reshape(B, T, -1) * (sigmoid(xg @ w.gate[0]) @ w.gate[1])
    valid = np.zeros((B, T, 1))
    for each in conv_norm_oracle.sequences(B, T, **packing):
        valid[each.row, each.start : each.end] = 1
    return y @ w.out * valid, layers.Cache(conv, state)


def lightning_oracle(c: layers.LightningAttentionConfig, x, w, cache: layers.Cache | None, packing: dict):
    """Lightning attention: of MiniMax, and with norms, positions and groups as in Ling 2.x."""
    heads = lambda y, count: y.reshape(*x.shape[:2], count, -1)
    normed = lambda y, weight: y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + c.eps) * weight
    act = silu if c.activation else lambda y: y
    q, k, v = (heads(act(x @ weight), count) for weight, count in zip((w.q, w.k, w.v), c.heads, strict=True))
    if c.qk_norm:
        q, k = (normed(y, weight) for y, weight in zip((q, k), w.qk_norm, strict=True))
    conv, n = (), len(c.frequencies)
    if n:
        found = conv_norm_oracle.sequences(*x.shape[:2], **packing)
        N = 1 + max(each.state for each in found)
        count = np.zeros((N, 1, 1)) if cache is None else np.array(cache.conv[0], float)
        before, position = count.copy(), np.zeros(x.shape[:2])
        for each in found:
            first = before[each.state, 0, 0] if each.has_initial else 0.0
            position[each.row, each.start : each.end] = first + np.arange(each.end - each.start)
            if each.has_final:
                count[each.state] = first + each.end - each.start
        factor = c.rotary_scale * np.exp(1j * position[..., None, None] * np.array(c.frequencies))
        for y in (q, k):
            pairs = (y[..., :n] + 1j * y[..., n : 2 * n]) * factor
            y[..., :n], y[..., n : 2 * n] = pairs.real, pairs.imag
        conv = (count,)
    factor = 1 - c.layer / (c.layers - 1 + 1e-5) + 1e-5 if c.slope_factor is None else c.slope_factor
    slope = 2.0 ** (-8 * np.arange(1, c.HV + 1) / c.HV) * factor
    state = None if cache is None else cache.state
    o, state = reference(q, k, v, g_gamma=-slope, scale=c.scale, initial_state=state, **packing)
    if c.groups is not None:
        o = normed(heads(o, c.groups), w.norm.reshape(c.groups, -1))
    y = o.reshape(*x.shape[:2], -1)
    return (y * conv_norm_oracle.activation(x @ w.z, "sigmoid") if c.gate else y) @ w.out, layers.Cache(conv, state)


def gla_oracle(c: layers.GatedLinearAttentionConfig, x, w, cache: layers.Cache | None, packing: dict):
    """Gated linear attention."""
    heads = lambda y, count: y.reshape(*x.shape[:2], count, -1)
    q, k, v = (heads(x @ weight, count) for weight, count in zip((w.q, w.k, w.v), c.heads, strict=True))
    g = -np.logaddexp(0, -(x @ w.f[0] @ w.f[1] + w.f_bias)) / c.normalizer
    state = None if cache is None else cache.state
    o, state = reference(q, k, v, heads(g, c.HV), initial_state=state, **packing)
    y = conv_norm_oracle.rms_norm_gated(o, heads(x @ w.z, c.HV), w.norm, eps=c.eps)
    return y.reshape(*x.shape[:2], -1) @ w.out, layers.Cache((), state)


def mlstm_oracle(c: layers.MlstmLayerConfig, x, w, cache: layers.Cache | None, packing: dict):
    """The layer of xLSTM, whose state is an `MlstmState`."""
    capped = lambda y: c.gate_soft_cap * np.tanh(y / c.gate_soft_cap)
    heads = dict(q=x @ w.q, k=x @ w.k, v=x @ w.v).items()
    named = {part: y.reshape(*x.shape[:2], c.HV if part == "v" else c.H, -1) for part, y in heads}
    named |= dict(i=capped(x @ w.i + w.i_bias), f=capped(x @ w.f + w.f_bias))
    step = functools.partial(definitions.mlstm, eps=c.divisor_eps)
    o, state = define(definitions.MLSTM._replace(step=step), named, cache, packing)
    o = (o - o.mean(-1, keepdims=True)) / np.sqrt(o.var(-1, keepdims=True) + c.eps)
    gate = conv_norm_oracle.activation(x @ w.z, "sigmoid")
    return (o.reshape(gate.shape) * w.norm * gate) @ w.out, layers.Cache((), MlstmState(*state))


BY_COMPOSITION = {
    "gated_delta_product": gated_delta_product_oracle, "delta_net": gated_delta_product_oracle,
    "rwkv7_attention": rwkv7_oracle, "mlstm_layer": mlstm_oracle, "lightning_attention": lightning_oracle,
    "lightning_attention_turned": lightning_oracle, "gated_linear_attention": gla_oracle,
}  # fmt: skip
