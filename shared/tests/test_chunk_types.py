"""Chunk tables are int32 and booleans, whatever the modes of JAX: kernels read them from scalar memory."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise.shared.kernels.chunking import Chunking, stream_masks, varlen_tiles
from chunkwise.shared.kernels.config import HeadConfig, choose_heads
from chunkwise.shared.testing.inputs import boundaries


@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_tables_under_x64(packed):
    cu_seqlens = boundaries(5, 0, 12) if packed else None
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        chunks = Chunking(1, 20, 16, cu_seqlens)
        for name in ("sequence", "length", "final_chunk"):
            assert getattr(chunks, name).dtype == jnp.int32, name
        for name in ("first", "last", "empty"):
            assert getattr(chunks, name).dtype == bool, name
        x = jnp.ones((1, 20, 2, 3), jnp.float32)
        gamma = chunks.gamma_rows(jnp.ones((2,), jnp.float32))
        for y in (chunks.split(x), chunks.merge(chunks.split(x)), chunks.split_cumulative(x), gamma):
            assert y.dtype == jnp.float32
        if packed:
            for table in (varlen_tiles(20, 16, cu_seqlens), stream_masks(20, 16, cu_seqlens)):
                for name, value in table._asdict().items():
                    assert value.dtype in (jnp.int32, bool), name


def test_choose_heads():
    assert choose_heads(4, 8, 1, most=8) == HeadConfig(heads=8)
    assert choose_heads(4, 8, 1, most=8, per_channel=True) == HeadConfig(heads=2)
    # Whole groups of value heads that share a key head, or a part of one group.
    assert choose_heads(2, 12, 1, most=8) == HeadConfig(heads=6)
