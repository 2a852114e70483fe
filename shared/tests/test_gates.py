"""The laws of raw gates and step sizes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.call.gates import GateActivation, check_gate_activation, decays, step_sizes
from chunkwise.shared.kernels.gate_activation import Softplus
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import make_inputs, spec
from tests.gradients import assert_gradients
from tests.laws import law_reference, raw_inputs

LAWS = [(None, True), (None, False), (-5.0, True)]


def small(per_channel, dtype=jnp.float32):
    x = raw_inputs(make_inputs(1, 5, 1, 2, 3, 1, per_channel=per_channel), dtype=dtype)
    return {name: x[name] for name in ("g", "beta", "A_log", "dt_bias")}


def law_of(bound):
    return GateActivation(True, bound).law


@pytest.mark.parametrize(("bound", "per_channel"), LAWS)
def test_gradients(bound, per_channel):
    """Numeric ones: so the analytic ones of `law_reference` are right too, which other tests use."""
    x = small(per_channel)
    run = lambda g, beta, A_log, dt_bias: (decays(g, A_log, dt_bias, law_of(bound), None), step_sizes(beta, True, None))

    def definition(**x):
        y = law_reference(**x, lower_bound=bound, allow_neg_eigval=True)[0]
        return y["g"], y["beta"]

    assert_gradients(run, definition, x)
    values, pull = law_reference(**x, lower_bound=bound, allow_neg_eigval=True)
    cotangents = {name: np.random.default_rng(0).standard_normal(y.shape) for name, y in values.items()}
    got = jax.vjp(run, *x.values())[1](tuple(jnp.asarray(y, jnp.float32) for y in cotangents.values()))
    for (name, want), y in zip(pull(cotangents["g"], cotangents["beta"]).items(), got, strict=True):
        assert_close(name, y, want, 1e-5)


def test_the_slope_of_saturated_gates():
    """Each gate has the digits of its slope, however near the law is to a limit, and so has the slope of the slope."""
    u, law = np.linspace(-60.0, 60.0, 49), law_of(-5.0)
    of = lambda x: decays(x[None, :, None], jnp.zeros(1), None, law, None).sum()
    x = jnp.asarray(u, jnp.float32)
    slope = 1 / (4 * np.cosh(u / 2) ** 2)
    np.testing.assert_allclose(jax.grad(of)(x), -5 * slope, rtol=1e-6)
    np.testing.assert_allclose(law.gradient(x, 0.0, 0.0, jnp.ones(49))[0], -5 * slope, rtol=1e-6)
    second = jax.grad(lambda x: jax.grad(of)(x).sum())(x)
    np.testing.assert_allclose(second, 5 * slope * np.tanh(u / 2), rtol=1e-5, atol=1e-30)


def test_softplus_overflows_nowhere_and_is_exact_where_it_is_small():
    x = jnp.array([-1e4, -100.0, -80.0, -20.0, -1.0, 0.0, 1.0, 20.0, 100.0, 1e4, jnp.inf, -jnp.inf]).reshape(1, -1, 1)
    got = np.asarray(decays(x, jnp.zeros(1), None, Softplus(), None)).ravel()
    want = -np.logaddexp(np.asarray(x, np.float64).ravel(), 0.0)
    # Below 2^-126 the processor may give zero.
    np.testing.assert_allclose(got, np.where(want > -1e-37, 0.0, want), rtol=1e-6, atol=1e-37)


def test_few_operations_lose_digits_only_where_softplus_is_small():
    x = jnp.array([-1e4, -100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 79.0, 81.0, 100.0, 1e4, jnp.inf, -jnp.inf])
    got = Softplus().decay(x, jnp.zeros(()), jnp.zeros(()), unit=2.0, exact=False)
    want = -2.0 * np.logaddexp(np.asarray(x, np.float64), 0.0)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_padding_reaches_nothing(bound):
    x, valid = small(True, jnp.bfloat16), (jnp.arange(5) < 3)[None]
    x |= {name: x[name].at[:, 3:].set(jnp.nan) for name in ("g", "beta")}

    def run(x):
        g, beta = decays(x["g"], x["A_log"], x["dt_bias"], law_of(bound), valid), step_sizes(x["beta"], False, valid)
        return jnp.where(jnp.arange(5)[:, None] < 3, beta + g.sum(axis=3), 0.0)

    for name, d in jax.grad(lambda x: run(x).sum())(x).items():
        assert np.isfinite(np.asarray(d, np.float32)).all(), name
        assert d.dtype == x[name].dtype


def test_types_are_stated():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        x = small(True, jnp.bfloat16)
        for bound in (None, -5.0):
            g, beta = decays(x["g"], x["A_log"], x["dt_bias"], law_of(bound), None), step_sizes(x["beta"], True, None)
            assert g.dtype == beta.dtype == jnp.float32


RAW = dict(use_gate_in_kernel=True)


@pytest.mark.parametrize(
    ("laws", "A_log", "dt_bias", "message"),
    [
        ({}, spec(4), None, "`A_log` must be None without `use_gate_in_kernel`; got an array float32 (4,)."),
        ({}, None, spec(4), "`dt_bias` must be None without `use_gate_in_kernel`; got an array float32 (4,)."),
        (dict(lower_bound=-5.0), None, None, "`lower_bound` must be None without `use_gate_in_kernel`; got -5.0."),
        (RAW, None, None,
         "`A_log` must be an array [HV] with `use_gate_in_kernel` and without `lower_bound`; got None."),
        (RAW, spec(3), None, "`A_log` must have shape [HV] = (4); got (3,)."),
        (RAW, spec(1, 1, 4), None, "`A_log` must have shape [HV]; got (1, 1, 4)."),
        (RAW, spec(1, 1, 3, 1), None, "`A_log` must have shape [1, 1, HV, 1] = (1, 1, 4, 1); got (1, 1, 3, 1)."),
        (RAW, spec(4), spec(4), "`dt_bias` must have shape [HV*K] = (32); got (4,)."),
        (RAW, spec(4), spec(4, 7), "`dt_bias` must have shape [HV, K] = (4, 8); got (4, 7)."),
        *(
            (RAW | dict(lower_bound=x), spec(4), None, f"`lower_bound` must be None or a finite number < 0; got {x!r}.")
            for x in (0.0, 1, True, -float("inf"), float("nan"), "-5")
        ),
        (
            RAW | dict(lower_bound=spec()), spec(4), None,
            "`lower_bound` must be None or a finite number < 0, known when the program is built; got an array "
            "float32 ().",
        ),
        (dict(use_gate_in_kernel="tanh"), spec(4), None,
         "`use_gate_in_kernel` must be True, False or the name of a law of ('softplus', 'sigmoid'); got 'tanh'."),
        (dict(use_gate_in_kernel="softplus", lower_bound=-5.0), spec(4), None,
         "`lower_bound` must be None for the law 'softplus'; got -5.0."),
        (dict(use_gate_in_kernel="sigmoid"), spec(4), None,
         "`lower_bound` must be a number < 0 for the law 'sigmoid'; got None."),
        (dict(allow_neg_eigval=True), None, None,
         "`allow_neg_eigval` must be False without `use_beta_sigmoid_in_kernel`; got True."),
        (dict(use_gate_in_kernel=1), None, None,
         "`use_gate_in_kernel` must be True or False, known when the program is built; got 1."),
    ],
)  # fmt: skip
def test_errors(laws, A_log, dt_bias, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_gate_activation(GateActivation(**laws), A_log, dt_bias, spec(1, 20, 4, 8))


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_flat_bias_and_none_give_the_same_decays(per_channel):
    x = small(per_channel)
    bias, zeros = x["dt_bias"], jnp.zeros_like(x["dt_bias"])
    for same, other in ((bias.ravel(), bias), (None, zeros)):
        check_gate_activation(GateActivation(use_gate_in_kernel=True), x["A_log"], same, x["g"])
        got, want = (decays(x["g"], x["A_log"], y, Softplus(), None) for y in (same, other))
        np.testing.assert_array_equal(got, want, "g")


@pytest.mark.parametrize(("named", "bound"), [("softplus", None), ("sigmoid", -5.0)])
def test_a_law_by_its_name(named, bound):
    assert GateActivation(named, bound).law == GateActivation(True, bound).law
    assert GateActivation(named, bound).law != GateActivation(True, -4.0).law
    assert GateActivation().law is None
