"""The kernels compile for every TPU generation."""

import re

import jax
import jax.numpy as jnp
import pytest

from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import has_libtpu, text_for_tpu
from tests.compilation import compile_gradient, tokens
from tests.either_two_keys import KINDS

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]
# The kernels of KDA, which its package compiles; one program of all of their new parts is quick.
THOROUGH = dict(
    test_forward_and_backward_compile=lambda kind, packed: (kind, packed) != ("gdn2", False),
)


def specs(kind, *sizes):
    x = tokens(*sizes, per_channel=kind == "gdn2")
    if kind == "comba":
        return x | dict(p=x["q"])
    del x["beta"]
    return x | dict(b=spec(*x["g"].shape, dtype=jnp.bfloat16), w=x["v"])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_compile(kind, packed, chip):
    cu_seqlens, x = spec(4, dtype=jnp.int32) if packed else None, specs(kind, 1, 300, 1, 2, 128, 128)
    text = compile_gradient(KINDS[kind].chunk, x, cu_seqlens, chip, use_qk_l2norm_in_kernel=True)
    assert f"chunk_{kind}_fwd_c64" in text
    assert f"chunk_{kind}_bwd_c64" in text


def test_gates_stay_narrow():
    """No product of a gate and a key or a value is in memory: nothing of their size is float32."""
    x = specs("gdn2", 1, 32, 1, 2, 256, 128)
    x["g"] = spec(*x["g"].shape, dtype=jnp.bfloat16)
    law = dict(A_log=spec(2), use_gate_in_kernel=True)

    def run(x, A_log):
        o, _ = KINDS["gdn2"].chunk(**x, **law | dict(A_log=A_log), chunk_size=16, implementation="fused")
        return o.astype(jnp.float32).sum()

    text = text_for_tpu(jax.grad(run), x, law["A_log"])
    assert "chunk_gdn2_bwd_c16" in text
    assert "tensor<1x32x512xbf16>" in text
    assert not re.search(r"tensor<1x32x(2x256|512)xf32>", text)
