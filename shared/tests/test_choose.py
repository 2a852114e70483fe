"""Which kernel decodes, by sizes, types and pools; and calls that name an implementation that cannot."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.implementation import implementations
from chunkwise.shared.implementation.implementations import Implementation
from chunkwise.shared.operator import Operator
from chunkwise.shared.serving import state_pool
from chunkwise.shared.serving.decode import choose
from chunkwise.shared.serving.decode.records import Decodes, DecodeStatic, static_of
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import make_inputs, spec
from chunkwise.shared.testing.oracle import reference
from tests import decode_suite, traced

N, H, HV = 3, 1, 2
# The type of a pool, the tokens of its rings, K, the tokens of a decode, whether there are erase keys, and the reason
# why the kernel does not take them, or None.
KERNELS = [
    (jnp.float32, 0, 128, 1, False, None),
    (jnp.int8, 0, 128, 4, False, None),
    (jnp.float32, 8, 128, 2, False, None),
    (jnp.float32, 0, 32, 1, False, None),
    (jnp.bfloat16, 0, 128, 9, False, None),
    (jnp.int8, 0, 128, 1, True, None),
    (jnp.int8, 8, 64, 1, False, None),
    (jnp.float32, 8, 128, 1, True, None),
    (jnp.int8, 0, 128, 9, False, None),
    (jnp.float32, 16, 128, 9, False, "takes decodes of at most 8 tokens over rings; got 9"),
    (jnp.float16, 0, 128, 1, False, "takes pools of float32, bfloat16 and int8; got float16"),
    (jnp.float16, 8, 64, 1, False, "takes pools of float32, bfloat16 and int8; got float16"),
    (jnp.float32, 0, 4096, 1, False, "do not fit into VMEM"),
    (jnp.float32, 8, 4096, 1, False, "do not fit into VMEM"),
]


@pytest.mark.parametrize(("dtype", "replay", "K", "W", "erases", "expected"), KERNELS)
def test_kernel(dtype, replay, K, W, erases, expected):
    x = make_inputs(1, N * W, H, HV, 8, 8)
    keys, values = spec(1, N * W, H, K), spec(1, N * W, HV, K)
    x = Arguments(keys, keys, values, x["g"], x["beta"], p=values if erases else None)
    pool = jax.eval_shape(lambda: state_pool.make_pool(5, HV, K, K, dtype, replay=replay, H=H))
    indices = jnp.zeros((N,) if replay or W == 1 else (N, W), jnp.int32)
    static = DecodeStatic(H, HV, K, K, W, True, 1.0, True, "recurrent_x_fwd")

    def find(strict):
        found = []
        ask = lambda *arrays: found.append(choose.by_kernel("fused", *arrays, Slots(indices), static, strict=strict))
        jax.eval_shape(ask, x, pool)
        return found[0]

    assert find(False) == (expected is None)
    if expected is not None:
        with pytest.raises(NotImplementedError, match=f'"fused" .*{re.escape(expected)}.*: use implementation="xla"'):
            find(True)


def test_the_best_of_a_machine():
    """It comes first for calls that it takes, if this is its machine; by its name it runs anywhere."""
    run, here = (lambda x, options, precomputed: (x.v, None)), []
    there = Implementation(
        "there",
        run,
        sizes=lambda x, options, _: "no" if x.v.dtype == jnp.bfloat16 else options,
        best_here=lambda: bool(here),
    )
    known = {"there": there, "xla": Implementation("xla", run, options=frozenset({"min_gate"}))}
    x = Arguments(**make_inputs(1, 4, H, HV, 8, 8))
    chosen = lambda x=x, asked=None, **options: implementations.choose(known, asked, x, Options(**options)).name
    assert (chosen(), chosen(asked="there")) == ("xla", "there")
    here.append(True)
    assert (chosen(), chosen(min_gate=-1.0), chosen(asked="xla")) == ("there", "xla", "xla")
    assert chosen(x._replace(v=x.v.astype(jnp.bfloat16))) == "xla"
    known["fused"] = there._replace(name="fused", sizes=lambda *_: "no", options=frozenset({"config"}), best_here=None)
    assert chosen(config=1) == "fused"


def test_only_fused_decodes_a_whole_layer():
    """Under "staged" and "xla" a layer runs one operation after the other."""
    decodes, conv, pool = decode_suite.make(1, 2)
    found = [choose.by_kernel(x, decodes, pool, decode_suite.slots(), conv=conv) for x in ("fused", "staged", "xla")]
    assert found == [True, False, False]


@pytest.mark.parametrize("implementation", ["fused", "staged"])
def test_int8_states_without_a_ring(implementation):
    """A kernel decodes them where the operator is called alone; its results are those of float64."""
    K, pool = 128, state_pool.make_pool(5, HV, 128, 128, jnp.int8)
    x, slots = make_inputs(1, N, H, HV, K, K), jnp.array([4, 0, 2], jnp.int32)
    before = np.random.default_rng(0).standard_normal((N, HV, K, K)).astype(np.float32)
    pool = state_pool.write_states(pool, slots, before)
    prefills = Implementation(implementation, lambda x, options, precomputed: (x.v, x.initial_state))
    operator = Operator("x", lambda x, options: None, {implementation: prefills})
    ends = jnp.arange(N + 1, dtype=jnp.int32)

    def step(x, pool):
        x = Arguments(**x, initial_state=pool, cu_seqlens=ends, slots=Slots(slots, num_decodes=N))
        return operator.ragged(x, Options(), implementation)

    assert "recurrent_x_fwd" in {launch.name for launch in traced.launches(step, x, pool)}
    o, after = jax.jit(step)(x, pool)
    want, states = reference(**x, initial_state=state_pool.read_states(pool, slots), cu_seqlens=ends)
    assert_close("o", o, want, 2e-6)
    assert_close("states", state_pool.read_states(after, slots), states, 1.2e-2)


def test_a_part_of_the_heads_has_its_own_states():
    x = tuple(jnp.zeros((1, channels)) for channels in (8, 8, 32))
    part = Decodes(static_of(2, 8, 4, 4, GateActivation()), x, None).of_heads(2, 1).static
    assert (part.first, part.H, part.HV) == (4, 1, 4)
