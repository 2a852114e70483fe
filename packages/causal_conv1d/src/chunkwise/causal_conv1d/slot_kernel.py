"""Rows of a pool [slots, ...] by their slots, copied between places of memory by one launch.

It does what `slot_rows.read` and `slot_rows.write` do. XLA's gather and scatter go through the rows one after another;
here all copies are under way at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher
from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.serving import slot_rows


def supports(pool: jax.Array) -> bool:
    """Return whether the kernels take a pool of this type."""
    return pool.dtype in (jnp.float32, jnp.bfloat16)


def check_type(pool: jax.Array) -> None:
    """Raise NotImplementedError for a pool that the kernels do not take, which a user asked for by name."""
    if not supports(pool):
        raise NotImplementedError(
            f'"pallas" takes serving steps over pools of float32 and bfloat16; got {pool.dtype}: use '
            f'implementation="xla".'
        )


def _read(pool, slots):
    rows = _launch("read_slots", pool, slots, None)
    # Rows without a slot were not written.
    exists = (pools.existing(slots, pool.shape[0]) >= 0).reshape(-1, *(1,) * (pool.ndim - 1))
    return jnp.where(exists, rows, jnp.zeros((), pool.dtype))


def _launch(name: str, pool: jax.Array, slots: jax.Array, rows: jax.Array | None) -> jax.Array:
    """Return the rows of a pool, or with rows the pool after they are written."""
    slots, rows = pools.existing(slots, pool.shape[0]), None if rows is None else rows.astype(pool.dtype)
    anywhere, in_hbm, n = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM), slots.shape[0]
    shape = (n, *pool.shape[1:]) if rows is None else pool.shape
    return launcher.pallas_call(
        _copy_rows,
        slots,
        pool,
        rows,
        name=name,
        num_scalar_prefetch=1,
        grid=(1,),
        dimension_semantics=("arbitrary",),
        in_specs=[in_hbm, None if rows is None else anywhere],
        out_specs=anywhere if rows is None else in_hbm,
        out_shape=compat.out_struct(shape, pool.dtype, slots, pool, rows),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        input_output_aliases={} if rows is None else {1: 0},
        in_bounds=True,
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * n * (pool.size // pool.shape[0]) * pool.dtype.itemsize
        ),
    )


def _copy_rows(slots_ref, pool_ref, rows_ref, out_ref, copies):
    """Copy the row of every slot that exists: out of the pool, or into it if there are rows."""

    def each(visit, n, _):
        slot = slots_ref[n]

        @pl.when(slot >= 0)
        def _():
            ends = (pool_ref.at[slot], out_ref.at[n]) if rows_ref is None else (rows_ref.at[n], out_ref.at[slot])
            visit(pltpu.make_async_copy(*ends, copies))

    for visit in (pools.start, pools.wait):
        lax.fori_loop(jnp.int32(0), jnp.int32(slots_ref.shape[0]), functools.partial(each, visit), None)


# They do the same as `slot_rows.read` and, if no slot is named twice, as `slot_rows.write`.
read = launcher.with_gradient_of(slot_rows.read, _read, "read_slots")
write = launcher.with_gradient_of(slot_rows.write, functools.partial(_launch, "write_slots"), "write_slots")
