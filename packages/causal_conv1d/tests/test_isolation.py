"""What is not finite in one sequence changes no bit of another."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.causal_conv1d import Config, causal_conv1d
from chunkwise.shared.testing.inputs import boundaries
from tests.poison import assert_isolated


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_isolated(packed, implementation):
    rng = np.random.default_rng(0)
    B, T, N = (1, 40, 4) if packed else (2, 20, 2)
    cu_seqlens = boundaries(3, 0, 2, 30) if packed else None
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    weight, bias = draw(3, 4), draw(3)

    def run(x, cu_seqlens):
        y, state = causal_conv1d(
            x["x"], weight, bias, x["initial_state"], True, activation="silu",
            cu_seqlens=cu_seqlens, implementation=implementation,
            config=Config(16, 128) if implementation == "pallas" else None,
        )  # fmt: skip
        return {"y": y, "final_state": state}

    assert_isolated(run, {"x": draw(B, T, 3), "initial_state": draw(N, 3, 3)}, cu_seqlens)
