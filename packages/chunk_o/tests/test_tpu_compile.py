"""The kernel compiles for every TPU generation."""

import jax.numpy as jnp
import pytest

from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.kernels.chunking import num_chunks
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]


# A packed batch has more chunks for the same kernel: only its tables are new, and they compile longer than the kernel.
SIZES = [(64, 128, False), (64, 256, False), (128, 128, False), (128, 256, False), (128, 256, True)]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("C", "K", "packed"), SIZES)
def test_compiles(C, K, packed, chip):
    q, v = (spec(1, 300, heads, K, dtype=jnp.bfloat16) for heads in (1, 2))
    h = spec(1, num_chunks(300, C, 3 if packed else None), 2, K, K)
    cu_seqlens = spec(4, dtype=jnp.int32) if packed else None

    def run(q, k, v, h, g_cum, scale, cu_seqlens):
        return chunk_fwd_o(q, k, v, h, g_cum, None, scale, cu_seqlens, C, implementation="pallas")

    text = compile_for(run, q, q, v, h, spec(1, 300, 2), spec(), cu_seqlens, chip=chip).as_text()
    assert "tpu_custom_call" in text
    assert f"chunk_fwd_o_fwd_c{C}" in text
