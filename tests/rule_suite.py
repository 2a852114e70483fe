"""Decodes of an operator alone with erase keys, narrow heads, and many tokens, against the float64 recurrence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call.arguments import Arguments, Slots
from chunkwise.shared.serving import state_pool
from chunkwise.shared.serving.decode import choose, launch, records
from chunkwise.shared.serving.decode.records import DecodeStatic
from chunkwise.shared.testing import definitions
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import make_dplr_inputs, make_inputs
from chunkwise.shared.testing.oracle import reference

N, H, HV = 3, 2, 2
# Gates per channel, erase keys and what they read, K and V, the type of the pool, the tokens of its rings, and the most
# tokens of a decode.
CASES = {
    "gdn2": (True, "after decay", 128, 128, jnp.float32, 0, 1),
    "comba, drafts in slots": (False, "before decay", 96, 192, jnp.bfloat16, 0, 3),
    "channels before decay": (True, "before decay", 128, 128, jnp.float32, 0, 3),
    "comba, int8 ring": (False, "before decay", 128, 128, jnp.int8, 8, 2),
    "gdn2, ring": (True, "after decay", 192, 256, jnp.float32, 8, 1),
    "half a register": (True, "after decay", 64, 64, jnp.int8, 0, 2),
    "Mamba-2": (False, None, 128, 64, jnp.bfloat16, 0, 1),
    "RWKV-7": (True, "echo", 64, 64, jnp.bfloat16, 0, 1),
    "RWKV-7, drafts in slots": (True, "echo", 128, 64, jnp.float32, 0, 2),
    "nine drafts, one after the other": (True, "before decay", 24, 40, jnp.int8, 0, 9),
}
LIMITS = TOLERANCE | dict(int8=0.02)


def make(case: str) -> tuple[dict[str, Any], Any, jax.Array, Slots]:
    """Return the tokens of two decodes of each sequence [N, 2 U, ...], the pool, the slots of tokens, and the step."""
    per_channel, erases, K, V, dtype, replay, U = CASES[case]
    x, rng = make_inputs(N, 2 * U, H, HV, K, V, per_channel=per_channel), np.random.default_rng(2)
    if erases == "echo":
        x = make_dplr_inputs(N, 2 * U, H, HV, K, V)
    elif erases is None:
        x.pop("beta")
    else:
        x["b"] = jnp.asarray(rng.uniform(size=(N, 2 * U, HV, K)), jnp.float32)
    pool = state_pool.make_pool(N * U, HV, K, V, dtype, replay=replay, H=H, per_channel=per_channel)
    states = rng.standard_normal((N * U, HV, K, V)).astype(np.float32)
    pool = state_pool.write_states(pool, jnp.arange(N * U, dtype=jnp.int32), states)
    indices = jnp.arange(N * U, dtype=jnp.int32).reshape(N, U)
    slots = Slots(indices[:, 0] if replay else indices, num_accepted_tokens=jnp.ones(N, jnp.int32), num_decodes=N)
    return x, pool, indices, slots


def part_of(x: dict[str, Any], case: str, i: int) -> dict[str, Any]:
    """Return the tokens of decode i of all sequences as a stream."""
    U = CASES[case][-1]
    return {name: y[:, i * U : (i + 1) * U].reshape(1, N * U, *y.shape[2:]) for name, y in x.items()}


def decode(case: str, part: dict[str, Any], pool, slots: Slots) -> tuple[jax.Array, Any]:
    """Return the outputs of a step of decodes by the kernel, and the pool."""
    _, erases, K, V, _, _, U = CASES[case]
    static = DecodeStatic(H, HV, K, V, U, True, 0.3, False, "recurrent_x_fwd", erases in ("before decay", "echo"))
    if erases == "echo":
        p, echo, g = (part[name] for name in ("a", "b", "gk"))
        x = Arguments(part["q"], part["k"], part["v"], g, p=p, echo=echo)
    else:
        p = part["k"] * part["b"] if "b" in part else None
        x = Arguments(**{name: y for name, y in part.items() if name != "b"}, p=p)
    assert choose.by_kernel("fused", x, pool, slots, static)
    o, _, pool = launch.launch(records.of_rule(static, x), (), pool, U * jnp.arange(N + 1, dtype=jnp.int32), slots)
    return o, pool


def assert_decodes(case: str) -> None:
    """Compare two decodes, one after the other, with the recurrence over their tokens."""
    _, erases, _, V, dtype, replay, U = CASES[case]
    x, pool, indices, slots = make(case)
    before = state_pool.read_states(pool, indices[:, 0])
    step = jax.jit(lambda part, *args: decode(case, part, *args))
    _, pool = step(part_of(x, case, 0), pool, slots)
    # The second decode starts after all tokens of the first one.
    o, pool = step(part_of(x, case, 1), pool, slots._replace(num_accepted_tokens=jnp.full(N, U, jnp.int32)))
    if erases == "echo":
        want_o, want, _ = definitions.reference(definitions.DPLR_DELTA_RULE, x | dict(initial_state=before), scale=0.3)
    else:
        want_o, want = reference(**x, initial_state=before, scale=0.3, erase_before_decay=erases == "before decay")
    limit = LIMITS[jnp.dtype(dtype).name]
    assert_close("o", o.reshape(N, U, HV, V), want_o[:, U:], limit)
    last = indices[:, 0] if replay else indices[:, U - 1]
    assert_close("states", state_pool.read_states(pool, last), want, limit)
