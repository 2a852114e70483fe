"""The oracles of what a layer does around its operator, on numbers worked out by hand."""

import numpy as np

from chunkwise.shared.testing.conv_norm_oracle import (
    Sequence,
    activation,
    causal_conv1d,
    rms_norm_gated,
    sequences,
)


def test_sequences():
    assert sequences(2, 3) == [Sequence(0, 0, 3, 0), Sequence(1, 0, 3, 1)]
    assert sequences(1, 5, np.array([0, 2, 2, 4])) == [
        Sequence(0, 0, 2, 0), Sequence(0, 2, 2, 1), Sequence(0, 2, 4, 2),
    ]  # fmt: skip
    ids = np.array([[-1, 4, 4, 0, -2], [-1, -1, -1, -1, -1]])
    assert sequences(2, 5, None, ids) == [Sequence(0, 1, 3, 0, True, False), Sequence(0, 3, 4, 0, False, True)]


def test_activation():
    x = np.array([-1000.0, 0.0, 2.0])
    np.testing.assert_allclose(activation(x, "sigmoid"), [0.0, 0.5, 1 / (1 + np.exp(-2.0))])
    np.testing.assert_allclose(activation(x, "silu"), [0.0, 0.0, 2 / (1 + np.exp(-2.0))])
    np.testing.assert_array_equal(activation(x, None), x)


def test_convolution():
    x = np.array([1.0, 10.0, 100.0, 1000.0]).reshape(1, 4, 1)
    weight, state = np.array([[1.0, 2.0, 3.0]]), np.array([0.1, 0.01]).reshape(1, 2, 1)
    y, final = causal_conv1d(x, weight, np.array([0.5]), state, name=None)
    np.testing.assert_allclose(y.ravel(), [3.62, 32.51, 321.5, 3210.5])
    np.testing.assert_allclose(final.ravel(), [100.0, 1000.0])
    y, final = causal_conv1d(x, weight, name=None, cu_seqlens=np.array([0, 1, 3]))
    np.testing.assert_allclose(y.ravel(), [3.0, 30.0, 320.0, 0.0])
    np.testing.assert_allclose(final[:, :, 0], [[0.0, 1.0], [10.0, 100.0]])


def test_norm():
    x, z, weight = np.array([[3.0, 4.0]]), np.array([[2.0, 1.0]]), np.array([1.0, 10.0])
    r = np.sqrt(12.5)
    np.testing.assert_allclose(rms_norm_gated(x, z, weight, name=None, eps=0.0), [[6 / r, 40 / r]])
    after = rms_norm_gated(x, z, weight, name=None, norm_before_gate=False, eps=0.0)
    np.testing.assert_allclose(after, [[6 / np.sqrt(26), 40 / np.sqrt(26)]])
