"""The scan over the devices of a mesh axis of their affine maps, which the tokens of a device apply to a state.

A device's tokens take a state S [..., K, V] to M S + N. M is a matrix [..., K, K], or a decay [..., K, 1] or
[..., 1, 1], which multiplies rows. The state before device r is the state after device r - 1. Where another document
begins on a device, no state passes it, not even a NaN. Three ways bring the states to D devices, with equal results up
to rounding. |M| and |N| are the bytes of M and N of one device:

    way            bytes that a device sends      steps, one after the other
    hand_over      |N|                            1, for two devices at most
    all_to_all     (D - 1) / D (|M| + 2 |N|)      2, between them D - 2 products of 1 / D of the heads
    doubling       log2(D) (|M| + |N|) + |N|      log2(D), each with a product of two maps, and one more

The first way needs no M: the first of two devices knows the state before its tokens, so its map begins there, and its N
is the state before the second one. The second way is best for a few more devices if there is a head for each of them,
and the third for many devices: see docs/distribution.md.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared import compat, trees


class AffineMap(NamedTuple):
    """The map that the tokens of a device apply to a state: S -> M S + N, or N where the state does not pass.

    Attributes:
      M: float32 [..., K, K], or a decay [..., K, 1] or [..., 1, 1]; None for `hand_over`.
      N: float32 [..., K, V].
      passes: bool [..., 1, 1], whether anything of S reaches the end; None if it always does.
    """

    M: Any
    N: jax.Array
    passes: jax.Array | None = None

    def apply(self, S: jax.Array) -> jax.Array:
        """Return M S in full precision, zeros where S does not pass, whatever it holds."""
        product = jnp.matmul(self.M, S, precision=lax.Precision.HIGHEST) if is_matrix(self.M) else self.M * S
        return product if self.passes is None else jnp.where(self.passes, product, 0.0)

    def after(self, S: jax.Array | None) -> jax.Array:
        """Return the state after the tokens; None stands for a state of zeros."""
        return self.N if S is None else self.apply(S) + self.N

    def after_map(self, first: "AffineMap") -> "AffineMap":
        """Return the map of both, `first` and then this one."""
        passes = jax.tree.map(jnp.logical_and, self.passes, first.passes)  # both have it or neither
        return AffineMap(self.apply(first.M), self.after(first.N), passes)


# `all_to_all` serves at most so many devices, because on each of them it takes some heads through the maps of all, one
# after the other.
_FEW = 16


def is_matrix(M: jax.Array) -> bool:
    """Return whether the linear part of a map is a matrix [..., K, K] and not a decay."""
    return M.shape[-1] > 1


def transposed(M: jax.Array | None) -> jax.Array | None:
    """Return the transpose of the linear part of a map."""
    return M if M is None or not is_matrix(M) else jnp.swapaxes(M, -1, -2)


def _rank(axis, reverse: bool) -> tuple[int, jax.Array]:
    """Return how many devices there are, and how many come before this one."""
    D, r = lax.axis_size(axis), lax.axis_index(axis)
    return D, jnp.int32(D - 1) - r if reverse else r


def shift(x, axis, distance: int = 1, reverse: bool = False):
    """Return x of the device that is `distance` devices earlier; zeros if there is no such device."""
    first = range(lax.axis_size(axis) - distance)
    return lax.ppermute(x, axis, [(i + distance, i) if reverse else (i, i + distance) for i in first])


def _start(local: AffineMap, S: jax.Array | None) -> jax.Array:
    """Return the state before the first device, typed as an array that varies over the devices."""
    return compat.vary_over(compat.varying_axes(*jax.tree.leaves(local)), jnp.zeros_like(local.N) if S is None else S)


def hand_over(local: AffineMap, S: jax.Array | None, axis, reverse: bool = False) -> jax.Array:
    """Return the state before each of two devices, or before the only one.

    N of the device that comes first begins from its state S, and not from zeros.
    """
    _, r = _rank(axis, reverse)
    return jnp.where(r == 0, _start(local, S), shift(local.N, axis, 1, reverse))


def all_to_all(local: AffineMap, S: jax.Array | None, axis, reverse: bool = False) -> jax.Array:
    """Return the same: every device gets the maps of all devices for some heads, and sends each its states of these."""
    D, r = lax.axis_size(axis), lax.axis_index(axis)
    lead, (K, V) = local.N.shape[:-2], local.N.shape[-2:]
    heads = math.prod(lead)

    def cut(x: jax.Array) -> jax.Array:
        """Return x [lead, m, n] as [D, heads of a device, m, n], padded with zeros after the last head."""
        x = jnp.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(heads, *x.shape[-2:])
        x = jnp.pad(x, [(0, -heads % D), (0, 0), (0, 0)])
        return x.reshape(D, -1, *x.shape[-2:])

    send = functools.partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0)
    every = jax.tree.map(send, jax.tree.map(cut, local))
    start = None if S is None else cut(S)[r]
    before = [jnp.zeros_like(every.N[0]) if start is None else start]
    # In reverse, the map of the last device comes first. No device follows the last map, so nobody needs it.
    for d in range(D - 1):
        at = D - 1 - d if reverse else d
        after = trees.at(every, at).after(start if d == 0 else before[-1])
        # Without the barrier, XLA computes a state again for every use.
        before.append(lax.optimization_barrier(after))
    states = send(jnp.concatenate(before[::-1] if reverse else before).reshape(D, -1, K, V))
    return states.reshape(-1, K, V)[:heads].reshape(*lead, K, V)


def doubling(local: AffineMap, S: jax.Array | None, axis, reverse: bool = False) -> jax.Array:
    """Return the same: every device composes the maps of 2, 4, 8, ... devices up to itself."""
    D, r = _rank(axis, reverse)
    first, distance = _start(local, S), 1
    while distance < D:
        both = local.after_map(shift(local, axis, distance, reverse))
        has = r >= distance
        local = jax.tree.map(functools.partial(jnp.where, has), both, local)
        distance *= 2
    return jnp.where(r == 0, first, shift(local.after(S), axis, 1, reverse))


def needs_M(axis) -> bool:
    """Return whether the best way over these devices reads M of the maps; without it, the way is `hand_over`."""
    return lax.axis_size(axis) > 2


def exclusive_scan(local: AffineMap, S: jax.Array | None, axis, reverse: bool = False) -> jax.Array:
    """Return the state before every device, by the way that is best for this number of devices.

    Args:
      local: the map of this device.
      S: the state before the first device, the same on all; None for zeros.
      axis: an axis of the mesh, or several.
      reverse: the scan begins with the last device.
    """
    D, few = lax.axis_size(axis), min(math.prod(local.N.shape[:-2]), _FEW)
    scan = hand_over if not needs_M(axis) else all_to_all if few >= D else doubling
    return scan(local, S, axis, reverse)
