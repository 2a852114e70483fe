"""The kernel compiles for every TPU generation."""

import jax.numpy as jnp
import pytest

from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]


# A packed batch has more chunks for the same kernel: only its tables are new, and they compile longer than the kernel.
SIZES = [(64, 128, False), (64, 256, False), (128, 128, False), (128, 256, False), (128, 256, True)]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("C", "K", "packed"), SIZES)
def test_compiles(C, K, packed, chip):
    k, beta, g_cum = spec(1, 300, 2, K, dtype=jnp.bfloat16), spec(1, 300, 4, dtype=jnp.bfloat16), spec(1, 300, 4)
    cu_seqlens = spec(4, dtype=jnp.int32) if packed else None

    def run(k, beta, g_cum, cu_seqlens):
        return chunk_scaled_dot_kkt(k, beta, g_cum, cu_seqlens, C, implementation="pallas")

    text = compile_for(run, k, beta, g_cum, cu_seqlens, chip=chip).as_text()
    assert "tpu_custom_call" in text
    assert f"chunk_scaled_dot_kkt_fwd_c{C}" in text
