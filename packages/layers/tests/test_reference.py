"""Every layer against float64: outputs, caches and gradients of rows, packs, segments, pieces and serving steps."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.layers import Step, empty_cache
from chunkwise.layers.mixer import rotary, running
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from tests.layer_oracle import LAYERS, SERVED, make, make_cache, oracle
from tests.shown import Shown, layer_of

# Tokens that no sequence has hold numbers which must not matter.
PACKED = np.array([0, 1, 1, 12, 19], np.int32)
IDS = np.array([[-1, 4, 4, 4, 4, 7, 7, 7, 4, *[2] * 9, -1, -1, -1], [*[0] * 20, 1]], np.int32)


def but_for(*quick: str):
    """Return a rule by which plain JAX of these layers is quick: the other layers repeat them."""
    return lambda name, implementation: implementation == "fused" or name not in quick


THOROUGH = dict(
    test_packed_sequences=but_for(
        "comba_layer", "gated_linear_attention", "mamba2_mixer", "gated_delta_product", "mlstm_layer"
    ),
    # Operators and convolutions have segments of their own, and all layers hand the ids on in the same way.
    test_segments=but_for("gated_delta_net", "mlstm_layer"),
    test_an_id_of_padding=lambda name: name != "lightning_attention",
    # What a layer does with padding is the same for all layers; a bias is an output of its own.
    test_padding_may_hold_anything=lambda name, form: (
        (name, form) not in (("mamba2_mixer", "rows"), ("gated_delta_net", "serving step"))
    ),
    test_pieces_and_tokens=lambda name, implementation: name != "mlstm_layer",
    test_serving_steps=but_for("gated_delta_net", "rwkv7_attention"),
    test_types=True,
    # The operators of the others have strict modes of their own.
    test_strict_modes=lambda name, implementation: implementation == "fused" and name != "mlstm_layer",
    # Whole layers have gradients beside transformers' in the tests above the packages.
    test_gradients=True,
)
SHOWS = dict(
    test_packed_sequences=lambda name: Shown(layer_of(LAYERS[name].config), "packed"),
    test_pieces_and_tokens=lambda name: Shown(layer_of(LAYERS[name].config), "cache decode"),
    test_serving_steps=lambda name: Shown(layer_of(LAYERS[name].config), "serving"),
)
layers = pytest.mark.parametrize("name", LAYERS)
implementations = pytest.mark.parametrize("implementation", ["xla", "fused"])


@functools.cache
def compiled(name, implementation, output_cache=True):
    """The layer as one program for all tests of the same shapes."""
    layer = LAYERS[name]
    options = dict(output_cache=output_cache, implementation=implementation)
    return jax.jit(lambda x, w, cache, packing: layer.run(x, w, layer.config, cache, **packing, **options))


def assert_same(got, want, tolerance=TOLERANCE["float32"]):
    """Compare (y, cache) with float64."""
    (y, cache), (y64, cache64) = got, want
    assert_close("y", y, y64, tolerance)
    for part, state, state64 in zip("Cnm", *map(jax.tree.leaves, (cache.state, cache64.state)), strict=False):
        assert_close(f"state {part}", state, state64, tolerance)
    for i, (conv, conv64) in enumerate(zip(cache.conv, cache64.conv, strict=True)):
        assert_close(f"conv[{i}]", conv, conv64, tolerance)


@implementations
@layers
def test_packed_sequences(name, implementation):
    (x, w), cache = make(name, B=1), make_cache(name, 4)
    got = compiled(name, implementation)(x, w, cache, {"cu_seqlens": PACKED})
    assert_same(got, oracle(name, x, w, cache, cu_seqlens=PACKED))


@implementations
@layers
def test_segments(name, implementation):
    (x, w), cache = make(name), make_cache(name, 2)
    got = compiled(name, implementation)(x, w, cache, {"segment_ids": IDS})
    assert_same(got, oracle(name, x, w, cache, segment_ids=IDS))
    assert not np.asarray(got[0])[IDS < 0].any()


@layers
def test_an_id_of_padding(name):
    """MaxText counts segments from 1, and 0 is padding, also between them."""
    (x, w), layer = make(name), LAYERS[name]
    ids = np.where(IDS == 4, 0, IDS)
    run = lambda ids, **options: layer.run(x, w, layer.config, segment_ids=ids, implementation="xla", **options)[0]
    got, want = jax.jit(lambda ids, own: (run(ids, padding_id=0), run(own)))(ids, np.where(ids == 0, -1, ids))
    np.testing.assert_array_equal(got, want)
    assert not np.asarray(got)[ids <= 0].any()


def test_pairs_of_channels_are_turned():
    x, angles = np.arange(1.0, 21.0, dtype=np.float32).reshape(1, 2, 2, 5), np.array([[0.5, 0.1], [1.5, 0.3]])
    z = 2 * (x[..., :2] + 1j * x[..., 2:4]) * np.exp(1j * angles)[None, :, None]
    run = running.Sequences(None, False, None, None, -1, None, None, None)
    got = rotary.turn(run, jnp.asarray(x), jnp.array([[1.0, 3.0]]), (0.5, 0.1), 2.0)
    assert_close("x", got, np.concatenate([z.real, z.imag, x[..., 4:]], axis=3), 1e-6)


def test_any_id_may_be_that_of_padding():
    run = running.Sequences(None, False, None, IDS, 4, None, None, None)
    np.testing.assert_array_equal(run.valid_tokens(np.zeros((*IDS.shape, 8))), (IDS >= 0) & (IDS != 4))


@pytest.mark.parametrize(
    ("name", "form"), [*itertools.product(LAYERS, ("rows", "packed")), *((name, "serving step") for name in SERVED)]
)
def test_padding_may_hold_anything(name, form):
    """NaN or infinity there leave the loss and the gradients of all weights as they are, and padding gives zeros."""
    (x, w), layer = make(name, B=2 if form == "rows" else 1), LAYERS[name]
    config = layer.config
    if name == "mamba2_mixer":
        config = dataclasses.replace(config, in_bias=True, out_bias=True)
        biased = layer.init(jax.random.key(0), config)
        biases = jax.tree.map(lambda y: y + 0.5, (biased.in_bias, biased.out_bias))
        w = w._replace(in_bias=biases[0], out_bias=biases[1])
    real = IDS >= 0 if form == "rows" else (np.arange(21) < PACKED[-1])[None]
    # What follows the sequences that exist holds anything, too.
    at = Step(np.array([*PACKED, 400], np.int32), np.arange(5, dtype=np.int32), num_sequences=np.int32(4))
    options = {"rows": dict(segment_ids=IDS), "packed": dict(cu_seqlens=PACKED)}

    def run(x, w):
        if form == "serving step":
            return layer.ragged(x, w, config, empty_cache(config, 5), at, implementation="xla")[0]
        return layer.run(x, w, config, **options[form], implementation="xla")[0]

    @jax.jit
    def loss_and_gradients(x, w):
        y, pull = jax.vjp(run, x, w)
        # A first layer is differentiated by its weights alone.
        alone = jax.vjp(functools.partial(run, x), w)[1]
        return (y, *(f(jnp.where(real[:, :, None], y, jnp.nan)) for f in (pull, alone)))

    want = loss_and_gradients(np.where(real[:, :, None], x, 0.0), w)
    assert not np.asarray(want[0])[~real].any()
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(want))
    for anything in (np.nan, np.inf):
        got = loss_and_gradients(np.where(real[:, :, None], x, anything).astype(np.float32), w)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@implementations
@layers
def test_pieces_and_tokens(name, implementation):
    """A prompt in two pieces and then tokens make what all of it makes at once."""
    (x, w), run = make(name, T=26), compiled(name, implementation)
    cache, parts = empty_cache(LAYERS[name].config, 2), []
    for start, end in ((0, 12), (12, 24), (24, 25), (25, 26)):
        y, cache = run(x[:, start:end], w, cache, {})
        parts.append(y)
    assert_same((jnp.concatenate(parts, axis=1), cache), oracle(name, x, w))


@implementations
@pytest.mark.parametrize("name", SERVED)
def test_serving_steps(name, implementation):
    """Two sequences arrive, one after the other, and decode, in any slots of a pool with other things in it."""
    (x, w), layer = make(name), LAYERS[name]
    pool = jax.tree.map(lambda y: y + jnp.nan, empty_cache(layer.config, 5))
    used, done, parts = [3, 1], [0, 0], [[], []]
    step = jax.jit(lambda x, pool, at: layer.ragged(x, w, layer.config, pool, at, implementation=implementation))
    # Which sequence computes how many tokens, decodes first.
    for plan in ([(0, 13)], [(0, 1), (1, 12)], [(0, 1), (1, 9)], [(0, 1), (1, 0)]):
        ends = np.cumsum([0, *(count for _, count in plan)]).astype(np.int32)
        tokens = np.zeros((1, 13, x.shape[2]), np.float32)
        counts = np.int32(len(plan) - 1), np.int32(len(plan))
        at = Step(np.resize(ends, 3), np.full(2, -1, np.int32), np.zeros(2, bool), *counts)
        at.cu_seqlens[len(ends) :] = ends[-1]
        for i, (n, count) in enumerate(plan):
            tokens[0, ends[i] : ends[i + 1]] = x[n, done[n] : done[n] + count]
            at.state_indices[i], at.has_initial_state[i] = used[n], done[n] > 0
            done[n] += count
        y, pool = step(tokens, pool, at)
        for i, (n, _) in enumerate(plan):
            parts[n].append(y[0, ends[i] : ends[i + 1]])
    for n in range(2):
        want, cache = oracle(name, x[n : n + 1, : done[n]], w)
        own = jax.tree.map(lambda y: y[used[n], None], pool)  # noqa: B023
        assert_same((jnp.concatenate(parts[n])[None], own), (want, cache))
    assert bool(jnp.isnan(pool.state[0]).all()), "a slot that no sequence names changed"


@layers
def test_types_of_first_weights(name):
    """Decays, steps and skips are float32 in whatever type the other weights are."""
    layer = LAYERS[name]
    weights = jax.eval_shape(lambda: layer.init(jax.random.key(0), layer.config, jnp.bfloat16))
    # Mamba-2 has biases of its projections where its config says so, the first layer of RWKV-7 takes no values, and
    # MiniMax has no norms of queries.
    parts = {part: jax.tree.leaves(found) for part, found in weights._asdict().items() if found != ()}
    optional = {"in_bias", "out_bias", "first", "first_bias", "qk_norm", "z_bias", "z", "a", "A_log", "dt_bias"}
    assert weights._asdict().keys() - parts.keys() <= optional
    for part, found in parts.items():
        # What is the decay of a key head in Comba is a projection in RWKV-7.
        wide = ("A_log", "dt_bias", "skip", *(("decay",) if name.startswith("comba") else ()))
        want = jnp.float32 if part in wide else jnp.bfloat16
        assert {leaf.dtype for leaf in found} == {jnp.dtype(want)}, part


@pytest.mark.parametrize(
    ("dtype", "kept", "tolerance"),
    [("bfloat16", "bfloat16", 2e-2), ("bfloat16", "float32", 2e-2), ("float16", "float16", 3e-3)],
)
@pytest.mark.parametrize("name", SERVED)
def test_types(name, dtype, kept, tolerance):
    """Hidden states of few bits, with weights of the same or of more, give their type, as exact as its rounding."""
    (x, w), layer = make(name), LAYERS[name]
    low = layer.init(jax.random.key(0), layer.config, dtype)
    rounded = jax.tree.map(lambda like, y: jnp.asarray(y, like.dtype), low, w)
    weights = jax.tree.map(lambda y: y.astype(jnp.promote_types(y.dtype, kept)), rounded)
    x = jnp.asarray(x, dtype)
    y, cache = compiled(name, "xla")(x, weights, None, {})
    assert y.dtype == dtype
    assert cache.state.dtype == jnp.float32
    assert_close("y", y, oracle(name, x, weights)[0], tolerance)


@pytest.fixture(scope="module", params=SERVED)
def gradients(request):
    """Inputs of a loss, the loss in float64, and its gradients as our layers compute them."""
    name = request.param
    (x, w), cache, layer = make(name, B=1), make_cache(name, 4), LAYERS[name]
    rng = np.random.default_rng(5)
    y, after = oracle(name, x, w, cache, cu_seqlens=PACKED)
    cotangents = jax.tree.map(lambda z: rng.standard_normal(z.shape), (y, after))

    def loss(x, w, cache):
        got = layer.run(x, w, layer.config, cache, True, cu_seqlens=jnp.asarray(PACKED))
        return sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(cotangents), strict=True))

    def exact(x, w, cache):
        got = oracle(name, x, w, cache, cu_seqlens=PACKED)
        return sum(np.sum(a * b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(cotangents), strict=True))

    return (x, w, cache), exact, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, w, cache)


def test_gradients(gradients):
    """The derivative of a loss along a random direction of every argument is that of the float64 layer."""
    arguments, exact, found = gradients
    rng, (leaves, tree) = np.random.default_rng(6), jax.tree.flatten(arguments)
    for i, (leaf, (path, gradient)) in enumerate(zip(leaves, jax.tree.leaves_with_path(found), strict=True)):
        direction = rng.standard_normal(leaf.shape)
        moved = lambda h: exact(*tree.unflatten([*leaves[:i], leaf + h * direction, *leaves[i + 1 :]]))  # noqa: B023
        want = (moved(1e-5) - moved(-1e-5)) / 2e-5
        size = np.linalg.norm(np.asarray(gradient, np.float64)) * np.linalg.norm(direction)
        got = np.sum(direction * np.asarray(gradient, np.float64))
        assert abs(got - want) < 1e-5 * size, jax.tree_util.keystr(path)


@implementations
@layers
def test_strict_modes(name, implementation):
    """No layer promotes a rank or a type, forward and backward, of bfloat16 neither, nor where JAX has 64 bits."""
    (x, w), cache, layer = make(name, B=1), make_cache(name, 4), LAYERS[name]

    def loss(x, w, cache):
        got = layer.run(x, w, layer.config, cache, True, cu_seqlens=jnp.asarray(PACKED), implementation=implementation)
        return sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(got))

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    kept = {key: getattr(w, key) for key in ("A_log", "dt_bias", "skip") if hasattr(w, key)}
    half, half_w = jax.tree.map(lambda y: y.astype(jnp.bfloat16), (x, w))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert jax.eval_shape(gradient, x, w, cache)[0].dtype == jnp.float32
        assert jax.eval_shape(gradient, half, half_w._replace(**kept), cache)[0].dtype == jnp.bfloat16
        with jax.enable_x64(True):
            found = jax.eval_shape(gradient, x, w, cache)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
