"""Rows of segments: a hard batch of them, and an operator compared with the float64 recurrence on it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.testing import compare, inputs, oracle
from tests.gradients import gradient_program

# Padding before, between and after segments, and between two of one id; a segment of one token; one that ends with a
# chunk of 16; an ordinary row; a row of padding.
SEGMENT_IDS = np.array(
    [
        [-1, -1, *[5] * 5, 2, -7, *[2] * 7, *[3] * 20, 9, 9, -1, -1],
        [*[1] * 33, *[0] * 7],
        [-1] * 40,
    ],
    np.int32,
)


def random_segment_ids(seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Return random ids [B, T]: runs of 1 to 20 tokens, of which every fourth is padding."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(shape[0]):
        lengths = rng.integers(1, 20, shape[1])
        rows.append(np.repeat(rng.integers(-1, 3, shape[1]), lengths)[: shape[1]])
    return np.stack(rows).astype(np.int32)


def assert_segments(
    fn: Callable[[dict, jax.Array], dict], x: dict[str, jax.Array], segment_ids=SEGMENT_IDS,
    tolerance=compare.TOLERANCE, gradient_tolerance=compare.GRADIENT_TOLERANCE,
) -> None:  # fmt: skip
    """Fail unless results and gradients are those of the recurrence, with NaN in the padding, where all must be zero.

    Args:
      fn: a function of inputs by name and segment ids that returns o and maybe final_state by name.
      x: inputs by the names of `reference`.
      segment_ids: concrete ids [B, T].
      tolerance, gradient_tolerance: of results and of gradients, by the name of a type.
    """
    padding, shared = segment_ids < 0, ("initial_state", "g_gamma")
    rng = np.random.default_rng(1)
    cotangents = {
        name: jnp.asarray(rng.standard_normal(y.shape), y.dtype)
        for name, y in jax.eval_shape(fn, x, jnp.asarray(segment_ids)).items()
    }
    nonfinite = inputs.poison_padding(jax.tree.map(jnp.asarray, x), segment_ids=segment_ids)
    got = gradient_program(fn)(nonfinite, jnp.asarray(segment_ids), cotangents)
    o, state, gradients = oracle.reference(
        **x, segment_ids=segment_ids, do=cotangents["o"], dht=cotangents.get("final_state"),
    )  # fmt: skip
    kind = x["v"].dtype.name
    for name, want in (("o", o), ("final_state", state)):
        if name in got:
            compare.assert_close(name, got[name], want, tolerance[kind])
    for name, want in gradients.items():
        compare.assert_close(f"d{name}", got[f"d{name}"], want, gradient_tolerance[kind])
    for name, y in got.items():
        if name.removeprefix("d") not in (*shared, "final_state"):
            assert not np.asarray(y.astype(jnp.float32))[padding].any(), f"{name} of padding is not zero"
