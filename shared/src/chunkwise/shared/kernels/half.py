"""float16 for kernels, which can read and write its bits only: no TPU loads or computes with it."""

import jax
import jax.numpy as jnp
from jax import lax

# In float32: the exponent of 2^112, by which the biases of the two types differ, and the bits of infinity, of 2^16 and
# of 2^-14. The largest float16 is below 2^16, and below 2^-14 they have a fixed exponent.
_BIAS, _INFINITY, _TOO_LARGE, _SMALL = (127 - 15) << 23, 0x7F800000, 0x47800000, 0x38800000
_HALF_INFINITY, _HALF_NAN, _HALF_SMALL = 0x7C00, 0x7E00, 0x0400


def from_half_bits(bits: jax.Array) -> jax.Array:
    """Return the float32 of float16 bits, whole numbers of which the lower 16 bits count."""
    bits = bits.astype(jnp.int32)
    sign, size = lax.shift_left(bits & jnp.int32(0x8000), jnp.int32(16)), bits & jnp.int32(0x7FFF)
    moved = lax.shift_left(size, jnp.int32(13))
    moved = jnp.where(size >= _HALF_INFINITY, moved | jnp.int32(_INFINITY), moved + jnp.int32(_BIAS))
    small = lax.bitcast_convert_type(size.astype(jnp.float32) * jnp.float32(2.0**-24), jnp.int32)
    return lax.bitcast_convert_type(jnp.where(size < _HALF_SMALL, small, moved) | sign, jnp.float32)


def to_half_bits(x: jax.Array) -> jax.Array:
    """Return the bits of float32 rounded to float16, to even where two are as near, in the lower 16 bits of int32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    sign = lax.shift_right_logical(bits, jnp.int32(16)) & jnp.int32(0x8000)
    size = bits & jnp.int32(0x7FFFFFFF)
    # Adding just below one half of the last place that stays, or one half if that place is odd, rounds to even.
    odd = lax.shift_right_logical(size, jnp.int32(13)) & jnp.int32(1)
    moved = size + jnp.int32(0x0FFF) + odd
    half = lax.shift_right_logical(moved - jnp.int32(_BIAS), jnp.int32(13))
    half = jnp.where(moved >= _TOO_LARGE, jnp.int32(_HALF_INFINITY), half)
    half = jnp.where(size > _INFINITY, jnp.int32(_HALF_NAN), half)
    # The sum with 2^23 has the whole number in its last bits, rounded to even.
    small = lax.bitcast_convert_type(size, jnp.float32) * jnp.float32(2.0**24) + jnp.float32(2.0**23)
    small = lax.bitcast_convert_type(small, jnp.int32) & jnp.int32(0x7FFFFF)
    return jnp.where(size < _SMALL, small, half) | sign
