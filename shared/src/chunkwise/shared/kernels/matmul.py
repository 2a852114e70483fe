"""Matrix products on tiles: the one place that states operand types and precision.

Tiles are [heads, rows, columns]; the products are batched over heads, which also keeps several heads in lock-step
inside a kernel. Two bfloat16 operands take one pass of the matrix unit with float32 accumulation; anything else is
computed from float32 operands at full float32 precision. A bare float32 product would run as a single bfloat16 pass on
a TPU, and never on a CPU, so a CPU test could not see the loss.

The user's bfloat16 tensors are exact as operands. A computed tile is not: if it is rounded to bfloat16, it gets a
relative error of 2^-9, which a delta rule amplifies a hundredfold where keys repeat, because there the values that it
adds cancel one another.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

_passes: int | None = None
# For the kernel that is being traced: whether it will be interpreted, and a list that is not empty if it asked.
_kernel: contextvars.ContextVar[tuple[bool, list] | None] = contextvars.ContextVar("kernel", default=None)


def operand_dtype(*dtypes) -> jnp.dtype:
    """Return the type in which tensors of `dtypes` enter the matrix unit: bfloat16 if all are, else float32."""
    return jnp.dtype(jnp.bfloat16 if all(x == jnp.bfloat16 for x in dtypes) else jnp.float32)


@contextlib.contextmanager
def emulate_mxu(passes: int = 1):
    """Round float32 operands on any backend as a matrix unit with `passes` bfloat16 passes (1 or 3) would.

    It is for tests, which see on a CPU how much a product loses without full precision. It acts while a function is
    traced, so trace a fresh function inside.
    """
    global _passes
    if passes not in (1, 3):
        raise ValueError(f"`passes` must be 1 or 3; got {passes}.")
    before, _passes = _passes, passes
    try:
        yield
    finally:
        _passes = before


@contextlib.contextmanager
def kernel_trace(interpreted: bool) -> Iterator[list]:
    """Trace a kernel inside; the yielded list stays empty if one trace serves to compile and to interpret it."""
    asked: list[bool] = []
    token = _kernel.set((interpreted, asked))
    try:
        yield asked
    finally:
        _kernel.reset(token)


def is_interpreted() -> bool:
    """Return whether the kernel that is being traced will be interpreted; a kernel that asks is traced twice."""
    interpreted, asked = _kernel.get() or (False, [])
    asked.append(True)
    return interpreted


def _contract(a: jax.Array, b: jax.Array, axes: tuple[int, int], dtype, passes: int | None = None) -> jax.Array:
    dims = (((axes[0],), (axes[1],)), ((0,), (0,)))
    dtype = operand_dtype(a.dtype, b.dtype) if dtype is None else operand_dtype(dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    exact = lax.Precision.HIGHEST if passes is None else lax.DotAlgorithmPreset.BF16_BF16_F32_X3

    def product(x, y):
        precision = lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else exact
        return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    if dtype == jnp.bfloat16 and _kernel.get():
        # Where a kernel is interpreted, some backends have no product of bfloat16 operands for every shape. In float32
        # the products of bfloat16 numbers are exact. The choice is made when the program is lowered.
        interpreted = lambda x, y: product(x.astype(jnp.float32), y.astype(jnp.float32))
        return lax.platform_dependent(a, b, mosaic=product, default=interpreted)
    if _passes is None or dtype == jnp.bfloat16:
        return product(a, b)
    a_high, b_high = rounded_by_xla(a), rounded_by_xla(b)
    if _passes == 1:
        return product(a_high, b_high)
    return (
        product(a_high, b_high)
        + product(rounded_by_xla(a - a_high), b_high)
        + product(a_high, rounded_by_xla(b - b_high))
    )


def rounded_by_xla(x: jax.Array) -> jax.Array:
    """Return float32 x rounded to bfloat16 in plain JAX, where XLA would leave a conversion and its reverse out."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def rounded(x: jax.Array) -> jax.Array:
    """Return float32 x rounded to bfloat16.

    Mosaic rounds by a conversion to bfloat16 and back. In an interpreted kernel XLA would leave both conversions out.
    """
    return rounded_by_xla(x) if is_interpreted() else x.astype(jnp.bfloat16).astype(jnp.float32)


def dot(a: jax.Array, b: jax.Array, dtype=None, passes: int | None = None) -> jax.Array:
    """Return a b for a [h, m, k] and b [h, k, n], as float32 [h, m, n].

    `dtype` forces the type of the operands. With `passes` = 3 float32 operands take three bfloat16 passes: for GPUs,
    whose tensor cores have no full precision.
    """
    return _contract(a, b, (2, 1), dtype, passes)


def dot_nt(a: jax.Array, b: jax.Array, dtype=None, passes: int | None = None) -> jax.Array:
    """Return a b^T for a [h, m, k] and b [h, n, k], as float32 [h, m, n]; `dtype` and `passes` as in `dot`."""
    return _contract(a, b, (2, 2), dtype, passes)


def dot_tn(a: jax.Array, b: jax.Array, dtype=None, passes: int | None = None) -> jax.Array:
    """Return a^T b for a [h, k, m] and b [h, k, n], as float32 [h, m, n]; `dtype` and `passes` as in `dot`."""
    return _contract(a, b, (1, 1), dtype, passes)


def bf16_parts(x: jax.Array, count: int = 3) -> tuple[jax.Array, ...]:
    """Return bfloat16 parts of a float32 x, the largest first: 8 bits each, so three hold all 24 bits of x."""
    parts = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return tuple(parts)


def dot_parts(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> jax.Array:
    """Return a b for a and b as `bf16_parts`: 16 bits from two parts of each, float32 accuracy from three parts.

    With three parts this does what `Precision.HIGHEST` does: six one-pass products, without those below the 24 bits.
    But the matrix unit gets each part of b once, because the parts of a lie below one another and two parts of b side
    by side, as do the third parts of two tiles. And a caller can split an operand before he repeats or masks it. The
    number of rows of a must be a multiple of 16.
    """
    beside = lambda *x: jnp.concatenate(x, axis=2)
    below = lambda *x: jnp.concatenate(x, axis=1)
    m, n = a[0].shape[1], b[0].shape[2]
    both = dot(below(*a), beside(*b[:2]), jnp.bfloat16)
    part = lambda i, j: both[:, i * m : (i + 1) * m, j * n : (j + 1) * n]
    if len(a) == 2:
        # The product of both second parts is computed anyway. Without it, the error is ten times as large where keys
        # repeat.
        return part(0, 0) + (part(0, 1) + part(1, 0) + part(1, 1))
    half = a[0].shape[0] // 2
    if a[0].shape[0] % 2:
        third = dot(a[0], b[2], jnp.bfloat16)
    else:
        pairs = dot(below(a[0][:half], a[0][half:]), beside(b[2][:half], b[2][half:]), jnp.bfloat16)
        third = jnp.concatenate([pairs[:, :m, :n], pairs[:, m:, n:]])
    return part(0, 0) + (part(0, 1) + part(1, 0) + (part(1, 1) + part(2, 0) + third))
