"""Gated DeltaProduct from the arrays of flash-linear-attention's layer, beside the layer in float64."""

import itertools

import jax
import numpy as np
import pytest

from chunkwise.layers import GatedDeltaProductConfig, gated_delta_product, load_gated_delta_product
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from tests.layer_oracle import oracle

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


@pytest.mark.parametrize("config", [GATED, UNGATED], ids=["gated", "ungated"])
def test_the_layer_of_flash_linear_attention(config):
    """Its arrays have the steps of a token one after the other; the layer is that in float64."""
    x, named = np.random.default_rng(1).standard_normal((1, T, D)).astype(np.float32), checkpoint(config)
    weights = load_gated_delta_product(named | {"model.layers.1.attn.A_log": np.zeros(7)}, config, PREFIX)
    for part in "kvb":
        steps = np.split(named[f"{PREFIX}{part}_proj.weight"].T, N, axis=1)
        jax.tree.map(np.testing.assert_array_equal, getattr(weights, part), tuple(steps))
    convs = [np.split(named[f"{PREFIX}{part}_conv1d.weight"][:, 0], n) for part, n in dict(q=1, k=N, v=N).items()]
    jax.tree.map(np.testing.assert_array_equal, weights.conv, tuple(itertools.chain(*convs)))
    y = jax.jit(lambda x, w: gated_delta_product(x, w, config, implementation="xla")[0])(x, weights)
    assert_close("y", y, oracle("gated_delta_product", x, weights, config=config)[0], TOLERANCE["float32"])


def test_weights_of_a_gate_that_the_layer_lacks():
    with pytest.raises(ValueError, match=r"no weights that the layer lacks; got \['A_log', 'a_proj', 'dt_bias'\]"):
        load_gated_delta_product(checkpoint(GATED), UNGATED, PREFIX)
