"""Rows and heads keep their states apart."""

import functools

import jax
import numpy as np

from chunkwise.chunk_h import chunk_gated_delta_rule_fwd_h
from chunkwise.shared.testing.cases import Case

NAMES = ("k", "w", "u", "g_cum", "initial_state")


def test_no_state_leaks_between_rows_and_heads():
    x = Case(B=3, T=40, HV=3, K=4, V=4, chunk_size=16).arguments()
    run = functools.partial(
        chunk_gated_delta_rule_fwd_h, output_final_state=True, chunk_size=16, implementation="pallas"
    )
    together = run(*(x[name] for name in NAMES))
    alone = run(*(x[name][1:2] for name in NAMES))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1:2], b), together, alone)
