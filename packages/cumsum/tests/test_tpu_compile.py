"""The kernel compiles for every TPU generation, with gates per channel."""

import jax.numpy as jnp
import pytest

from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu

THOROUGH = dict(test_compiles=lambda C, channels, packed: (C, channels, packed) != (128, 256, True))


pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
@pytest.mark.parametrize("channels", [128, 256])
@pytest.mark.parametrize("C", [64, 128])
def test_compiles(C, channels, packed, chip):
    cu_seqlens = spec(4, dtype=jnp.int32) if packed else None

    def run(g, cu_seqlens):
        return chunk_local_cumsum(g, C, cu_seqlens=cu_seqlens, implementation="pallas")

    text = compile_for(run, spec(1, 300, 4, channels, dtype=jnp.bfloat16), cu_seqlens, chip=chip).as_text()
    assert "tpu_custom_call" in text
    assert f"chunk_local_cumsum_fwd_c{C}" in text
