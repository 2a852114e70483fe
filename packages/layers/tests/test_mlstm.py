"""What the mLSTM layer has beside others: types of its state, fused matrices, and what it refuses."""

import jax
import numpy as np
import pytest

from chunkwise import layers
from tests.layer_oracle import LAYERS, make

CONFIG = LAYERS["mlstm_layer"].config


@jax.jit
def run(x, w, cache):
    return layers.mlstm_layer(x, w, CONFIG, cache, True)


def test_fused_matrices_of_a_checkpoint():
    """A checkpoint may have the matrices in one piece."""
    _, w = make("mlstm_layer")
    named = layers.save_mlstm_layer(w, CONFIG)
    join = lambda *names: np.concatenate([named.pop(f"{name}.weight") for name in names])
    fused = {"qkv_opreact.weight": join("q", "k", "v", "ogate_preact")}
    fused["ifgate_preact.weight"] = join("igate_preact", "fgate_preact")
    fused["ifgate_preact.bias"] = np.concatenate([named.pop("igate_preact.bias"), named.pop("fgate_preact.bias")])
    for x, y in zip(layers.load_mlstm_layer(named | fused, CONFIG), w, strict=True):
        np.testing.assert_array_equal(x, y)


def test_errors():
    x, w = make("mlstm_layer")
    cache = layers.empty_cache(CONFIG, 2)
    with pytest.raises(ValueError, match=r"`cache.state` must be an MlstmState; got an array float32 \(2, 4, 12, 8\)"):
        run(x, w, cache._replace(state=cache.state.C))
    with pytest.raises(ValueError, match=r"`cache.state.m` must have shape \[N, HV\] = \(2, 4\); got \(2, 3\)"):
        run(x, w, cache._replace(state=cache.state._replace(m=cache.state.m[:, :3])))
    with pytest.raises(ValueError, match=r"`gate_soft_cap` must be None or above 0; got 0"):
        layers.MlstmLayerConfig(20, 2, 2, 4, 4, gate_soft_cap=0)
    with pytest.raises(ValueError, match=r"`divisor_eps` must be at least 0; got -1"):
        layers.MlstmLayerConfig(20, 2, 2, 4, 4, divisor_eps=-1)
