"""tpu-inference and SGLang-JAX, which serve: what they call, and the recurrence in float64 token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.integrations import sglang_jax, tpu_inference
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.oracle import reference
from tests.engine import linear_attention
from tests.hosts import doubles, normal, sigmoid, unit

# The same step with gates per channel.
THOROUGH = dict(
    test_tpu_inference_step=lambda law: law != "gdn",
    test_sglang_jax=lambda form: form == "prefill",
)

N_KQ, N_V, D, W, SLOTS = 2, 4, 8, 4, 12
SIZES = dict(n_kq=N_KQ, n_v=N_V, d_k=D, d_v=D)
DIM = (2 * N_KQ + N_V) * D


def serving_inputs(T, a_columns=N_V):
    rng = np.random.default_rng(2)
    return dict(
        qkv=normal(rng, T, DIM), b=normal(rng, T, N_V), a=normal(rng, T, a_columns),
        conv_state=normal(rng, SLOTS, W - 1, DIM), recurrent_state=normal(rng, SLOTS, N_V, D, D),
        conv_weight=normal(rng, DIM, 1, W), conv_bias=normal(rng, DIM), a_log=normal(rng, N_V),
        dt_bias=normal(rng, a_columns),
    )  # fmt: skip


def rates(a, a_log, dt_bias, law="gdn"):
    """Return the log decay of every token."""
    shape = (len(a), N_V, -1) if law == "kda" else (len(a), N_V)
    a = (a + dt_bias).reshape(shape)
    rate = np.exp(a_log)[:, None] if law == "kda" else np.exp(a_log)
    return -rate * np.logaddexp(0, a)


def convolved(x, before, weight, bias):
    """Return silu of the convolution of a request, and its inputs with those before it."""
    whole = np.concatenate([before, x])
    y = sum(whole[i : i + len(x)] * weight[:, 0, i] for i in range(W)) + bias
    return y * sigmoid(y), whole


def serve(x, requests, law="gdn", skip=None):
    """Return pools and output of a step. A request is (start, end, slot read or None, slots written by token)."""
    x = {name: np.asarray(y, np.float64) for name, y in x.items()}
    conv, state, out = x["conv_state"].copy(), x["recurrent_state"].copy(), np.zeros((len(x["qkv"]), N_V * D))
    for start, end, read, writes in requests:
        tokens = slice(start, end)
        before, S = (np.zeros_like(y[0]) if read is None else y[read] for y in (x["conv_state"], x["recurrent_state"]))
        y, inputs = convolved(x["qkv"][tokens], before, x["conv_weight"], x["conv_bias"])
        if law == "mamba2":
            v, k, q = (part.reshape(len(y), -1, D) for part in np.split(y, [N_V * D, (N_V + N_KQ) * D], axis=1))
            dt = np.logaddexp(0, x["b"][tokens] + x["dt_bias"])
            # The scale of this law is 1.
            q, gates = q * D**0.5, dict(v=dt[..., None] * v, g=-np.exp(x["a_log"]) * dt)
        else:
            q, k, v = (part.reshape(len(y), -1, D) for part in np.split(y, [N_KQ * D, 2 * N_KQ * D], axis=1))
            q, k, g = unit(q), unit(k), rates(x["a"][tokens], x["a_log"], x["dt_bias"], law)
            gates = dict(v=v, g=g, beta=sigmoid(x["b"][tokens]))
        for t in range(len(y)):
            S, o = linear_attention(S, q=q[t], k=k[t], **{name: z[t] for name, z in gates.items()})
            out[start + t] = (o if skip is None else o + skip[:, None] * v[t]).reshape(-1)
            if t in writes:
                conv[writes[t]], state[writes[t]] = inputs[t + 1 : t + W], S
    return conv, state, out


def assert_served(got, want):
    (conv, state), out = got
    for name, y, ref in zip(("conv_state", "recurrent_state", "out"), (conv, state, out), want, strict=True):
        assert_close(name, y, ref, 2e-6)


# Two decodes, a prompt that goes on from a slot of another, and a new one in a slot that holds something; the rest of
# the stream and of the requests is padding.
MIXED = dict(
    query_start_loc=jnp.asarray([0, 1, 2, 9, 20, 23], jnp.int32),
    state_indices=jnp.asarray([3, 7, 1, 5, 0], jnp.int32),
    distribution=jnp.asarray([2, 2, 4], jnp.int32),
    seq_lens=jnp.asarray([9, 4, 30, 11, 0], jnp.int32),
    read_state_indices=jnp.asarray([3, 7, 2, 5, 0], jnp.int32),
)
REQUESTS = [(0, 1, 3, {0: 3}), (1, 2, 7, {0: 7}), (2, 9, 2, {6: 1}), (9, 20, None, {10: 5})]
T = 23


def jitted(function, **static):
    return jax.jit(lambda arrays: function(**arrays, **static))


@pytest.mark.parametrize("law", ["gdn", "kda", "mamba2"])
def test_tpu_inference_step(law):
    x = serving_inputs(T, N_V * D if law == "kda" else N_V)
    if law == "mamba2":
        skip = normal(np.random.default_rng(3), N_V)
        names = dict(qkv="xbc", b="dt", recurrent_state="ssm_state")
        arrays = {names.get(name, name): y for name, y in x.items() if name != "a"} | dict(skip=skip)
        got = jitted(tpu_inference.fused_conv1d_mamba2, kernel_size=W, **SIZES)(arrays | MIXED)
        assert_served(got, serve(x, REQUESTS, law, np.asarray(skip, np.float64)))
        return
    function = {"gdn": tpu_inference.fused_conv1d_gdn, "kda": tpu_inference.fused_conv1d_kda}[law]
    want = serve(x, REQUESTS, law)
    assert_served(jitted(function, kernel_size=W, **SIZES)(x | MIXED), want)
    if law == "kda":
        activated = jitted(function, kernel_size=W, beta_is_activated=True, **SIZES)
        assert_served(activated(x | MIXED | dict(b=jax.nn.sigmoid(x["b"]))), want)


def test_tpu_inference_decodes_are_one_launch():
    sizes = dict(n_kq=2, n_v=4, d_k=128, d_v=128)
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    x = dict(qkv=of(8, 1024), b=of(8, 4), a=of(8, 4), conv_state=of(9, 3, 1024), recurrent_state=of(9, 4, 128, 128))
    x |= dict(conv_weight=of(1024, 1, 4), conv_bias=None, a_log=of(4), dt_bias=of(4))
    step = jax.tree.map(lambda y: of(*y.shape, dtype=y.dtype), MIXED)
    run = lambda x, step, kind: tpu_inference.fused_conv1d_gdn(**x, **step, **sizes, kernel_size=4, implementation=kind)
    names = {kind: str(jax.make_jaxpr(lambda *y, kind=kind: run(*y, kind))(x, step)) for kind in ("fused", "xla")}
    assert "decode_layer_fwd" in names["fused"]
    assert "decode_layer_fwd" not in names["xla"]


def test_tpu_inference_speculation():
    """A decode goes on from an accepted token and leaves a state for each of its own; a prompt has no offset."""
    at = dict(
        query_start_loc=jnp.asarray([0, 3, 5, 12], jnp.int32),
        state_indices=jnp.asarray([1, 4, 9], jnp.int32),
        distribution=jnp.asarray([2, 2, 3], jnp.int32),
        seq_lens=jnp.asarray([9, 4, 30], jnp.int32),
        read_state_indices=jnp.asarray([1, 4, 7], jnp.int32),
        read_offsets=jnp.asarray([2, 0, 1], jnp.int32),
    )
    x = serving_inputs(T)
    want = serve(x, [(0, 3, 3, {0: 1, 1: 2, 2: 3}), (3, 5, 4, {0: 4, 1: 5}), (5, 12, 7, {6: 9})])
    assert_served(jitted(tpu_inference.fused_conv1d_gdn, kernel_size=W, num_spec_tokens=2, **SIZES)(x | at), want)


def test_tpu_inference_errors():
    x = serving_inputs(T)
    with pytest.raises(ValueError, match=r"`conv_weight` must have shape \(64, 1, 3\); got \(64, 1, 4\)\."):
        tpu_inference.fused_conv1d_gdn(**x, **MIXED, kernel_size=3, **SIZES)
    with pytest.raises(ValueError, match=r"`qkv` must have 80 channels, as its heads have; got 64\."):
        tpu_inference.fused_conv1d_gdn(**x, **MIXED, kernel_size=W, **SIZES | dict(n_kq=3))


def tracked(x, requests):
    """Return the same step without a convolution, as SGLang-JAX calls it: pool and output."""
    identity = {"conv_weight": np.zeros((DIM, 1, W)), "conv_bias": np.zeros(DIM)}
    identity["conv_weight"][:, 0, -1] = 1
    return serve(x | identity, requests)[1:]


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_sglang_jax(form):
    """A request has a second slot for its state; slot 0 keeps what it holds."""
    x = serving_inputs(T if form == "prefill" else 3)
    ends = [0, 4, 20, 20] if form == "prefill" else [0, 1, 2, 3]
    slots, second, mask = jnp.asarray([4, 2, 0]), jnp.asarray([8, 9, 10]), jnp.asarray([1, 0, 1])
    has = jnp.asarray([True, False, False])
    silu = jax.nn.silu(x["qkv"])
    arguments = (silu, x["b"], x["a"], x["recurrent_state"], x["a_log"], x["dt_bias"])
    options = dict(has_initial_state=has, track_indices=second, track_mask=mask, **SIZES)
    if form == "prefill":
        call = lambda *y: sglang_jax.prefill_gated_delta_rule(*y, jnp.asarray(ends, jnp.int32), slots, **options)
    else:
        call = lambda *y: sglang_jax.decode_gated_delta_rule(*y, slots, **options)
    pool, out = jax.jit(call)(*arguments)
    (a, b, c, _), n = ends, x["recurrent_state"]
    want, o = tracked(x, [(a, b, 4, {b - a - 1: 4}), (b, c, None, {c - b - 1: 2})])
    want[8] = want[4]
    assert_close("pool", pool, want, 2e-6)
    assert_close("out", out[:c].reshape(c, -1), o[:c], 2e-6)
    np.testing.assert_array_equal(pool[0], n[0])


def test_sglang_jax_kda_and_lightning():
    """Three requests of one token each, by the pool and by the recurrence. The model has made step sizes of b."""
    rng = np.random.default_rng(4)
    q, k, v = normal(rng, 3, N_V, D), normal(rng, 3, N_V, D), normal(rng, 3, N_V, D)
    a, A_log, dt_bias = normal(rng, 3, N_V, D), normal(rng, N_V), normal(rng, N_V * D)
    b = jnp.asarray(rng.uniform(size=(3, N_V)), jnp.float32)
    pool, slots, slope = normal(rng, SLOTS, N_V, D, D), jnp.asarray([4, 2, 6]), -jnp.abs(normal(rng, N_V))
    track = dict(track_indices=jnp.asarray([8, 0, 9]))
    kda, o = jax.jit(lambda *y: sglang_jax.kda(*y, None, slots, **track))(q, k, v, a, b, pool, A_log, dt_bias)
    plain, p = jax.jit(lambda *y: sglang_jax.lightning(*y, None, slots, **track, scale=1.0))(q, k, v, slope, pool)
    q, k, v, a, b, A_log, dt_bias, S, slope = doubles(q, k, v, a, b, A_log, dt_bias, pool, slope)
    # Each request is a row of one token.
    q, k, v, g, b = (y[:, None] for y in (q, k, v, rates(a.reshape(3, -1), A_log, dt_bias, "kda"), b))
    start = dict(initial_state=S[np.array(slots)])
    for name, found, pool, (out, states) in (
        ("kda", o, kda, reference(q, k, v, g, b, **start, use_qk_l2norm_in_kernel=True)),
        ("lightning", p, plain, reference(q, k, v, g_gamma=slope, **start, scale=1.0)),
    ):
        assert_close(name, found, out[:, 0], 1e-6)
        assert_close("states", pool[np.array([4, 2, 6])], states, 1e-6)
        assert_close("states in second slots", pool[np.array([8, 9])], states[np.array([0, 2])], 1e-6)
