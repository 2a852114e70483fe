"""The kernels compile for every TPU generation."""

import re

import jax
import jax.numpy as jnp
import pytest

from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu, text_for_tpu
from tests.either_two_keys import KINDS

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]
# The kernels of KDA, which its package compiles; one program of all of their new parts is quick.
THOROUGH = dict(
    test_forward_and_backward_compile=lambda kind, packed: (kind, packed) != ("gdn2", False),
)


def specs(kind, B, T, H, HV, K, V, dtype):
    q, per_channel = spec(B, T, H, K, dtype=dtype), kind == "gdn2"
    x = dict(q=q, k=q, v=spec(B, T, HV, V, dtype=dtype), g=spec(B, T, HV, *([K] if per_channel else [])))
    if per_channel:
        return x | dict(b=spec(B, T, HV, K, dtype=dtype), w=spec(B, T, HV, V, dtype=dtype))
    return x | dict(p=q, beta=spec(B, T, HV))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_compile(kind, packed, chip):
    cu_seqlens = spec(4, dtype=jnp.int32) if packed else None

    def run(x, cu_seqlens):
        def loss(x):
            o, _ = KINDS[kind].chunk(**x, cu_seqlens=cu_seqlens, implementation="fused", use_qk_l2norm_in_kernel=True)
            return o.astype(jnp.float32).sum(), o

        return jax.grad(loss, has_aux=True)(x)

    text = compile_for(run, specs(kind, 1, 300, 1, 2, 128, 128, jnp.bfloat16), cu_seqlens, chip=chip).as_text()
    assert f"chunk_{kind}_fwd_c64" in text
    assert f"chunk_{kind}_bwd_c64" in text


def test_gates_stay_narrow():
    """No product of a gate and a key or a value is in memory: nothing of their size is float32."""
    x = specs("gdn2", 1, 32, 1, 2, 256, 128, jnp.bfloat16)
    x["g"] = spec(*x["g"].shape, dtype=jnp.bfloat16)
    law = dict(A_log=spec(2), use_gate_in_kernel=True)

    def run(x, A_log):
        o, _ = KINDS["gdn2"].chunk(**x, **law | dict(A_log=A_log), chunk_size=16, implementation="fused")
        return o.astype(jnp.float32).sum()

    text = text_for_tpu(jax.grad(run), x, law["A_log"])
    assert "chunk_gdn2_bwd_c16" in text
    assert "tensor<1x32x512xbf16>" in text
    assert not re.search(r"tensor<1x32x(2x256|512)xf32>", text)
