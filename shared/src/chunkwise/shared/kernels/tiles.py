"""Small pieces of tile mathematics that several kernels share; arrays in, arrays out.

Tiles are [heads, rows, columns]. A value per token is a row [heads, 1, C] in memory (a column would be padded to 128
lanes) and is turned into a column [heads, C, 1] where it multiplies the rows of a matrix.
"""

import jax
import jax.numpy as jnp
from jax import lax

# Gates to base 2 are gates in nats times this; the machine's exponential is 2^x.
LOG2_E = 1.4426950408889634
# A gate in nats that forgets everything, because e^-110 is 0 in float32.
FORGET = -110.0


def row_index(size: int) -> jax.Array:
    """Return i of shape [1, size, size]."""
    return lax.broadcasted_iota(jnp.int32, (1, size, size), 1)


def column_index(size: int) -> jax.Array:
    """Return j of shape [1, size, size]."""
    return lax.broadcasted_iota(jnp.int32, (1, size, size), 2)


def strictly_lower(size: int) -> jax.Array:
    """Return i > j of shape [1, size, size]."""
    return row_index(size) > column_index(size)


def lower(size: int) -> jax.Array:
    """Return i >= j of shape [1, size, size]."""
    return row_index(size) >= column_index(size)


def to_column(row: jax.Array) -> jax.Array:
    """Return [heads, 1, C] as [heads, C, 1], exactly: the diagonal of the broadcast row, summed over lanes.

    Every TPU generation can compile a selection and a sum over lanes; not every one can transpose a single row.
    """
    size = row.shape[-1]
    on_diagonal = row_index(size) == column_index(size)
    return jnp.sum(jnp.where(on_diagonal, row, 0.0), axis=-1, keepdims=True)


def repeat_heads(x: jax.Array, heads: int, axis: int = 0) -> jax.Array:
    """Return x, which has h heads along an axis, with `heads` heads: value head n is head n // (heads // h).

    It is a broadcast and a reshape, which cost nothing in a kernel, and which JAX can divide over explicit meshes.
    """
    h = x.shape[axis]
    if h == heads:
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    grouped = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*before, h, heads // h, *after))
    return grouped.reshape(*before, heads, *after)


def masked_exp(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Return exp(x) where `mask`, else 0.

    x is masked before the exponential too: above the diagonal a difference of cumulative gates is positive and may
    overflow, and inf * 0 is NaN.
    """
    return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0.0)), 0.0)


def pair_decay(g_col: jax.Array, g_row: jax.Array, mask: jax.Array) -> jax.Array:
    """Return exp(G_i - G_j) where `mask`, else 0, for cumulative gates G as a column and a row."""
    return masked_exp(g_col - g_row, mask)


def clip_gate(g: jax.Array) -> jax.Array:
    """Return gates in float32, none below `FORGET`.

    So a gate that means "forget everything", such as -1e9 or -inf, leaves sums of it and other gates finite and exact.
    """
    return jnp.maximum(g.astype(jnp.float32), FORGET)


def to_row(column: jax.Array) -> jax.Array:
    """Return [heads, C, 1] as [heads, 1, C], exactly; the inverse of `to_column`."""
    size = column.shape[1]
    on_diagonal = row_index(size) == column_index(size)
    return jnp.sum(jnp.where(on_diagonal, column, 0.0), axis=1, keepdims=True)


def sum_groups(x: jax.Array, heads: int) -> jax.Array:
    """Return x [NC, HV, ...] summed over the value heads that share a head: [NC, heads, ...]."""
    NC, HV, *tail = x.shape
    return jnp.sum(x.reshape(NC, heads, HV // heads, *tail), axis=2)


def l2norm(x: jax.Array, sum_of=lambda x: jnp.sum(x, axis=-1, keepdims=True)) -> jax.Array:
    """Return x * rsqrt(sum x^2 + 1e-6), computed in the type of x; `sum_of` returns the sums of heads."""
    return x * lax.rsqrt(sum_of(x * x) + 1e-6)


def unit_keys(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Return float32 keys x with unit length, in `dtype`, and a factor for the step sizes of a delta rule.

    A token with the key k and the step size beta takes away beta |k|^2 times the value that k reads from a state. In
    bfloat16 |k|^2 is up to 1.005: where a key repeats and beta is 2, a state that should only change its sign would
    grow without end. The factor is (exact |k|^2) / (rounded |k|^2), [..., 1], up to 2e-7; None for float32. It has no
    gradient, because without rounding it is 1.
    """
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    r = lax.rsqrt(squares + 1e-6)
    k = (x * r).astype(dtype)
    if k.dtype == jnp.float32:
        return k, None
    rounded = k.astype(jnp.float32)
    excess = jnp.sum(rounded * rounded, axis=-1, keepdims=True) - squares * r * r
    # The first terms of the quotient. A key near 0, whose length is not 1, needs no more.
    return k, lax.stop_gradient(1.0 - excess * (1.0 - excess))


def l2norm_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    """Return the gradient of x through `l2norm`."""
    x = x.astype(jnp.float32)
    r = lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
    y = x * r
    return r * (dy - y * jnp.sum(y * dy, axis=-1, keepdims=True))
