"""The helpers of the tests themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing.compare import assert_close, error
from chunkwise.shared.testing.inputs import GATES, boundaries, make_gate, make_inputs, poison_padding, spec
from tests.gradients import assert_gradients


def test_error():
    assert error([3.0, 4.0], [3.0, 4.0]) == 0.0
    assert error([1.0, 1.1], [1.0, 1.0]) == pytest.approx(0.1 / np.sqrt(2))
    assert error([np.nan], [1.0]) == np.inf
    assert error([1.0, 2.0], [1.0]) == np.inf
    assert error([0.0], [0.0]) == 0.0
    assert error([1e-30], [0.0]) == np.inf


def test_assert_close_names_the_worst_coordinate_and_both_values():
    ref = np.ones((2, 3))
    x = ref.copy()
    x[1, 2] = 1.5
    message = r"dk: error 2\.041e-01 > 1\.0e-05; worst at \(1, 2\): got 1\.5, reference 1"
    with pytest.raises(AssertionError, match=message):
        assert_close("dk", x, ref, 1e-5)
    x[0, 0] = np.nan
    with pytest.raises(AssertionError, match=r"error inf.*worst at \(0, 0\): got nan, reference 1"):
        assert_close("dk", x, ref, 1e-5)
    with pytest.raises(AssertionError, match=r"dk: shape \(1,\), reference \(2, 3\)"):
        assert_close("dk", x[0, :1], ref, 1e-5)
    assert assert_close("dk", ref, ref, 0.0) == 0.0


@pytest.mark.parametrize("gate", GATES)
def test_make_inputs(gate):
    x = make_inputs(2, 9, 2, 4, 3, 5, dtype=jnp.bfloat16, gate=gate, per_channel=True, num_states=2)
    shapes = dict(q=(2, 9, 2, 3), k=(2, 9, 2, 3), v=(2, 9, 4, 5), beta=(2, 9, 4), g=(2, 9, 4, 3))
    assert {name: y.shape for name, y in x.items()} == shapes | dict(initial_state=(2, 4, 3, 5))
    assert x["k"].dtype == jnp.bfloat16
    assert x["g"].dtype == x["initial_state"].dtype == jnp.float32
    assert (np.asarray(x["g"]) <= 0).all()
    again = make_inputs(2, 9, 2, 4, 3, 5, dtype=jnp.bfloat16, gate=gate, per_channel=True, num_states=2)
    jax.tree.map(np.testing.assert_array_equal, x, again)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_make_inputs_keeps_types_and_numbers_under_x64(dtype):
    want = make_inputs(T=3, K=2, V=2, dtype=dtype, num_states=1)
    with jax.enable_x64(True):
        got = make_inputs(T=3, K=2, V=2, dtype=dtype, num_states=1)
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in want.items()}
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_make_gate():
    gate = lambda kind: make_gate(kind, np.random.default_rng(0), (1, 15, 2))
    np.testing.assert_allclose(gate("logsigmoid*10"), 100 * gate("logsigmoid/10"))
    assert not gate("zero").any()
    assert (gate("strong") == -30.0).all()
    assert (gate("spikes")[:, ::7] == -30.0).all()
    assert [gate("resets")[0, t, 0] for t in (0, 7, 14)] == [-1e9, -np.inf, -1e9]


def test_boundaries_and_padding():
    cu_seqlens = boundaries(2, 0, 1)
    np.testing.assert_array_equal(cu_seqlens, [0, 2, 2, 3])
    assert cu_seqlens.dtype == jnp.int32
    x = make_inputs(T=5, K=2, V=2, num_states=3)
    spoilt = poison_padding(x, cu_seqlens)
    for name, y in spoilt.items():
        assert np.isnan(y).any() == (name != "initial_state")
        assert np.isfinite(y[:, :3]).all()
    assert poison_padding(x, None) is x
    assert (spec(2, 3).shape, spec(2, dtype=jnp.bfloat16).dtype) == ((2, 3), jnp.bfloat16)


def test_assert_gradients_finds_a_wrong_one():
    @jax.custom_vjp
    def wrong(x):
        return x**2

    wrong.defvjp(lambda x: (x**2, x), lambda x, d: (3 * x * d,))
    args = dict(x=jnp.array([1.0, 2.0]))
    assert_gradients(lambda x: x**2, lambda x: x**2, args)
    with pytest.raises(AssertionError, match="dx: error"):
        assert_gradients(wrong, lambda x: x**2, args)
