"""Which weights of a layer take weight decay."""

from typing import Any

import jax

from chunkwise.layers import config
from chunkwise.layers.devices import sharding
from chunkwise.shared.call import checks

# Rates and steps of decays, skips, norms and biases: zero has no meaning of its own for them. Of RWKV-7 also all other
# weights but the large projections: mixtures of tokens, factors of channels, and projections of low rank.
_KEPT = ("A_log", "dt_bias", "skip", "norm", "qk_norm", "bias", "in_bias", "out_bias", "z_bias", "i_bias", "f_bias")
_KEPT += ("mix", "decay", "decay_bias", "rate", "rate_bias", "first", "first_bias", "gate", "k_k", "k_a", "r_k")
_KEPT += ("norm_bias",)


def decayed(config: config.LayerConfig) -> Any:
    """Return which weights of a layer take weight decay, in the structure of its weights: True or False for each.

    Projections and convolutions do. A_log, dt_bias, skips, norms and biases do not, as in the packages of these layers'
    authors, whatever dimensions they have: dt_bias of Kimi delta attention is [HV, K]. Of RWKV-7 only r, k, v and out
    do. For optax the tree is a mask::

        optax.adamw(rate, weight_decay=0.1, mask=decayed(config))

    Args:
      config: sizes of a layer.

    Raises:
      ValueError: `config` is not that of a layer.
    """
    known = type(config) in sharding.LAYERS
    checks.check(known, f"`config` must be that of a layer; got {type(config).__name__}.")
    layer = sharding.LAYERS[type(config)]
    split = layer.split(config)
    masks = (jax.tree.map(lambda _, name=name: name not in _KEPT, x) for name, x in split._asdict().items())
    return layer.weights(*masks)
