"""The tile mathematics of decodes over a ring, without Pallas, against the float64 recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.kernels import matmul
from chunkwise.shared.serving import ring_tile, state_pool
from chunkwise.shared.serving.state_pool import StatePool
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference

# Gates per channel, a delta rule, erase keys and what they read, the type of the pool, tokens of a decode, key heads,
# and V. Eight heads are rows of one product, and states of 128 columns lie in pairs.
CASES = {
    "gated_delta_rule": (False, True, None, "float32", 2, 1, 16),
    "wide": (False, True, None, "bfloat16", 1, 8, 128),
    "kda": (True, True, None, "int8", 2, 2, 16),
    "simple_gla": (False, False, None, "float32", 3, 2, 16),
    "gla": (True, False, None, "bfloat16", 1, 2, 16),
    "gdn2": (True, True, "after decay", "float32", 2, 1, 16),
    "comba": (False, True, "before decay", "float32", 3, 2, 16),
    "per channel": (True, True, "before decay", "int8", 2, 2, 16),
}
# A state is rounded where its ring is folded, and a token where it enters a ring.
LIMITS = {"float32": 2e-6, "bfloat16": 6e-3, "int8": 1.5e-2}
R, K, L, SCALE = 2, 8, 4, 0.3

THOROUGH = dict(test_steps=lambda case: case != "comba")


@functools.partial(jax.jit, static_argnums=(2, 3))
def run_step(tokens: dict[str, jax.Array], pool: StatePool, fold: bool, before: bool):
    """Return the outputs [W, HV, V] of a decode, and the slot after it, which is a `StatePool` without slots."""
    (W, H, _), HV = tokens["q"].shape, tokens["v"].shape[1]
    by_row = lambda y: jnp.swapaxes(y.reshape(W, H, R, *y.shape[2:]), 1, 2)  # [W, R, H, ...]
    rows = lambda y: None if y is None else [x.reshape(1, HV) for x in by_row(y)]
    scales = None if pool.scales is None else jnp.swapaxes(pool.scales.reshape(H, R, K), 0, 1)
    slot = pool._replace(scales=scales)
    if fold:
        keys, writes, decay = ring_tile.fold_tokens(slot)
        decay = jnp.stack(decay) if scales is None else jnp.stack(decay) * scales  # [R, H, 1 or K]
        heads = [(h, r) for h in range(H) for r in range(R)]
        folded = [
            ring_tile.fold_head(
                slot.states[h * R + r], keys[r, :, h], writes[r, :, h], decay[r, h : h + 1], pool.writes.dtype
            )
            for h, r in heads
        ]
        pool = pool._replace(states=jnp.stack([S for S, _ in folded]), count=jnp.int32(0))
        if scales is not None:
            pool = pool._replace(scales=jnp.concatenate([x for _, x in folded]))
            scales = jnp.swapaxes(pool.scales.reshape(H, R, K), 0, 1)
        slot = pool._replace(scales=scales)
    g, beta, p = tokens["g"], tokens.get("beta"), tokens.get("p")
    gates = by_row(g) if g.ndim == 3 else by_row(g).reshape(W, 1, HV)
    o, written = ring_tile.decode(
        list(tokens["q"]), list(tokens["k"]), [list(x) for x in by_row(tokens["v"])], list(gates), rows(beta),
        None if p is None else list(by_row(p)), slot, *ring_tile.masks(W, L, H, beta is not None), SCALE, before,
    )  # fmt: skip
    put = lambda ring, x: jax.lax.dynamic_update_slice_in_dim(ring, x.astype(ring.dtype), pool.count, 0)
    after = dict(keys=put(pool.keys, tokens["k"]), gates=put(pool.gates, gates.reshape(W, *pool.gates.shape[1:])))
    after["writes"] = put(pool.writes, jnp.stack([jnp.stack(x) for x in written]))
    o = jnp.stack([jnp.stack(x, axis=1).reshape(HV, -1) for x in o])
    return o, pool._replace(**after, count=pool.count + W)


@pytest.mark.parametrize("case", CASES)
def test_steps(case):
    """Outputs and states are those of the recurrence: a ring that is folded, and a guess that is taken back."""
    per_channel, delta, erases, dtype, W, H, V = CASES[case]
    HV, T = H * R, 8 * W
    x = make_inputs(
        1, T, H, HV, K, V, per_channel=per_channel, num_states=1, gate="spikes", erase="key" if erases else None
    )
    x |= {} if delta else {"beta": None}
    one = state_pool.make_pool(1, HV, K, V, dtype, replay=L, H=H, per_channel=per_channel)
    one = state_pool.store(one, jnp.zeros(1, jnp.int32), x["initial_state"])
    # What no token has written may be anything.
    spoilt = {name: jnp.full_like(getattr(one, name), jnp.nan) for name in ("keys", "writes", "gates")}
    slot = jax.tree.map(lambda y: y[0], one._replace(**spoilt, drafts=None))
    taken: list[int] = []
    for i in range(8):
        tokens = {name: y[0, i * W : (i + 1) * W] for name, y in x.items() if name != "initial_state" and y is not None}
        if erases:
            tokens["p"] = jnp.repeat(tokens["p"], R, axis=1)
        with matmul.kernel_trace(interpreted=True):
            o, slot = run_step(tokens, slot, bool(slot.count > L - W), erases == "before decay")
        taken += range(i * W, (i + 1) * W)
        known = {name: y if y is None or name == "initial_state" else y[:, np.array(taken)] for name, y in x.items()}
        want, states = reference(**known, scale=SCALE, erase_before_decay=erases == "before decay")
        assert_close("o", o, want[0, -W:], LIMITS[dtype])
        if i == 2 and W > 1:
            # Of this decode the first token is kept.
            taken, slot = taken[: 1 - W], slot._replace(count=slot.count - (W - 1))
        elif i == 7:
            held = jax.tree.map(lambda y: y[None], slot._replace(drafts=jnp.int32(W)))
            assert_close("states", state_pool.read_states(held, jnp.zeros(1, jnp.int32)), states, LIMITS[dtype])
