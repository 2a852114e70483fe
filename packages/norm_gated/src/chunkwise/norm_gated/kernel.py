"""The kernels: a grid step takes a block of rows, and computes it strip by strip.

Rows are flat, [rows, groups D], as projections and operators produce them, so the layout does not change. Columns past
the end of the array hold anything, and results of them are not stored. Rows past the end do not count in the gradient
of the weight.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.norm_gated import config as tiles
from chunkwise.norm_gated import tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, windows

# Rows of a register of float32.
_SUBLANES = 8
# The most cores of a chip that share a launch. The gradient of the weight leaves a launch as so many sums.
_CORES = 2


def _strips(cut: tiles.Config, width: int, D: int, compute) -> None:
    """Call compute(rows, lanes) for every strip of a block and for every unit of its lanes."""
    unit = tiles.unit(D, width)

    def strip(i, _):
        rows = pl.ds(pl.multiple_of(i * jnp.int32(cut.strip), cut.strip), cut.strip)
        for first in range(0, width, unit):
            compute(rows, slice(first, min(first + unit, width)))

    lax.fori_loop(jnp.int32(0), jnp.int32(cut.rows // cut.strip), strip, None)


def _load(ref, rows, lanes) -> Any:
    return None if ref is None else ref[rows, lanes].astype(jnp.float32)


def _fwd_kernel(x_ref, z_ref, weight_ref, y_ref, *, s: tile.NormStatic, config: tiles.Config):
    """Write y of a block."""

    def compute(rows, lanes):
        x, z = (_load(ref, rows, lanes) for ref in (x_ref, z_ref))  # [strip, lanes]
        y_ref[rows, lanes] = tile.forward(x, z, weight_ref[:, lanes], s).astype(y_ref.dtype)

    _strips(config, x_ref.shape[1], s.D, compute)


def _bwd_kernel(
    x_ref, z_ref, weight_ref, dy_ref, dx_ref, dz_ref, dweight_ref, *, s: tile.NormStatic, config: tiles.Config,
    rows: int,
):  # fmt: skip
    """Write dx and dz of a block; add up the gradient of the weight over the blocks of a core's part, in 8 rows."""
    part, grid_step = pl.program_id(0), pl.program_id(2)
    first = (part * pl.num_programs(2) + grid_step) * jnp.int32(config.rows)

    @pl.when(grid_step == 0)
    def _():
        dweight_ref[...] = jnp.zeros_like(dweight_ref)

    def compute(at, lanes):
        x, z, dy = (_load(ref, at, lanes) for ref in (x_ref, z_ref, dy_ref))  # [strip, lanes]
        dx, dz, dweight = tile.backward(x, z, weight_ref[:, lanes], dy, s)
        dx_ref[at, lanes] = dx.astype(dx_ref.dtype)
        if dz_ref is not None:
            dz_ref[at, lanes] = dz.astype(dz_ref.dtype)
        if rows % config.rows:
            row = first + at.start + lax.broadcasted_iota(jnp.int32, dweight.shape, 0)
            dweight = jnp.where(row < jnp.int32(rows), dweight, 0.0)
        # Whole registers are added; the sum over the 8 rows of a register is left to the caller.
        dweight_ref[:, lanes] += jnp.sum(dweight.reshape(-1, _SUBLANES, dweight.shape[1]), axis=0)

    # The last part may have fewer blocks than the others.
    pl.when(first < jnp.int32(rows))(functools.partial(_strips, config, x_ref.shape[1], s.D, compute))


def launch(
    x: jax.Array,
    z: jax.Array | None,
    weight: jax.Array,
    s: tile.NormStatic,
    config: tiles.Config,
    dy: jax.Array | None = None,
    in_place: bool = False,
) -> tuple[jax.Array, ...]:
    """Run the forward kernel, or with dy the backward one.

    Args:
      x, z, dy: [rows, groups * D]; z is None for a norm without a gate.
      weight: float32 [1, groups * D].
      s: the static description.
      config: tile sizes.
      in_place: whether y takes the memory of x.

    Returns:
      A tuple. Forward: y, shaped and typed as x. Backward: dx and dz, shaped and typed as x and z, of which dz is None
      without z, and dweight, float32 [n, groups * D], to be summed over n.
    """
    rows, width = x.shape
    blocks, lanes = -(-rows // config.rows), config.groups * s.D
    parts = blocks if dy is None else min(blocks, _CORES)
    steps = -(-blocks // parts)
    # A grid step past the last block keeps the index of the last block and does nothing.
    block: Any = pl.BlockSpec((config.rows, lanes), lambda i, j, n: (jnp.minimum(i * steps + n, blocks - 1), j))
    gate = None if z is None else block
    body, operands = functools.partial(_fwd_kernel, s=s, config=config), (x, z, weight)
    out_specs, like = (block,), (x,)
    if dy is not None:
        body, operands = functools.partial(_bwd_kernel, s=s, config=config, rows=rows), (x, z, weight, dy)
        sums = jax.ShapeDtypeStruct((parts * _SUBLANES, width), jnp.float32)
        out_specs, like = (block, gate, windows.along((_SUBLANES, lanes), 0, 1)), (x, z, sums)
    return launcher.pallas_call(
        body,
        *operands,
        name=f"rms_norm_gated_{'fwd' if dy is None else 'bwd'}_d{s.D}",
        # Parts and blocks of groups are independent; the blocks of a part add to the same sums.
        grid=(parts, -(-width // lanes), steps),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=[block, gate, windows.along((1, lanes), None, 1), block][: len(operands)],
        out_specs=out_specs,
        out_shape=jax.tree.map(lambda y: compat.out_struct(y.shape, y.dtype, *operands), like),
        input_output_aliases={0: 0} if in_place else None,
        cost_estimate=tiles.cost(
            rows=rows * width // s.D, D=s.D, itemsize=x.dtype.itemsize, backward=dy is not None, gated=z is not None
        ),
    )
