"""Hosts over devices: the tokens of a module of flax, and MaxText's context parallelism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from chunkwise.integrations.maxtext import jax_chunk_gated_delta_rule
from chunkwise.shared.testing.compare import assert_close
from tests_e2e.mesh.meshes import make_mesh

nnx = pytest.importorskip("flax.nnx")
from chunkwise.integrations.nnx import GatedDeltaNet  # noqa: E402
from tests.nnx_modules import CONFIGS  # noqa: E402

X = jax.random.normal(jax.random.key(1), (2, 24, 16))
# A module is a layer, and layers have meshes of their own.
THOROUGH = dict(test_tokens_inside_a_shard_map=True)


def test_tokens_inside_a_shard_map():
    """The axes of tokens that a shard_map holds are those of the module."""
    module = GatedDeltaNet(CONFIGS[GatedDeltaNet], rngs=nnx.Rngs(0), mesh_axes=dict(tokens="a"))
    want = module(X)
    mesh = make_mesh((4,), "automatic")
    run = jax.shard_map(lambda x: module(x), mesh=mesh, in_specs=P(None, "a"), out_specs=P(None, "a"))
    with jax.set_mesh(mesh):
        got = jax.jit(run)(X)
    assert_close("y", got, np.asarray(want, np.float64), 1e-5)


def test_maxtext_context_parallel():
    """MaxText calls its function inside a shard_map, with a tuple of axes over which tokens are split."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v = (jax.random.normal(key, (1, 64, 2, 8)) for key in keys[:3])
    g, beta = -jax.random.uniform(keys[3], (1, 64, 2)), jax.random.uniform(keys[4], (1, 64, 2))
    arguments = (q, k, v, g, beta, jax.random.normal(keys[5], (1, 2, 8, 8)))

    def run(*x, cp_axis=None):
        options = dict(use_qk_norm_in_gdn=True, compute_dtype=jnp.float32)
        return jax_chunk_gated_delta_rule(*x[:5], initial_state=x[5], cp_axis=cp_axis, **options)

    specs = (P(None, ("a", "b")),) * 5 + (P(),)
    mesh = make_mesh((2, 2), "automatic")
    split = lambda *x: run(*x, cp_axis=("a", "b"))
    split = jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=(specs[0], P()), check_vma=False)
    for got, want in zip(jax.jit(split)(*arguments), jax.jit(run)(*arguments), strict=True):
        assert_close("result", got, np.asarray(want, np.float64), 1e-5)
