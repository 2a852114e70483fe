"""The tables of blocks, and how the kernels are launched."""

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.causal_conv1d import Config, causal_conv1d
from chunkwise.causal_conv1d.kernel import ConvStatic, tables
from chunkwise.causal_conv1d.sequences import find, state_rows
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.tpu import text_for_tpu

SMALL = Config(16, 128)


def test_only_blocks_with_an_end_are_mixed():
    static = ConvStatic(96, 4, None, SMALL)
    # Sequences of 20, 50 and 26 tokens: boundaries at 0, 20, 70 and 96, in blocks 0, 1, 4 and 5 of 16.
    blocks, sequences, _ = tables(find(1, 96, boundaries(20, 50, 26), None), 1, False, static)
    assert blocks[0].tolist() == [1, 1, 0, 0, 1, 1]
    assert sequences is None


def test_the_range_of_sequences_of_a_block():
    static = ConvStatic(48, 4, None, SMALL)
    # The first 3 tokens of the sequence at 15 lie in blocks 0 and 1.
    blocks, sequences, _ = tables(find(1, 48, boundaries(15, 0, 20, 13), None), 1, True, static)
    assert blocks[1:].tolist() == [[0, 1, 3], [3, 3, 4]]
    assert sequences.tolist() == [[0, 15, 15, 35], [15, 0, 20, 13]]


def test_whole_blocks_need_no_tables():
    assert tables(find(2, 64, None, None), 2, False, ConvStatic(64, 4, None, SMALL)) == (None, None, None)


def test_state_rows():
    rng = np.random.default_rng(0)
    weight, states = rng.standard_normal((4, 5)), rng.standard_normal((2, 3, 5))
    rows = state_rows(jnp.asarray(weight, jnp.float32), jnp.asarray(states, jnp.float32))
    for age in range(3):
        want = sum(weight[i - age] * states[:, i] for i in range(age, 3))
        np.testing.assert_allclose(rows[:, age], want, rtol=1e-5, atol=1e-6)


def test_one_launch_a_direction():
    x, weight = jnp.zeros((1, 64, 128), jnp.bfloat16), jnp.zeros((128, 4))
    f = lambda x, w: causal_conv1d(x, w, implementation="pallas")[0]
    assert text_for_tpu(f, x, weight).count("causal_conv1d_fwd_w4") >= 1
    assert "causal_conv1d_bwd_w4" in text_for_tpu(lambda x, w, dy: jax.vjp(f, x, w)[1](dy), x, weight, x)
