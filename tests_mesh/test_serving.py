"""A serving step divides itself over value heads and channels, and so does its pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from chunkwise.pipeline import ragged_gated_delta_rule
from meshes import P, collectives, inputs_of, make_mesh

pytestmark = pytest.mark.interpreted
SLOTS = 7


@pytest.mark.parametrize(
    ("mode", "implementation"),
    [
        ("explicit", "fused"),
        ("automatic", "xla"),
        pytest.param("explicit", "xla", marks=pytest.mark.thorough),
        pytest.param("automatic", "fused", marks=pytest.mark.thorough),
    ],
)
def test_step_over_heads_and_channels(mode, implementation):
    """Every device has its heads of the pool, and no device asks another for anything."""
    x = inputs_of("chunk_gated_delta_rule", B=1, T=40, states=SLOTS)
    pool = x.pop("initial_state")
    boundaries, slots = jnp.array([0, 1, 3, 3, 30], jnp.int32), jnp.array([[2, 5], [0, 1], [4, -1], [6, -1]], jnp.int32)
    mesh, spec = make_mesh((2, 2), mode), P(None, None, "a", "b")
    split = dict(q=P(), k=P(), v=spec, g=P(None, None, "a"), beta=P(None, None, "a"))
    sharding = NamedSharding(mesh, spec) if mode == "automatic" else None

    def step(x, pool, boundaries, slots, decodes, sharding=None):
        return ragged_gated_delta_rule(
            **x, states=pool, cu_seqlens=boundaries, state_indices=slots, num_decodes=decodes,
            implementation=implementation, sharding=sharding,
        )  # fmt: skip

    wanted = jax.jit(step)(x, pool, boundaries, slots, jnp.int32(2))
    put = lambda y, spec: jax.device_put(y, NamedSharding(mesh, spec))
    placed = {name: put(y, split[name]) for name, y in x.items()}
    arguments = placed, put(pool, P(None, "a", None, "b")), *(put(y, P()) for y in (boundaries, slots, jnp.int32(2)))
    program = jax.jit(step, static_argnames="sharding").lower(*arguments, sharding=sharding).compile()
    assert collectives(program.as_text()) == []
    for got, want in zip(program(*arguments), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
