"""The kernel compiles for every TPU generation."""

import functools

import jax.numpy as jnp
import pytest

from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu
from chunkwise.wy_fast import recompute_w_u

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]


# A packed batch has more chunks for the same kernel: only its tables are new, and they compile longer than the kernel.
SIZES = [(64, 128, False), (64, 256, False), (128, 128, False), (128, 256, False), (128, 256, True)]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("C", "K", "packed"), SIZES)
def test_compiles(C, K, packed, chip):
    k, v = (spec(1, 300, heads, K, dtype=jnp.bfloat16) for heads in (1, 2))
    beta, A_inv, g_cum = spec(1, 300, 2, dtype=jnp.bfloat16), spec(1, 300, 2, C), spec(1, 300, 2)
    cu_seqlens = spec(4, dtype=jnp.int32) if packed else None
    run = functools.partial(recompute_w_u, implementation="pallas")
    text = compile_for(run, k, v, beta, A_inv, g_cum, cu_seqlens, chip=chip).as_text()
    assert "tpu_custom_call" in text
    assert f"recompute_w_u_fwd_c{C}" in text
