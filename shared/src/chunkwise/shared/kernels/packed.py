"""Tiles of several heads side by side in the lanes, so that small matrices fill a register and a matrix unit.

Tiles are [heads, rows, columns]. p heads form a *pack*: their [C, C] matrices lie side by side, [n, C, p C] with n =
heads / p, and one product with p tiles placed block-diagonally serves them all. In a kernel, slices of whole registers
of lanes cost nothing, nor do zeros in the place of a tile.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared import tuning
from chunkwise.shared.kernels import matmul

LANES = tuning.LANES


def round_up(size: int, whole: int) -> int:
    """Return `size` rounded up to a multiple of `whole`."""
    return -(-size // whole) * whole


def pad_lanes(size: int) -> int:
    """Return the lanes that whole registers have for so many numbers: a multiple of 128."""
    return round_up(size, LANES)


def pad_channels(size: int) -> int:
    """Return the size that a head dimension takes in a flat view: itself for all usual ones, multiples of 16."""
    return round_up(size, 16)


def packing(C: int, *heads: int) -> int:
    """Return how many [C, C] matrices to lay side by side: as many as fill the lanes and divide all of `heads`."""
    p = max(1, LANES // C)
    while any(n % p for n in heads):
        p //= 2
    return p


def lane_index(size: int) -> jax.Array:
    """Return the lane of shape [1, 1, size]."""
    return lax.broadcasted_iota(jnp.int32, (1, 1, size), 2)


def block_of(index: jax.Array, b: int) -> jax.Array:
    """Return index // b."""
    # Under jax_enable_x64 a Python number would be an int64.
    if b.bit_count() > 1:
        return lax.div(index, jnp.int32(b))
    return lax.shift_right_logical(index, jnp.int32(b.bit_length() - 1))


def rotate(x: jax.Array, shift: int, axis: int = 2) -> jax.Array:
    """Return x with its lanes, or the entries of another axis, moved up by `shift`, around the end."""
    return pltpu.roll(x, jnp.int32(shift % x.shape[axis]), axis)


def concat_lanes(tiles) -> jax.Array:
    """Return [n, m, w] tiles side by side."""
    return jnp.concatenate(tiles, axis=2)


def concat_rows(tiles) -> jax.Array:
    """Return [n, m, w] tiles below one another."""
    return jnp.concatenate(tiles, axis=1)


def whole(x: jax.Array, axis: int = 2, size: int = LANES) -> jax.Array:
    """Return tiles with zeros behind an axis, up to a multiple of `size`."""
    missing = [*x.shape[:axis], -x.shape[axis] % size, *x.shape[axis + 1 :]]
    return jnp.concatenate([x, jnp.zeros(missing, x.dtype)], axis) if missing[axis] else x


def beside(tiles) -> jax.Array:
    """Return [n, m, w] tiles side by side, each in whole registers, so that no tile moves in the lanes."""
    return concat_lanes([whole(x) for x in tiles]) if len(tiles) > 1 else tiles[0]


def split_lanes(x: jax.Array, p: int, width: int | None = None) -> jax.Array:
    """Return [n, m, p w] as [n p, m, w], or as [n p, m, width] without the last lanes of every tile."""
    w = x.shape[2] // p
    width = width or w
    return jnp.stack([x[i, :, j * w : j * w + width] for i in range(x.shape[0]) for j in range(p)])


def diagonal_blocks(x: jax.Array, p: int, width: int) -> jax.Array:
    """Return the p diagonal blocks of [n, p m, p w] as [n p, m, width], without the last lanes of every block."""
    m, w = x.shape[1] // p, x.shape[2] // p
    return jnp.stack([x[i, j * m : (j + 1) * m, j * w : j * w + width] for i in range(x.shape[0]) for j in range(p)])


def pack_members(x: jax.Array, p: int) -> list[jax.Array]:
    """Return tiles [heads, m, w] as p tiles [n, m, w]: tile j has the heads at place j of all packs."""
    return [jnp.stack([x[i] for i in range(j, x.shape[0], p)]) for j in range(p)]


def side_lanes(x: jax.Array, p: int) -> jax.Array:
    """Return tiles [heads, m, w] packed, [n, m, p w]."""
    return concat_lanes(pack_members(x, p))


def side_registers(x: jax.Array, p: int) -> jax.Array:
    """Return tiles [heads, m, w] packed as by `beside`, [n, m, p lanes]."""
    return beside(pack_members(x, p))


def place_tiles(tiles: list[jax.Array]) -> jax.Array:
    """Return p tiles [n, C, w] block-diagonally, [n, p C, p lanes], each in whole registers."""
    if len(tiles) == 1:
        return tiles[0]
    zero, places = jnp.zeros_like(tiles[0]), range(len(tiles))
    return concat_rows([beside([tiles[i] if i == j else zero for j in places]) for i in places])


def split_bf16(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return x as operands: two bfloat16 parts (16 bits) of a float32 x if `dtype` is bfloat16, else x itself."""
    return matmul.bf16_parts(x, 2) if x.dtype != dtype == jnp.bfloat16 else (x,)


def split_computed(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return `split_bf16` of a computed x, which is float32; an x of another type is a user's tensor and exact."""
    return split_bf16(x, dtype) if x.dtype == jnp.float32 else (x,)


def part_pairs(a, b) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return two lists, parts of a and of b, whose products add up to a b without the product of the small parts."""
    pairs = [(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i + j < 2]
    return [x for x, _ in pairs], [y for _, y in pairs]


def multiply_packed(A, x, p: int, dtype):
    """Return A x of every head, [heads, m, V] float32, for packed A as `split_bf16` gives it, and x [heads, C, V].

    An x that is not float32 is exact.
    """
    w = p * x.shape[1]
    right = [place_tiles(pack_members(part, p)) for part in split_computed(x, dtype)]
    left, right = part_pairs([A[:, :, i : i + w] for i in range(0, A.shape[2], w)], right)
    return split_lanes(matmul.dot(concat_lanes(left), concat_rows(right)), p, x.shape[2])


def apply_transposed(X, tiles, dtype, p: int):
    """Return X^T R of every head, [heads, C, w], at 16 bits."""
    X_parts, right = part_pairs(split_bf16(X, dtype), [side_registers(x, p) for x in split_computed(tiles, dtype)])
    return diagonal_blocks(matmul.dot_tn(concat_rows(X_parts), concat_rows(right)), p, tiles.shape[2])


def outer(a: jax.Array, b: jax.Array, dtype, p: int) -> jax.Array:
    """Return a b^T of every head, packed [n, m, p C], for tiles a [heads, m, w] and b [heads, C, w]; b keeps 16 bits.

    The parts of b stand below one another, because time on the matrix unit grows with the size of a, and not of b.
    """
    b_parts = split_bf16(b, dtype)
    products = matmul.dot_nt(a.astype(dtype), concat_rows(b_parts))
    C, first = b.shape[1], lane_index(products.shape[2]) < b.shape[1]
    if len(b_parts) == 1:
        return side_lanes(products, p)
    if p == 2 and products.shape[2] == LANES:  # two heads at a time: one rotation aligns the second parts of both
        even, odd = pack_members(products, 2)
        return jnp.where(first, even, odd) + rotate(jnp.where(first, odd, even), C)
    return side_lanes(products[:, :, :C] + products[:, :, C:], p)
