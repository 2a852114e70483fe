"""The kernels of the convolution and of the gated norm in the forms that the stages do not have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import causal_conv1d, norm_gated
from chunkwise.shared.testing import compare, conv_norm_oracle, inputs
from tests import engine

# Two blocks of channels, and one, so that cores share the rows of a batch.
CHANNELS = {1: 130, 2: 100}
D, W = 130, 4
PACK = dict(cu_seqlens=inputs.boundaries(1, 0, 2, 29, 5))
SEGMENTS = dict(segment_ids=jnp.asarray([[-1, -1, 5, *[2] * 20, *[-1] * 3, *[2] * 14], [1] * 40, [-1] * 40], jnp.int32))
BATCHES = {"rows": ({}, (2, 37), 2), "pack": (PACK, (1, 40), 5), "segments": (SEGMENTS, (3, 40), 3)}


THOROUGH = dict(
    # Over a pool it has the same kernel.
    test_convolution=True,
    test_convolution_over_a_pool=lambda pool: pool != "float32",
    test_norm=True,
)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_convolution(batch, states, cores):
    """Values against the definition, gradients against plain JAX, which the tests of the package compare with it."""
    (sequences, (B, T), count), D = BATCHES[batch], CHANNELS[cores]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x = dict(x=draw(B, T, D), weight=draw(D, W), bias=draw(D))
    x |= dict(initial_state=draw(count, W - 1, D)) if states else {}
    free = np.ones((B, T), bool)
    for s in conv_norm_oracle.sequences(B, T, **sequences):
        free[s.row, s.start : s.end] = False
    cotangents = dict(y=jnp.where(free[:, :, None], jnp.nan, draw(B, T, D)), final_state=draw(count, W - 1, D))

    def run(implementation):
        def fn(x, sequences):
            y, final = causal_conv1d.causal_conv1d(
                **x, **sequences, output_final_state=True, activation="silu", implementation=implementation,
                config=causal_conv1d.Config(16, 128),
            )  # fmt: skip
            return dict(y=y, final_state=final)

        return jax.jit(compare.with_gradients(fn))

    poisoned = x | dict(x=jnp.where(free[:, :, None], jnp.nan, x["x"]))
    got = run("pallas")(poisoned, sequences, cotangents)
    y, final = conv_norm_oracle.causal_conv1d(**x, name="silu", **sequences)
    compare.assert_close("y", got["y"], y, compare.TOLERANCE["float32"])
    np.testing.assert_array_equal(np.asarray(got["final_state"], np.float64), final)
    want = run("xla")(x, sequences, cotangents | dict(y=jnp.nan_to_num(cotangents["y"])))
    for name in x:
        compare.assert_close(f"d{name}", got[f"d{name}"], want[f"d{name}"], compare.GRADIENT_TOLERANCE["float32"])


@pytest.mark.parametrize(("pool", "cores"), [("float32", 1), ("bfloat16", 2)])
def test_convolution_over_a_pool(pool, cores):
    """A serving step: decodes, one of them of two guesses, and prefills, which keep the state after a block."""
    rng, T, slots = np.random.default_rng(0), 40, 12
    weight, bias = rng.standard_normal((D, W)).astype(np.float32), rng.standard_normal(D).astype(np.float32)
    schedule = dict(
        cu_seqlens=np.array([0, 1, 3, 3, 20, 33, -7], np.int32),
        state_indices=np.array([[4, -1], [2, 3], [9, 0], [5, 0], [-1, 7], [99, 99]], np.int32),
        has_initial_state=np.array([True, True, True, False, True, False]),
        num_decodes=2,
        num_sequences=5,
        num_accepted_tokens=np.array([1, 2, 1, 1, 2, 77], np.int32),
        block_state_indices=np.array([[1], [1], [-1], [10], [11], [99]], np.int32),
    )
    x = rng.standard_normal((1, T, D)).astype(np.float32)
    x[:, 33:] = np.nan
    states = rng.standard_normal((slots, W - 1, D)).astype(jnp.dtype(pool))
    states[[5, 10, 11]] = np.nan
    want = engine.Oracle(engine.convolution(weight.astype(np.float64), bias.astype(np.float64)), 8, states)
    want_y, written = want.run({"x": x}, schedule)
    counts = {name: jnp.int32(schedule[name]) for name in ("num_decodes", "num_sequences")}
    update = lambda x, states, schedule: causal_conv1d.causal_conv1d_update(
        x, states, weight, bias, activation=None, block_size=8, implementation="pallas", **schedule
    )
    y, after = jax.jit(update)(x, states, schedule | counts)
    np.testing.assert_allclose(y[0, :33], want_y, rtol=0, atol=1e-5)
    assert not np.asarray(y[0, 33:]).any()
    for slot in range(slots):
        if slot in written:
            np.testing.assert_array_equal(after[slot], want.states[slot].astype(states.dtype), f"slot {slot}")
        else:
            assert np.asarray(after[slot]).tobytes() == states[slot].tobytes(), f"slot {slot} has changed"


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(("activation", "norm_before_gate"), [("silu", False), ("sigmoid", True), (None, True)])
def test_norm(activation, norm_before_gate, cores):
    """Rows past the last block of rows, and blocks of groups of channels."""
    rng, shape = np.random.default_rng(0), (1, 19, 4, 64)
    x, z, dy = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3))
    x = dict(x=x, z=z, weight=jnp.asarray(rng.standard_normal(64), jnp.float32))
    options = dict(norm_before_gate=norm_before_gate)

    def run(implementation):
        fn = lambda x, _: dict(
            y=norm_gated.rms_norm_gated(
                **x, **options, activation=activation, implementation=implementation,
                config=norm_gated.Config(16, 2, 16),
            )
        )  # fmt: skip
        return jax.jit(compare.with_gradients(fn))(x, None, dict(y=dy))

    got, want = run("pallas"), run("xla")
    exact = conv_norm_oracle.rms_norm_gated(**x, **options, name=activation)
    compare.assert_close("y", got["y"], exact, compare.TOLERANCE["float32"])
    for name in x:
        compare.assert_close(f"d{name}", got[f"d{name}"], want[f"d{name}"], compare.GRADIENT_TOLERANCE["float32"])
