"""The kernel of decodes over a ring, whose copies it makes itself, beside plain JAX.

Tests of the pipeline compare the latter with float64.
"""

import jax
import jax.numpy as jnp
import pytest

from chunkwise.shared.call.arguments import Arguments, Slots
from chunkwise.shared.kernels.spans.pools import Routes
from chunkwise.shared.serving import run, state_pool
from chunkwise.shared.serving.decode import choose, launch, records
from chunkwise.shared.serving.decode.records import DecodeStatic
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import make_inputs

# Gates per channel, a delta rule, erase keys and what they read, the type of the pool, tokens of a decode, key heads,
# and value heads of a key head. Of many heads one product takes 16.
CASES = {
    "gated_delta_rule": (False, True, None, "bfloat16", 1, 1, 2),
    "kda": (True, True, None, "int8", 2, 1, 2),
    "simple_gla": (False, False, None, "float32", 3, 2, 2),
    "gdn2": (True, True, "after decay", "float32", 2, 1, 2),
    "comba": (False, True, "before decay", "int8", 3, 2, 2),
    "per channel": (True, True, "before decay", "float32", 2, 1, 2),
    "many key heads": (False, True, None, "bfloat16", 1, 16, 2),
    "many value heads": (False, False, None, "int8", 1, 2, 16),
    "many keys per channel": (True, True, "after decay", "bfloat16", 1, 32, 1),
}
THOROUGH = dict(test_steps=True)
# Plain JAX goes on from the state that it folds, the kernel from its rounding, and from the rounded tokens of a step.
LIMITS = {"float32": 2e-6, "bfloat16": 5e-3, "int8": 1.5e-2}


def _decode(static, x: Arguments, pool, routes: Routes, accepted):
    """Run a step by the kernel, whose sequences start where the one before ends."""
    N = routes.source.shape[0]
    slots = Slots(routes.target[:, 0], num_accepted_tokens=accepted, num_decodes=N, read_indices=routes.source)
    assert choose.by_kernel("fused", x, pool, slots, static, strict=True)
    ends = jnp.concatenate([routes.start[:1], routes.end])
    o, _, pool = launch.launch(records.of_rule(static, x), (), pool, ends, slots)
    return o.reshape(x.v.shape), pool


@pytest.mark.parametrize("case", CASES)
def test_steps(case):
    """Rings that become full, a sequence without tokens, drafts taken back, a shared prefix."""
    per_channel, delta, erases, dtype, W, H, R = CASES[case]
    N, HV, K, V, L = 3, R * H, 8, 16, 4
    T = N * W
    one = lambda: state_pool.make_pool(5, HV, K, V, dtype, replay=L, H=H, per_channel=per_channel)
    static = DecodeStatic(H, HV, K, V, W, True, 0.3, delta, "recurrent_x_fwd", erases == "before decay")
    plain = jax.jit(lambda *args: run._plain_tokens(static, *args))
    kernel = jax.jit(lambda *args: _decode(static, *args))
    x, expected, pool = make_inputs(T=8 * T, H=H, HV=HV, K=K, V=V, per_channel=per_channel), one(), one()
    int32 = lambda *values: jnp.array(values, jnp.int32)
    for i in range(8):
        tokens = {name: x[name][:, i * T : (i + 1) * T] for name in ("q", "k", "v", "g", "beta")}
        tokens |= {} if delta else {"beta": None}
        tokens |= {"p": 0.3 * jnp.repeat(tokens["k"], HV // H, axis=2)[..., ::-1]} if erases else {}
        source = int32(3, -1, 1) if i else int32(-1, -1, -1)
        target = int32(0 if i == 4 else 3, -1, 1)
        routes = Routes(int32(0, W, W), int32(W, W, 2 * W - (W > 1)), source, target[:, None])
        args = Arguments(**tokens), routes, int32(W, 1, 1)
        want, expected = plain(args[0], expected, *args[1:])
        o, pool = kernel(args[0], pool, *args[1:])
        assert_close("o", o, want, LIMITS[dtype])
        slots = jnp.arange(5, dtype=jnp.int32)
        states, before = (state_pool.read_states(y, slots) for y in (pool, expected))
        assert_close("states", states, before, LIMITS[dtype])
        assert pool.count.tolist() == expected.count.tolist()
        assert pool.drafts.tolist() == expected.drafts.tolist()
