"""The output against its definition in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.shared import stage_reference
from chunkwise.shared.testing import CASES, TOLERANCE, Case

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])
NAMES = ("q", "k", "v_new", "h", "g_cum")


@both
@pytest.mark.parametrize("case", CASES, ids=str)
def test_definition(case, implementation):
    x = case.arguments()
    args = [x[name] for name in NAMES]
    cut = dict(chunk_size=case.chunk_size, cu_seqlens=case.cu_seqlens)
    o = chunk_fwd_o(*args, **cut, implementation=implementation)
    # The one stage whose result is in the type of the inputs.
    assert o.dtype == case.dtype
    tolerance = 1e-6 if case.dtype == "float32" else TOLERANCE[case.dtype]
    case.assert_close("o", o, stage_reference.output(*args, **cut), tolerance)


@both
@pytest.mark.parametrize("kind", ["none", "g_gamma", "both"])
@pytest.mark.parametrize("lengths", [None, (0, 1, 17, 3)], ids=["fixed", "packed"])
def test_gates(lengths, kind, implementation):
    case = Case(T=23, HV=2, K=8, V=4, chunk_size=16, lengths=lengths)
    x = case.arguments()
    q, k, v, h, g_cum = (x[name] for name in NAMES)
    cut = dict(chunk_size=16, cu_seqlens=case.cu_seqlens)
    gamma = jnp.array([-0.03, -30.0])
    total = np.zeros(g_cum.shape) if kind != "both" else np.asarray(g_cum, np.float64)
    if kind != "none":
        total = total + stage_reference.cumsum(np.broadcast_to(gamma, g_cum.shape), **cut)
    gates = dict(g_cum=g_cum if kind == "both" else None, g_gamma=None if kind == "none" else gamma)
    o = chunk_fwd_o(q, k, v, h, **gates, **cut, implementation=implementation)
    case.assert_close("o", o, stage_reference.output(q, k, v, h, total, None, **cut), 1e-6)


@both
def test_own_scale(implementation):
    case = Case(T=20, K=8, V=4, chunk_size=16)
    x = case.arguments()
    args = [x[name] for name in NAMES]
    for scale in (0.3, jnp.float32(0.3)):
        o = chunk_fwd_o(*args, scale=scale, chunk_size=16, implementation=implementation)
        case.assert_close("o", o, stage_reference.output(*args, 0.3, 16), 1e-6)
