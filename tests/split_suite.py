"""Tokens split over devices: what a device does one after the other, against the operator in one go."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call import arguments, gates
from chunkwise.shared.implementation import implementations
from chunkwise.shared.testing import compare, inputs
from tests.segment_suite import SEGMENT_IDS

# The other order of the same sums, in float32, or of products of bfloat16.
_TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


_PACKED = dict(cu_seqlens=inputs.boundaries(1, 17, 0, 3))
_SEGMENTS = dict(segment_ids=jnp.asarray(SEGMENT_IDS))
# Type, sizes, and form of the batch.
CASES: dict[str, tuple] = {
    "rows": ("float32", (2, 21, 1, 2, 8, 12), {}),
    # A map may take a launch of its own.
    "wide": ("bfloat16", (2, 21, 2, 4, 136, 72), {}),
    "documents": ("float32", (1, 24, 1, 2, 8, 12), _PACKED),
    "documents-bfloat16": ("bfloat16", (1, 24, 1, 2, 8, 12), _PACKED),
    "segments": ("bfloat16", (*SEGMENT_IDS.shape, 1, 2, 8, 12), _SEGMENTS),
    "segments-32": ("float32", (*SEGMENT_IDS.shape, 1, 2, 8, 12), _SEGMENTS),
}


def make(case: tuple, **options) -> tuple[dict, dict]:
    """Return the inputs of a case, and its other arguments."""
    dtype, sizes, fixed = case
    N = len(fixed["cu_seqlens"]) - 1 if "cu_seqlens" in fixed else sizes[0]
    return inputs.make_inputs(*sizes, dtype=jnp.dtype(dtype), num_states=N, **options), fixed


def assert_split(
    implementation: implementations.Implementation, x: dict, fixed: dict, activation: gates.GateActivation
) -> None:
    """Compare the operator behind the map of its tokens with the operator alone: values and all gradients.

    The map must also say what the tokens do to any state. Padding is NaN. Where the operator alone is not finite
    because a sequence is not, the other must not be finite either, and there are no gradients to compare.

    Args:
      implementation: of the operator.
      x: its floating-point arrays by name, initial_state among them.
      fixed: its other arguments.
      activation: of its gates.
    """
    dtype, T, S = str(x["v"].dtype), x["v"].shape[1], x["initial_state"]
    options = arguments.Options(True, chunk_size=16 if T < 64 else 64, activation=activation)
    given = lambda x: arguments.Arguments(**x, **fixed)
    finite = all(np.isfinite(np.asarray(y, np.float32)).all() for y in x.values())
    x = inputs.poison_padding(x, **fixed)

    def results(pull: Callable, o, states, cotangents) -> dict[str, Any]:
        return dict(o=o, states=states) | (pull(cotangents)[0] if finite else {})

    @jax.jit
    def programs(x, *cotangents):
        plan, of_states = (implementations.plan(implementation, given(x), options, states) for states in (False, True))
        (o, states), pull = jax.vjp(lambda x: implementations.run(plan, given(x)), x)
        want = results(pull, o, states, cotangents)
        found, precomputed = implementations.map_states(of_states, given(x | dict(initial_state=jnp.zeros_like(S))))
        (o, states), pull = jax.vjp(lambda x: implementations.run(plan, given(x), precomputed), x)
        mapped = found.N + jnp.matmul(found.M, x["initial_state"], precision="highest")
        dh0 = implementations.state_gradient(of_states, given(x), precomputed, *cotangents)
        return results(pull, o, states, cotangents), want, mapped, dh0

    rng = np.random.default_rng(1)
    cotangents = ((x["v"].shape, dtype), (S.shape, "float32"))
    got, want, mapped, dh0 = programs(x, *(jnp.asarray(rng.standard_normal(s), t) for s, t in cotangents))
    for name, y in got.items():
        nonfinite = np.isnan(np.asarray(want[name], np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(y, np.float32)), nonfinite)
        compare.assert_close(name, np.where(nonfinite, 0, y), np.where(nonfinite, 0, want[name]), _TOLERANCE[dtype])
    if finite:
        compare.assert_close("states through the map", mapped, want["states"], _TOLERANCE[dtype])
        compare.assert_close("dh0", dh0, want["initial_state"], _TOLERANCE[dtype])
