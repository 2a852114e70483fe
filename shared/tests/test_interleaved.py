"""Tokens of several kinds in turn: as one array, and put together and taken apart by a launch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared.chips import CHIPS
from chunkwise.shared.kernels import interleaved, launcher
from chunkwise.shared.kernels.interleaved import InLanes, Interleaved
from chunkwise.shared.kernels.spans import joins
from chunkwise.shared.testing.tpu import compile_for, has_libtpu

CASES = [
    (jnp.bfloat16, (True, True)),
    (jnp.bfloat16, (False, True)),
    (jnp.bfloat16, (True, False, True, True)),
    (jnp.float32, (True, False)),
    (jnp.float32, (True, True, False, True)),
]
IN_LANES = [(jnp.bfloat16, 2), (jnp.float32, 2), (jnp.bfloat16, 4)]
T, C, LANES = 48, 32, 256


class Refs(NamedTuple):
    """The Refs of a launch that copies tokens, as they are and as one array."""

    x: Any
    y: Any
    all: Any


def copy(x: Any) -> dict[str, Any]:
    """Copy tokens [B, T, lanes] by a launch whose body sees all of them in turn."""

    def body(refs: Refs) -> None:
        refs.y[...] = refs.all[...] = refs.x[...]

    spec = pl.BlockSpec((None, C, LANES), lambda b, h, i: (b, i, h))
    return launcher.launch(
        body, Refs, name="copy", grid=(x.shape[0], x.shape[2] // LANES, pl.cdiv(x.shape[1], C)),
        inputs={"x": (x, spec)}, outputs=dict.fromkeys(("y", "all"), (spec, x.shape, x.dtype)), like={"y": x},
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=0, transcendentals=0),
    )  # fmt: skip


def make(dtype, present, numbers=True) -> Any:
    """Tokens of the kinds that are present, or for a number so many kinds in the lanes of one array."""
    rng, n = np.random.default_rng(0), present if isinstance(present, int) else len(present)

    def one(lanes):
        shape = 2, T // n, lanes
        return jnp.asarray(rng.standard_normal(shape), dtype) if numbers else jax.ShapeDtypeStruct(shape, dtype)

    if isinstance(present, int):
        return InLanes(one(2 * LANES * n), n)
    return Interleaved(*(one(2 * LANES) if has else None for has in present))


@pytest.mark.parametrize(("dtype", "present"), [*CASES, *IN_LANES])
def test_launch(dtype, present):
    x = make(dtype, present)
    found = jax.jit(copy)(x)
    want = x.rows.reshape(x.shape) if isinstance(x, InLanes) else x.whole()
    np.testing.assert_array_equal(found["all"], want)
    assert jax.tree.structure(found["y"]) == jax.tree.structure(x)
    jax.tree.map(np.testing.assert_array_equal, found["y"], x)


@pytest.mark.tpu
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("dtype", "present"), [*CASES, *IN_LANES])
def test_launch_compiles(chip, dtype, present):
    compile_for(copy, make(dtype, present, numbers=False), chip=chip)


def test_pairs_of_rows():
    """A pair is what a register has for two rows, the first one in the low half; halves are the rows again."""
    low, high = (jnp.asarray([1.5, -0.0, y, jnp.nan, 3e-39], jnp.bfloat16) for y in (jnp.inf, -2.0))
    words = joins.pair(low, high)
    bits = lambda y: np.asarray(lax.bitcast_convert_type(y, jnp.uint16))
    np.testing.assert_array_equal(np.asarray(words).view(np.uint16).reshape(-1, 2).T, [bits(low), bits(high)])
    for found, want in zip(joins.halves(words), (low, high), strict=True):
        np.testing.assert_array_equal(found.astype(jnp.float32), want.astype(jnp.float32))


def test_outputs_at_queries():
    q, o = make(jnp.float32, (False, False, True)), jnp.arange(2 * T).reshape(2, T)
    np.testing.assert_array_equal(interleaved.select_queries(q, o), o[:, 2::3])
    few = o[:, : T // 3]
    assert interleaved.select_queries(q, few) is few
    assert interleaved.select_queries(o, o) is o


def test_what_a_chunk_cannot_hold_becomes_one_array():
    """Three kinds divide no chunk, a kernel reads no float16, and parts of blocks have whole registers."""
    for dtype, n, size, fits in (("float32", 2, 16, True), ("float32", 4, 16, False), ("float32", 3, 64, False),
                                 ("float16", 2, 64, False)):  # fmt: skip
        x = dict(x=make(dtype, (True,) * n))
        assert isinstance(interleaved.unless_fitting(x, size)["x"], Interleaved) == fits
