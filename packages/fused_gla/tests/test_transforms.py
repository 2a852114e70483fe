"""Under jit, vmap, remat, grad, eval_shape and export, and invariance to what else is in the batch."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gla import recurrent_simple_gla
from chunkwise.fused_gla.operator import SIMPLE_GLA
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs, spec
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.tpu import text_for_tpu
from tests.either_gla import chunk_either_gla
from tests.transforms import TRANSFORMS, assert_transform

each_implementation = pytest.mark.parametrize("implementation", ["xla", "fused"])
THOROUGH = dict(
    test_an_output_that_nobody_reads_is_not_computed=lambda transform: transform != "jit",
    test_transform=lambda transform, implementation: implementation == "xla" and transform != "remat",
    test_gradient_of_a_scale_of_zero=lambda implementation: implementation == "xla",
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


def test_heads_that_are_too_large_for_the_kernels(monkeypatch):
    """The chain of stages, which the pipeline registers, comes before plain JAX."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with mock.patch.dict(SIMPLE_GLA.implementations):
        SIMPLE_GLA.implementations.pop("staged", None)
        for K, kernels in ((2048, False), (8, True)):
            x = dict.fromkeys("qkv", spec(1, 64, 2, K))
            assert ("tpu_custom_call" in text_for_tpu(lambda x: chunk_either_gla(**x)[0], x)) == kernels
