"""The tile mathematics by itself, and the kernel around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.chunk_h import chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_h.tile import new_values_tile, next_state_tile
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close

NAMES = ("k", "w", "u", "g_cum", "initial_state")


@pytest.mark.parametrize("gate_width", [1, 5], ids=["per_head", "per_channel"])
def test_tiles(gate_width):
    rng = np.random.default_rng(0)
    shapes = [(4, 5, 3), (2, 16, 5), (4, 16, 5), (4, 16, 3), (4, 16, gate_width), (4, gate_width, 1)]
    x = [rng.standard_normal(shape) for shape in shapes]
    S, k, w, u, to_end, through = (jnp.asarray(y, jnp.float32) for y in x)
    v_new = new_values_tile(S, w, u)
    after = next_state_tile(S, k, v_new, to_end, through)
    S, k, w, u, to_end, through = x
    assert_close("v_new", v_new, u - w @ S, STAGE_TOLERANCE)
    assert_close("S", after, through * S + (np.repeat(k, 2, axis=0) * to_end).mT @ (u - w @ S), STAGE_TOLERANCE)
    np.testing.assert_array_equal(new_values_tile(S, None, jnp.asarray(u, jnp.bfloat16)), jnp.asarray(u, jnp.bfloat16))


def test_no_state_leaks_between_rows_and_heads():
    x = Case(B=3, T=40, HV=3, K=4, V=4, chunk_size=16).arguments()
    run = functools.partial(
        chunk_gated_delta_rule_fwd_h, output_final_state=True, chunk_size=16, implementation="pallas"
    )
    together = run(*(x[name] for name in NAMES))
    alone = run(*(x[name][1:2] for name in NAMES))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1:2], b), together, alone)
