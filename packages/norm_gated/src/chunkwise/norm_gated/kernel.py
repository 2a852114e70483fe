"""The kernels: a grid step takes a block of rows, and computes it strip by strip.

Rows are flat, [rows, groups D], as projections and operators produce them, so the layout does not change. Columns past
the end of the array hold anything, and results of them are not stored. Rows past the end do not count in the gradient
of the weight.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.norm_gated import config as tiles
from chunkwise.norm_gated import tile
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


def _load(ref, rows, lanes) -> jax.Array:
    return ref[rows, lanes].astype(jnp.float32)


class NormRefs(NamedTuple):
    """The Refs of both kernels; None for a Ref that a launch does not have."""

    x: jax.Ref  # [rows, lanes]
    z: jax.Ref  # [rows, lanes]
    weight: jax.Ref  # [1, lanes]
    dy: jax.Ref  # [rows, lanes]
    y: jax.Ref  # [rows, lanes]
    dx: jax.Ref  # [rows, lanes]
    dz: jax.Ref  # [rows, lanes]
    dweight: jax.Ref  # [8, lanes]


def _fwd_kernel(refs: NormRefs, *, s: tile.NormStatic, config: tiles.Config):
    """Write y of a block."""

    def compute(rows, lanes):
        x, z = (_load(ref, rows, lanes) for ref in (refs.x, refs.z))  # [strip, lanes]
        refs.y[rows, lanes] = tile.forward(x, z, refs.weight[:, lanes], s).astype(refs.y.dtype)

    _strips(config, refs.x.shape[1], s.D, compute)


def _bwd_kernel(refs: NormRefs, *, s: tile.NormStatic, config: tiles.Config, rows: int):
    """Write dx and dz of a block; add up the gradient of the weight over the blocks of a core's part, in 8 rows."""
    part, grid_step = pl.program_id(0), pl.program_id(2)
    first = (part * pl.num_programs(2) + grid_step) * jnp.int32(config.rows)

    @pl.when(grid_step == 0)
    def _():
        refs.dweight[...] = jnp.zeros_like(refs.dweight)

    # The last part may have fewer blocks than the others.
    pl.when(first < jnp.int32(rows))(functools.partial(_add_block, refs, first, s, config, rows))


def _add_block(refs: NormRefs, first: jax.Array, s: tile.NormStatic, config: tiles.Config, rows: int) -> None:
    """Write dx and dz of a block whose first row is `first`, and add its gradient of the weight."""

    def compute(at, lanes):
        x, z, dy = (_load(ref, at, lanes) for ref in (refs.x, refs.z, refs.dy))  # [strip, lanes]
        dx, dz, dweight = tile.backward(x, z, refs.weight[:, lanes], dy, s)
        refs.dx[at, lanes], refs.dz[at, lanes] = dx.astype(refs.dx.dtype), dz.astype(refs.dz.dtype)
        if rows % config.rows:
            row = first + at.start + lax.broadcasted_iota(jnp.int32, dweight.shape, 0)
            dweight = jnp.where(row < jnp.int32(rows), dweight, 0.0)
        # Whole registers are added; the sum over the 8 rows of a register is left to the caller.
        refs.dweight[:, lanes] += jnp.sum(dweight.reshape(-1, _SUBLANES, dweight.shape[1]), axis=0)

    _strips(config, refs.x.shape[1], s.D, compute)


def launch(
    x: jax.Array,
    z: jax.Array,
    weight: jax.Array,
    s: tile.NormStatic,
    config: tiles.Config,
    dy: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Run the forward kernel, or with dy the backward one.

    Args:
      x, z, dy: [rows, groups * D].
      weight: float32 [1, groups * D].
      s: the static description.
      config: tile sizes.

    Returns:
      A dict. Forward: y, shaped and typed as x. Backward: dx and dz, shaped and typed as x and z, and dweight, float32
      [n, groups * D], to be summed over n.
    """
    rows, width = x.shape
    blocks, lanes = -(-rows // config.rows), config.groups * s.D
    parts = blocks if dy is None else min(blocks, _CORES)
    steps = -(-blocks // parts)
    # A grid step past the last block keeps the index of the last block and does nothing.
    block = pl.BlockSpec((config.rows, lanes), lambda i, j, n: (jnp.minimum(i * steps + n, blocks - 1), j))
    sums = windows.along((_SUBLANES, lanes), 0, 1)
    body, outputs = functools.partial(_fwd_kernel, s=s, config=config), {"y": (block, x.shape, x.dtype)}
    if dy is not None:
        body = functools.partial(_bwd_kernel, s=s, config=config, rows=rows)
        outputs = {
            "dx": (block, x.shape, x.dtype),
            "dz": (block, z.shape, z.dtype),
            "dweight": (sums, (parts * _SUBLANES, width), jnp.float32),
        }
    return launcher.launch(
        body,
        NormRefs,
        name=f"rms_norm_gated_{'fwd' if dy is None else 'bwd'}_d{s.D}",
        # Parts and blocks of groups are independent; the blocks of a part add to the same sums.
        grid=(parts, -(-width // lanes), steps),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        inputs={
            "x": (x, block),
            "z": (z, block),
            "weight": (weight, windows.along((1, lanes), None, 1)),
            "dy": (dy, block),
        },
        outputs=outputs,
        in_bounds=False,
        cost_estimate=tiles.cost(rows=rows * width // s.D, D=s.D, itemsize=x.dtype.itemsize, backward=dy is not None),
    )
