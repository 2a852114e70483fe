"""Under jit, vmap, remat, grad, eval_shape and export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, assert_close, assert_gradients
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.transforms import TRANSFORMS, assert_traced_once, assert_transform

NAMES = ("k", "w", "u", "g_cum", "initial_state")
both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


def arguments(**sizes):
    x = Case(**dict(T=20, HV=2, K=3, V=2, chunk_size=16) | sizes).arguments()
    return {name: x[name] for name in NAMES}


def run(implementation, **cut):
    return functools.partial(
        chunk_gated_delta_rule_fwd_h, output_final_state=True, chunk_size=16, implementation=implementation, **cut
    )


@pytest.mark.interpreted
@both
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, implementation):
    assert_transform(transform, run(implementation), tuple(arguments(B=2).values()))


@pytest.mark.parametrize(
    ("implementation", "lengths"),
    [
        pytest.param("xla", None, id="fixed-xla", marks=pytest.mark.thorough),
        pytest.param("xla", (1, 0, 17), id="packed-xla"),
        pytest.param("pallas", None, id="fixed-pallas"),
        pytest.param("pallas", (1, 0, 17), id="packed-pallas"),
    ],
)
def test_gradients(lengths, implementation):
    cut = dict(cu_seqlens=None if lengths is None else boundaries(*lengths))
    definition = functools.partial(stage_oracle.states, chunk_size=16, **cut)
    x = arguments(HV=1) if lengths is None else arguments(HV=1, T=18, lengths=lengths)
    assert_gradients(run(implementation, **cut), definition, x)


@pytest.mark.parametrize(
    ("gate", "implementation"),
    [("g_cum", "xla"), ("g_cum", "pallas"), pytest.param("gk_cum", "xla", marks=pytest.mark.thorough),
     ("gk_cum", "pallas")],
)  # fmt: skip
def test_gradients_of_linear_attention(gate, implementation):
    x = Case(T=20, HV=2, K=3, V=2, chunk_size=16).arguments()
    args = dict(k=x["k"], v=x["v"], initial_state=x["initial_state"])
    # Any decreasing gates per channel will do.
    args[gate] = x["g_cum"] if gate == "g_cum" else x["g_cum"][..., None] * (1 + x["k"] ** 2)

    def definition(k, v, initial_state, **gates):
        h, _, final_state = stage_oracle.states(k, None, v, *gates.values(), initial_state, 16)
        return h, final_state

    linear = functools.partial(chunk_fwd_h, output_final_state=True, chunk_size=16, implementation=implementation)
    assert_gradients(linear, definition, args)


@both
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_gradients_of_strong_constant_gates(kind, implementation):
    """Each head by itself, and a tail: the key at the end is not decayed, and is e^30 times what depends on gates."""
    lengths, gamma = (21, 0, 16), jnp.array([-1.0, -5.0, -30.0])
    cut = dict(cu_seqlens=boundaries(*lengths))
    x = Case(T=40, H=3, HV=3, K=4, V=2, chunk_size=16, lengths=lengths).arguments()
    k, v, start = x["k"], x["v"], x["initial_state"]
    dht = np.random.default_rng(1).standard_normal(start.shape)

    def loss(gamma):
        gates = dict(g_gamma=gamma)
        if kind == "channel":
            local = jnp.asarray(stage_oracle.cumsum(np.ones((1, 40, 3, 4)), chunk_size=16, **cut), jnp.float32)
            gates = dict(gk_cum=gamma[:, None] * local)
        return jnp.sum(dht * chunk_fwd_h(k, v, **gates, initial_state=start, output_final_state=True, chunk_size=16,
                                         implementation=implementation, **cut)[1])  # fmt: skip

    k, v = (jnp.nan_to_num(y) for y in (k, v))
    want = reference(k, k, v, g_gamma=gamma, initial_state=start, **cut, do=np.zeros(v.shape), dht=dht)[2]["g_gamma"]
    got = jax.jit(jax.grad(loss))(gamma)
    for head, strength in enumerate(gamma):
        assert_close(f"dg_gamma at {strength}", got[head], want[head], GRADIENT_TOLERANCE["float32"])


@pytest.mark.interpreted
@both
def test_boundaries_are_traced(implementation):
    x = arguments(T=20, lengths=(1, 0, 19))
    batches = [(x, boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]]
    assert_traced_once(lambda x, cu_seqlens: run(implementation, cu_seqlens=cu_seqlens)(**x), *batches)
