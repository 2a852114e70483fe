"""The weights of MaxText's Qwen3-Next layer, as the weights of `chunkwise.layers.gated_delta_net` and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.layers import GatedDeltaNetConfig, GatedDeltaNetWeights, init_gated_delta_net, load_gated_delta_net
from chunkwise.shared.call import checks


def load_qwen3_next(params: Mapping[str, Any], config: GatedDeltaNetConfig) -> GatedDeltaNetWeights:
    """Return the weights of `gated_delta_net` from MaxText's parameters of a `Qwen3NextGatedDeltaNet`.

    Args:
      params: nested, {"in_proj_qkvz": {"kernel": ...}, ...}, arrays or nnx.Param, of one layer.
      config: sizes of the layer.

    Raises:
      ValueError: an array is missing, left over, or of another shape than `config` asks for.
    """
    initial = lambda: save_qwen3_next(init_gated_delta_net(jax.random.key(0), config), config)
    wanted, found = _named(jax.eval_shape(initial)), _named(params)
    checks.check(found.keys() == wanted.keys(), f"`params` must have {sorted(wanted)}; got {sorted(found)}.")
    for name, x in found.items():
        shape = wanted[name].shape
        checks.check(x.shape == shape, f"`params` must have {name} of shape {shape}; got {x.shape}.")
    # A checkpoint of transformers has the same arrays, transposed and with nearly the same names.
    other = lambda name: name.replace("rms_norm.", "").replace("kernel", "weight").replace("scale", "weight")
    return load_gated_delta_net({other(name): jnp.asarray(x).T for name, x in found.items()}, config)


def save_qwen3_next(weights: GatedDeltaNetWeights, config: GatedDeltaNetConfig) -> dict[str, Any]:
    """Return weights of `gated_delta_net` as MaxText's nested parameters: the inverse of `load_qwen3_next`."""
    c, w = config, weights
    qkvz, ba = (
        jnp.concatenate([x.reshape(c.D, c.H, -1) for x in parts], axis=2).reshape(c.D, -1)
        for parts in ((w.q, w.k, w.v, w.z), (w.b, w.a))
    )
    return {
        "in_proj_qkvz": {"kernel": qkvz},
        "in_proj_ba": {"kernel": ba},
        "conv1d": {"kernel": jnp.concatenate(w.conv).T[:, None]},
        "A_log": w.A_log,
        "dt_bias": w.dt_bias,
        "norm": {"rms_norm": {"scale": w.norm}},
        "out_proj": {"kernel": w.out},
    }


def _named(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the arrays of nested parameters by their whole names, also out of variables."""
    named = {}
    for name, x in params.items():
        opened = x.get_value() if hasattr(x, "get_value") else x
        named |= _named(x, f"{prefix}{name}.") if isinstance(x, Mapping) else {prefix + name: opened}
    return named
