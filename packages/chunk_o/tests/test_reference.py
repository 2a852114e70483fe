"""Types, gates and scales against the definition in float64; gates that would overflow, and the cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.chunk_o.config import cost
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, TOLERANCE, assert_close

THOROUGH = dict(
    test_gates=lambda lengths, kind, implementation: kind != "both" and (implementation == "xla" or not lengths),
    test_output_has_the_type_of_the_values=lambda keys, values, implementation: (
        (implementation == "xla") != (values == "bfloat16") or keys == values
    ),
)


both = pytest.mark.parametrize("implementation", ["xla", "pallas"])
NAMES = ("q", "k", "v_new", "h", "g_cum")


@both
@pytest.mark.parametrize(("keys", "values"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16",) * 2])
def test_output_has_the_type_of_the_values(keys, values, implementation):
    case = Case(T=20, K=8, V=4, chunk_size=16)
    x = case.arguments()
    q, k, v = x["q"].astype(keys), x["k"].astype(keys), x["v"].astype(values)
    o = chunk_fwd_o(q, k, v, x["h"], x["g_cum"], chunk_size=16, implementation=implementation)
    assert o.dtype == values
    expected = stage_oracle.output(q, k, v, x["h"], x["g_cum"], None, 16)
    case.assert_close("o", o, expected, STAGE_TOLERANCE if values == "float32" else TOLERANCE[values])


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
        total = total + stage_oracle.cumsum(np.broadcast_to(gamma, g_cum.shape), **cut)
    gates = dict(g_cum=g_cum if kind == "both" else None, g_gamma=None if kind == "none" else gamma)
    o = chunk_fwd_o(q, k, v, h, **gates, **cut, implementation=implementation)
    case.assert_close("o", o, stage_oracle.output(q, k, v, h, total, None, **cut))


@both
def test_scale(implementation):
    case = Case(T=20, K=8, V=4, chunk_size=16)
    x = case.arguments()
    args = [x[name] for name in NAMES]
    for scale, number in ((None, 8**-0.5), (0.3, 0.3), (jnp.float32(0.3), 0.3)):
        o = chunk_fwd_o(*args, scale=scale, chunk_size=16, implementation=implementation)
        case.assert_close(f"o with scale {scale}", o, stage_oracle.output(*args, number, 16))


@both
def test_gradient_of_a_scale_of_zero(implementation):
    x = Case(T=20, HV=2, K=3, V=2, chunk_size=16).arguments()
    run = functools.partial(chunk_fwd_o, *(x[name] for name in NAMES), chunk_size=16, implementation=implementation)
    dscale = jax.grad(lambda scale: jnp.sum(run(scale=scale)))(jnp.float32(0.0))
    assert_close("dscale", dscale, jnp.sum(run(scale=1.0)), 1e-5)


NAMES = ("q", "k", "v_new", "h", "g_cum")


def test_finite_where_the_decay_above_the_diagonal_overflows():
    case = Case(T=64, K=8, V=4, gate="strong")
    x = case.arguments()
    assert np.isfinite(chunk_fwd_o(*(x[name] for name in NAMES), implementation="pallas")).all()


def test_flops_of_the_gradient():
    sizes = dict(B=2, T=384, H=6, HV=6, K=96, V=80, C=64)
    # The scores, and the gradients of both operands of three products.
    assert cost(**sizes, backward=True).flops == 2 * cost(**sizes).flops + 2 * 2 * 384 * 6 * 64 * 96
