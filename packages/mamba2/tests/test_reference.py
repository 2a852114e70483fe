"""Mamba-2 against its definition in float64, token by token: outputs, states, and the gradients of all arguments."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.mamba2 import chunk_mamba2, ragged_mamba2, recurrent_mamba2
from chunkwise.shared.testing.compare import GATE_GRADIENT_TOLERANCE, GRADIENT_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries

T, H, HV, K, V = 75, 2, 4, 16, 64
PACKED = boundaries(17, 0, 50)  # an empty sequence, padding at the end
FORMS = {"rows": {}, "stream": dict(cu_seqlens=PACKED), "sequences": dict(cu_seqlens=PACKED)}
OF_GATES = ("dt", "A", "D", "dt_bias", "initial_state")
QUICK = (
    ("chunk", "rows", "fused", jnp.bfloat16),
    ("chunk", "stream", "fused", jnp.float32),
    ("chunk", "sequences", "fused", jnp.float32),
    ("chunk", "sequences", "xla", jnp.float32),
    ("recurrent", "sequences", "xla", jnp.float32),
)
THOROUGH = dict(
    test_values_and_gradients=lambda call, form, implementation, dtype: (call, form, implementation, dtype) not in QUICK
)


def make(dtype=jnp.float32, states=0, **sizes):
    """Return inputs by name."""
    rng, sizes = np.random.default_rng(0), dict(T=T, H=H, HV=HV, K=K, V=V) | sizes
    T_, H_, HV_, K_, V_ = sizes.values()
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x = dict(x=draw(1, T_, HV_, V_), B=draw(1, T_, H_, K_), C=draw(1, T_, H_, K_), z=draw(1, T_, HV_, V_))
    x = {name: y.astype(dtype) for name, y in x.items()}
    x |= dict(dt=draw(1, T_, HV_), A=-jnp.geomspace(0.1, 8.0, HV_), D=draw(HV_, V_), dt_bias=draw(HV_))
    return x | (dict(initial_state=draw(states, HV_, K_, V_)) if states else {})


def definition(x, cu_seqlens=None, dt_limit=(0.0, math.inf)):
    """Return o and the final states of one row of the batch, token by token."""
    T, HV, V = x["x"].shape[1:]
    dt = jnp.clip(jax.nn.softplus(x["dt"] + x["dt_bias"]), *dt_limit)
    B, C = (jnp.repeat(x[name], HV // x[name].shape[2], axis=2) for name in "BC")
    ends = np.asarray([0, T] if cu_seqlens is None else cu_seqlens)
    o, states = jnp.zeros_like(x["x"]), []
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        S = x["initial_state"][n] if "initial_state" in x else jnp.zeros((HV, B.shape[3], V), B.dtype)

        def token(S, t):
            S = jnp.exp(x["A"] * dt[0, t])[:, None, None] * S
            S = S + jnp.einsum("h,hk,hv->hkv", dt[0, t], B[0, t], x["x"][0, t])
            o = jnp.einsum("hkv,hk->hv", S, C[0, t]) + x["D"] * x["x"][0, t]
            return S, o * jax.nn.silu(x["z"][0, t])

        S, found = jax.lax.scan(token, S, jnp.arange(start, end))
        o, states = o.at[0, start:end].set(found), [*states, S]
    return o, jnp.stack(states)


def check(function, x, form="rows", limits=TOLERANCE, **options):
    fixed, states = FORMS[form], form != "stream"
    rng, dtype = np.random.default_rng(1), x["x"].dtype.name
    end = int(fixed["cu_seqlens"][-1]) if fixed else x["x"].shape[1]
    do = jnp.asarray(rng.standard_normal(x["x"].shape), x["x"].dtype)
    N = len(PACKED) - 1 if fixed else 1
    dstate = jnp.asarray(rng.standard_normal((N, x["x"].shape[2], x["B"].shape[3], x["x"].shape[3])), jnp.float32)
    dstate = dstate if states else 0 * dstate
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(y, np.float64)) for name, y in x.items()}
        want, pull = jax.vjp(functools.partial(definition, **fixed), wide)
        (gradients,) = pull((jnp.asarray(np.asarray(do, np.float64)), jnp.asarray(np.asarray(dstate, np.float64))))
        want, gradients = jax.tree.map(np.asarray, (want, gradients))

    @jax.jit
    def run(x):
        call = functools.partial(function, output_final_state=states, dt_softplus=True, **fixed, **options)
        (o, state), pull = jax.vjp(lambda x: call(**x), x)
        return o, state, pull((do, dstate if states else None))[0]

    poison = lambda y: y.at[:, end:].set(jnp.nan) if y.shape[1:2] == x["x"].shape[1:2] else y
    o, state, found = run({name: poison(y) for name, y in x.items()})
    assert o.dtype == dtype
    assert not np.asarray(o)[:, end:].any()
    assert_close("o", o, want[0], limits[dtype])
    if states:
        assert_close("final_state", state, want[1], limits[dtype])
    for name, y in x.items():
        assert found[name].dtype == y.dtype
        limit = (GATE_GRADIENT_TOLERANCE if name in OF_GATES else GRADIENT_TOLERANCE)[dtype]
        assert_close(f"d{name}", found[name], gradients[name], limit)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", ["chunk", "recurrent"])
def test_values_and_gradients(call, form, implementation, dtype):
    x = make(dtype, states={"rows": 1, "stream": 0, "sequences": 3}[form])
    check({"chunk": chunk_mamba2, "recurrent": recurrent_mamba2}[call], x, form, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_steps_of_zero(implementation):
    """They write nothing, as padding in mamba_ssm, and have a gradient."""
    x = make(T=20)
    x = x | dict(dt=jnp.abs(x["dt"]).at[:, ::3].set(0.0), D=x["D"][:, 0])
    bias = x.pop("dt_bias")

    def run(x, how):
        if how is None:
            x = x | dict(D=x["D"][:, None], dt=jnp.log(jnp.expm1(x["dt"])), dt_bias=0 * bias)
            return definition(x)[0]
        return chunk_mamba2(**x, implementation=how)[0]

    tokens = lambda how: jax.jacobian(lambda dt: jnp.sum(run(x | dict(dt=dt), how)))(x["dt"])
    assert_close("ddt", tokens(implementation), tokens("xla"), 1e-4)
    assert np.asarray(tokens(implementation))[:, ::3].all()
    kept = {name: y[:, [i for i in range(20) if i % 3]] if y.shape[1:2] == (20,) else y for name, y in x.items()}
    found, want = (chunk_mamba2(**y, implementation=implementation)[0] for y in (x, kept))
    assert_close("o", np.delete(found, np.s_[::3], axis=1), want, 1e-5)


@pytest.mark.parametrize("limit", [(0.5, 1.0)])
def test_limits_of_steps(limit):
    x = make(T=12)
    with jax.enable_x64(True):
        want = definition({name: jnp.asarray(np.asarray(y, np.float64)) for name, y in x.items()}, dt_limit=limit)[0]
    assert_close("o", chunk_mamba2(**x, dt_softplus=True, dt_limit=limit)[0], want, 1e-5)


def test_a_serving_step():
    """Two decodes and a prefill over one pool."""
    x, pool, cu = make(T=9), jnp.ones((4, HV, K, V)), boundaries(1, 1, 7)
    slots = jnp.asarray([2, 0, 3], jnp.int32)
    o, after = ragged_mamba2(**x, states=pool, cu_seqlens=cu, state_indices=slots, num_decodes=2, dt_softplus=True)
    states = pool[slots]
    want, last = definition(x | dict(initial_state=states), cu)
    assert_close("o", o, want, 1e-5)
    assert_close("states", after[slots], last, 1e-5)


def test_errors():
    x = make(T=4)
    for wrong, message in (
        (dict(B=x["B"][:, :, :, :3]), r"`C` must have shape \[B, T, H, K\] = \(1, 4, 2, 3\); got \(1, 4, 2, 16\)\."),
        (dict(x=x["x"][:, :, :3]), "`x` must have a multiple of the heads of `B`; got 3 heads for 2."),
        (dict(A=x["A"][:2]), r"`A` must have shape \[HV\] = \(4\); got \(2,\)\."),
        (dict(D=x["D"][:, :2]), r"`D` must have shape \[HV, V\] = \(4, 64\); got \(4, 2\)\."),
        (dict(dt_limit=(1.0, 0.5)), r"`dt_limit` must be two numbers, 0 <= least <= most; got \(1.0, 0.5\)\."),
    ):
        with pytest.raises(ValueError, match=message):
            chunk_mamba2(**x | wrong)
