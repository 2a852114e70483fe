"""Raw gates and step sizes in every delta rule and implementation: values and gradients against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.kernels import gate_activation
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import boundaries
from tests import laws
from tests.laws import raw_inputs
from tests.recurrence import assert_recurrence

DELTA = [operator for operator in OPERATORS.values() if operator.delta]
# 1 token, an empty sequence, two sequences in a chunk, padding.
PACKED = boundaries(1, 17, 0, 3)
LAWS = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
LAW = {"softplus": dict(lower_bound=None, allow_neg_eigval=True), "bounded": dict(lower_bound=-5.0)}


# The laws come before all implementations but one, which its package tests, so each of these takes one of them.
CASES = [
    ("chunk_gated_delta_rule", "xla", "softplus packed"),
    ("chunk_gated_delta_rule", "staged", "bounded"),
    ("chunk_gated_delta_rule", "fused", "softplus stream"),
    ("chunk_kda", "xla", "bounded stream"),
    ("chunk_kda", "staged", "softplus packed"),
    ("chunk_kda", "fused", "bounded"),
    ("recurrent_gated_delta_rule", "xla", "bounded"),
    ("recurrent_gated_delta_rule", "fused", "softplus packed"),
    ("recurrent_kda", "xla", "softplus"),
    ("recurrent_kda", "fused", "bounded packed"),
]
QUICK = "chunk_gated_delta_rule", "xla", "softplus packed"
THOROUGH = dict(
    # The package of KDA has raw gates of chunks, in kernels. Of gates per head one case is quick.
    test_values_and_gradients=lambda operator, implementation, case: (
        operator.startswith("chunk") and (operator, implementation, case) != QUICK
    ),
    test_every_rate=lambda operator, implementation, law, A_log: A_log[0] < 100 or operator.startswith("chunk"),
    test_a_law_more_is_a_line_of_the_table=lambda implementation: implementation == "fused",
    test_types_are_stated=lambda operator: operator.chunked or not operator.per_channel,
    test_forms_of_a_rate=lambda operator: operator.chunked,
)


@pytest.mark.parametrize(("operator", "implementation", "case"), CASES)
def test_values_and_gradients(operator, implementation, case):
    operator, (law, *how) = OPERATORS[operator], case.split()
    packed = bool(how)
    states = 0 if "stream" in how else 4 if packed else 1
    # A few tokens are what the recurrent kernel is for, and quick to interpret.
    T = 2 if not operator.chunked and implementation == "fused" and not packed else 24
    inputs = raw_inputs(operator.source.inputs(1, T, 1, 2, 8, 8, num_states=states))
    compare(operator, implementation, inputs, LAW[law], PACKED if packed else None)


class LogSigmoid(gate_activation.Law):
    """A law more: a log(sigmoid(x + b))."""

    def decay(self, x, A_log, dt_bias, unit=1.0, exact=True):
        return unit * jnp.exp(A_log) * jax.nn.log_sigmoid(x + dt_bias)

    def gradient(self, x, A_log, dt_bias, dg):
        dx = jnp.exp(A_log) * jax.nn.sigmoid(-(x + dt_bias)) * dg
        return dx, self.decay(x, A_log, dt_bias) * dg


def log_sigmoid(x, a, lower_bound):
    decay = -a * np.logaddexp(-x, 0.0)
    return decay, a * np.exp(-np.logaddexp(0.0, x)), decay


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_a_law_more_is_a_line_of_the_table(implementation, monkeypatch):
    monkeypatch.setitem(gate_activation.LAWS, "logsigmoid", LogSigmoid)
    monkeypatch.setitem(laws.LAWS, "logsigmoid", log_sigmoid)
    operator = OPERATORS["chunk_kda"]
    inputs = raw_inputs(operator.source.inputs(1, 24, 1, 2, 8, 8, num_states=1))
    compare(operator, implementation, inputs, dict(use_gate_in_kernel="logsigmoid"), None)


RATES = [(name, "xla") for name in ("chunk_gated_delta_rule", "chunk_kda", "recurrent_gated_delta_rule")]
RATES.append(("chunk_kda", "fused"))


@pytest.mark.parametrize("A_log", [(-100.0, 17.0), (60.0, 88.0), (100.0, 300.0)], ids=str)
@pytest.mark.parametrize("law", ["softplus", "bounded"])
@pytest.mark.parametrize(("operator", "implementation"), RATES)
def test_every_rate(operator, implementation, law, A_log):
    """e^A_log may be no number in float32; where a bias takes it back decays are as exact as others.

    Under the second law a decay is at an end then, or, where x + dt_bias is 0, half of the bound.
    """
    operator = OPERATORS[operator]
    inputs = raw_inputs(operator.source.inputs(1, 24, 1, 2, 8, 8, num_states=1), A_log=A_log)
    if law == "bounded":
        zero = jnp.zeros_like(inputs["g"]).at[:, ::2].set(inputs["g"][:, ::2])
        inputs |= dict(g=zero, dt_bias=jnp.zeros_like(inputs["dt_bias"]))
    compare(operator, implementation, inputs, LAW[law], None, () if law == "softplus" else ("g", "dt_bias", "A_log"))


def compare(operator, implementation, inputs, law, cu_seqlens, but_for=()):
    """Compare values and gradients with float64."""
    options = LAWS | law | (dict(chunk_size=16) if operator.chunked else {})
    run = operator.function
    assert_recurrence(run, inputs, cu_seqlens=cu_seqlens, but_for=but_for, implementation=implementation, **options)


@pytest.mark.parametrize("operator", DELTA, ids=lambda operator: operator.name)
def test_types_are_stated(operator):
    """Raw gates keep their type, and no Python number widens one."""
    erasing = dict(use_gate_in_kernel=True, use_erase_sigmoid_in_kernel=True, use_write_sigmoid_in_kernel=True)
    laws = erasing if operator.erase == "gate" else LAWS
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        inputs = raw_inputs(operator.source.inputs(1, 18, 1, 1, 8, 8), dtype=jnp.bfloat16)
        for name in operator.implementations:
            for law in LAW.values():
                run = lambda x: operator.function(**x, **laws, **law, implementation=name)[0]  # noqa: B023
                grads = jax.eval_shape(lambda x: jax.vjp(run, x)[1](inputs["v"])[0], inputs)  # noqa: B023
                assert {n: d.dtype for n, d in grads.items()} == {n: x.dtype for n, x in inputs.items()}


@pytest.mark.parametrize("operator", [x for x in DELTA if x.erase != "gate"], ids=lambda operator: operator.name)
def test_forms_of_a_rate(operator):
    """A bound alone is the law lower_bound sigmoid(g + dt_bias), and checkpoints have A_log as [1, 1, HV, 1].

    No bias means zeros, and the step sizes stay as they are.
    """
    inputs = raw_inputs(operator.source.inputs(1, 20 if operator.chunked else 2, 1, 2, 8, 8))
    inputs["beta"] = jax.nn.sigmoid(inputs["beta"])
    run = functools.partial(operator.function, use_gate_in_kernel=True)
    for law in (dict(), dict(lower_bound=-5.0)):
        want, _ = run(**inputs, **law)
        np.testing.assert_array_equal(run(**inputs | dict(A_log=inputs["A_log"].reshape(1, 1, 2, 1)), **law)[0], want)
    zeros = jnp.zeros_like(inputs["dt_bias"])
    want, _ = run(**inputs | dict(dt_bias=zeros), **law)
    np.testing.assert_array_equal(run(**inputs | dict(dt_bias=None), **law)[0], want)
    want, _ = run(**inputs | dict(A_log=jnp.zeros(2)), **law)
    np.testing.assert_array_equal(run(**inputs | dict(A_log=None), **law)[0], want)
    plain = -5.0 * jax.nn.sigmoid(inputs["g"] + inputs["dt_bias"])
    decayed = {name: x for name, x in inputs.items() if name not in ("A_log", "dt_bias")} | dict(g=plain)
    assert_close("o", want, operator.function(**decayed)[0], 1e-5)
