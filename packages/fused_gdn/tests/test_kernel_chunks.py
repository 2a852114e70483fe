"""The forward of several chunks a grid step, interpreted, against the float64 recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gdn import Config, chunk_gated_delta_rule
from chunkwise.shared.testing import compare
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference
from tests.traced import launches


def run(x, chunks, **options):
    """Return the output and the final states of chunks of 16, so many of them in a grid step."""
    config = Config(2, 2, chunks)
    call = lambda x: chunk_gated_delta_rule(
        **x, **options, output_final_state=True, chunk_size=16, implementation="fused", config=config
    )
    T, HV = x["v"].shape[1:3]
    assert launches(call, x)[0].steps == len(x["v"]) * HV // 2 * (-(-T // (chunks * 16)) + 2)
    return call(x)


@pytest.mark.parametrize(
    ("dtype", "sizes", "more"),
    [
        # Two rows, of which the last grid step has one of three chunks, and this chunk some tokens.
        (jnp.float32, (2, 200, 1, 2, 24, 40), dict(num_states=2, gate="resets")),
        # Two blocks of heads, on a key head each, which the kernel scales to unit length.
        (jnp.bfloat16, (1, 200, 2, 4, 24, 40), dict(normalise=False)),
        # Rounding of L where keys repeat, and step sizes near 2.
        (jnp.bfloat16, (1, 192, 1, 2, 24, 40), dict(repeat_key=True, beta=1.9, num_states=1)),
    ],
)
def test_values_and_gradients(dtype, sizes, more):
    x = make_inputs(*sizes, dtype=dtype, **more)
    options = {} if more.get("normalise", True) else dict(use_qk_l2norm_in_kernel=True)
    rng, (B, T, _, HV, K, V) = np.random.default_rng(1), sizes
    cotangents = dict(o=jnp.asarray(rng.standard_normal((B, T, HV, V)), dtype))
    cotangents["final_state"] = jnp.asarray(rng.standard_normal((B, HV, K, V)), jnp.float32)
    results = lambda x, _: dict(zip(cotangents, run(x, 3, **options), strict=True))
    got = jax.jit(lambda x: compare.with_gradients(results)(x, None, cotangents))(x)
    o, state, dx = reference(**x, **options, do=cotangents["o"], dht=cotangents["final_state"])
    want = dict(o=o, final_state=state) | {f"d{name}": y for name, y in dx.items()}
    for name, y in got.items():
        compare.assert_close(name, y, want[name], compare.tolerance(name, dtype.__name__))


def test_rows_are_isolated():
    """What a row leaves in fast memory is not in the next one, not even NaN."""
    x = make_inputs(3, 130, 1, 2, 24, 40)
    spoilt = x | {"v": x["v"].at[0, 5].set(jnp.nan)}
    for found, expected in zip(run(spoilt, 2), run(x, 2), strict=True):
        np.testing.assert_array_equal(found[1:], expected[1:])
        assert np.isnan(found[0]).any()
