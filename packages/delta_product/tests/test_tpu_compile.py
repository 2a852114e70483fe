"""The kernels compile for every TPU generation at the shapes of the composition."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise.delta_product import chunk_gated_delta_product
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("chip", CHIPS)
def test_forward_and_backward_compile(chip, n):
    x = dict(
        q=spec(1, 96, 1, 128, dtype=jnp.bfloat16), k=spec(1, 96 * n, 1, 128, dtype=jnp.bfloat16),
        v=spec(1, 96 * n, 2, 128, dtype=jnp.bfloat16), g=spec(1, 96, 2), beta=spec(1, 96 * n, 2),
    )  # fmt: skip

    def run(x, cu_seqlens):
        def loss(x):
            o, state = chunk_gated_delta_product(
                **x, cu_seqlens=cu_seqlens, output_final_state=True, implementation="fused", num_householder=n
            )
            return o.astype(jnp.float32).sum() + state.sum(), o

        return jax.grad(loss, has_aux=True)(x)

    text = compile_for(run, x, spec(4, dtype=jnp.int32), chip=chip).as_text()
    assert all(f"chunk_gated_delta_rule_{part}_c64" in text for part in ("fwd", "bwd"))
