"""Stages: functions of the tiles of one chunk, run over all chunks and heads; the form of every one without a state."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared import compat
from chunkwise.shared.kernels import derivatives, gating, launcher, tiles, windows

# The operands and results of a stage by name: chunks [NC, H or HV, rows, columns], or a scalar [1], float32.
Chunks = Mapping[str, jax.Array]


@dataclass(frozen=True)
class ChunkMap:
    """A function of the tiles of one chunk, and its gradient.

    Attributes:
      name: the public function, whose kernels have its name.
      tile: takes tiles [h, rows, columns], and scalars, by name, and returns a tuple of tiles [HV, rows, columns]. Keys
        of H heads are k; g are cumulative gates of HV heads.
      tile_bwd: takes the cotangents of the results, too, each with a leading d, and returns the gradients by the names
        of the operands, for all HV heads; scalars get none.
      results: from the operands to ((rows, columns), dtype) of every result by name.
      cost: `cost` of the package.
    """

    name: str
    tile: Callable[..., tuple[jax.Array, ...]]
    tile_bwd: Callable[..., dict[str, jax.Array]]
    results: Callable[..., dict[str, tuple]]
    cost: Callable[..., pl.CostEstimate]

    def run(self, implementation: str, heads: int, **operands: jax.Array | None) -> tuple[jax.Array, ...]:
        """Return the results, by a kernel of `heads` value heads a grid step or in plain JAX; None is no operand."""
        x = {name: y for name, y in operands.items() if y is not None}
        x = compat.vary_over(compat.varying_axes(*x.values()), x)
        if implementation == "pallas":
            return _run(self, heads, derivatives.of_kernel(self.name, x))
        scalars = {name: y[0] for name, y in x.items() if y.ndim == 1}
        chunks = {name: y for name, y in x.items() if y.ndim > 1}
        return jax.vmap(lambda chunk: self.tile(**chunk, **scalars))(chunks)


def _launch(
    stage: ChunkMap, heads: int, tile: Callable, x: Chunks, direction: str, results: Mapping[str, tuple]
) -> list:
    """Run `tile`, which returns tiles by the names of `results`, on every chunk, `heads` value heads in lock-step."""
    k, g = x["k"], x["g"]
    NC, HV = g.shape[:2]
    # A traced scalar cannot be captured by a kernel.
    scalars = [name for name, y in x.items() if y.ndim == 1]
    names = [*scalars, *(name for name in x if name not in scalars)]

    def kernel(*refs):
        read = {name: ref[0] if name in scalars else ref[...] for name, ref in zip(names, refs, strict=False)}
        found = tile(**read)
        for name, ref in zip(results, refs[len(names) :], strict=True):
            ref[...] = found[name].astype(ref.dtype)

    chunks = [x[name] for name in names[len(scalars) :]]
    return launcher.pallas_call(
        kernel,
        *(x[name] for name in names),
        name=f"{stage.name}_{direction}_{gating.suffix(k, g)}",
        num_scalar_prefetch=len(scalars),
        # Chunks and blocks of heads are independent: no state is carried.
        grid=(NC, HV // heads),
        dimension_semantics=("parallel", "parallel"),
        in_specs=[windows.head_block(heads, *y.shape[2:], group=HV // y.shape[1]) for y in chunks],
        out_specs=[windows.head_block(heads, *tail) for tail, _ in results.values()],
        out_shape=[compat.out_struct((NC, HV, *tail), dtype, *x.values()) for tail, dtype in results.values()],
        cost_estimate=stage.cost(**gating.sizes(k, g, x.get("v")), backward=direction == "bwd"),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(stage: ChunkMap, heads: int, x: Chunks) -> tuple[jax.Array, ...]:
    results = stage.results(**x)
    tile = lambda **read: dict(zip(results, stage.tile(**read), strict=True))
    return tuple(_launch(stage, heads, tile, x, "fwd", results))


def _backward(stage: ChunkMap, heads: int, x: Chunks, cotangents: tuple[jax.Array, ...]) -> tuple[dict[str, Any]]:
    HV, arrays = x["g"].shape[1], {name: y for name, y in x.items() if y.ndim > 1}
    d = {f"d{name}": y for name, y in zip(stage.results(**x), cotangents, strict=True)}
    # The kernel writes a gradient for every value head; those of heads that share a key head are added up here.
    results = {name: (y.shape[2:], y.dtype if y.shape[1] == HV else jnp.float32) for name, y in arrays.items()}
    found = _launch(stage, heads, stage.tile_bwd, {**x, **d}, "bwd", results)
    added_up = lambda y, like: tiles.sum_groups(y, like.shape[1]).astype(like.dtype) if like.shape[1] < HV else y
    return (dict.fromkeys(x) | dict(zip(arrays, map(added_up, found, arrays.values()), strict=True)),)


_run.defvjp(lambda stage, heads, x: (_run(stage, heads, x), x), _backward)
