"""Decode out of a pool of states, by the kernel and in plain JAX, against the float64 recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from chunkwise.shared.operators import decode, decode_fits, token_by_token
from chunkwise.shared.testing import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    assert_close,
    boundaries,
    make_inputs,
    reference,
    spec,
    text_for_tpu,
)

HV, K, V = 4, 24, 40


def pool_of(slots: int):
    return np.float32(np.random.default_rng(1).standard_normal((slots, HV, K, V)))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize(
    ("dtype", "B", "T", "lengths"),
    [(jnp.float32, 256, 1, None), (jnp.bfloat16, 1, 8, (1, 0, 4, 2))],
    ids=["256 sequences", "packed"],
)
def test_pool(dtype, B, T, lengths, per_channel, implementation):
    """Named slots are updated, freed ones start from zero whatever they hold, all others keep every bit."""
    N, cu_seqlens = (B, None) if lengths is None else (len(lengths), boundaries(*lengths))
    x = make_inputs(B, T, 2, HV, K, V, dtype=dtype, per_channel=per_channel, normalise=False)
    pool, slots = pool_of(N + 5), np.int32(np.random.default_rng(2).permutation(N + 5)[:N])
    kept = np.arange(N) % 3 != 1  # in the pack, that frees the slot of the empty sequence
    start = np.where(kept[:, None, None, None], pool[slots], 0.0)
    pool[slots[~kept]] = np.nan
    o, after = decode(
        **x, scale=0.3, initial_state=jnp.asarray(pool), cu_seqlens=cu_seqlens, state_indices=jnp.asarray(slots),
        has_initial_state=jnp.asarray(kept), normalise=True, name="decode", implementation=implementation,
    )  # fmt: skip
    options = dict(scale=0.3, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)
    want_o, want = reference(**x, **options, initial_state=start)
    after = np.asarray(after)
    assert o.dtype == dtype
    assert_close("o", o, want_o, TOLERANCE[jnp.dtype(dtype).name])
    assert_close("states", after[slots], want, TOLERANCE["float32"])
    others = np.setdiff1d(np.arange(N + 5), slots)
    np.testing.assert_array_equal(after[others], pool[others])


def test_gradients_reach_the_pool_and_a_traced_scale():
    x = make_inputs(2, 2, 2, HV, K, V, per_channel=True)
    x["initial_state"], slots = jnp.asarray(pool_of(4)), jnp.array([3, 0], jnp.int32)
    do = np.random.default_rng(3).standard_normal(x["v"].shape)

    def loss(x, scale):
        o, _ = decode(
            **x, scale=scale, cu_seqlens=None, state_indices=slots, has_initial_state=None, normalise=False,
            name="decode", implementation="pallas",
        )  # fmt: skip
        return jnp.sum(o * do)

    got, dscale = jax.grad(loss, argnums=(0, 1))(x, jnp.float32(0.3))
    o, _, want = reference(**x | {"initial_state": x["initial_state"][slots]}, scale=0.3, do=do)
    named = want["initial_state"]
    want["initial_state"] = np.zeros(x["initial_state"].shape)
    want["initial_state"][slots] = named
    for name in x:
        assert_close(f"d{name}", got[name], want[name], GRADIENT_TOLERANCE["float32"])
    assert_close("dscale", dscale, np.sum(o * do) / 0.3, GRADIENT_TOLERANCE["float32"])


def test_padding_may_hold_anything():
    x = make_inputs(1, 6, K=4, V=4, num_states=2, normalise=False)
    poisoned = {name: y if name == "initial_state" else y.at[:, 5:].set(jnp.nan) for name, y in x.items()}

    def loss(x):
        o, states = token_by_token(**x, scale=0.3, cu_seqlens=boundaries(2, 3), normalise=True)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(states))

    gradient = jax.jit(jax.grad(loss))
    jax.tree.map(np.testing.assert_array_equal, gradient(poisoned), gradient(x))


@pytest.mark.parametrize(
    ("tokens", "H", "HV", "K", "fit"),
    [(256, 16, 32, 128, True), (2048, 16, 32, 128, False), (1, 1, 64, 128, True), (1, 1, 64, 256, False)],
    ids=["decode", "too many tokens", "large group", "too large group"],
)
def test_what_fits(tokens, H, HV, K, fit):
    """The kernel says itself what it cannot take; a lowering tells."""
    x = [spec(1, tokens, heads, K) for heads in (H, H, HV)] + [spec(1, tokens, HV)] * 2
    assert decode_fits(*x) == fit
    run = lambda *x: decode(
        *x, 1.0, None, None, None, None, normalise=False, name="decode", implementation="pallas"
    )[0]  # fmt: skip
    if fit:
        assert "decode" in text_for_tpu(run, *x)
    else:
        with pytest.raises(NotImplementedError, match="do not fit into VMEM"):
            text_for_tpu(run, *x)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_gradient_passes_the_check_of_shard_map(implementation):
    """Without a state, and with keys and queries that all devices share while each has value heads of its own."""
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Auto,))
    x = make_inputs(1, 2, 1, 2, 8, 8)
    specs = {name: P() if name in ("q", "k") else P(None, None, "heads") for name in x}

    def loss(x):
        o, state = decode(
            **x, scale=1.0, initial_state=None, cu_seqlens=None, state_indices=None, has_initial_state=None,
            normalise=False, name="decode", implementation=implementation,
        )  # fmt: skip
        return jnp.sum(o) + jnp.sum(state)

    text = text_for_tpu(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs,), out_specs=specs), x)
    assert "stablehlo.all_reduce" in text
