"""The kernels, interpreted, against the float64 recurrence."""

import jax.numpy as jnp
import pytest

from chunkwise.fused_gdn import Config, chunk_gated_delta_rule
from chunkwise.fused_gdn import config as tiles
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.tuning import VMEM_LIMIT_BYTES
from tests.recurrence import assert_recurrence

THOROUGH = dict(
    test_shapes_with_states=lambda C: C < 128,
    test_gradients_where_nothing_is_forgotten=True,
    test_widths=lambda K, V: (K, V) != (96, 192),
)


@pytest.mark.parametrize(
    ("dtype", "C", "T", "H", "HV", "K", "V"),
    [
        (jnp.float32, 16, 37, 1, 3, 60, 100),
        (jnp.bfloat16, 32, 70, 2, 4, 64, 256),
        (jnp.float32, 64, 1, 2, 2, 1, 130),
        (jnp.bfloat16, 128, 130, 1, 2, 256, 128),
    ],
)
def test_shapes_with_states(dtype, C, T, H, HV, K, V):
    x = make_inputs(2, T, H, HV, K, V, dtype=dtype, num_states=2, normalise=False)
    options = dict(chunk_size=C, use_qk_l2norm_in_kernel=True, scale=0.3, implementation="fused")
    assert_recurrence(chunk_gated_delta_rule, x, gradients=False, **options)


@pytest.mark.parametrize(("K", "V"), [(16, 48), (64, 64), (80, 112), (96, 192), (160, 32), (192, 96), (256, 80)])
def test_widths(K, V):
    """Two key heads in a pack, whose tiles are no whole registers: gradients, too."""
    x = make_inputs(1, 37, 2, 4, K, V, dtype=jnp.bfloat16, num_states=1)
    assert_recurrence(chunk_gated_delta_rule, x, chunk_size=16, use_qk_l2norm_in_kernel=True, implementation="fused")


def test_gradients_where_nothing_is_forgotten():
    """What a chunk passes to the one before is a sum of rows that nearly cancel, so they must keep their digits."""
    x = make_inputs(2, 256, 1, 2, 16, 24, dtype=jnp.bfloat16, num_states=2, gate="zero", beta=2.0, repeat_key=True)
    assert_recurrence(chunk_gated_delta_rule, x, implementation="fused", chunk_size=64)


def test_one_key_head_in_turns():
    """A turn that begins while others of all heads still read their key head does not replace it."""
    x = make_inputs(1, 128, 1, 32, 8, 8, num_states=1)
    options = dict(chunk_size=16, implementation="fused", config=Config(32, 32, turns=2))
    assert_recurrence(chunk_gated_delta_rule, x, gradients=False, **options)


@pytest.mark.parametrize(
    ("H", "HV", "C", "K", "heads", "chunks", "repeats"),
    [
        (16, 32, 64, 128, 32, 1, 1),
        (1, 64, 64, 128, 32, 1, 2),
        (2, 96, 64, 128, 24, 1, 2),
        (1, 12, 128, 256, 6, 1, 2),
        (7, 7, 16, 128, 7, 4, 1),
        (2, 4, 64, 128, 4, 8, 1),
        (2, 4, 64, 256, 4, 3, 1),
    ],
)
def test_heads_of_a_step_fit_into_vmem(H, HV, C, K, heads, chunks, repeats):
    """A group of value heads too large for one step is cut, and its key head repeated; few heads take chunks."""
    config = tiles.default_for(H, HV, C, K, K)
    assert config == Config(heads, heads, chunks, turns=2)
    assert tiles.key_repeats(H, HV, config) == repeats
    assert chunks * heads * tiles.vmem_bytes_per_head(C, K, K) <= tiles.VMEM_BUDGET < VMEM_LIMIT_BYTES


def test_chunks_of_16_heads(monkeypatch):
    """They fill a narrow matrix unit by themselves; fewer heads take the same chunks on all devices."""
    for columns, chunks in ((256, [8, 4, 2]), (128, [8, 4, 1])):
        monkeypatch.setattr(tiles.compat, "matrix_columns", lambda columns=columns: columns)
        assert [tiles.default_for(n, n, 64, 128, 128).chunks for n in (4, 8, 16)] == chunks
