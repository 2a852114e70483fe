"""The kernels compile for every TPU generation, and nothing is laid out anew around them."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise.norm_gated import rms_norm_gated
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]


def gradients(shape):
    """Return forward and gradients of flat rows, as in a model, and their shapes."""
    flat = spec(1, shape[1], shape[2] * shape[3], dtype=jnp.bfloat16)

    def run(x, z, weight, dy):
        f = lambda x, z, weight: rms_norm_gated(
            x.reshape(shape), z.reshape(shape), weight, implementation="pallas"
        ).reshape(flat.shape)
        y, pull = jax.vjp(f, x, z, weight)
        return y, *pull(dy)

    return run, (flat, flat, spec(shape[3]), flat)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("H", "D"), [(4, 64), (4, 96), (4, 128), (2, 192), (2, 256)])
def test_compiles(H, D, chip):
    run, specs = gradients((1, 100, H, D))
    text = compile_for(run, *specs, chip=chip).as_text()
    assert f"rms_norm_gated_fwd_d{D}" in text
    assert f"rms_norm_gated_bwd_d{D}" in text


def test_no_temporaries_from_the_flat_layout():
    run, specs = gradients((1, 4096, 32, 128))
    program = compile_for(run, *specs, auto_layout=True)
    # Less than a hundredth of one of the arrays.
    assert program.memory_analysis().temp_size_in_bytes < 4096 * 4096 * 2 // 100


def test_the_result_takes_the_memory_of_x():
    x = spec(1, 256, 4096, dtype=jnp.bfloat16)
    run = lambda x, z, weight: rms_norm_gated(x + z, z, weight, in_place=True, implementation="pallas")
    program = compile_for(run, x, x, spec(4096))
    assert program.memory_analysis().temp_size_in_bytes < x.size * 2 // 100


@pytest.mark.parametrize("chip", CHIPS)
def test_no_gate_compiles(chip):
    x = spec(1, 100, 4, 96, dtype=jnp.bfloat16)
    f = lambda x, weight: jnp.sum(rms_norm_gated(x, None, weight, implementation="pallas") ** 2)
    text = compile_for(jax.grad(f), x, spec(96), chip=chip).as_text()
    assert "rms_norm_gated_fwd_d96" in text
    assert "rms_norm_gated_bwd_d96" in text


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_one_group_a_row_compiles(norm_before_gate):
    x = spec(1, 300, 4096, dtype=jnp.bfloat16)
    f = lambda *a: rms_norm_gated(*a, norm_before_gate=norm_before_gate, implementation="pallas")
    assert "rms_norm_gated_fwd" in compile_for(f, x, x, spec(4096)).as_text()
