"""Pools of states and caches of layers go through flax.serialization and orbax as they are, every bit of them."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

from chunkwise import layers
from chunkwise.pipeline import make_pool

CONFIG = layers.GatedDeltaNetConfig(D=8, H=1, HV=2, K=4, V=4)
EMPTY = {
    "float32": make_pool(3, 2, 4, 4),
    "int8": make_pool(3, 2, 4, 4, jnp.int8),
    "a ring": make_pool(3, 2, 4, 4, jnp.bfloat16, replay=8, per_channel=True),
    "the pool of a layer": layers.empty_pool(CONFIG, 3, jnp.bfloat16, jnp.int8, replay=8, decode_tokens=2),
    "the cache of a layer": layers.empty_cache(CONFIG, 3, jnp.bfloat16),
}


@pytest.mark.parametrize("name", EMPTY)
def test_flax_and_orbax(name, tmp_path):
    empty, rng = EMPTY[name], np.random.default_rng(0)
    pool = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 99, x.shape)).astype(x.dtype), empty)
    copies = [serialization.from_bytes(empty, serialization.to_bytes(pool))]
    copies.append(serialization.from_state_dict(empty, serialization.to_state_dict(pool)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "pool", pool)
        checkpointer.wait_until_finished()
        copies.append(checkpointer.restore(tmp_path / "pool", jax.eval_shape(lambda: empty)))
    for copy in copies:
        assert jax.tree.structure(copy) == jax.tree.structure(pool)
        for got, want in zip(jax.tree.leaves(copy), jax.tree.leaves(pool), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
