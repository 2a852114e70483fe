"""The scan of affine maps over the devices of a mesh axis: what the tokens of every device do to a state.

A device's tokens take a state S [..., K, V] to M S + N. M is a matrix [..., K, K], or a decay [..., K, 1] or
[..., 1, 1], which multiplies rows. The state before device r is that after device r - 1. Three ways to bring it there,
which give the same states up to rounding, on D devices, each with M and N of |M| and |N| bytes:

    way            bytes that a device sends    steps, one after the other
    all_gather     (D - 1) (|M| + |N|)          1, then a loop over D maps on every device
    doubling       log2(D) (|M| + |N|) + |N|    log2(D), each with a product of two maps, and one more
    ring           (D - 1) |N|                  D - 1

The first is best for few devices, the second for many: see docs/performance.md.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.compat import vary_over, varying_axes

# Of M, N, the state before the first device, the axis, and whether it runs from the last device to the first.
Scan = Callable[[jax.Array, jax.Array, jax.Array, "str | tuple[str, ...]", bool], jax.Array]

# Up to so many devices all maps are sent to all of them.
_FEW = 8


def is_matrix(M: jax.Array) -> bool:
    """Return whether the linear part of a map is a matrix [..., K, K] and not a decay."""
    return M.shape[-1] > 1


def apply(M: jax.Array, S: jax.Array) -> jax.Array:
    """Return M S, in full precision; zeros for M of zeros, whatever S holds.

    Such an M stands where another document begins, which a NaN in the state of the one before must not reach.
    """
    product = jnp.matmul(M, S, precision=lax.Precision.HIGHEST) if is_matrix(M) else M * S
    return jnp.where(jnp.all(M == 0.0, axis=(-2, -1), keepdims=True), 0.0, product)


def transposed(M: jax.Array) -> jax.Array:
    """Return the transpose of the linear part of a map."""
    return jnp.swapaxes(M, -1, -2) if is_matrix(M) else M


def _rank(axis, reverse: bool) -> tuple[int, jax.Array]:
    """Return how many devices there are, and how many come before this one."""
    D, r = lax.axis_size(axis), lax.axis_index(axis)
    return D, jnp.int32(D - 1) - r if reverse else r


def shift(x, axis, distance: int = 1, reverse: bool = False):
    """Return what the device at this distance before has, zeros where there is none."""
    first = range(lax.axis_size(axis) - distance)
    return lax.ppermute(x, axis, [(i + distance, i) if reverse else (i, i + distance) for i in first])


def all_gather(M: jax.Array, N: jax.Array, S: jax.Array, axis, reverse: bool = False) -> jax.Array:
    """Return the state before every device, from that before the first: every device gets all maps."""
    D, r = _rank(axis, reverse)
    S = vary_over(varying_axes(M, N), S)
    # Going back, the map of the last device comes first.
    maps = list(zip(*lax.all_gather((M, N), axis), strict=True))[:: -1 if reverse else 1]
    # Nothing lies behind the last device, so nobody needs its map.
    for d, (M, N) in enumerate(maps[:-1]):
        S = jnp.where(d < r, apply(M, S) + N, S)
    return S


def doubling(M: jax.Array, N: jax.Array, S: jax.Array, axis, reverse: bool = False) -> jax.Array:
    """Return the same: every device composes the maps of 2, 4, 8, ... devices up to itself."""
    D, r = _rank(axis, reverse)
    S, distance = vary_over(varying_axes(M, N), S), 1
    while distance < D:
        before = shift((M, N), axis, distance, reverse)
        has = r >= distance
        M, N = jnp.where(has, apply(M, before[0]), M), jnp.where(has, apply(M, before[1]) + N, N)
        distance *= 2
    return jnp.where(r == 0, S, shift(apply(M, S) + N, axis, 1, reverse))


def ring(M: jax.Array, N: jax.Array, S: jax.Array, axis, reverse: bool = False) -> jax.Array:
    """Return the same: the state itself goes from device to device."""
    D, r = _rank(axis, reverse)
    S = vary_over(varying_axes(M, N), S)
    for d in range(1, D):
        S = jnp.where(r == d, shift(apply(M, S) + N, axis, 1, reverse), S)
    return S


SCANS: dict[str, Scan] = {"all_gather": all_gather, "doubling": doubling, "ring": ring}


def exclusive_scan(M: jax.Array, N: jax.Array, S: jax.Array, axis, reverse: bool = False) -> jax.Array:
    """Return the state before every device by the way that is best for so many.

    Args:
      M, N: the map of this device; float32.
      S: the state before the first device, the same on all.
      axis: of the mesh, or several.
      reverse: the scan begins with the last device.
    """
    scan = all_gather if lax.axis_size(axis) <= _FEW else doubling
    return scan(M, N, S, axis, reverse)
