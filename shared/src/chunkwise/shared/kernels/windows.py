"""How a launch cuts an array into the blocks of its grid steps."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


def along(block: Sequence[int | None], *axes: int | None, pipeline_mode: pl.Buffered | None = None) -> pl.BlockSpec:
    """Return the spec of blocks of this shape, by the axes of the grid.

    Args:
      block: the shape, in which None is one entry, without the dimension.
      *axes: for the first dimensions of the array, the axis of the grid that walks its blocks, or None for the first
        block in every grid step; so it is in the other dimensions.
      pipeline_mode: as in `pl.BlockSpec`.
    """
    walked = *axes, *(None,) * (len(block) - len(axes))

    def index(*ids):
        return tuple(0 if axis is None else ids[axis] for axis in walked)

    return pl.BlockSpec(tuple(block), index, pipeline_mode=pipeline_mode)


def head_block(
    heads: int, *tail: int, group: int = 1, axes: tuple[int, int] = (0, 1), backwards_from: int | None = None
) -> pl.BlockSpec:
    """Return the spec of `heads` value heads of one chunk of an array [NC, H, *tail].

    Args:
      heads: value heads of a grid step.
      *tail: the remaining dimensions, taken whole.
      group: value heads that share one head of the array; 1 for arrays with a head per value head.
      axes: the grid axes that walk the chunks and the blocks of heads.
      backwards_from: the chunk of the first grid step, if the axis walks the chunks backwards.
    """
    heads_of_array = max(heads // group, 1)
    steps = max(group // heads, 1)

    def index(*ids):
        chunk, block = ids[axes[0]], ids[axes[1]]
        if backwards_from is not None:
            chunk = backwards_from - chunk
        return (chunk, lax.div(block, jnp.int32(steps)) if steps > 1 else block, *(0 for _ in tail))

    return pl.BlockSpec((None, heads_of_array, *tail), index)
