"""Decode out of a pool of states, by the kernel and in plain JAX, against the float64 recurrence."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.operator import Operator
from chunkwise.shared.serving.decode import launch
from chunkwise.shared.serving.few_tokens import scan_tokens
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs, spec
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.tpu import compile_for, has_libtpu, text_for_tpu
from tests import traced
from tests.poison import assert_isolated

HV, K, V = 4, 24, 40
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def run_recurrent(x, slots, options, implementation):
    """Run an operator that checks no tensors."""
    return Operator("decode", lambda x, options: None, {}).recurrent(x._replace(slots=slots), options, implementation)


IMPLEMENTATIONS = ["xla", "fused"]
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
THOROUGH = dict(
    test_what_does_not_exist_is_none=lambda dtype: dtype == jnp.bfloat16,
    test_a_pool_keeps_its_type=lambda dtype, implementation: dtype == jnp.float16 or implementation == "xla",
    test_gradients_reach_named_slots_and_a_traced_scale=lambda implementation: implementation == "xla",
    test_isolation=lambda implementation: implementation == "xla",
)


def pool_of(slots: int, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(1).standard_normal((slots, HV, K, V)), dtype)


def run(x, slots=None, has_initial_state=None, normalise=True, implementation="xla", **others):
    """Return o and the states; `slots` are numbers."""
    slots = slots if slots is None else jnp.asarray(slots, jnp.int32)
    has_initial_state = has_initial_state if has_initial_state is None else jnp.asarray(has_initial_state)
    options = Options(output_final_state=True, use_qk_l2norm_in_kernel=normalise)
    return run_recurrent(
        Arguments(**{"scale": 0.3, **x, **others}), Slots(slots, has_initial_state), options, implementation
    )


def expected(x, pool, slots, has_initial_state=None, cu_seqlens=None):
    """Return o and the states [N, HV, K, V] of the float64 recurrence, and the slots that are written."""
    slots = np.asarray(slots)
    read = (slots >= 0) & (True if has_initial_state is None else np.asarray(has_initial_state))
    start = np.where(read[:, None, None, None], np.asarray(pool, np.float64)[np.maximum(slots, 0)], 0.0)
    o, states = reference(**x, scale=0.3, cu_seqlens=cu_seqlens, initial_state=start, use_qk_l2norm_in_kernel=True)
    return o, states, slots[slots >= 0]


@each
@pytest.mark.parametrize(
    "slots",
    [[-1, 2, 4, 1], [2, -1, 0, 4], [1, 0, 2, -1], [-1, -3, 0, -1], [4, -1, -1, -1], [-1, -1, -1, -1]],
    ids=["first", "inside", "last", "one left", "one first", "all"],
)
def test_negative_slots(slots, implementation):
    """They start from zeros and are not written: their sequence, packed, changes no bit of the pool, nor reads one.

    Freed slots start from zeros whatever they hold.
    """
    lengths, kept = (2, 1, 0, 3), np.array([True, False, False, True])
    x = make_inputs(1, 7, 2, HV, K, V, normalise=False)
    cu_seqlens, unnamed = boundaries(*lengths), np.setdiff1d(np.arange(5), slots)
    # Nobody may look at what nobody names: a wrong slot would be NaN.
    freed = [slot for slot, keep in zip(slots, kept, strict=True) if slot >= 0 and not keep]
    pool = pool_of(5).at[np.array([*unnamed, *freed], int)].set(jnp.nan)
    o, after = run(x, slots, kept, initial_state=pool, cu_seqlens=cu_seqlens, implementation=implementation)
    want_o, want, written = expected(x, jnp.nan_to_num(pool), slots, kept, cu_seqlens=cu_seqlens)
    assert_close("o", o, want_o, TOLERANCE["float32"])
    assert_close("states", after[written], want[np.asarray(slots) >= 0], TOLERANCE["float32"])
    assert np.asarray(after[unnamed]).tobytes() == np.asarray(pool[unnamed]).tobytes()


@each
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("given", "want"),
    [
        ([0, 3, -9, 900, 4], [0, 3, 3, 7, 7]),
        ([-5, 2, LEAST, 4, MOST], [0, 2, 2, 4, 7]),
        ([0, 7, 8, 7, 0], [0, 7, 7, 7, 7]),
    ],
    ids=["falling", "extremes", "all of one"],
)
def test_what_does_not_exist_is_none(given, want, dtype, implementation):
    """Under jit a slot past the end is as a negative one, and a boundary past the end is the last token."""
    x = make_inputs(1, 7, 2, HV, K, V, normalise=False)
    slots, none = np.array([5, 2, MOST, 0], np.int32), np.array([-1, 2, -1, 0])
    unnamed = np.setdiff1d(np.arange(5), none)
    pool = pool_of(5, dtype).at[unnamed].set(jnp.nan)
    step = jax.jit(
        lambda pool, slots, cu: run(x, slots, initial_state=pool, cu_seqlens=cu, implementation=implementation)
    )
    for named in (slots, np.array([LEAST, 2, 2**30, 0], np.int32)):
        o, after = step(pool, named, np.array(given, np.int32))
        want_o, states, written = expected(x, jnp.nan_to_num(pool), none, cu_seqlens=boundaries(*np.diff(want)))
        assert_close("o", o, want_o, TOLERANCE["float32"])
        tolerance = TOLERANCE["float32"] if dtype == jnp.float32 else float(jnp.finfo(dtype).eps) / 2
        assert_close("states", after[written], states[none >= 0], tolerance)
        assert np.asarray(after[unnamed]).tobytes() == np.asarray(pool[unnamed]).tobytes()


@pytest.mark.parametrize(
    ("dtype", "implementation"), [(jnp.bfloat16, "xla"), (jnp.bfloat16, "fused"), (jnp.float16, "xla")]
)
def test_a_pool_keeps_its_type(dtype, implementation):
    """It is computed with in float32 and rounded once, when it is stored; states without slots are float32."""
    x = make_inputs(3, 4, 2, HV, K, V, normalise=False)
    slots, pool = [3, -1, 0], pool_of(4, dtype)
    o, after = run(x, slots, initial_state=pool, implementation=implementation)
    want_o, want, written = expected(x, pool, slots)
    assert after.dtype == dtype
    assert_close("o", o, want_o, TOLERANCE["float32"])
    # Half a unit in the last place of every number, as an error of the whole.
    rounding = float(jnp.finfo(dtype).eps) / 2
    assert_close("states", after[written], want[[0, 2]], rounding)
    np.testing.assert_array_equal(after[np.array([1, 2])], pool[np.array([1, 2])])
    assert run(x, initial_state=pool[:3], implementation=implementation)[1].dtype == jnp.float32


@each
def test_gradients_reach_named_slots_and_a_traced_scale(implementation):
    """The gradient of the pool is that of the named states, in the type of the pool; all else is zero."""
    x, pool = make_inputs(2, 2, 2, HV, K, V, per_channel=True), pool_of(4, jnp.bfloat16)
    do = np.random.default_rng(3).standard_normal(x["v"].shape)

    def loss(x, pool, scale):
        given = dict(initial_state=pool, scale=scale, implementation=implementation)
        o, after = run(x, [2, -1], normalise=False, **given)
        return jnp.sum(o * do) + jnp.sum(after[0].astype(jnp.float32))

    dx, dpool, dscale = jax.grad(loss, argnums=(0, 1, 2))(x, pool, jnp.float32(0.3))
    start = np.stack([np.asarray(pool[2], np.float64), np.zeros((HV, K, V))])
    o, _, want = reference(**x, scale=0.3, initial_state=start, do=do)
    for name in x:
        assert_close(f"d{name}", dx[name], want[name], GRADIENT_TOLERANCE["float32"])
    assert_close("dscale", dscale, np.sum(o * do) / 0.3, GRADIENT_TOLERANCE["float32"])
    assert dpool.dtype == jnp.bfloat16
    assert_close("dpool", dpool[2], want["initial_state"][0], TOLERANCE["bfloat16"])
    np.testing.assert_array_equal(dpool[0], jnp.ones((HV, K, V)))
    assert not dpool[np.array([1, 3])].any()


def test_heads_that_do_not_fit_have_launches_in_turn(monkeypatch):
    """Each takes a part of the heads of the same pool; the value heads of a single key head share it."""
    monkeypatch.setattr(launch, "MOST_HEADS", 2)
    slots, pool = [3, -1, 0], pool_of(4)
    for H in (1, 2):
        x = make_inputs(1, 4, H, HV, K, V, per_channel=True, normalise=False)
        step = lambda x, pool: run(x, slots, initial_state=pool, cu_seqlens=boundaries(2, 1, 1), implementation="fused")
        assert len(list(traced.launches(step, x, pool))) == 2
        o, after = step(x, pool)
        want_o, want, written = expected(x, pool, slots, cu_seqlens=boundaries(2, 1, 1))
        assert_close("o", o, want_o, TOLERANCE["float32"])
        assert_close("states", after[written], want[[0, 2]], TOLERANCE["float32"])


@each
def test_isolation(implementation):
    """What is not finite in one sequence, or in its slot, changes no bit of another."""
    x = make_inputs(1, 6, 1, 2, 8, 8, num_states=3)
    slots = jnp.array([2, 0, 1])

    def fn(x, cu_seqlens):
        # Sequence n lies in slot slots[n].
        pool = jnp.zeros_like(x["initial_state"]).at[slots].set(x["initial_state"])
        arguments = dict(initial_state=pool, cu_seqlens=cu_seqlens, implementation=implementation)
        o, after = run(x, slots, normalise=False, **arguments)
        return dict(o=o, final_state=after[slots])

    assert_isolated(fn, x, boundaries(2, 0, 3))


def test_padding_may_hold_anything():
    x = make_inputs(1, 6, K=4, V=4, num_states=2, normalise=False)
    poisoned = {name: y if name == "initial_state" else y.at[:, 5:].set(jnp.nan) for name, y in x.items()}

    def loss(x):
        o, states = scan_tokens(**x, scale=0.3, cu_seqlens=boundaries(2, 3), normalise=True)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(states))

    gradient = jax.jit(jax.grad(loss))
    jax.tree.map(np.testing.assert_array_equal, gradient(poisoned), gradient(x))


@each
def test_gradient_passes_the_check_of_shard_map(implementation):
    """Without a state, and with keys and queries that all devices share while each has value heads of its own."""
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Auto,))
    x = make_inputs(1, 2, 1, 2, 8, 8)
    specs = {name: P() if name in ("q", "k") else P(None, None, "heads") for name in x}

    def loss(x):
        o, state = run(x, normalise=False, implementation=implementation)
        return jnp.sum(o) + jnp.sum(state)

    text = text_for_tpu(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs,), out_specs=specs), x)
    assert "stablehlo.all_reduce" in text


x = {name: spec(*y.shape, dtype=y.dtype) for name, y in make_inputs(2, 1, 1, 2, 8, 8).items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(slots=spec(2, dtype=jnp.int32)), "`state_indices` must come with the pool as `initial_state`; got None."),
        (dict(slots=spec(3, dtype=jnp.int32), pool=spec(4, 2, 8, 8)),
         "`state_indices` must be int32 of shape (2,); got int32 (3,)."),
        (dict(slots=[0, 1], pool=spec(4, 2, 8, 8)), "`state_indices` must be int32 of shape (2,); got list."),
        (dict(started=spec(2, dtype=jnp.int32), pool=spec(2, 2, 8, 8)),
         "`has_initial_state` must be bool of shape (2,); got int32 (2,)."),
        (dict(slots=spec(2, dtype=jnp.int32), pool=spec(4, 2, 8, 9)),
         "`initial_state` must have shape [N, HV, K, V] = (any, 2, 8, 8); got (4, 2, 8, 9)."),
        (dict(slots=np.array([0, 4], np.int32), pool=spec(4, 2, 8, 8)),
         "`state_indices` must be below 4, the number of slots of `initial_state`; got 4."),
        (dict(slots=jnp.array([3, 3]), pool=spec(4, 2, 8, 8)),
         "`state_indices` must name a slot only once, but for negative ones; got 3 twice."),
    ],
)  # fmt: skip
def test_errors(arguments, message):
    a = dict(slots=None, started=None, pool=None, options=Options(), implementation=None, scale=None) | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        run_recurrent(
            Arguments(**x, scale=a["scale"], initial_state=a["pool"]), Slots(a["slots"], a["started"]), a["options"],
            a["implementation"],
        )  # fmt: skip


def test_slots_are_read_by_nobody_under_jit():
    """Known values are checked; those of a traced argument are not, nor are they fetched from a device."""
    step = lambda pool, slots: run_recurrent(Arguments(**x, initial_state=pool), Slots(slots), Options(), "xla")
    pool = spec(4, 2, 8, 8)
    with jax.transfer_guard("disallow"):
        jax.eval_shape(step, pool, spec(2, dtype=jnp.int32))
    with pytest.raises(ValueError, match="must be below 4"):
        jax.eval_shape(lambda pool: step(pool, np.array([9, 1], np.int32)), pool)


@pytest.mark.tpu
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_compiles_in_place(dtype, chip):
    """With a donated pool nothing is allocated beside what comes in and out; x64 changes nothing."""
    heads = dict(q=(2, 128), k=(2, 128), v=(4, 128), g=(4,), beta=(4,))
    tokens = {name: spec(8, 1, *tail, dtype=jnp.bfloat16) for name, tail in heads.items()}
    step = lambda pool, x, slots: run_recurrent(
        Arguments(**x, initial_state=pool), Slots(slots), Options(True, True), "fused"
    )
    pool = spec(64, 4, 128, 128, dtype=dtype)
    with jax.enable_x64(dtype == jnp.bfloat16):
        program = compile_for(step, pool, tokens, spec(8, dtype=jnp.int32), chip=chip, donate_argnums=(0,))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 64 * 4 * 128 * 128 * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < 2**20
