"""Ours beside MaxText's own functions, out of its wheel: `nox -s host-maxtext`."""

import collections
import functools
import os
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from chunkwise.integrations import maxtext
from chunkwise.layers import GatedDeltaNetConfig, gated_delta_net
from chunkwise.shared.testing import oracle
from chunkwise.shared.testing.compare import assert_close, error
from tests_e2e.hosts.host import count_places, module_of, on_v6e, parts_of, path_of, put

_MODES = dict(MODEL_MODE_TRAIN="train", MODEL_MODE_AUTOREGRESSIVE="autoregressive")
_KNOWN = dict(
    jax=jax, jnp=jnp, lax=jax.lax, nnx=nnx, os=os, functools=functools, is_fp8_dtype=lambda dtype: False,
    ShardMode=types.SimpleNamespace(AUTO="auto", EXPLICIT="explicit"), **_MODES,
)  # fmt: skip
_NORM = parts_of(
    path_of("maxtext", "maxtext/layers/normalizations.py"), ("l2norm", "RMSNorm", "Qwen3NextRMSNormGated"), _KNOWN
)
_CP = module_of(path_of("maxtext", "maxtext/kernels/attention/gdn_cp.py"), "gdn_cp")
_KNOWN |= vars(_NORM) | dict(gdn_cp=_CP)
_QWEN3 = path_of("maxtext", "maxtext/models/qwen3.py")
THEIRS = parts_of(_QWEN3, ("jax_chunk_gated_delta_rule", "jax_ar_gated_delta_rule"), _KNOWN)
FLOAT32 = dict(use_qk_norm_in_gdn=True, compute_dtype=jnp.float32)
FUSED = dict(implementation="fused")


def inputs(B=2, S=150, H=4, K=32, V=32, strongest=1.0):
    keys = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(key, (B, S, H, K)) for key in keys[:2])
    v, g = jax.random.normal(keys[2], (B, S, H, V)), -strongest * jax.random.uniform(keys[3], (B, S, H))
    return q, k, v, g, jax.random.uniform(keys[4], (B, S, H)), jax.random.normal(keys[5], (B, H, K, V))


def run(module: Any, **options):
    return jax.jit(lambda *x: module.jax_chunk_gated_delta_rule(*x[:5], initial_state=x[5], **FLOAT32, **options))


@pytest.mark.parametrize("strongest", [1.0, 60.0])
def test_error(strongest):
    x = inputs(strongest=strongest)
    want = oracle.reference(*x[:5], initial_state=x[5], use_qk_l2norm_in_kernel=True)[0]
    theirs, ours = (error(run(module)(*x)[0], want) for module in (THEIRS, maxtext))
    print(f"\ngates down to -{strongest:.0f}: {theirs:.1e} theirs, {ours:.1e} ours")
    assert ours < 1e-6


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_chunk_and_gradients(chunk_size):
    x = inputs()

    def loss(module, x):
        o, state = run(module, chunk_size=chunk_size)(*x)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(state)), (o, state)

    both = [jax.jit(jax.grad(functools.partial(loss, module), has_aux=True))(x) for module in (THEIRS, maxtext)]
    for theirs, ours in zip(*(jax.tree.leaves(part) for part in both), strict=True):
        assert_close("result or gradient", ours, np.asarray(theirs, np.float64), 1e-5)


def test_types():
    q, k, v, g, beta, state = inputs()
    for dtype in (jnp.float32, jnp.bfloat16):
        run = lambda module, q: module.jax_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state)
        shapes = [jax.eval_shape(functools.partial(run, m), q.astype(dtype)) for m in (maxtext, THEIRS)]
        got, want = (jax.tree.map(lambda y: (y.shape, y.dtype), each) for each in shapes)
        assert got == want


def test_a_token():
    *x, state = inputs(S=1)
    got, want = (jax.jit(functools.partial(m.jax_ar_gated_delta_rule, **FLOAT32))(*x, state) for m in (maxtext, THEIRS))
    for ours, theirs in zip(got, want, strict=True):
        assert_close("result", ours, np.asarray(theirs, np.float64), 1e-6)


def test_temporaries_on_v6e():
    """What XLA needs besides arguments and results in a forward of 8,192 tokens."""
    shapes = [(1, 8192, 16, 128)] * 3 + [(1, 8192, 16)] * 2
    run = lambda *x, module, **o: module.jax_chunk_gated_delta_rule(*x, use_qk_norm_in_gdn=True, **o)[0]
    theirs, ours = (functools.partial(run, module=x, **o) for x, o in ((THEIRS, {}), (maxtext, FUSED)))
    found = on_v6e(theirs, ours, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    assert found["ours"] < found["theirs"]


CONFIG = GatedDeltaNetConfig(D=24, H=2, HV=4, K=16, V=8)


class DenseGeneral(nnx.Module):
    """A stand-in for MaxText's products with weights, which bring its quantizations."""

    def __init__(self, in_features_shape, out_features_shape, *, rngs, **_):
        shape = (in_features_shape, *np.atleast_1d(out_features_shape).tolist())
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape) * in_features_shape**-0.5)

    def __call__(self, x, out_sharding=None):
        return x @ self.kernel.get_value()


def layer(functions: Any, module: types.ModuleType | None = None) -> nnx.Module:
    """Return MaxText's layer on one device, with these functions for the gated delta rule, as a part of the module."""
    whole = lambda spec, *_, **__: spec
    known = vars(functions) | dict(
        DenseGeneral=DenseGeneral, get_weight_dtype=lambda cfg, name: cfg.weight_dtype, gdn_context_axes=lambda cfg: (),
        get_logical_axis_rules=tuple, logical_to_mesh_axes=lambda *_, **__: jax.sharding.PartitionSpec(),
        remove_incompatible_mesh_axes_from_partition_spec=whole, maybe_shard_with_name=whole,
        KV_BATCH=None, KV_HEAD=None, LENGTH=None,
    )  # fmt: skip
    made = parts_of(_QWEN3, ("Qwen3NextGatedDeltaNet",), _KNOWN | known, module)
    config = types.SimpleNamespace(
        emb_dim=CONFIG.D, gdn_num_key_heads=CONFIG.H, gdn_num_value_heads=CONFIG.HV, gdn_key_head_dim=CONFIG.K,
        gdn_value_head_dim=CONFIG.V, gdn_conv_kernel_dim=CONFIG.W, gdn_chunk_size=64, gdn_mamba_block_size=None,
        use_qk_norm_in_gdn=True, dtype=jnp.float32, weight_dtype=jnp.float32, matmul_precision="highest",
        shard_mode="auto", debug_sharding=False, normalization_layer_epsilon=CONFIG.eps,
    )  # fmt: skip
    return made.Qwen3NextGatedDeltaNet(config, mesh=jax.make_mesh((1,), ("data",)), rngs=nnx.Rngs(0))


def test_the_whole_layer():
    """Its parameters go both ways; its results, and the gradients of hidden states, are those of `gated_delta_net`."""
    theirs, x = layer(THEIRS), jax.random.normal(jax.random.key(1), (2, 90, CONFIG.D))
    params = nnx.to_pure_dict(nnx.state(theirs, nnx.Param))
    weights = maxtext.load_qwen3_next(nnx.state(theirs, nnx.Param), CONFIG)
    jax.tree.map(np.testing.assert_array_equal, maxtext.save_qwen3_next(weights, CONFIG), params)
    runs = {
        "theirs": lambda x: theirs(x)[0],
        "theirs with our functions": lambda x: layer(maxtext)(x)[0],
        "ours": lambda x: gated_delta_net(x, weights, CONFIG)[0],
    }
    both = lambda run: jax.jit(lambda x: (run(x), jax.grad(lambda x: jnp.sum(jnp.sin(run(x))))(x)))(x)
    want = both(runs.pop("theirs"))
    for name, run in runs.items():
        for ours, reference in zip(both(run), want, strict=True):
            assert_close(name, ours, np.asarray(reference, np.float64), 1e-5)


def test_the_layer_calls_all_that_is_replaced():
    """It reads a prompt, and then a token."""
    qwen3 = types.ModuleType("qwen3")
    theirs, x = layer(THEIRS, qwen3), jax.random.normal(jax.random.key(1), (2, 40, CONFIG.D))
    put({"maxtext.models.qwen3": qwen3})
    c, calls = CONFIG, collections.Counter()

    def run():
        states = [jnp.zeros((2, c.HV, c.K, c.V)), jnp.zeros((2, c.W - 1, 2 * c.H * c.K + c.HV * c.V))]
        update = functools.partial(states.__setitem__, slice(None))
        cache = types.SimpleNamespace(get_gdn_states=lambda: states, update_gdn_states=lambda *new: update(new))
        steps = (x[:, :-1], "prefill"), (x[:, -1:], "autoregressive")
        return [theirs(*step, cache)[0] for step in steps], states

    want = run()
    put_back = maxtext.install()
    count_places(put_back, calls)
    found = run()
    put_back()
    assert calls.keys() == {place.label for place in put_back.places}
    for ours, reference in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        assert_close("result or state", ours, np.asarray(reference, np.float64), 1e-5)


def test_the_layer_keeps_documents_apart():
    """MaxText's layer sends the first document into the second; what `install(documents=True)` puts there does not."""
    qwen3, utils = types.ModuleType("qwen3"), types.ModuleType("sharding")
    theirs, x = layer(THEIRS, qwen3), jax.random.normal(jax.random.key(1), (1, 90, CONFIG.D))
    put({"maxtext.models.qwen3": qwen3, "maxtext.utils.sharding": utils})
    theirs.quant = None
    ids = jnp.asarray([[1] * 30 + [2] * 50 + [0] * 10])
    alone = np.asarray(theirs(x[:, 30:80])[0], np.float64)
    put_back = maxtext.install(documents=True)
    try:
        packed, cache = nnx.jit(lambda layer, x: layer(x, decoder_segment_ids=ids))(theirs, x)
    finally:
        put_back()
    assert cache is None
    assert_close("the second document", packed[:, 30:80], alone, 1e-5)
    assert not np.asarray(packed)[:, 80:].any()
    difference = error(theirs(x, decoder_segment_ids=ids)[0][:, 30:80], alone)
    print(f"\nthe second document differs by {difference:.0%} in MaxText's layer")
    assert difference > 0.01
