"""mLSTM against its definition in float64, token by token: outputs, states, and the gradients of all arguments."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.mlstm import MlstmState, chunk_mlstm, recurrent_mlstm
from chunkwise.shared.testing import definitions
from chunkwise.shared.testing.compare import (
    AMPLIFIED,
    GATE_GRADIENT_TOLERANCE,
    GRADIENT_TOLERANCE,
    TOLERANCE,
    assert_close,
)
from chunkwise.shared.testing.inputs import boundaries, poison_padding

T, HV, K, V = 150, 2, 24, 16
PACKED = boundaries(1, 17, 0, 100, 8)  # an empty sequence, padding at the end
IDS = jnp.asarray(np.repeat([[-2, 3, 5, -1, 5, 6]], [2, 1, 17, 4, 60, T - 84], axis=1), jnp.int32)
# Options of a call, and how many states it has.
FORMS = {
    "rows": ({}, 2),
    "stream": (dict(cu_seqlens=PACKED), 0),
    "sequences": (dict(cu_seqlens=PACKED), 5),
    "segments": (dict(segment_ids=IDS), 1),
}
# Forget gates near 1 as after training, gates of any strength, tokens that write nothing or forget everything, and
# input gates that rise, so that the stabiliser follows them.
GATES = {
    "usual": lambda i, f: (i, f + 3),
    "strong": lambda i, f: (30 * i, 30 * f),
    "resets": lambda i, f: (
        i.at[:, ::5].set(-jnp.inf), f.at[:, ::7].set(-jnp.inf).at[:, 3::7].set(jnp.inf).at[:, 1::7].set(-1e9)
    ),
    "rising": lambda i, f: (i + jnp.arange(i.shape[1])[None, :, None] / 4, f + 3),
}  # fmt: skip
QUICK = (
    *(("chunk", form, "xla", "resets", jnp.float32) for form in ("rows", "sequences", "segments")),
    ("chunk", "rows", "xla", "strong", jnp.float32),
    ("chunk", "rows", "xla", "rising", jnp.float32),
    ("chunk", "sequences", "fused", "usual", jnp.float32),
    ("chunk", "segments", "fused", "rising", jnp.float32),
    ("chunk", "rows", "fused", "usual", jnp.bfloat16),
    ("recurrent", "sequences", "xla", "resets", jnp.float32),
)
THOROUGH = dict(
    test_values_and_gradients=lambda call, form, implementation, gate, dtype: (
        (call, form, implementation, gate, dtype) not in QUICK
    ),
)


def make(B=1, T=T, H=2, HV=HV, K=K, V=V, gate="usual", states=0, dtype=jnp.float32, repeat_key=False, seed=0):
    """Return inputs by name."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, k, v = (draw(B, T, *tail).astype(dtype) for tail in ((H, K), (H, K), (HV, V)))
    if gate == "rising" or (gate == "strong" and dtype == jnp.bfloat16):
        # Where e^-m is small, a divisor of terms that cancel would amplify any rounding.
        q, k = abs(q), abs(k)
    i, f = GATES[gate](draw(B, T, HV), draw(B, T, HV))
    x: dict[str, Any] = dict(q=q, k=jnp.broadcast_to(k[:, :1], k.shape) if repeat_key else k, v=v, i=i, f=f)
    if states:
        x["initial_state"] = MlstmState(draw(states, HV, K, V), draw(states, HV, K), draw(states, HV))
    return x


def assert_all_close(got, want, limit, name):
    for part, x, y in zip(MlstmState._fields, got, want, strict=True):
        exists = np.isfinite(y)
        assert np.array_equal(np.asarray(x)[~exists], y[~exists])
        assert_close(f"{name}.{part}", np.where(exists, x, 0.0), np.where(exists, y, 0.0), limit)


def check(function, x, form="rows", limits=None, gradient_limits=None, scale=None, **options):
    """Compare outputs, states and gradients with the definition; padding is NaN, and gives zeros."""
    fixed, states = FORMS[form]
    rng = np.random.default_rng(1)
    (B, T, HV, V), K, dtype = x["v"].shape, x["q"].shape[3], x["v"].dtype.name
    N = max(states, B) if "cu_seqlens" not in fixed else len(PACKED) - 1
    do = jnp.asarray(rng.standard_normal((B, T, HV, V)), dtype)
    dC, dn = (jnp.asarray(rng.standard_normal((N, HV, *tail)), jnp.float32) * bool(states) for tail in ((K, V), (K,)))
    dstate = MlstmState(dC, dn, jnp.zeros((N, HV)))
    cotangents = dict(do=do, dht=dstate if states else None)
    o, state, gradients = definitions.reference(definitions.MLSTM, x, **fixed, scale=scale, **cotangents)

    @jax.jit
    def run(x):
        call = functools.partial(function, output_final_state=bool(states), scale=scale, **fixed, **options)
        (o, state), pull = jax.vjp(lambda x: call(**x), x)
        return o, state, pull((do, None if state is None else dstate))[0]

    got, after, found = run(poison_padding(x, **fixed))
    assert got.dtype == dtype
    assert_close("o", got, o, (limits or TOLERANCE)[dtype])
    if states:
        assert_all_close(after, state, (limits or TOLERANCE)[dtype], "final_state")
    for name, want in ((name, gradients[name]) for name in x):
        limit = (gradient_limits or (GATE_GRADIENT_TOLERANCE if name in "if" else GRADIENT_TOLERANCE))[dtype]
        if name == "initial_state":
            # The gradient of m is <C, dC> + <n, dn>. Where n divides, these cancel, and leave their rounding.
            C, n, _ = x[name]
            terms = np.sum(C * want.C, (2, 3)), np.sum(n * want.n, 2)
            beside = lambda state, terms=terms: state._replace(m=np.stack([state.m, *terms]))
            assert_all_close(beside(found[name]), beside(want), limit, "dinitial_state")
        else:
            assert_close(f"d{name}", np.where(np.isfinite(want), found[name], 0.0), want, limit)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", ["chunk", "recurrent"])
def test_values_and_gradients(call, form, implementation, gate, dtype):
    if call == "recurrent" and form == "segments":
        pytest.skip("it takes no ids")
    states, B = FORMS[form][1], 2 if form == "rows" else 1
    # A stabiliser of 100 is rounded to 4e-6, and so is every exponent.
    rounded = AMPLIFIED if gate in ("strong", "rising") else None
    x = make(B, gate=gate, states=states, dtype=dtype)
    check({"chunk": chunk_mlstm, "recurrent": recurrent_mlstm}[call], x, form, rounded, rounded,
          implementation=implementation)  # fmt: skip


def test_heads_that_share_keys():
    """Keys that repeat, value heads of one key head, a scale that is an array, float16, and one token."""
    check(chunk_mlstm, make(2, 9, H=1, states=2, repeat_key=True), implementation="xla")
    check(chunk_mlstm, make(2, 9, H=1, states=2), scale=jnp.float32(0.7), implementation="fused")
    loose = dict(float16=2e-3)
    check(
        chunk_mlstm, make(2, 1, states=2, dtype=jnp.float16), limits=loose, gradient_limits=loose, implementation="xla"
    )


def test_large_input_gates():
    """Where the stabiliser stays at a large number, no decay is rounded to its digits."""
    x = make(T=40)
    x["i"] = jnp.full_like(x["i"], 1000.0)
    assert_close("o", chunk_mlstm(**x)[0], definitions.reference(definitions.MLSTM, x)[0], AMPLIFIED["float32"])


@pytest.mark.parametrize("size", [200.0, -200.0])
def test_queries_of_zeros(size):
    """Where e^-m is no number of float32, they read zeros, and gradients are finite."""
    x = make(T=4)
    x |= dict(q=jnp.zeros_like(x["q"]), i=jnp.full_like(x["i"], size))
    o, pull = jax.vjp(lambda x: chunk_mlstm(**x, eps=0.0, implementation="xla")[0], x)
    np.testing.assert_array_equal(o, 0.0)
    assert all(np.isfinite(y).all() for y in jax.tree.leaves(pull(x["v"])))


def test_stabilisers_need_no_gradient():
    """Without eps, a definition with gradients through the stabilisers has the same gradients."""
    x = make(T=20)
    of = lambda **fixed: definitions.reference(
        definitions.MLSTM._replace(step=functools.partial(definitions.mlstm, eps=0.0, **fixed)), x, do=jnp.sin(x["v"])
    )[2]
    want, without = of(fixed=lambda m: m), of()
    for name in set(want) - {"initial_state"}:
        assert_close(f"d{name}", without[name], want[name], 1e-12)


def test_a_traced_scale_of_divided_outputs_is_read():
    q = jnp.ones((1, 16, 1, 8))
    run = lambda scale: chunk_mlstm(q, q, q, *[jnp.zeros((1, 16, 1))] * 2, scale=scale, implementation="fused")[0]
    program = jax.make_jaxpr(run)(jnp.float32(0.5)).jaxpr
    assert any(program.invars[0] in step.invars for step in program.eqns if step.outvars[0].aval.ndim)


def test_no_pool():
    with pytest.raises(TypeError, match="keyword argument 'state_indices': the recurrent and ragged functions"):
        recurrent_mlstm(**make(T=1), state_indices=jnp.zeros(1, jnp.int32))


def test_errors_have_its_name():
    """What a kernel lacks is said of the function that was called."""
    x = make(T=4)
    run = lambda q: chunk_mlstm(**x | dict(q=q), implementation="fused")[0]
    with pytest.raises(NotImplementedError, match="chunk_mlstm has no forward-mode derivative"):
        jax.jvp(run, (x["q"],), (x["q"],))
