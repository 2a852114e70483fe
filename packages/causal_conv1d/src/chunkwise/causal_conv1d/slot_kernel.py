"""Rows of a pool [slots, ...] by their slots, copied between places of memory by one launch.

It does what `slot_rows.read` and `slot_rows.write` do. XLA's gather and scatter go through the rows one after another;
here all copies are under way at once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared.kernels import launcher
from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.serving import slot_rows


class SlotRefs(NamedTuple):
    """The Refs of both kernels.

    Attributes:
      slots: int32 [n], a slot of the pool for each row, -1 for none.
      pool: [slots, ...].
      rows: [n, ...], in the type of the pool: what `read` returns, and `write` takes.
      pool_out: the pool after `write`, in the memory of the pool.
      copies: the semaphore of all copies.
    """

    slots: jax.Ref
    pool: jax.Ref
    rows: jax.Ref
    pool_out: jax.Ref
    copies: jax.Ref


def takes(pool: jax.Array) -> bool:
    """Return whether the kernels take a pool of this type."""
    return pool.dtype in (jnp.float32, jnp.bfloat16)


def check_type(pool: jax.Array) -> None:
    """Raise NotImplementedError for a pool that the kernels do not take, which a user asked for by name."""
    if not takes(pool):
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
    slots = pools.existing(slots, pool.shape[0])
    anywhere, in_hbm, n = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM), slots.shape[0]
    result = "rows" if rows is None else "pool"
    shape = (n, *pool.shape[1:]) if rows is None else pool.shape
    out = launcher.launch(
        _copy_rows,
        SlotRefs,
        name=name,
        grid=(1,),
        dimension_semantics=("arbitrary",),
        tables={"slots": slots},
        inputs={"pool": (pool, in_hbm)} | ({} if rows is None else {"rows": (rows.astype(pool.dtype), anywhere)}),
        outputs={result: (anywhere if rows is None else in_hbm, shape, pool.dtype)},
        scratch={"copies": pltpu.SemaphoreType.DMA},
        in_place={} if rows is None else {"pool": "pool"},
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * n * (pool.size // pool.shape[0]) * pool.dtype.itemsize
        ),
    )
    return out[result]


def _copy_rows(refs: SlotRefs):
    """Copy the row of every slot that exists, out of the pool or into it."""

    def each(visit, n, _):
        slot = refs.slots[n]

        @pl.when(slot >= 0)
        def _():
            row = refs.rows.at[n]
            ends = (refs.pool.at[slot], row) if refs.pool_out is None else (row, refs.pool_out.at[slot])
            visit(pltpu.make_async_copy(*ends, refs.copies))

    for visit in (pools.start, pools.wait):
        lax.fori_loop(jnp.int32(0), jnp.int32(refs.slots.shape[0]), functools.partial(each, visit), None)


# They do the same as `slot_rows.read` and, if no slot is named twice, as `slot_rows.write`.
read = launcher.with_gradient_of(slot_rows.read, _read, "read_slots")
write = launcher.with_gradient_of(slot_rows.write, functools.partial(_launch, "write_slots"), "write_slots")
