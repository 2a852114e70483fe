"""How whole operators are divided over the devices of a mesh, and how their tokens may be split over some of them."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.call import arguments, checks
from chunkwise.shared.implementation import implementations
from chunkwise.shared.implementation.implementations import Implementation
from chunkwise.shared.mesh import context, partition

# How the fields of `Slots` may be split: "s" are sequences.
SLOT_DIMENSIONS = {name: "" if name in ("num_decodes", "num_sequences") else "s" for name in arguments.Slots._fields}
# Letters: n value heads, d value channels, and h, i, j and l the key heads of q, k, p and echo. Devices along axes that
# split value heads but not key heads all hold the same key heads, and each takes the key heads that its value heads
# read.
_LAYOUT = partition.Layout(
    leading="v",
    meanings={"b": "rows", "t": "tokens", "n": "value heads", "d": "value channels"},
    arguments={
        "q": "bth",
        "k": "bti",
        "v": "btnd",
        "g": "btn",
        "beta": "btn",
        "g_gamma": "n",
        "scale": "",
        "initial_state": "sn.d",
        "cu_seqlens": "",
        "A_log": "n",
        "dt_bias": "n",
        "segment_ids": "bt",
        "p": "btj",
        "echo": "btl",
        "b": "btn",
        "w": "btnd",
        "log_weight": "btn",
        "least": "btn",
        "skip": "nd",
        **SLOT_DIMENSIONS,
    },
    results=("btnd", "sn.d"),
    prefixes={"h": "n", "i": "n", "j": "n", "l": "n"},
)
_KEY_HEADS = {"q": "h", "k": "i", "p": "j", "echo": "l"}
# The argument that is a pool if there are slots.
_POOL = "initial_state"


# How an operator is divided over a mesh, or None without a mesh; and the axes that split its tokens.
Places = tuple[partition.Division | None, partition.Axes]


def find_places(x: arguments.Arguments, options: arguments.Options, pool: str = _POOL) -> Places:
    """Return how the operator is divided over a mesh, by the types of its arguments and by its options.

    `pool` is the user's name of the argument `initial_state`.
    """
    known = lambda named: {pool if name == _POOL else name: y for name, y in named.items()}
    arrays, layout = known(x.arrays()), _LAYOUT._replace(arguments=known(_LAYOUT.arguments))
    division = partition.find_division(arrays, layout, options.sharding)
    check_pool(arrays, division, pool)
    division = division if division is None else division._replace(layout=_LAYOUT)
    tokens = partition.token_axes(division, options.context_axis)
    checks.check(
        not (tokens and x.slots), f"`state_indices` must come with tokens that are not split; got them over {tokens}."
    )
    return division, tokens


def on_device(
    implementation: Implementation,
    x: arguments.Arguments,
    options: arguments.Options,
    places: Places,
    run: Callable[[implementations.Plan, arguments.Arguments], tuple[jax.Array, jax.Array | None]],
) -> partition.Run:
    """Return a function for `partition.over_mesh`, which runs an operator on one device from its arrays by name.

    Args:
      implementation: an implementation of the operator.
      x, options: the arguments and options of all devices.
      places: from `find_places`.
      run: from the plan and the arguments of one device to its results; runs if tokens are not split.
    """
    division, tokens = places
    options, group = options._replace(sharding=None, context_axis=None), x.v.shape[2] // x.q.shape[2]

    def compute(arrays: partition.Arrays) -> tuple[jax.Array, jax.Array | None]:
        arrays, elsewhere = (arrays, None) if division is None else _local(arrays, division, group)
        y = x.with_arrays(arrays)
        if lax.axis_size(tokens) > 1:
            return context.run_context(implementation, y, options, tokens)
        o, states = run(implementations.plan(implementation, y, options), y)
        return without_elsewhere(o, elsewhere), states

    return compute


def check_pool(arrays: partition.Arrays, division: partition.Division | None, pool: str) -> None:
    """Check that devices that divide the rows of a batch can divide the pool of states; `pool` names the argument."""
    # A StatePool is no array, and cannot be divided over a mesh.
    if division is None or "state_indices" not in arrays or pool not in arrays:
        return
    axes = division.axes["s"]
    slots, devices = arrays[pool].shape[0], partition.size_of(division.mesh, axes)
    checks.check(
        slots % devices == 0,
        f"`{pool}` must have slots that {devices} devices along {axes} can share; got {slots} slots.",
    )


def _local(
    arrays: partition.Arrays, division: partition.Division, group: int
) -> tuple[partition.Arrays, jax.Array | None]:
    """Return arguments with the key heads and slots of one device, and which sequences have slots elsewhere."""
    arrays, elsewhere = local_slots(arrays, division.axes["s"], _POOL)
    HV = arrays["v"].shape[2]
    for name, letter in _KEY_HEADS.items():
        if name not in arrays:
            continue
        rest = division.axes["n"][len(division.axes[letter]) :]
        arrays[name] = _take_key_heads(arrays[name], rest, HV, group)
    return arrays, elsewhere


def _take_key_heads(x: jax.Array, rest: partition.Axes, HV: int, group: int) -> jax.Array:
    """Return the key heads that the value heads of a device read.

    Args:
      x: [B, T, H, K], which the devices along `rest` share.
      rest: axes over which the value heads are split and x is not.
      HV: value heads of a device.
      group: value heads for a key head.
    """
    if not rest:
        return x
    each = math.gcd(HV, group)  # so many value heads of a device share a key head
    first = lax.axis_index(rest) * jnp.int32(HV)
    heads = lax.div(first + jnp.arange(0, HV, each, dtype=jnp.int32), jnp.int32(group))
    return jax.tree.map(functools.partial(jnp.take, indices=heads, axis=2), x)


def without_elsewhere(o: jax.Array, elsewhere: jax.Array | None) -> jax.Array:
    """Return outputs [N, ...] with NaN for sequences whose slot is elsewhere, so that nobody takes them for results."""
    if elsewhere is None:
        return o
    return jnp.where(jnp.expand_dims(elsewhere, range(1, o.ndim)), jnp.full((), jnp.nan, o.dtype), o)


def local_slots(arrays: partition.Arrays, axes: partition.Axes, pool: str) -> tuple[partition.Arrays, jax.Array | None]:
    """Return arguments whose slots are counted within a device's part of the pool, and which sequences are elsewhere.

    `pool` names the argument, which is split over `axes`. The second result is bool [N], whether the slot of a sequence
    is in the part of another device; None if the pool is not split.
    """
    if "state_indices" not in arrays or not axes:
        return dict(arrays), None
    slots, indices = arrays[pool].shape[0], arrays["state_indices"]
    local = indices - lax.axis_index(axes) * jnp.int32(slots)
    # A slot past the end of the whole pool does not exist, as a negative one does not.
    exists = (indices >= 0) & (indices < slots * lax.axis_size(axes))
    here = exists & (local >= 0) & (local < slots)
    return arrays | {"state_indices": jnp.where(here, local, jnp.int32(-1))}, exists & ~here
