"""Gated DeltaProduct from the arrays of flash-linear-attention's layer, beside that layer restated in float64."""

import re

import jax
import numpy as np
import pytest

from chunkwise.layers import GatedDeltaProductConfig, gated_delta_product, load_gated_delta_product
from chunkwise.shared.testing.compare import TOLERANCE, assert_close

D, H, HV, K, V, W, N, T, PREFIX = 10, 2, 4, 6, 5, 3, 3, 9, "model.layers.0.attn."
GATED = GatedDeltaProductConfig(D, H, HV, K, V, W, 1e-3, num_householder=N, allow_neg_eigval=True)
UNGATED = GatedDeltaProductConfig(D, H, HV, K, V, W, 1e-3, num_householder=N, forget_gate=False)
SHAPES = {
    "q_proj.weight": (H * K, D), "k_proj.weight": (N * H * K, D), "v_proj.weight": (N * HV * V, D),
    "b_proj.weight": (N * HV, D), "a_proj.weight": (HV, D), "A_log": (HV,), "dt_bias": (HV,),
    "q_conv1d.weight": (H * K, 1, W), "k_conv1d.weight": (N * H * K, 1, W), "v_conv1d.weight": (N * HV * V, 1, W),
    "g_proj.weight": (HV * V, D), "o_norm.weight": (V,), "o_proj.weight": (D, HV * V),
}  # fmt: skip


def checkpoint(config) -> dict:
    rng = np.random.default_rng(0)
    named = {PREFIX + name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    left = () if config.forget_gate else ("a_proj.weight", "A_log", "dt_bias")
    return {name: x for name, x in named.items() if name.removeprefix(PREFIX) not in left}


def restated(x, named: dict, c) -> np.ndarray:
    """Return the output of the layer for hidden states [T, D]: rearrangements, step sizes and steps as its file has."""
    of = lambda name: np.asarray(named[PREFIX + name], np.float64)
    sigmoid = lambda y: 1 / (1 + np.exp(-y))
    silu = lambda y: y * sigmoid(y)

    def convolved(name):
        y, w = x @ of(f"{name}_proj.weight").T, of(f"{name}_conv1d.weight")[:, 0]
        padded = np.concatenate([np.zeros((W - 1, y.shape[1])), y])
        return silu(sum(padded[i : i + T] * w[:, i] for i in range(W)))

    unit = lambda y: y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + 1e-6)
    q = unit(convolved("q").reshape(T, H, K).repeat(HV // H, axis=1)) * K**-0.5
    k = unit(convolved("k").reshape(T, N, H, K).repeat(HV // H, axis=2))
    v = convolved("v").reshape(T, N, HV, V)
    beta = sigmoid(x @ of("b_proj.weight").T).reshape(T, N, HV) * (2 if c.allow_neg_eigval else 1)
    g = np.zeros((T, HV))
    if c.forget_gate:
        g = -np.exp(of("A_log")) * np.logaddexp(x @ of("a_proj.weight").T + of("dt_bias"), 0)
    S, o = np.zeros((HV, K, V)), np.zeros((T, HV, V))
    for t in range(T):
        S = S * np.exp(g[t])[:, None, None]
        for i in range(N):
            change = beta[t, i][:, None] * (v[t, i] - np.einsum("hkv,hk->hv", S, k[t, i]))
            S = S + k[t, i][:, :, None] * change[:, None]
        o[t] = np.einsum("hkv,hk->hv", S, q[t])
    o = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + c.eps) * of("o_norm.weight")
    return (o.reshape(T, -1) * silu(x @ of("g_proj.weight").T)) @ of("o_proj.weight").T


@pytest.mark.parametrize("config", [GATED, UNGATED], ids=["gated", "ungated"])
def test_the_layer_of_flash_linear_attention(config):
    x, named = np.random.default_rng(1).standard_normal((T, D)).astype(np.float32), checkpoint(config)
    weights = load_gated_delta_product(named | {"model.layers.1.attn.A_log": np.zeros(7)}, config, PREFIX)
    y = jax.jit(lambda x, w: gated_delta_product(x, w, config, implementation="xla")[0])(x[None], weights)
    assert_close("y", y[0], restated(x.astype(np.float64), named, config), TOLERANCE["float32"])


def test_wrong_checkpoint():
    """A name that is missing, whichever it is, and weights of a layer with a gate for a layer without."""
    named = checkpoint(GATED)
    for name in SHAPES:
        full = re.escape(PREFIX + name.removesuffix(".weight"))
        with pytest.raises(ValueError, match=rf"`named` must have '{full}' or '{full}\.weight'; got neither, but \["):
            load_gated_delta_product({key: x for key, x in named.items() if key != PREFIX + name}, GATED, PREFIX)
    with pytest.raises(ValueError, match=r"no weights that the layer lacks; got \['A_log', 'a_proj', 'dt_bias'\]"):
        load_gated_delta_product(named, UNGATED, PREFIX)
    with pytest.raises(ValueError, match=r"of shape \(24, 10\), as `config` asks for; got \(36, 10\)"):
        load_gated_delta_product(named, GatedDeltaProductConfig(D, H, HV, K, V, W, num_householder=2), PREFIX)
