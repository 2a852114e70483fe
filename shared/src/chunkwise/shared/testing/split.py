"""Tokens split over devices: what a device does one after the other, against the operator in one go."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.operators import arguments, chunked, gates
from chunkwise.shared.testing import compare, inputs

# The other order of the same sums, in float32, or of products of bfloat16.
_TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def assert_split(
    run: Callable, summary: Callable, state_gradient: Callable, x: dict, fixed: dict, laws: gates.Laws, raw_gates=False
) -> None:
    """Compare the operator behind a summary of its tokens with the operator alone: values and all gradients.

    The summary must also say what the tokens do to any state. Padding is NaN. Where the operator alone is not finite
    because a sequence is not, the other must not be finite either, and there are no gradients to compare.

    Args:
      run, summary, state_gradient: the three of `Launches`, from prepared arguments and options.
      x: its floating-point arrays by name, initial_state among them.
      fixed: its other arguments.
      laws, raw_gates: as `prepare` takes them.
    """
    dtype, T, S = str(x["v"].dtype), x["v"].shape[1], x["initial_state"]
    options = arguments.Options(True, chunk_size=16 if T < 64 else 64, laws=laws)
    prepared = lambda x: chunked.prepare(arguments.Arguments(**x, **fixed), options, "fused", raw_gates)
    finite = all(np.isfinite(np.asarray(y, np.float32)).all() for y in x.values())
    x = inputs.spoil_padding(x, **fixed)

    def results(pull: Callable, o, states, cotangents) -> dict[str, Any]:
        return dict(o=o, states=states) | (pull(cotangents)[0] if finite else {})

    @jax.jit
    def programs(x, *cotangents):
        (o, states), pull = jax.vjp(lambda x: run(*prepared(x)), x)
        want = results(pull, o, states, cotangents)
        found = summary(*prepared(x | dict(initial_state=jnp.zeros_like(S))))
        given = found.kept if found.given is None else found.given
        (o, states), pull = jax.vjp(lambda x: run(*prepared(x), given), x)
        mapped = found.states + jnp.matmul(found.M, x["initial_state"], precision="highest")
        dh0 = state_gradient(*prepared(x), found.kept, *cotangents)
        return results(pull, o, states, cotangents), want, mapped, dh0

    rng = np.random.default_rng(1)
    cotangents = ((x["v"].shape, dtype), (S.shape, "float32"))
    got, want, mapped, dh0 = programs(x, *(jnp.asarray(rng.standard_normal(s), t) for s, t in cotangents))
    for name, y in got.items():
        spoilt = np.isnan(np.asarray(want[name], np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(y, np.float32)), spoilt)
        compare.assert_close(name, np.where(spoilt, 0, y), np.where(spoilt, 0, want[name]), _TOLERANCE[dtype])
    if finite:
        compare.assert_close("states through the map", mapped, want["states"], _TOLERANCE[dtype])
        compare.assert_close("dh0", dh0, want["initial_state"], _TOLERANCE[dtype])
