"""The mathematics of decodes, without Pallas."""

import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.serving.decode import tile
from chunkwise.shared.serving.decode.records import static_of
from chunkwise.shared.testing.compare import assert_close


def test_parts_are_numbers_of_bfloat16_and_exact():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 128)) * 10.0 ** rng.integers(-20, 20, (8, 128)), jnp.float32)
    parts = tile.exact_parts(x)
    for part in parts:
        np.testing.assert_array_equal(part.astype(jnp.bfloat16).astype(jnp.float32), part)
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in parts), np.asarray(x, np.float64))


def test_a_state_is_read_alike_by_both_units():
    rng = np.random.default_rng(0)
    S, row = jnp.asarray(rng.standard_normal((128, 128)), jnp.bfloat16), rng.standard_normal((1, 128))
    want = row @ np.asarray(S, np.float64)
    row = jnp.asarray(row, jnp.float32)
    parts = jnp.concatenate([*tile.exact_parts(row), *[jnp.zeros_like(row)] * 5])
    products = tile.read_on_matrix_unit(S, parts, static_of(1, 1, 128, 128, GateActivation()))
    assert_close("matrix unit", jnp.sum(products, axis=0, keepdims=True), want, 1e-6)
    assert_close("vector unit", tile.read_on_vector_unit(S.astype(jnp.float32), row), want, 1e-6)
