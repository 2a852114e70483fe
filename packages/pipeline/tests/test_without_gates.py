"""Without gates nothing decays: in every operator and form, and the delta rule under its own names."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import pipeline
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.oracle import reference
from tests.traced import launches

SIZES = 1, 70, 1, 2, 16, 8
PACK = boundaries(40, 0, 30)
NAMES = [*OPERATORS, "chunk_delta_rule", "recurrent_delta_rule"]
RAGGED = ["gated_delta_rule", "kda", "gdn2", "comba", "simple_gla", "gla", "delta_rule"]
# The operators share what turns None into no decay; the delta rules have kernels of two packages, GLA of a third.
THOROUGH = dict(
    test_no_decay=lambda name, implementation: (name, implementation) not in (
        ("chunk_delta_rule", "fused"), ("chunk_kda", "fused"), ("chunk_gla", "fused"), ("recurrent_kda", "fused"),
    ),
    test_no_gates_in_memory=True,
    test_no_gates_in_a_step=lambda replay: replay > 0,
    test_a_step=lambda name, implementation, replay: (name, implementation, replay) != ("delta_rule", "fused", 8),
)  # fmt: skip


def make(name: str):
    """Return an operator, its inputs without gates, and the same with gates of zeros for the reference."""
    kind = name.partition("_")[2]
    like = OPERATORS[f"chunk_{kind.replace('delta_rule', 'gated_delta_rule') if kind == 'delta_rule' else kind}"]
    x = like.source.inputs(*SIZES, num_states=3)
    x.pop("g_gamma", None)
    zeros = x | dict(g=0 * x["g"])
    del x["g"]
    function = getattr(pipeline, name)
    takes = "g" in inspect.signature(function).parameters
    return function, x | (dict(g=None) if takes else {}), zeros


@pytest.mark.parametrize("implementation", ["xla", "staged", "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_no_decay(name, implementation):
    """Outputs, states and gradients of a packed batch are those of the recurrence in float64 with gates of zeros."""
    function, x, zeros = make(name)
    if name.startswith("recurrent") and implementation == "staged":
        pytest.skip("the recurrent forms have no stages")
    rng = np.random.default_rng(1)
    do, dht = (rng.standard_normal(x[each].shape) for each in ("v", "initial_state"))
    run = functools.partial(function, output_final_state=True, cu_seqlens=PACK, implementation=implementation)

    @jax.jit
    def both(arrays):
        results, pull = jax.vjp(lambda y: run(**y | dict.fromkeys(x.keys() - y.keys())), arrays)
        return results, pull((jnp.asarray(do, jnp.float32), jnp.asarray(dht, jnp.float32)))[0]

    (o, ht), gradients = both({key: y for key, y in x.items() if y is not None})
    want = reference(**zeros, do=do, dht=dht, cu_seqlens=PACK)
    assert_close("o", o, want[0], TOLERANCE["float32"])
    assert_close("ht", ht, want[1], TOLERANCE["float32"])
    for key, gradient in gradients.items():
        assert_close(f"d{key}", gradient, want[2][key], 10 * TOLERANCE["float32"])


@pytest.mark.parametrize("replay", [0, 8])
@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("name", RAGGED)
def test_a_step(name, implementation, replay):
    """A step with a decode and a prefill, over a pool with a ring or without."""
    function, x, zeros = make(f"ragged_{name}")
    states, ends, slots = x.pop("initial_state"), boundaries(1, 0, 69), jnp.array([2, 0, 1], jnp.int32)
    zeros["initial_state"] = states[slots]
    pool = pipeline.write_states(
        pipeline.make_pool(3, 2, 16, 8, replay=replay, H=1), jnp.arange(3, dtype=jnp.int32), states
    )
    step = jax.jit(functools.partial(function, num_decodes=1, implementation=implementation))
    o, pool = step(**x, states=pool, cu_seqlens=ends, state_indices=slots)
    want, last = reference(**zeros, cu_seqlens=ends)
    assert_close("o", o, want, TOLERANCE["float32"])
    assert_close("states", pipeline.read_states(pool, slots), last, TOLERANCE["float32"])


@pytest.mark.parametrize(("name", "times"), [("gated_delta_rule", 4), ("kda", 3), ("gdn2", 3), ("comba", 3)])
def test_no_gates_in_memory(name, times):
    """The launches of a forward and its backward move so many arrays fewer, each of the size of the gates."""
    x = jax.eval_shape(lambda: OPERATORS[f"chunk_{name}"].source.inputs(1, 256, 1, 2, 128, 128))

    def moved(gates) -> int:
        run = lambda y: getattr(pipeline, f"chunk_{name}")(**gates | y, implementation="fused")[0]
        found = launches(jax.grad(lambda y: jnp.sum(run(y).astype(jnp.float32))), x)
        return sum(launch.array_bytes for launch in found)

    both, g = moved({}), x.pop("g")
    assert both - moved({"g": None}) == times * g.size * g.dtype.itemsize


@pytest.mark.parametrize("replay", [0, 8])
def test_no_gates_in_a_step(replay):
    """The launches of decodes and of prefills move no gates of tokens; a decode reads one number a head."""
    T, HV, N = 256, 2, 16
    x = jax.eval_shape(lambda: OPERATORS["chunk_gated_delta_rule"].source.inputs(1, T, 1, HV, 128, 128))
    pool = jax.eval_shape(lambda: pipeline.make_pool(N, HV, 128, 128, replay=replay, H=1))
    ends, slots = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (N + 1, N))

    def moved(gates) -> dict[str, int]:
        run = lambda y, pool, ends, slots: pipeline.ragged_gated_delta_rule(
            **gates | y, states=pool, cu_seqlens=ends, state_indices=slots, num_decodes=1, implementation="fused"
        )
        return {launch.name: launch.array_bytes for launch in launches(run, x, pool, ends, slots)}

    both = moved({})
    del x["g"]
    alone = moved({"g": None})
    tokens = {name: both[name] - size for name, size in alone.items()}
    prefill = next(name for name in tokens if name.startswith("chunk"))
    assert tokens.pop(prefill) == 4 * T * HV
    assert [*tokens.values()] == [4 * HV * (N - 1)]


def test_raw_gates_need_gates():
    function, x, _ = make("chunk_kda")
    with pytest.raises(ValueError, match="`use_gate_in_kernel` must be False without `g`; got True"):
        function(**x, use_gate_in_kernel=True, cu_seqlens=PACK)
