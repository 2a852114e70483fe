"""The oracle, beside loops that share nothing with it."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from chunkwise.shared.testing.oracle import reference
from tests.gradients import numeric_gradients

OPERATORS = ["gdn", "kda", "simple_gla", "gla", "gamma", "gamma_and_g"]


def loops(q, k, v, g=None, beta=None, *, g_gamma=None, scale, initial_state, lengths, normalise=False):
    """The four operators as literal loops over sequences, heads and tokens."""
    q, k, v, state = (np.array(x, np.float64) for x in (q, k, v, initial_state))
    B, T, HV, _ = v.shape
    group = HV // k.shape[2]
    o = np.zeros(v.shape)
    spans = [(b, b, 0, T) for b in range(B)]
    if lengths is not None:
        ends = np.cumsum(lengths)
        spans = [(0, n, end - length, end) for n, (length, end) in enumerate(zip(lengths, ends, strict=True))]
    for b, n, start, end in spans:
        for head in range(HV):
            for t in range(start, end):
                q_t, k_t, S = q[b, t, head // group], k[b, t, head // group], state[n, head]
                if normalise:
                    q_t, k_t = (x / np.sqrt(x @ x + 1e-6) for x in (q_t, k_t))
                gate = 0.0 if g is None else np.asarray(g[b, t, head], np.float64)
                gate = gate + (0.0 if g_gamma is None else float(g_gamma[head]))
                S = S * np.exp(gate)[..., None] if np.ndim(gate) else S * np.exp(gate)
                added = v[b, t, head] if beta is None else float(beta[b, t, head]) * (v[b, t, head] - k_t @ S)
                state[n, head] = S = S + np.outer(k_t, added)
                o[b, t, head] = scale * (q_t @ S)
    return o, state


def inputs(operator, B=1, T=12, num_states=1):
    x = make_inputs(B, T, 1, 2, 3, 2, num_states=num_states, per_channel=operator in ("kda", "gla"))
    if operator not in ("gdn", "kda"):
        del x["beta"]
    if operator in ("gamma", "gamma_and_g"):
        x["g_gamma"] = jnp.array([-0.1, -0.5])
    if operator == "gamma":
        del x["g"]
    return x


@pytest.mark.parametrize("lengths", [None, (1, 0, 7, 2)], ids=["fixed", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_loops(operator, lengths):
    x = inputs(operator, B=1 if lengths else 2, num_states=4 if lengths else 2)
    expected = loops(**x, scale=0.4, lengths=lengths)
    got = reference(**x, scale=0.4, cu_seqlens=boundaries(*lengths) if lengths else None)
    for name, a, b in zip(("o", "final_state"), got, expected, strict=True):
        assert_close(name, a, b, 1e-13)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("lengths", [None, (1, 0, 3)], ids=["fixed", "packed"])
def test_gradients_are_finite_differences_of_the_loops(lengths, operator):
    """All kernels' gradients are held against these, so that they come from nothing but the definition."""
    x = inputs(operator, T=5, num_states=3 if lengths else 1)
    rng = np.random.default_rng(1)
    do, dht = rng.standard_normal(x["v"].shape), rng.standard_normal(x["initial_state"].shape)
    grads = reference(**x, scale=0.4, cu_seqlens=boundaries(*lengths) if lengths else None, do=do, dht=dht)[2]
    expected = numeric_gradients(lambda **x: loops(**x, scale=0.4, lengths=lengths), x, [do, dht])
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert_close(f"d{name}", grad, expected[name], 1e-7)


def test_normalisation_and_default_scale():
    x = inputs("gdn") | dict(k=3 * inputs("gdn")["k"])
    expected = loops(**x, scale=3**-0.5, lengths=None, normalise=True)
    got = reference(**x, use_qk_l2norm_in_kernel=True)
    for name, a, b in zip(("o", "final_state"), got, expected, strict=True):
        assert_close(name, a, b, 1e-13)
