"""The kernels compile for every TPU generation."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]
# A packed batch has more chunks for the same kernel: only its tables are new, and they compile longer than the kernel.
SIZES = [(64, 128, False), (64, 256, False), (128, 128, False), (128, 256, False), (128, 256, True)]


def specs(K, packed):
    k, v = (spec(1, 300, heads, K, dtype=jnp.bfloat16) for heads in (1, 2))
    w, g_cum, gk_cum = spec(1, 300, 2, K), spec(1, 300, 2), spec(1, 300, 2, K)
    return k, v, w, g_cum, gk_cum, spec(3 if packed else 1, 2, K, K), spec(4, dtype=jnp.int32) if packed else None


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("C", "K", "packed"), SIZES)
def test_delta_rule(C, K, packed, chip):
    def run(k, w, u, g_cum, start, cu_seqlens):
        return chunk_gated_delta_rule_fwd_h(k, w, u, g_cum, start, True, cu_seqlens, C, implementation="pallas")

    k, _, w, g_cum, _, start, cu_seqlens = specs(K, packed)
    text = compile_for(run, k, w, w, g_cum, start, cu_seqlens, chip=chip).as_text()
    assert "tpu_custom_call" in text
    assert f"chunk_gated_delta_rule_fwd_h_fwd_c{C}" in text


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("C", "K", "packed"), [(64, 256, False), (128, 128, False), (128, 128, True)])
@pytest.mark.parametrize("per_channel", [False, True], ids=["per_head", "per_channel"])
def test_linear_attention(per_channel, C, K, packed, chip):
    def run(k, v, gates, start, cu_seqlens):
        return chunk_fwd_h(k, v, **gates, initial_state=start, cu_seqlens=cu_seqlens, chunk_size=C,
                           implementation="pallas")  # fmt: skip

    k, v, _, g_cum, gk_cum, start, cu_seqlens = specs(K, packed)
    gates = dict(gk_cum=gk_cum) if per_channel else dict(g_cum=g_cum)
    text = compile_for(run, k, v, gates, start, cu_seqlens, chip=chip).as_text()
    assert f"chunk_fwd_h_fwd_c{C}" + ("_gk" if per_channel else "") in text


def test_compiles_under_x64():
    """Under x64 a Python number in an index map would be an int64, which no TPU kernel can return."""
    k, _, w, g_cum, _, start, cu_seqlens = specs(128, True)

    def run(k, w, g_cum, start, cu_seqlens):
        states = lambda k, g_cum: chunk_gated_delta_rule_fwd_h(
            k, w, w, g_cum, start, True, cu_seqlens, implementation="pallas"
        )
        results, pullback = jax.vjp(states, k, g_cum)
        return pullback(results)

    with jax.enable_x64(True):
        text = compile_for(run, k, w, g_cum, start, cu_seqlens).as_text()
    assert "chunk_gated_delta_rule_fwd_h_bwd_c64" in text
