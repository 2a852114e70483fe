"""Mamba-2 against its definition in float64, token by token: outputs, states, and the gradients of all arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.mamba2 import chunk_mamba2, operator, ragged_mamba2, recurrent_mamba2
from chunkwise.shared.testing import definitions
from chunkwise.shared.testing.compare import assert_close, tolerance
from chunkwise.shared.testing.inputs import boundaries, make_mamba2_inputs
from tests.recurrence import assert_recurrence

T, H, HV, K, V = 75, 2, 4, 16, 64
PACKED = boundaries(17, 0, 50)  # an empty sequence, padding at the end
FORMS = {"rows": (1, {}), "stream": (0, dict(cu_seqlens=PACKED)), "sequences": (3, dict(cu_seqlens=PACKED))}
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


def make(dtype=jnp.float32, T=T, states=0):
    """Return inputs by name."""
    return make_mamba2_inputs(1, T, H, HV, K, V, dtype=dtype, num_states=states)


def definition(do=None, dht=None, cu_seqlens=None, rule=definitions.MAMBA2, **x):
    """Return o and the final states, and gradients."""
    return definitions.reference(rule, x, cu_seqlens=cu_seqlens, do=do, dht=dht)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", ["chunk", "recurrent"])
def test_values_and_gradients(call, form, implementation, dtype):
    (states, packing), kind = FORMS[form], jnp.dtype(dtype).name
    assert_recurrence(
        {"chunk": chunk_mamba2, "recurrent": recurrent_mamba2}[call], make(dtype, states=states), **packing,
        dt_softplus=True, implementation=implementation, expected=definition, values="x",
        limit=lambda name, dtype, x: tolerance(name, kind),
    )  # fmt: skip


@pytest.mark.parametrize(("limit", "steps"), [((0.0, 0.5), [0.125, 0.5]), ((0.25, np.inf), [0.25, 0.75])])
def test_a_limit_may_have_one_end(limit, steps):
    named = dict(dt=jnp.array([0.125, 0.75]).reshape(1, 2, 1), dt_bias=None, dt_softplus=False, dt_limit=limit)
    assert operator.step_sizes(named, None).ravel().tolist() == steps


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_steps_of_zero(implementation):
    """They write nothing, as padding in mamba_ssm, and have a gradient."""
    x = make(T=20)
    x = x | dict(dt=jnp.abs(x["dt"]).at[:, ::3].set(0.0), D=x["D"][:, 0], dt_bias=None)
    run = lambda x, how: chunk_mamba2(**x, implementation=how)[0]
    tokens = lambda how: jax.jacobian(lambda dt: jnp.sum(run(x | dict(dt=dt), how)))(x["dt"])
    assert_close("ddt", tokens(implementation), tokens("xla"), 1e-4)
    assert np.asarray(tokens(implementation))[:, ::3].all()
    rest = np.asarray([i for i in range(20) if i % 3])
    others = {name: x[name][:, rest] for name in ("x", "dt", "B", "C", "z")}
    assert_close("o", run(x, implementation)[:, rest], run(x | others, implementation), 1e-5)


@pytest.mark.parametrize("limit", [(0.5, 1.0)])
def test_limits_of_steps(limit):
    x, step = make(T=12), functools.partial(definitions.mamba2, dt_limit=limit)
    want = definition(rule=definitions.MAMBA2._replace(step=step), **x)[0]
    assert_close("o", chunk_mamba2(**x, dt_softplus=True, dt_limit=limit)[0], want, 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_a_serving_step(implementation):
    """Two decodes and a prefill over one pool, with NaN in the padding; the last row of the table is of no sequence."""
    x, pool, cu = make(T=9), jnp.ones((4, HV, K, V)), boundaries(1, 1, 7)
    padded = {n: jnp.pad(y, [(0, 0), (0, 2)] + [(0, 0)] * (y.ndim - 2), constant_values=jnp.nan) if y.ndim > 2 else y
              for n, y in x.items()}  # fmt: skip
    slots = jnp.asarray([2, 0, 3], jnp.int32)
    o, after = ragged_mamba2(
        **padded, states=pool, cu_seqlens=jnp.append(cu, 99), state_indices=jnp.append(slots, 1), num_decodes=2,
        num_sequences=3, dt_softplus=True, implementation=implementation,
    )  # fmt: skip
    want, last, _ = definition(initial_state=pool[slots], cu_seqlens=cu, **x)
    assert_close("o", o[:, :9], want, 1e-5)
    assert not o[:, 9:].any()
    assert_close("states", after[slots], last, 1e-5)
