"""The scans over devices for benchmarks: the library's scans, and a ring, which the library does not have."""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.plain import affine_scan
from chunkwise.shared.plain.affine_scan import AffineMap


def ring(own: AffineMap, S: jax.Array | None, axis, reverse: bool = False) -> jax.Array:
    """Return the state before every device: the state goes from device to device, in D - 1 steps of |N| bytes each."""
    D, r = lax.axis_size(axis), lax.axis_index(axis)
    r = jnp.int32(D - 1) - r if reverse else r
    before = jnp.zeros_like(own.N) if S is None else S
    for d in range(1, D):
        after = own.after(S if d == 1 else before)
        before = jnp.where(r == d, affine_scan.shift(after, axis, 1, reverse), before)
    return before


SCANS = affine_scan.SCANS | {"ring": ring}
