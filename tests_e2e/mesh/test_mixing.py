"""The mixer of decodes is one launch on every device, which has its heads of the pool, and no device sends anything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from chunkwise import layers
from chunkwise.layers.mixer import running
from chunkwise.shared.serving.decode import launch
from chunkwise.shared.testing.compare import assert_close
from tests_e2e.mesh.meshes import MODES, P, collectives, make_mesh

CONFIGS = {
    "gated_delta_net": layers.GatedDeltaNetConfig(D=16, H=8, HV=16, K=128, V=128),
    "kimi_delta_attention": layers.KimiDeltaAttentionConfig(D=16, H=8, HV=8, K=128, V=128, lower_bound=-5.0),
    "mamba2_mixer": layers.Mamba2Config(D=16, H=8, HV=16, K=128, V=64),
}
# One layer along automatic axes, and another one along explicit axes.
THOROUGH = dict(
    test_a_step_of_decodes=lambda name, mode: (
        (name, mode) not in (("gated_delta_net", "automatic"), ("mamba2_mixer", "explicit"))
    ),
)


def arrays(name: str, rows: int, tokens: int, slots: int):
    """Return a config, and hidden states, weights and a cache or pool of seeded numbers."""
    config = CONFIGS[name]
    draw = lambda seed, y: 0.3 * jax.random.normal(jax.random.key(seed), y.shape, y.dtype)
    weights = getattr(layers, f"init_{name}")(jax.random.key(0), config)
    pool = jax.tree.map(functools.partial(draw, 1), layers.empty_cache(config, slots))
    return config, draw(2, jnp.zeros((rows, tokens, config.D))), weights, pool


@pytest.fixture(autouse=True)
def between_projections(monkeypatch):
    """Leave out the last product of a layer, whose sum over devices is the only message of a forward.

    A grid step takes one sequence, so that there is less to compile.
    """
    monkeypatch.setattr(running, "project_out", lambda o, weight, x: o)
    monkeypatch.setattr(launch, "_STATES", 1)


def assert_one_launch(run, mesh, values, specs, sharding) -> None:
    """Fail unless a function does over a mesh what it does in plain JAX on one device, by one launch on each device."""
    wanted = jax.jit(lambda values: run(*values, "xla"))(values)
    place = lambda y, spec: jax.device_put(y, NamedSharding(mesh, spec))
    placed = jax.tree.map(place, values, specs)
    with jax.set_mesh(mesh):
        traced = jax.jit(lambda values: run(*values, "fused", sharding=sharding)).trace(placed)
        program = traced.lower().compile()
        got = program(placed)
    assert "decode_layer_fwd" in str(traced.jaxpr)
    assert collectives(program.as_text()) == []
    for (path, have), want in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert_close(jax.tree_util.keystr(path), have, want, 1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_decodes(name, mode):
    config, *values = arrays(name, 1, 3, 4)
    mesh = make_mesh((8,), mode)
    on = layers.shardings(config, {"heads": "a"}, mesh)
    sharding = NamedSharding(mesh, on.values) if mode == "automatic" else None
    step = np.arange(4, dtype=np.int32), np.array([3, -1, 0], np.int32), np.array([True, True, False])

    def run(x, weights, pool, step, implementation, sharding=None):
        # With a number of decodes that is no array the program has one branch.
        told = layers.Step(*step, num_decodes=3)
        function = getattr(layers, f"ragged_{name}")
        return function(x, weights, config, pool, told, implementation=implementation, sharding=sharding)

    specs = on.x, on.weights, on.cache, (P(),) * 3
    assert_one_launch(run, mesh, (*values, step), specs, sharding)
