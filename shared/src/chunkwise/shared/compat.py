"""The JAX names that differ between the supported releases, kept in one place."""

from collections.abc import Sequence

import jax
from jax.experimental.pallas import tpu as pltpu

CompilerParams = pltpu.CompilerParams
PrefetchScalarGridSpec = pltpu.PrefetchScalarGridSpec


def out_struct(shape: Sequence[int], dtype, *operands: jax.Array | None) -> jax.ShapeDtypeStruct:
    """Return the type of a kernel output that varies over the same mesh axes as `operands`.

    Under `shard_map` an output must say over which mesh axes it varies; outside of one there are none.
    """
    kinds = [jax.typeof(x).manual_axis_type for x in operands if x is not None]
    widest = max(kinds, key=lambda kind: len(kind.varying), default=None)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=widest)
