"""The helpers of the tests themselves, and small tile mathematics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.kernels import largest_divisor, pick_heads, split_gate, to_column
from chunkwise.shared.testing import (
    CASES,
    GATES,
    assert_close,
    assert_traced_once,
    error,
    make_inputs,
    numeric_gradients,
    spec,
)
from chunkwise.shared.testing.tpu import CHIPS, compile_for, has_libtpu


def test_split_gate_is_exact():
    rng = np.random.default_rng(0)
    g = jnp.asarray(-np.exp(rng.uniform(-20, 7, 4096)), jnp.float32)
    coarse, fine = split_gate(g)
    np.testing.assert_array_equal(np.asarray(coarse, np.float64) + np.asarray(fine, np.float64), g)
    np.testing.assert_array_equal(np.asarray(coarse) % 0.0625, 0.0)
    assert np.abs(fine).max() <= 1 / 32


def test_split_gate_keeps_differences_of_large_sums():
    g = make_inputs(T=128, gate="spikes")["g"][0, :, 0]
    coarse, fine = (jnp.cumsum(part) for part in split_gate(g))
    exact = np.cumsum(np.asarray(g, np.float64))
    kept = (coarse[1:] - coarse[:-1]) + (fine[1:] - fine[:-1])
    plain = jnp.cumsum(g)[1:] - jnp.cumsum(g)[:-1]
    # Against the tokens' own gates: the plain difference inherits the rounding of both sums.
    assert np.abs(kept - np.diff(exact)).max() < 1e-6
    assert np.abs(plain - np.diff(exact)).max() > 1e-5


def test_to_column_is_exact():
    row = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 64)), jnp.float32)
    np.testing.assert_array_equal(to_column(row), jnp.swapaxes(row, 1, 2))


def test_pick_heads():
    assert pick_heads(32, 16, 1, most=8) == 8
    assert pick_heads(6, 2, 1, most=8) == 6
    # Four heads would hold a group of three and a part of the next.
    assert pick_heads(12, 4, 1, most=5) == 3
    assert pick_heads(32, 16, 10, most=8, budget=25) == 2
    assert pick_heads(32, 16, 100, most=8, budget=25) == 1
    assert [largest_divisor(12, most) for most in (1, 5, 7, 100)] == [1, 4, 6, 12]


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


def test_make_inputs_options():
    x = make_inputs(T=5, K=4, repeat_key=True, beta=1.9)
    np.testing.assert_array_equal(x["k"][:, 1:], x["k"][:, :-1])
    np.testing.assert_allclose(jnp.linalg.norm(x["k"], axis=-1), 1.0, rtol=1e-6)
    assert (x["beta"] == jnp.float32(1.9)).all()


def test_cases_hold_what_they_promise():
    assert {c.chunk_size for c in CASES} == {16, 32, 64, 128}
    assert {c.gate for c in CASES} == set(GATES)
    assert {c.dtype for c in CASES} == {"float32", "bfloat16"}
    assert {c.K for c in CASES} | {c.V for c in CASES} == {1, 60, 64, 100, 128, 256}
    assert all(c.K != c.V for c in CASES)
    assert any(c.HV > c.H > 1 for c in CASES)


def test_numeric_gradients():
    grads = numeric_gradients(lambda x, y: x**2 * y, dict(x=np.array([1.0, 2.0]), y=np.array([3.0, 4.0])), [np.ones(2)])
    np.testing.assert_allclose(grads["x"], [6.0, 16.0], rtol=1e-8)
    np.testing.assert_allclose(grads["y"], [1.0, 4.0], rtol=1e-8)


def test_assert_traced_once_counts():
    with pytest.raises(AssertionError, match="traced 2 times"):
        assert_traced_once(lambda x: 2 * x, (jnp.ones(2),), (jnp.ones(3),))


@pytest.mark.tpu
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("auto_layout", [False, True])
@pytest.mark.parametrize("chip", CHIPS)
def test_compile_for(chip, auto_layout):
    executable = compile_for(lambda x: x @ x, spec(256, 256), chip=chip, auto_layout=auto_layout)
    assert executable.memory_analysis().output_size_in_bytes == 256 * 256 * 4
