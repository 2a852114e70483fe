"""Under jit, vmap, remat, grad, eval_shape and export, and invariance to what else is in the batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.fused_gla import recurrent_simple_gla
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.tpu import text_for_tpu
from tests.either_gla import chunk_either_gla
from tests.transforms import TRANSFORMS, assert_traced_once, assert_transform

each_implementation = pytest.mark.parametrize("implementation", ["xla", "fused"])
THOROUGH = dict(
    test_an_output_that_nobody_reads_is_not_computed=lambda transform: transform != "jit",
    test_transform=lambda transform, implementation: implementation == "xla" and transform != "remat",
    test_gradients_are_finite_differences=lambda implementation: implementation == "fused",
    test_boundaries_are_traced=lambda states, implementation: states or implementation == "fused",
    test_gradient_of_a_scale_of_zero=lambda implementation: implementation == "fused",
)


def arguments(B=1, T=20, K=3, V=2, **options):
    x = make_inputs(B, T, K=K, V=V, **options)
    del x["beta"]
    return x


def run(implementation, **options):
    options = dict(chunk_size=16, output_final_state=True) | options
    return lambda **x: chunk_either_gla(**x, **options, implementation=implementation)


@each_implementation
@pytest.mark.parametrize("transform", sorted(TRANSFORMS.keys() - {"jit"}))
def test_transform(transform, implementation):
    x = arguments(B=2, num_states=2)
    assert_transform(transform, lambda *a: run(implementation)(**dict(zip(x, a, strict=True))), tuple(x.values()))


@each_implementation
def test_shard_map(implementation):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    x = arguments(B=2, num_states=2)
    # The interpreter of Pallas kernels lacks the check of varying axes; compiled kernels pass it.
    options = dict(mesh=mesh, in_specs=(rows,), out_specs=rows, check_vma=implementation == "xla")
    fn = lambda x: run(implementation)(**x)
    for want, got in zip(fn(x), jax.jit(jax.shard_map(fn, **options))(x), strict=True):
        assert_close("under shard_map", got, want, STAGE_TOLERANCE)


def test_shard_map_sums_the_gradient_of_a_replicated_gate():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x = arguments(B=2) | dict(g_gamma=jnp.asarray([-0.1]))
    specs = {name: PartitionSpec() if name == "g_gamma" else PartitionSpec("data") for name in x}
    gradient = jax.grad(lambda x: jnp.sum(run("fused")(**x)[0]))
    text = text_for_tpu(jax.shard_map(gradient, mesh=mesh, in_specs=(specs,), out_specs=specs), x)
    assert text.count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("transform", ["jit", "remat", "vmap over q"])
def test_an_output_that_nobody_reads_is_not_computed(transform):
    x = arguments(B=2, num_states=2)
    fn = lambda x: run("fused")(**x)
    fn = jax.checkpoint(fn) if transform == "remat" else fn

    def gradients(q, read):
        out, pullback = jax.vjp(fn, x | dict(q=q))
        return pullback((x["v"], x["initial_state"]))[0], out if read else None

    q, programs = x["q"], [functools.partial(gradients, read=read) for read in (False, True)]
    if transform == "vmap over q":
        q, programs = jnp.stack([q, -q]), [jax.vmap(program) for program in programs]
    launches = [
        [text_for_tpu(program, q).count(f'chunk_gla_{kernel}_c16"') for kernel in ("fwd", "states", "bwd")]
        for program in programs
    ]
    assert launches == [[0, 1, 1], [1, 1, 1] if transform == "remat" else [1, 0, 1]]
    (unread, _), (read, _) = (jax.jit(program)(q) for program in programs)
    jax.tree.map(np.testing.assert_array_equal, unread, read)


@pytest.mark.parametrize(
    ("per_channel", "lengths", "implementation"),
    [(False, None, "xla"), (False, None, "fused"), (True, (1, 0, 17), "fused")],
)
def test_gradients_are_finite_differences(per_channel, lengths, implementation):
    x = arguments(T=18, per_channel=per_channel, num_states=3 if lengths else 1)
    x |= dict(scale=jnp.float32(0.7))
    if not per_channel:
        x["g_gamma"] = jnp.asarray([-0.1])
    cut = dict(cu_seqlens=None if lengths is None else boundaries(*lengths))
    rng = np.random.default_rng(1)
    out, pullback = jax.vjp(lambda x: run(implementation, **cut)(**x), x)
    cotangents = [rng.standard_normal(y.shape) for y in out]
    (grads,) = pullback(tuple(jnp.asarray(c, jnp.float32) for c in cotangents))

    def loss(x):
        return sum(np.sum(y * c) for y, c in zip(reference(**x, **cut), cotangents, strict=True))

    exact = {name: np.asarray(y, np.float64) for name, y in x.items()}
    for name, y in exact.items():
        step = 1e-4 * rng.standard_normal(y.shape)
        change = (loss(exact | {name: y + step}) - loss(exact | {name: y - step})) / 2
        size = np.linalg.norm(step) * np.linalg.norm(grads[name])
        assert abs(np.sum(np.asarray(grads[name], np.float64) * step) - change) <= 1e-5 * size, name


@each_implementation
def test_gradient_of_a_scale_of_zero(implementation):
    """A learnable scale may start at zero, and padding may hold anything."""
    x, cut = arguments(), dict(cu_seqlens=boundaries(17))
    do = np.random.default_rng(1).standard_normal(x["v"].shape)
    do[:, 17:] = 0.0
    want = np.sum(reference(**x, **cut, scale=1.0)[0] * do)
    x["q"] = x["q"].at[:, 17:].set(jnp.nan)
    loss = lambda scale: jnp.sum(run(implementation, **cut)(**x, scale=scale)[0] * do)
    assert_close("dscale", jax.grad(loss)(jnp.float32(0.0)), want, TOLERANCE["float32"])


def test_recurrences_compile_once(caplog):
    x = arguments()
    recurrent_simple_gla(**x)
    with jax.log_compiles():
        recurrent_simple_gla(**x | dict(q=x["k"]))
    assert not caplog.records


@each_implementation
@pytest.mark.parametrize("states", [False, True], ids=["no states", "states"])
def test_boundaries_are_traced(states, implementation):
    x = arguments(num_states=3 * states)
    fn = lambda x, cu: run(implementation, cu_seqlens=cu, output_final_state=states)(**x)
    assert_traced_once(fn, *((x, boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]))
