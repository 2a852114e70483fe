"""The mLSTM layer against float64: rows, packs, segments, pieces and tokens; and what it refuses."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import layers
from chunkwise.pipeline import MlstmState
from chunkwise.shared.testing.compare import TOLERANCE, assert_close

CONFIG = layers.MlstmLayerConfig(D=20, H=2, HV=4, K=12, V=8, eps=1e-3, gate_soft_cap=4.0)
PACKED = np.array([0, 1, 1, 12, 19], np.int32)
THOROUGH = dict(test_types=True)


def make(B=2, T=21):
    """Return hidden states [B, T, D] and weights, none of which are all ones or zeros."""
    rng = np.random.default_rng(0)
    weights = layers.init_mlstm_layer(jax.random.key(0), CONFIG)
    spread = lambda w: (np.maximum(w, -1) + 0.3 * rng.standard_normal(w.shape)).astype(np.float32)
    return rng.standard_normal((B, T, CONFIG.D)).astype(np.float32), jax.tree.map(spread, weights)


def oracle(x, w, state=None):
    """Return y and the state after a row of tokens [T, D], from the state before it, in float64."""
    x, w, c = np.asarray(x, np.float64), jax.tree.map(lambda y: np.asarray(y, np.float64), w), CONFIG
    sigmoid = lambda y: 1 / (1 + np.exp(-y))
    q, k = (np.repeat((x @ y).reshape(-1, c.H, c.K), c.HV // c.H, axis=1) for y in (w.q, w.k))
    v = (x @ w.v).reshape(-1, c.HV, c.V)
    i, f = (c.gate_soft_cap * np.tanh((x @ y + b) / c.gate_soft_cap) for y, b in ((w.i, w.i_bias), (w.f, w.f_bias)))
    C, n, m = state or (np.zeros((c.HV, c.K, c.V)), np.zeros((c.HV, c.K)), np.full(c.HV, -np.inf))
    o = np.zeros(v.shape)
    for t in range(len(x)):
        new = np.maximum(np.log(sigmoid(f[t])) + m, i[t])
        decay, weight = np.exp(np.log(sigmoid(f[t])) + m - new), np.exp(i[t] - new)
        C = decay[:, None, None] * C + weight[:, None, None] * k[t][:, :, None] * v[t][:, None]
        n, m = decay[:, None] * n + weight[:, None] * k[t], new
        read = np.einsum("hkv,hk->hv", C, q[t]) * c.K**-0.5
        least = np.maximum(abs(np.sum(n * q[t], axis=1)) * c.K**-0.5, np.exp(-m))
        o[t] = read / (least + c.divisor_eps)[:, None]
    o = (o - o.mean(-1, keepdims=True)) / np.sqrt(o.var(-1, keepdims=True) + c.eps)
    return (o.reshape(len(x), c.HV * c.V) * w.norm * sigmoid(x @ w.z)) @ w.out, (C, n, m)


@functools.partial(jax.jit, static_argnames=("output_cache", "implementation", "padding_id"))
def run(x, w, cache=None, output_cache=True, implementation=None, **packing):
    return layers.mlstm_layer(x, w, CONFIG, cache, output_cache, implementation=implementation, **packing)


def assert_same(got, want, tolerance=TOLERANCE["float32"]):
    """Compare y and a state with those of the oracle."""
    (y, state), (y64, state64) = got, want
    assert_close("y", y, y64, tolerance)
    for name, have, expected in zip(MlstmState._fields, state, state64, strict=True):
        assert_close(name, have, expected, tolerance)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_rows_then_tokens(implementation):
    """A prefill, then a piece, then tokens one by one are one sequence."""
    x, w = make()
    cache, parts = layers.empty_cache(CONFIG, 2), []
    for tokens in (slice(12), slice(12, 17), *(slice(t, t + 1) for t in range(17, 21))):
        y, cache = run(x[:, tokens], w, cache, implementation=implementation)
        parts.append(y)
    for row in range(2):
        state = (z[row] for z in cache.state)
        assert_same((jnp.concatenate(parts, axis=1)[row], state), oracle(x[row], w))


def test_packed_sequences():
    """Sequences of a stream go on from their states; padding holds NaN."""
    x, w = make(B=1)
    cache = run(np.repeat(x[:, :5], 4, axis=0), w)[1]
    before = oracle(x[0, :5], w)[1]
    y, after = run(np.where(np.arange(21)[None, :, None] < 19, x, np.nan), w, cache, cu_seqlens=PACKED)
    assert not np.asarray(y)[0, 19:].any()
    for n, (a, b) in enumerate(itertools.pairwise(PACKED)):
        assert_same((y[0, a:b], [z[n] for z in after.state]), oracle(x[0, a:b], w, before))


def test_segments():
    """An id of padding, and a batch that is padded on the left, as generation has it."""
    x, w = make()
    ids = np.array([[0, 0, 0, *[1] * 18], [*[3] * 9, *[5] * 12]], np.int32)
    y, cache = run(x, w, segment_ids=ids, padding_id=0)
    assert_same((y[0, 3:], [z[0] for z in cache.state]), oracle(x[0, 3:], w))
    assert_close("y", y[1, :9], oracle(x[1, :9], w)[0], 1e-5)
    assert_same((y[1, 9:], [z[1] for z in cache.state]), oracle(x[1, 9:], w))
    assert not np.asarray(y)[0, :3].any()


def test_types():
    """A cache keeps its types; its stabilisers are float32."""
    x, w = make()
    half = jax.tree.map(lambda y: jnp.asarray(y, jnp.bfloat16), w)
    cache = layers.empty_cache(CONFIG, 2, state_dtype=jnp.bfloat16)
    y, after = run(jnp.asarray(x, jnp.bfloat16), half, cache)
    assert [z.dtype.name for z in (y, *after.state)] == ["bfloat16", "bfloat16", "bfloat16", "float32"]
    for row in range(2):
        assert_close("y", y[row], oracle(x[row], w)[0], 3e-2)


def test_gradients():
    """Every weight and the cache have the gradients that differences show."""
    x, w = make(B=1, T=5)
    cache, dy = run(x, w)[1], np.random.default_rng(3).standard_normal(x.shape)
    loss = lambda x, w, state: np.sum(oracle(x[0], w, tuple(z[0] for z in state))[0] * dy[0])
    found = jax.jit(jax.grad(
        lambda *args: jnp.sum(layers.mlstm_layer(args[0], args[1], CONFIG, layers.Cache((), args[2]))[0] * dy),
        argnums=(0, 1, 2),
    ))(x, w, cache.state)  # fmt: skip
    args = jax.tree.map(lambda y: np.asarray(y, np.float64), (x, w, cache.state))
    rng = np.random.default_rng(4)
    for _ in range(3):
        step = jax.tree.map(lambda y: rng.standard_normal(y.shape) * 1e-5, args)
        ahead, behind = (loss(*jax.tree.map(lambda y, d, s=s: y + s * d, args, step)) for s in (1, -1))
        want = (ahead - behind) / 2
        got = sum(
            np.sum(np.asarray(g, np.float64) * d) for g, d in zip(*map(jax.tree.leaves, (found, step)), strict=True)
        )
        assert abs(got - want) < 1e-3 * abs(want)


def test_fused_matrices_of_a_checkpoint():
    """A checkpoint may have the matrices in one piece."""
    _, w = make()
    named = layers.save_mlstm_layer(w, CONFIG)
    join = lambda *names: np.concatenate([named.pop(f"{name}.weight") for name in names])
    fused = {"qkv_opreact.weight": join("q", "k", "v", "ogate_preact")}
    fused["ifgate_preact.weight"] = join("igate_preact", "fgate_preact")
    fused["ifgate_preact.bias"] = np.concatenate([named.pop("igate_preact.bias"), named.pop("fgate_preact.bias")])
    for x, y in zip(layers.load_mlstm_layer(named | fused, CONFIG), w, strict=True):
        np.testing.assert_array_equal(x, y)


def test_errors():
    x, w = make()
    cache = layers.empty_cache(CONFIG, 2)
    with pytest.raises(ValueError, match=r"`cache.state` must be an MlstmState; got an array float32 \(2, 4, 12, 8\)"):
        run(x, w, cache._replace(state=cache.state.C))
    with pytest.raises(ValueError, match=r"`cache.state.m` must have shape \[N, HV\] = \(2, 4\); got \(2, 3\)"):
        run(x, w, cache._replace(state=cache.state._replace(m=cache.state.m[:, :3])))
    with pytest.raises(ValueError, match=r"`gate_soft_cap` must be None or above 0; got 0"):
        layers.MlstmLayerConfig(20, 2, 2, 4, 4, gate_soft_cap=0)
    with pytest.raises(ValueError, match=r"`divisor_eps` must be at least 0; got -1"):
        layers.MlstmLayerConfig(20, 2, 2, 4, 4, divisor_eps=-1)
