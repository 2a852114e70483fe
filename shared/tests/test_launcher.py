"""Launches: Refs by name, absent operands, types that a TPU cannot read, scales, blocks of heads."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from chunkwise.shared.compat import out_struct, vary_alike, varying_zeros
from chunkwise.shared.kernels.chunk_map import map_chunks
from chunkwise.shared.kernels.launcher import (
    head_block,
    launch,
    scaled,
    split_scale,
)
from chunkwise.shared.testing.tpu import text_for_tpu

FREE = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0)


class AddRefs(NamedTuple):
    x: Any
    sum: Any
    total: Any
    y: Any = None
    copy: Any = None


def add(x, y, want_copy, dtype):
    """x + y by a kernel, and a copy of x if wanted; y may be None."""
    whole = pl.BlockSpec(x.shape, lambda i: (0, 0))

    def body(refs):
        assert (refs.copy is not None) == want_copy
        assert (refs.y is not None) == (y is not None)
        refs.total[...] = refs.x[...]
        refs.sum[...] = refs.total[...] + 1.0 + (0.0 if refs.y is None else refs.y[...])
        if want_copy:
            refs.copy[...] = refs.x[...]

    return launch(
        body,
        AddRefs,
        name="add",
        grid=(1,),
        dimension_semantics=("arbitrary",),
        inputs={"x": (x, whole), "y": (y, whole)},
        outputs={"sum": (whole, x.shape, dtype), "copy": (whole, x.shape, dtype)},
        requested=("sum", "copy") if want_copy else ("sum",),
        scratch={"total": x.shape},
        cost_estimate=FREE,
    )


class ShiftRefs(NamedTuple):
    offset: Any
    x: Any
    x_out: Any


def test_an_output_in_the_place_of_its_input():
    """With a scalar table; an input and an output of one name are two Refs."""
    x, whole = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128), pl.BlockSpec((8, 128), lambda i, *_: (0, 0))

    def body(refs):
        refs.x_out[...] = refs.x[...] + refs.offset[0].astype(jnp.float32)

    result = launch(
        body,
        ShiftRefs,
        name="shift",
        grid=(1,),
        dimension_semantics=("arbitrary",),
        tables={"offset": jnp.array([3], jnp.int32)},
        inputs={"x": (x, whole)},
        outputs={"x": (whole, x.shape, x.dtype)},
        in_place={"x": "x"},
        cost_estimate=FREE,
    )
    assert list(result) == ["x"]
    np.testing.assert_array_equal(result["x"], x + 3)


@pytest.mark.parametrize("want_copy", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_names_and_absent_operands(second, want_copy):
    x = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
    results = add(x, x if second else None, want_copy, jnp.float32)
    np.testing.assert_array_equal(results["sum"], (2 * x if second else x) + 1)
    assert list(results) == ["sum", "copy"][: 1 + want_copy]
    if want_copy:
        np.testing.assert_array_equal(results["copy"], x)


def test_float16_is_float32_in_the_kernel():
    x = jnp.ones((8, 128), jnp.float16)
    result = add(x, None, False, jnp.float16)["sum"]
    assert result.dtype == jnp.float16
    np.testing.assert_array_equal(result, 2 * x)
    assert "memref<8x128xf16>" not in text_for_tpu(lambda x: add(x, None, False, jnp.float16), x)


def test_the_platform_decides_when_the_program_is_lowered():
    x = jnp.ones((8, 128))
    assert "tpu_custom_call" in text_for_tpu(lambda x: add(x, None, False, jnp.float32), x)
    assert "tpu_custom_call" not in jax.jit(lambda x: add(x, None, False, jnp.float32)).lower(x).as_text()


def test_a_kernel_has_no_derivative():
    """A sentence says what does; the guard that says so leaves nothing in a program, and passes every other rule."""
    x = jnp.ones((8, 128))
    run = lambda x: add(x, 2 * x, False, jnp.float32)["sum"]
    message = re.escape('the kernel add has no derivative: "fused", "staged" and "pallas" can be differentiated once,')
    for derivative in (
        jax.grad(lambda x: run(x).sum()),
        jax.jacfwd(run),
        jax.checkpoint(jax.grad(lambda x: run(x).sum())),
    ):
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(derivative, x)
    # The tangent of an argument that is not asked for is zero.
    jax.eval_shape(jax.grad(lambda y, x: jnp.sum(y * run(x))), x, x)
    assert "custom_jvp" not in text_for_tpu(run, x)
    np.testing.assert_array_equal(jax.vmap(run)(x[None])[0], run(x))
    np.testing.assert_array_equal(jax.checkpoint(run)(x), run(x))


def test_map_chunks():
    """Heads that share one of an operand, a traced scalar, two results."""
    x, y, factor = jnp.ones((3, 2, 8, 4)), jnp.arange(3 * 4 * 8 * 4.0).reshape(3, 4, 8, 4), jnp.array([3.0])

    def tile(factor, x, y):
        assert (x.shape, y.shape) == ((1, 8, 4), (2, 8, 4))
        return x + factor * y, jnp.sum(y, axis=2, keepdims=True)

    outputs = [((8, 4), jnp.float32), ((8, 1), jnp.bfloat16)]
    first, second = map_chunks(tile, (x, y), name="tile", HV=4, heads=2, outputs=outputs, cost=FREE, scalars=(factor,))
    np.testing.assert_array_equal(first, 1 + 3 * y)
    np.testing.assert_array_equal(second, y.sum(axis=3, keepdims=True).astype(jnp.bfloat16))


def test_scales():
    assert split_scale(2) == (2.0, None)
    inside, after = split_scale(jnp.float32(2.0))
    assert (inside, after) == (1.0, 2.0)
    o = jnp.ones((2,), jnp.bfloat16)
    assert scaled(o, None) is o
    assert scaled(o, after).dtype == jnp.bfloat16
    np.testing.assert_array_equal(scaled(o, after), 2 * o)


def test_head_block():
    index = lambda *ids, **options: tuple(int(i) for i in head_block(*ids, 16, 8, **options).index_map(5, 3))
    assert index(2) == (5, 3, 0, 0)
    # Four value heads share a head: two blocks of two read the same one.
    assert index(2, group=4) == (5, 1, 0, 0)
    assert index(2, axes=(1, 0), backwards_from=7) == (4, 5, 0, 0)
    assert head_block(4, 16, 8, group=2).block_shape == (None, 2, 16, 8)


def test_axes_of_a_mesh():
    """A result, a carry and all operands vary over the axes of every operand; outside of shard_map nothing does."""
    x, y = jnp.ones(4), jnp.ones(4)
    assert (out_struct((2,), jnp.bfloat16, x).shape, out_struct((2,), jnp.bfloat16, x).dtype) == ((2,), jnp.bfloat16)
    assert vary_alike(x, None)[1] is None
    assert not varying_zeros((2,), x, None).any()

    def inside(x, y):
        axes = lambda z: jax.typeof(z).manual_axis_type.varying
        assert (axes(x), axes(y)) == ({"a"}, set())
        assert [axes(z) for z in vary_alike(x, y)] == [{"a"}] * 2
        assert axes(varying_zeros((2,), x, y)) == {"a"}
        assert out_struct((2,), jnp.float32, x, y).manual_axis_type.varying == {"a"}
        return x

    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a")))(x, y)
