"""Rows of a pool by their slots, copied by a kernel: the same rows, bit by bit, as by indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.causal_conv1d import slot_kernel
from chunkwise.shared.serving import slot_rows

# One slot twice to read from, one below zero, and one past the end.
READ = jnp.array([3, -1, 0, 7, 3, -5], jnp.int32)
WRITTEN = jnp.array([3, -1, 0, 7, 6, -5], jnp.int32)


def make(shape, dtype):
    """Return a pool of seven slots and six rows, each with a row of NaN."""
    rng = np.random.default_rng(0)
    pool, rows = (rng.standard_normal((n, *shape)) for n in (7, 6))
    pool[5], rows[1] = np.nan, np.nan
    return jnp.asarray(pool, dtype), jnp.asarray(rows, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 256), (1, 20)])
def test_reads_and_writes(shape, dtype):
    pool, rows = make(shape, dtype)
    bits = lambda x: np.asarray(x).tobytes()
    assert bits(slot_kernel.read(pool, READ)) == bits(slot_rows.read(pool, READ))
    assert bits(slot_kernel.write(pool, WRITTEN, rows)) == bits(slot_rows.write(pool, WRITTEN, rows))


def test_no_forward_mode():
    pool, _ = make((3, 8), "float32")
    with pytest.raises(NotImplementedError, match="the kernel read_slots has no derivative: "):
        jax.jvp(lambda pool: slot_kernel.read(pool, READ), (pool,), (pool,))


def test_types():
    """TPU kernels take no float16."""
    assert not slot_kernel.supports(jnp.zeros((2, 3, 8), jnp.float16))


def test_more_slots_than_scalar_memory_holds():
    """Tables of any kernel that do not fit are refused when the program is traced."""
    pool, slots = jax.ShapeDtypeStruct((2, 1, 8), jnp.float32), jax.ShapeDtypeStruct((2**18,), jnp.int32)
    with pytest.raises(NotImplementedError, match=r"read_slots takes 1048576 bytes of scalar memory .* 983040: use"):
        jax.eval_shape(slot_kernel.read, pool, slots)
