"""Launching a function of tiles over all chunks and heads: the form of every kernel that carries no state."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, windows


def map_chunks(
    tile: Callable,
    operands: Sequence[jax.Array],
    *,
    name: str,
    HV: int,
    heads: int,
    outputs: Sequence[tuple[tuple[int, ...], jax.typing.DTypeLike]],
    cost: pl.CostEstimate,
    scalars: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Run `tile` on every chunk, `heads` value heads in lock-step, as one Pallas launch.

    Args:
      tile: takes the scalars, and a tile [h, rows, columns] of every operand; returns a tuple of tiles
        [heads, rows, columns]. h is `heads` for operands with a head per value head, and fewer for operands whose heads
        are shared.
      operands: chunks [NC, H or HV, rows, columns].
      name: name of the kernel.
      HV: value heads.
      heads: value heads of a grid step, from `choose_heads`.
      outputs: ((rows, columns), dtype) of every result; its head dimension is HV.
      cost: the cost of the launch, for the scheduler of XLA.
      scalars: float32 [1] arrays, kept in scalar memory; they may be traced, so a kernel cannot capture them.

    Returns:
      The results [NC, HV, rows, columns].
    """
    NC = operands[0].shape[0]
    first_output = len(scalars) + len(operands)

    def kernel(*refs):
        values = [ref[0] for ref in refs[: len(scalars)]] + [ref[...] for ref in refs[len(scalars) : first_output]]
        for ref, value in zip(refs[first_output:], tile(*values), strict=True):
            ref[...] = value.astype(ref.dtype)

    results = [compat.out_struct((NC, HV, *tail), dtype, *operands) for tail, dtype in outputs]
    return launcher.pallas_call(
        kernel,
        *scalars,
        *operands,
        name=name,
        num_scalar_prefetch=len(scalars),
        # Chunks and blocks of heads are independent: no state is carried.
        grid=(NC, HV // heads),
        dimension_semantics=("parallel", "parallel"),
        in_specs=[windows.head_block(heads, *x.shape[2:], group=HV // x.shape[1]) for x in operands],
        out_specs=[windows.head_block(heads, *tail) for tail, _ in outputs],
        out_shape=results,
        cost_estimate=cost,
    )


def float32_of(*arrays: jax.Array) -> list[tuple[tuple[int, ...], jax.typing.DTypeLike]]:
    """Return the `outputs` of `map_chunks` that have the rows and columns of arrays, in float32."""
    return [(x.shape[2:], jnp.float32) for x in arrays]


def differentiable(launch: Callable, launch_bwd: Callable) -> Callable:
    """Return launch(*operands, cut) with a gradient: launch_bwd(*operands, *cotangents, cut).

    Args:
      launch: runs a kernel on operands, of which some may be None, with tile sizes; returns its results.
      launch_bwd: returns a gradient for every operand, None for no gradient.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(cut, operands: tuple):
        return launch(*operands, cut)

    def backward(cut, operands: tuple, cotangents: jax.Array | tuple[jax.Array, ...]):
        cotangents = cotangents if isinstance(cotangents, tuple) else (cotangents,)
        return (launch_bwd(*operands, *cotangents, cut),)

    run.defvjp(lambda cut, operands: (launch(*operands, cut), operands), backward)
    return lambda *arguments: run(arguments[-1], arguments[:-1])
