"""mLSTM over meshes does what it does on one device, which its package compares with float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from chunkwise.layers import MlstmLayerConfig, empty_cache, init_mlstm_layer, mlstm_layer, place, shardings
from chunkwise.pipeline import MlstmState, chunk_mlstm, recurrent_mlstm
from chunkwise.shared.testing.compare import assert_close
from tests_e2e.mesh.meshes import MODES, P, make_mesh

B, T, H, HV, K, V = 2, 48, 4, 4, 8, 8
# Documents begin inside of devices, one is empty, one has the tokens of three devices; padding ends the row.
ENDS = jnp.asarray([0, 5, 5, 30, 44], jnp.int32)
IDS = jnp.asarray([[*[-1] * 3, *[4] * 20, *[2] * 10, *[-1] * 15], [*[0] * 13, *[1] * 35]], jnp.int32)
FORMS = {
    "rows": (2, {}, 2), "segments": (2, dict(segment_ids=IDS), 2), "documents": (1, dict(cu_seqlens=ENDS), 4),
    "stream": (1, dict(cu_seqlens=ENDS), 0),
}  # fmt: skip
THOROUGH = dict(
    test_divided=lambda mode, split: split not in ("heads", "all"),
    test_tokens_of_a_shard_map=lambda form, implementation: implementation == "fused" and form != "documents",
)


def make(B, states):
    draw = lambda *shape, key: jax.random.normal(jax.random.key(key), shape)
    x = dict(q=draw(B, T, H, K, key=0), k=draw(B, T, H, K, key=1), v=draw(B, T, HV, V, key=2))
    x |= dict(i=3 * draw(B, T, HV, key=3), f=2 + draw(B, T, HV, key=4))
    if states:
        N = states
        x["initial_state"] = MlstmState(draw(N, HV, K, V, key=5), draw(N, HV, K, key=6), draw(N, HV, key=7))
    return x


def gradients_of(run, x, cotangents):
    """Return results and gradients; the final stabilisers have none."""
    results, pull = jax.vjp(run, x)
    return results, pull(cotangents)[0]


def cotangents_of(run, x):
    o, state = jax.eval_shape(run, x)
    draw = lambda y: jax.random.normal(jax.random.key(9), y.shape)
    return draw(o), None if state is None else MlstmState(draw(state.C), draw(state.n), jnp.zeros(state.m.shape))


def assert_same(got, want):
    named = jax.tree_util.tree_leaves_with_path(want)
    for have, (path, ref) in zip(jax.tree.leaves(got), named, strict=True):
        exists = np.isfinite(ref)
        np.testing.assert_array_equal(np.isfinite(have), exists, str(path))
        assert_close(str(path), np.where(exists, have, 0), np.where(exists, ref, 0), 1e-4)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_a_shard_map(form, implementation):
    """Four devices, each with consecutive tokens."""
    B, packing, states = FORMS[form]
    x, mesh = make(B, states), make_mesh((4,), "automatic")
    options = dict(output_final_state=bool(states), chunk_size=16)
    single = lambda x: chunk_mlstm(**x, **packing, **options)
    tokens = {name: P() if name == "initial_state" else P(None, "a") for name in x}
    split = {name: P(None, "a") if name == "segment_ids" else P() for name in packing}

    def over_devices(x):
        run = lambda x, packing: chunk_mlstm(**x, **packing, **options, context_axis="a", implementation=implementation)
        out = (P(None, "a"), P() if states else None)
        # JAX's interpreter of kernels does not know which arrays vary.
        check = implementation == "xla"
        return jax.shard_map(run, mesh=mesh, in_specs=(tokens, split), out_specs=out, check_vma=check)(x, packing)

    if implementation == "fused":
        assert_same(jax.jit(over_devices)(x), single(x))
        return
    cotangents = cotangents_of(single, x)
    got, want = (jax.jit(functools.partial(gradients_of, run))(x, cotangents) for run in (over_devices, single))
    assert_same(got, want)


SPLITS = {
    "heads": P(None, None, "a"), "rows": P("a"), "tokens": P(None, "a"), "channels": P(None, None, None, "a"),
    "all": P("b", "c", "a"),
}  # fmt: skip


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", MODES)
def test_divided(mode, split):
    """By the sharding of v."""
    spec, x = (*SPLITS[split], *[None] * 4)[:4], make(B, B)
    mesh = make_mesh((2, 2, 2), mode)
    b, t, n, d = spec
    specs = dict(q=P(b, t, n), k=P(b, t, n), v=P(*spec), i=P(b, t, n), f=P(b, t, n))
    specs["initial_state"] = MlstmState(P(b, n, None, d), P(b, n), P(b, n))
    placed = place(x, mesh, specs)
    options = dict(sharding=NamedSharding(mesh, P(*spec))) if mode == "automatic" else {}
    run = lambda x, **options: chunk_mlstm(**x, output_final_state=True, chunk_size=16, **options)
    cotangents = cotangents_of(run, x)
    laid = place(cotangents, mesh, (P(*spec), specs["initial_state"]))
    got = jax.jit(functools.partial(gradients_of, functools.partial(run, **options)))(placed, laid)
    assert_same(got, jax.jit(functools.partial(gradients_of, run))(x, cotangents))


@pytest.mark.parametrize("mode", MODES)
def test_decode(mode):
    """Heads divided, one token."""
    x, mesh = make(B, B), make_mesh((4,), mode)
    x = {name: y if name == "initial_state" else y[:, :1] for name, y in x.items()}
    specs = {name: P(None, None, "a") for name in x} | dict(initial_state=P(None, "a"))
    options = dict(sharding=NamedSharding(mesh, specs["v"])) if mode == "automatic" else {}
    run = lambda x, **options: recurrent_mlstm(**x, output_final_state=True, **options)
    got = jax.jit(functools.partial(run, **options))(place(x, mesh, specs))
    assert_same(got, run(x))


@pytest.mark.parametrize("mode", MODES)
def test_layer(mode):
    """A prefill and a token of the layer, with heads and rows divided."""
    config, mesh = MlstmLayerConfig(D=16, H=4, HV=4, K=8, V=8), make_mesh((2, 4), mode)
    weights, x = init_mlstm_layer(jax.random.key(0), config), jax.random.normal(jax.random.key(1), (2, 20, 16))
    how = shardings(config, dict(batch="a", heads="b"), mesh)
    options = dict(sharding=NamedSharding(mesh, how.values)) if mode == "automatic" else {}

    def run(x, weights, cache, **options):
        y, cache = mlstm_layer(x[:, :19], weights, config, cache, True, **options)
        return y, *mlstm_layer(x[:, 19:], weights, config, cache, True, **options)

    cache = empty_cache(config, 2)
    placed = [place(*y) for y in ((x, mesh, how.x), (weights, mesh, how.weights), (cache, mesh, how.cache))]
    got = jax.jit(functools.partial(run, **options))(*placed)
    for name, have, want in zip("xyz", got[:2], run(x, weights, cache)[:2], strict=False):
        assert_close(name, have, want, 1e-5)
