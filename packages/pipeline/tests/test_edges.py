"""Numbers at the edge: resets, keys whose rounding adds up, residuals beside large states, long texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.pipeline import chunk_comba, chunk_gated_delta_rule, chunk_gdn2, chunk_kda, chunk_simple_gla
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.testing.compare import TOLERANCE, assert_close, error
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference

DELTA = {"gated_delta_rule": chunk_gated_delta_rule, "kda": chunk_kda, "gdn2": chunk_gdn2, "comba": chunk_comba}
THOROUGH = dict(
    test_nothing_is_forgotten=True,
    # A step size of 2 is the hardest.
    test_a_repeated_key_does_not_grow=lambda implementation, operator, beta: (
        beta < 2.0 or (operator, implementation) not in (("gated_delta_rule", "fused"), ("kda", "xla"))
    ),
    test_a_state_near_its_fixed_point_learns=lambda implementation: implementation == "xla",
    test_nothing_before_a_reset_is_left=lambda operator, row: operator != "kda" or row != 13,
)


def arguments(operator, q, k, v, g, beta):
    """Return the arguments of a delta rule that erases and writes alike, for gates g and step sizes beta [B, T, H].

    The erase keys of Comba read the state before the decay, so they have the decay themselves.
    """
    x = dict(q=q, k=k, v=v, g=g, beta=beta)
    per_channel = lambda y: jnp.broadcast_to(y[..., None], k.shape)
    if operator in ("kda", "gdn2"):
        x["g"] = per_channel(g)
    if operator == "gdn2":
        x |= dict(b=per_channel(x.pop("beta")), w=jnp.ones_like(v) * beta[..., None].astype(v.dtype))
    if operator == "comba":
        x["p"] = (k * jnp.exp(g)[..., None]).astype(k.dtype)
    return x


@pytest.mark.parametrize("row", [2, 5, 8, 13, 15])
@pytest.mark.parametrize("operator", DELTA)
def test_nothing_before_a_reset_is_left(operator, row):
    """Values before a gate of -inf are 2^27 times those behind it: 2^-24 of them would be seen."""
    T = 20
    k = jnp.zeros((1, T, 1, 8), jnp.bfloat16).at[..., 0].set(1)
    size = jnp.where(jnp.arange(T) < row, 2.0**14, 2.0**-13)
    v = jnp.broadcast_to(size[None, :, None, None], k.shape).astype(jnp.bfloat16)
    g = jnp.zeros((1, T, 1)).at[:, row].set(-jnp.inf)
    x = arguments(operator, k, k, v, g, jnp.full((1, T, 1), 0.5))
    o, pull = jax.vjp(lambda x: DELTA[operator](**x, scale=1.0, chunk_size=16, implementation="fused")[0], x)
    want = 2.0**-13 * (1.0 - 0.5 ** np.arange(1, T - row + 1))
    np.testing.assert_allclose(np.asarray(o, np.float64)[0, row:, 0, 0], want, rtol=5e-3)
    # And no gradient passes.
    (d,) = pull(jnp.zeros_like(o).at[:, row:].set(1.0))
    assert not np.asarray(d["v"], np.float64)[0, :row].any()
    assert np.isfinite(np.asarray(d["g"])).all()


@pytest.mark.parametrize("beta", [1.0, 1.99, 1.9921875, 2.0])
@pytest.mark.parametrize("operator", DELTA)
@pytest.mark.parametrize("implementation", ["xla", "fused", "staged"])
def test_a_repeated_key_does_not_grow(operator, implementation, beta):
    """1 / sqrt(7) is rounded up in bfloat16: |k|^2 becomes 1.005, and 2 |k|^2 more than a state can lose."""
    T, K = 512, 7
    k = jnp.ones((1, T, 1, K), jnp.bfloat16)
    v = jnp.asarray(np.random.default_rng(0).standard_normal((1, T, 1, K)), jnp.bfloat16)
    x = arguments(operator, k, k, v, jnp.zeros((1, T, 1)), jnp.full((1, T, 1), beta))
    o, _ = DELTA[operator](**x, scale=1.0, use_qk_l2norm_in_kernel=True, implementation=implementation)
    assert_close("o", o, reference(**x, scale=1.0, use_qk_l2norm_in_kernel=True)[0], 5e-3)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_a_state_near_its_fixed_point_learns(implementation):
    """A residual of 2 beside a prediction of 4,098 is not lost, and the step sizes have a gradient."""
    T = 16
    k = jnp.zeros((1, T, 1, 8), jnp.bfloat16).at[..., 0].set(1)
    x = dict(q=k, k=k, v=jnp.full(k.shape, 4096, jnp.bfloat16), g=jnp.zeros((1, T, 1)), scale=1.0)
    x["initial_state"] = jnp.zeros((1, 1, 8, 8)).at[0, 0, 0].set(4098)

    def run(beta):
        o, state = chunk_gated_delta_rule(**x, beta=beta, output_final_state=True, implementation=implementation)
        return jnp.sum(o.astype(jnp.float32)), state[0, 0, 0, 0]

    dbeta, last = jax.grad(run, has_aux=True)(jnp.full((1, T, 1), 0.25))
    np.testing.assert_allclose(last - 4096, 2 * 0.75**T, rtol=0.05)
    np.testing.assert_allclose(dbeta[0, 0, 0], -8 * 2 * sum(0.75**s for s in range(T)), rtol=0.05)


@pytest.mark.parametrize("operator", [x for x in OPERATORS.values() if x.chunked], ids=lambda operator: operator.name)
def test_segments_make_no_infinity(operator):
    """Under `jax_debug_infs` a call that has no infinity raises nothing."""
    x = operator.source.inputs(1, 6, 1, 1, 8, 8)
    ids = jnp.array([[0, 0, 1, 1, 1, 2]], jnp.int32)
    with jax.debug_infs(True):
        o, _ = operator.function(**x, segment_ids=ids, implementation="xla")
    assert jnp.all(jnp.isfinite(o))


@pytest.mark.parametrize("implementation", ["xla", "fused", "staged"])
def test_a_constant_gate_that_forgets_everything(implementation):
    x = make_inputs(1, 20, 2, 2, 8, 8) | dict(g=None, g_gamma=jnp.array([-jnp.inf, -0.1]))
    del x["beta"]
    o, state = chunk_simple_gla(**x, output_final_state=True, chunk_size=16, implementation=implementation)
    q, k, v = (np.asarray(x[name], np.float64)[0, :, 0] for name in ("q", "k", "v"))
    assert_close("o", o[0, :, 0], 8**-0.5 * np.sum(q * k, axis=1, keepdims=True) * v, 1e-5)
    assert_close("state", state[0, 0], np.outer(k[-1], v[-1]), 1e-5)
    assert jnp.all(jnp.isfinite(o))


def test_nothing_is_forgotten():
    """Reflections of the state without a decay: after 8,192 tokens within the limit, and no linear growth after it."""
    T, K, V = 32_768, 16, 8
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(rng.standard_normal((T, K))).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((T, V)).astype(np.float32)
    S, expected = np.zeros((K, V)), np.zeros((T, V))
    for t, (q_t, k_t, v_t) in enumerate(zip(*(y.astype(np.float64) for y in (q, k, v)), strict=True)):
        S = S + 2.0 * np.outer(k_t, v_t - S.T @ k_t)
        expected[t] = S.T @ q_t
    rows = [jnp.asarray(y)[None, :, None] for y in (q, k, v)]
    g, beta = jnp.zeros((1, T, 1)), jnp.full((1, T, 1), 2.0)
    o = chunk_gated_delta_rule(*rows, g, beta, 1.0, implementation="xla")[0][0, :, 0]
    after = {n: error(o[:n], expected[:n]) for n in (8_192, T)}
    assert after[8_192] < TOLERANCE["float32"]
    assert after[T] < 3 * after[8_192]
