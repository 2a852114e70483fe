"""Where the weights, the caches and the hidden states of a layer lie on a mesh of devices."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from chunkwise.layers import (
    caches,
    comba,
    config,
    delta_net,
    delta_net2,
    delta_product,
    gla,
    kimi,
    layer,
    lightning,
    mamba2,
    mlstm,
    rwkv7,
)
from chunkwise.layers.devices import division
from chunkwise.shared.call import checks

_MODULES = comba, delta_net, delta_net2, delta_product, gla, kimi, mamba2, lightning, mlstm, rwkv7
LAYERS: dict[type, layer.Definition] = {module.LAYER.config: module.LAYER for module in _MODULES}


class Shardings(NamedTuple):
    """PartitionSpecs of the arrays that a layer takes and returns.

    Attributes:
      weights: for the weights, in the structure of the weights.
      x: for hidden states [B, T, D], read and written.
      cache: for a cache with a state for each row.
      values: for v [B, T, HV, V]; a layer takes it as `sharding`.
    """

    weights: Any
    x: PartitionSpec
    cache: caches.Cache
    values: PartitionSpec


def shardings(
    config: config.LayerConfig, mesh_axes: Mapping[str, Any], mesh: Mesh | AbstractMesh | None = None
) -> Shardings:
    """Return how a layer is divided over a mesh: rows of the batch, tokens, and heads.

    The call is::

        on = shardings(config, {"batch": "rows", "heads": "heads"})

    Heads divide projections, convolutions, decays and states, as in tensor parallelism, and the last product is a sum
    over the devices of heads. Tokens divide sequences, as in context parallelism; the convolution and the operator
    exchange the inputs and states that they need.

    Args:
      config: sizes of a layer.
      mesh_axes: an axis of the mesh, or a tuple of axes, under the name of the dimension to divide: "batch", "tokens"
        or "heads". A dimension without an entry is not divided. "batch" also divides the states of a cache, so leave it
        out for a pool.
      mesh: the mesh. It is needed only if key heads (groups of Mamba-2) are not a multiple of the devices of heads:
        they are divided over as many of the first axes as possible, and repeated over the other axes.

    Raises:
      ValueError: `mesh_axes` has another key, or value heads are not a multiple of the devices of heads.
    """
    checks.check(type(config) in LAYERS, f"`config` must be that of a layer; got {type(config).__name__}.")
    letters = division.Letters(config, mesh_axes, mesh)
    found = LAYERS[type(config)]
    conv: Any = config.conv_letters
    cache = caches.Cache(conv, config.state_letters)
    return Shardings(*jax.tree.map(letters.spec, (found.split(config), "bt.", cache, "btn.")))


def place(weights: Any, mesh: jax.sharding.Mesh, specs: Any) -> Any:
    """Return a tree of arrays, JAX's or numpy's, laid on a mesh.

    The call is::

        weights = place(weights, mesh, shardings(config, {"heads": "heads"}).weights)

    An array goes to its devices part by part, so no device holds the whole of an array that is divided.

    Args:
      weights: a tree of arrays, such as the result of `load_gated_delta_net`, or the state of an nnx module.
      mesh: the mesh.
      specs: a PartitionSpec for every array, or for whole parts of the tree; None for arrays that all devices have. For
        a layer it is `shardings(...).weights`, for a state `nnx.get_partition_spec(state)`.
    """

    def put(spec, part):
        sharding = NamedSharding(mesh, PartitionSpec() if spec is None else spec)
        return jax.tree.map(lambda x: jax.device_put(x, sharding), part)

    return jax.tree.map(put, specs, weights, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
