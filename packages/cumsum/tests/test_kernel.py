"""The precision of the tile, tile sizes and cost."""

import jax.numpy as jnp
import numpy as np

from chunkwise.cumsum.config import cost, default_for
from chunkwise.cumsum.tile import cumsum_tile
from chunkwise.shared.kernels.matmul import emulate_mxu
from chunkwise.shared.testing.compare import error


def test_a_single_pass_of_the_matrix_unit_would_lose_the_gate():
    # Half of the 8 bits of a bfloat16 gate: why the product with ones is one of float32 operands at full precision.
    g = np.random.default_rng(0).standard_normal((1, 64, 4))
    with emulate_mxu(passes=1):
        assert error(cumsum_tile(jnp.asarray(g, jnp.float32), False), np.cumsum(g, axis=1)) > 1e-4


def test_default_config_divides_what_it_cuts():
    for NC, C, gates in [(1, 64, 1), (7, 16, 60), (128, 64, 32), (129, 128, 4096), (130, 64, 384)]:
        config = default_for(NC, C, gates)
        assert NC % config.chunks == 0
        assert gates % config.lanes == 0
        assert config.lanes % 128 == 0 or config.lanes == gates


def test_bytes():
    # A gate of two bytes is read and four bytes are written.
    assert cost(B=2, T=128, H=3, C=64, itemsize=2).bytes_accessed == 6 * 2 * 128 * 3
