"""RWKV-7's attention: a layer that takes the values of the first one, its names of weights, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import layers
from chunkwise.shared.serving.decode import launch
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from tests.layer_oracle import rwkv7_oracle

FIRST = layers.Rwkv7AttentionConfig(D=20, H=3, HV=3, K=8, V=6, eps=1e-3, R_decay=4, R_rate=5, R_gate=6)
LATER = layers.Rwkv7AttentionConfig(D=20, H=3, HV=3, K=8, V=6, eps=1e-3, R_decay=4, R_rate=5, R_gate=6, R_first=7)
ENDS, T = np.array([0, 1, 1, 9], np.int32), 12


def make(config, B=1, T=T):
    """Return hidden states [B, T, D], weights, and values of the first layer [B, T, H, V]."""
    rng = np.random.default_rng(0)
    weights = jax.jit(lambda: layers.init_rwkv7_attention(jax.random.key(0), config))()
    spread = lambda w: np.asarray(w + 0.3 * rng.standard_normal(w.shape), np.float32)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return draw(B, T, config.D), jax.tree.map(spread, weights), draw(B, T, config.H, config.V)


def test_a_later_layer():
    """Packed sequences go on from their caches; padding holds NaN; the gradients are those that differences show."""
    x, w, v_first = make(LATER)
    rng = np.random.default_rng(1)
    cache = jax.tree.map(lambda y: rng.standard_normal(y.shape).astype(np.float32), layers.empty_cache(LATER, 3))
    inside = (np.arange(T) < ENDS[-1])[None, :, None]
    dy, ds = rng.standard_normal(x.shape) * inside, rng.standard_normal(cache.state.shape)

    def run(x, w, v_first, cache):
        y, after, first = layers.rwkv7_attention(x, w, LATER, cache, True, v_first=v_first, cu_seqlens=ENDS)
        return jnp.sum(y * dy) + jnp.sum(after.state * ds), (y, after, first)

    def exact(x, w, v_first, cache):
        y, after = rwkv7_oracle(LATER, x, w, cache, dict(cu_seqlens=ENDS), v_first)
        return np.sum(y * dy) + np.sum(after.state * ds), (y, after)

    spoilt = np.where(inside, x, np.nan), w, np.where(inside[..., None], v_first, np.nan), cache
    (_, (y, after, first)), found = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3), has_aux=True))(*spoilt)
    args = jax.tree.map(lambda y: np.asarray(y, np.float64), (x, w, v_first, cache))
    y64, after64 = exact(*args)[1]
    assert_close("y", y, y64, TOLERANCE["float32"])
    assert_close("state", after.state, after64.state, TOLERANCE["float32"])
    np.testing.assert_array_equal(after.conv[0], after64.conv[0].astype(np.float32))
    np.testing.assert_array_equal(first, np.where(inside[..., None], v_first, 0))
    assert not np.asarray(y)[0, ENDS[-1] :].any()
    for _ in range(2):
        step = jax.tree.map(lambda y: rng.standard_normal(y.shape) * 1e-6, args)
        ahead, behind = (exact(*jax.tree.map(lambda y, d, s=s: y + s * d, args, step))[0] for s in (1, -1))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(step), strict=True)
        got = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in pairs)
        assert abs(got - (ahead - behind) / 2) < 1e-4 * abs(got)


def test_a_serving_step():
    """A later layer takes the values of a step."""
    x, w, v_first = make(LATER)
    step = layers.Step(ENDS, np.arange(3, dtype=np.int32), np.zeros(3, bool))
    run = functools.partial(layers.ragged_rwkv7_attention, config=LATER, step=step, implementation="xla")
    y, pool, first = jax.jit(run)(x, w, pool=layers.empty_cache(LATER, 3), v_first=v_first)
    want, cache = rwkv7_oracle(LATER, x, w, None, dict(cu_seqlens=ENDS), v_first)
    assert_close("y", y, want, TOLERANCE["float32"])
    assert_close("state", pool.state[::2], cache.state[::2], TOLERANCE["float32"])
    np.testing.assert_array_equal(first, np.where((np.arange(T) < ENDS[-1])[None, :, None, None], v_first, 0))


def test_decodes_in_one_launch(monkeypatch):
    """Over a pool, in which the states of two heads lie side by side, and after a cache."""
    c = layers.Rwkv7AttentionConfig(D=20, H=2, HV=2, K=64, V=64, eps=1e-3, R_decay=4, R_rate=5, R_gate=6)
    x, w, _ = make(c, 1, 4)
    used, run = [], launch.launch
    monkeypatch.setattr(launch, "launch", lambda *args: (used.append(args), run(*args))[1])
    rng = np.random.default_rng(1)
    cache = jax.tree.map(lambda y: rng.standard_normal(y.shape).astype(np.float32), layers.empty_cache(c, 3))
    slots = np.array([3, 0, 2], np.int32)
    pool = layers.write_cache(layers.empty_pool(c, 4), slots, cache)
    assert pool.state.states.shape == (4, 1, 1, 64, 128)
    assert pool.state.shape == (4, 2, 64, 64)
    step = layers.Step(np.arange(4, dtype=np.int32), slots, num_decodes=3)
    decode = functools.partial(layers.ragged_rwkv7_attention, config=c, step=step, implementation="fused")
    y, pool, _ = jax.jit(decode)(x, w, pool=pool)
    rows = x[0, :3, None]
    y64, after64 = rwkv7_oracle(c, rows, w, cache, {})
    assert_close("y", y[0, :3], y64[:, 0], TOLERANCE["float32"])
    assert not np.asarray(y)[0, 3].any()
    after = layers.read_cache(pool, slots)
    assert_close("state", after.state, after64.state, TOLERANCE["float32"])
    np.testing.assert_array_equal(after.conv[0], rows)
    y, after, _ = layers.rwkv7_attention(rows, w, c, cache, True, implementation="fused")
    assert_close("y", y, y64, TOLERANCE["float32"])
    assert_close("state", after.state, after64.state, TOLERANCE["float32"])
    assert [args[0].static.name for args in used].count("decode_layer_fwd") == 2


def released(config) -> dict:
    """Return the arrays of a layer with the names and shapes of a released file."""
    _, w, _ = make(config)
    return layers.save_rwkv7_attention(w, config, "blocks.1.att.", "rwkv_x070")


def test_released_names():
    """The shapes that released files have; the first layer may have what it does not read."""
    shapes = {name.removeprefix("blocks.1.att."): x.shape for name, x in released(LATER).items()}
    HK, HV, D = 24, 18, 20
    assert shapes == {
        **{f"x_{name}": (1, 1, D) for name in "rwkvag"}, "w0": (1, 1, HK), "w1": (D, 4), "w2": (4, HK),
        "a0": (1, 1, HK), "a1": (D, 5), "a2": (5, HK), "v0": (1, 1, HV), "v1": (D, 7), "v2": (7, HV), "g1": (D, 6),
        "g2": (6, HV), "k_k": (1, 1, HK), "k_a": (1, 1, HK), "r_k": (3, 8), "receptance.weight": (HK, D),
        "key.weight": (HK, D), "value.weight": (HV, D), "output.weight": (D, HV), "ln_x.weight": (HV,),
        "ln_x.bias": (HV,),
    }  # fmt: skip
    theirs = layers.save_rwkv7_attention(make(LATER)[1], LATER, "blocks.1.att.", "rwkv7")
    jax.tree.map(np.testing.assert_array_equal, theirs, released(LATER))
    read = layers.load_rwkv7_attention(released(LATER), FIRST, "blocks.1.att.")
    assert read.first == () == read.first_bias


def test_names_of_flash_linear_attention():
    """Matrices of low rank are transposed there; its first version has the six mixtures in one array."""
    _, w, _ = make(LATER)
    file = {name.removeprefix("blocks.1.att."): x for name, x in released(LATER).items()}
    names = dict(receptance="r_proj", key="k_proj", value="v_proj", output="o_proj", ln_x="g_norm")
    named = {name: file[name] for name in ("r_k", *(f"x_{letter}" for letter in "rwkvag"))}
    named |= {name: file[name].reshape(-1) for name in ("k_k", "k_a")} | {"g_norm.bias": file["ln_x.bias"]}
    named |= {f"{theirs}.weight": file[f"{name}.weight"] for name, theirs in names.items()}
    for letter in "wavg":
        named |= {f"{letter}_lora.lora.{i}.weight": file[f"{letter}{j}"].T for i, j in ((0, 1), (2, 2))}
        named |= {f"{letter}_lora.lora.2.bias": file[f"{letter}0"].reshape(-1)} if letter != "g" else {}
    jax.tree.map(np.testing.assert_array_equal, layers.load_rwkv7_attention(named, LATER), w)
    saved = layers.save_rwkv7_attention(w, LATER, model="rwkv7_fla")
    jax.tree.map(np.testing.assert_array_equal, saved, named)
    mixtures = np.concatenate([named.pop(f"x_{letter}")[0] for letter in "rwkvag"])
    jax.tree.map(np.testing.assert_array_equal, layers.load_rwkv7_attention(named | {"x_x": mixtures}, LATER), w)


def test_errors():
    x, w, v_first = make(LATER)
    run = functools.partial(layers.rwkv7_attention, x, w, LATER)
    with pytest.raises(ValueError, match="`v_first` must be the values that the first layer returned; got None"):
        run()
    with pytest.raises(ValueError, match=r"`v_first` must have shape \[B, T, H, V\]; got \(1, 12, 18\)"):
        run(v_first=v_first.reshape(1, T, 18))
    with pytest.raises(ValueError, match=r"`v_first` must be None for the first layer, whose `R_first` is None; got"):
        layers.rwkv7_attention(x, make(FIRST)[1], FIRST, v_first=v_first)
    with pytest.raises(TypeError, match="unexpected keyword argument 'v_first'"):
        layers.init_rwkv7_attention(jax.random.key(0), LATER, v_first=v_first)
    pool, step = layers.empty_pool(LATER, 3), layers.Step(ENDS, np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="`v_first` must be the values that the first layer returned; got None"):
        layers.ragged_rwkv7_attention(x, w, LATER, pool, step)
    ring = pool._replace(state=layers.empty_pool(layers.KimiDeltaAttentionConfig(20, 3, 3, 8, 6), 3, replay=4).state)
    with pytest.raises(NotImplementedError, match=r"`replay` must be 0 for a layer of which a token is several .*4"):
        layers.ragged_rwkv7_attention(x, w, LATER, ring, step, v_first=v_first)
