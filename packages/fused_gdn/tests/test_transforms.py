"""Gradients against float64, and the kernels under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gdn import fused_chunk_gated_delta_rule
from chunkwise.shared.reference import reference
from chunkwise.shared.testing import GATE_GRADIENT_TOLERANCE, GRADIENT_TOLERANCE, assert_close, make_inputs

pytestmark = pytest.mark.interpreted
CUTS = [0, 1, 64, 64, 70, 128, 200]


def cotangents(x, N, seed=9):
    rng = np.random.default_rng(seed)
    HV, V = x["v"].shape[2:]
    do = jnp.asarray(rng.standard_normal(x["v"].shape), x["v"].dtype)
    return do, jnp.asarray(rng.standard_normal((N, HV, x["k"].shape[-1], V)), jnp.float32) if N else None


@pytest.mark.parametrize(
    ("dtype", "gate", "T", "H", "HV", "K", "V", "C", "states", "packed"),
    [
        (jnp.float32, "logsigmoid", 50, 1, 2, 60, 100, 32, True, False),
        (jnp.float32, "spikes", 210, 2, 2, 64, 64, 64, False, True),
        (jnp.bfloat16, "zero", 150, 1, 2, 128, 128, 64, False, False),
        (jnp.bfloat16, "logsigmoid/10", 210, 1, 2, 64, 128, 64, True, True),
        (jnp.bfloat16, "strong", 130, 1, 1, 256, 64, 128, False, False),
        # Gradients of e^-30: what no gate decays must not be added and taken away again.
        (jnp.float32, "strong", 41, 1, 1, 16, 16, 16, True, False),
    ],
)
def test_gradients(dtype, gate, T, H, HV, K, V, C, states, packed):
    N = (len(CUTS) - 1 if packed else 1) * states
    cu_seqlens = jnp.array(CUTS, jnp.int32) if packed else None
    x = make_inputs(1, T, H, HV, K, V, dtype=dtype, gate=gate, num_states=N)
    do, dht = cotangents(x, N)
    options = dict(cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=not packed)

    @jax.jit
    def gradients(x):
        run = lambda x: fused_chunk_gated_delta_rule(
            **x, **options, output_final_state=states, chunk_size=C, implementation="pallas"
        )
        return jax.vjp(run, x)[1]((do, dht))[0]

    got, want = gradients(x), reference(**x, **options, do=do, dht=dht)[2]
    assert set(got) == set(want)
    for name in got:
        tolerance = GATE_GRADIENT_TOLERANCE if name in ("g", "beta") else GRADIENT_TOLERANCE
        assert got[name].dtype == x[name].dtype
        assert_close("d" + name, got[name], want[name], tolerance[jnp.dtype(dtype).name])


def test_new_boundaries_do_not_trace_again():
    traces = []

    @jax.jit
    def run(x, cu_seqlens):
        traces.append(1)
        return fused_chunk_gated_delta_rule(**x, cu_seqlens=cu_seqlens, chunk_size=16, implementation="pallas")[0]

    x = make_inputs(1, 40, 1, 1, 16, 16)
    for cuts in ([0, 5, 40], [0, 31, 33]):
        cu_seqlens = jnp.array(cuts, jnp.int32)
        assert_close("o", run(x, cu_seqlens), reference(**x, cu_seqlens=cu_seqlens)[0], 1e-5)
    assert len(traces) == 1


def test_vmap_remat_and_traced_scale():
    x = make_inputs(2, 20, 1, 1, 16, 16)
    scale = jnp.float32(0.7)
    run = lambda x, scale: fused_chunk_gated_delta_rule(**x, scale=scale, chunk_size=16, implementation="pallas")[0]
    loss = lambda x, scale: jnp.sum(jax.checkpoint(run)(x, scale) ** 2)
    o = jax.vmap(run, in_axes=(0, None))({n: y[:, None] for n, y in x.items()}, scale)[:, 0]
    want, _ = reference(**x, scale=0.7)
    assert_close("o", o, want, 1e-5)
    got = jax.grad(loss, argnums=(0, 1))(x, scale)
    _, _, gradients = reference(**x, scale=0.7, do=2 * want)
    assert_close("dq", got[0]["q"], gradients["q"], 1e-4)
    assert_close("dscale", got[1], 2 * np.sum(want**2) / 0.7, 1e-4)


def test_gradients_of_repeated_keys_in_bfloat16():
    """Whole chunks of one key: v_new oscillates and its sums cancel.

    Not dg where it cancels too: with beta = 1 every token forgets all that its key held, so the gate has no effect and
    dg is nothing but rounding; with beta = 1.9 and no decay it is off by 3e-2, a limit that the README states.
    """

    @jax.jit
    def gradients(x, do):
        run = lambda x: fused_chunk_gated_delta_rule(**x, implementation="pallas")[0]
        return jax.vjp(run, x)[1](do)[0]

    for gate, beta in (("zero", 1.9), ("zero", 1.0), ("logsigmoid/10", 1.9)):
        x = make_inputs(1, 200, 1, 1, 64, 64, dtype=jnp.bfloat16, gate=gate, beta=beta, repeat_key=True)
        do, _ = cotangents(x, 0)
        got, want = gradients(x, do), reference(**x, do=do)[2]
        for name in got.keys() - ({"g"} if gate == "zero" else set()):
            tolerance = GATE_GRADIENT_TOLERANCE if name in ("g", "beta") else GRADIENT_TOLERANCE
            assert_close(f"d{name} {gate} {beta}", got[name], want[name], tolerance["bfloat16"])
