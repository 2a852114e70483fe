"""The kernels compile for every TPU generation."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from chunkwise.kda import chunk_kda
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, compile_over_tokens, has_libtpu
from tests.transforms import KEEPING

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]
# Plain kernels of chunks and those of the gated delta rule over devices are compiled every time.
THOROUGH = dict(
    test_split_tokens_compile=True,
    # A gradient compiles the forward pass too, and a pack has all that a batch has.
    test_forward_and_backward_compile=lambda packed: not packed,
    test_raw_gates_compile=True,
)


def specs(B, T, H, HV, K, V, dtype):
    return (
        spec(B, T, H, K, dtype=dtype),
        spec(B, T, H, K, dtype=dtype),
        spec(B, T, HV, V, dtype=dtype),
        spec(B, T, HV, K),
        spec(B, T, HV),
    )


@pytest.mark.parametrize(
    ("packed", "bound", "K", "dtype", "chip"),
    [
        *((False, None, 128, jnp.bfloat16, chip) for chip in CHIPS),
        *((True, -5.0, 128, jnp.bfloat16, chip) for chip in ("v5e", "v6e", "tpu7x")),
        (True, None, 256, jnp.float32, "v5p"),
    ],
)
def test_forward_and_backward_compile(packed, bound, K, dtype, chip):
    """The rows that are not packed are long enough for a forward of several chunks a grid step."""
    cu_seqlens = spec(4, dtype=jnp.int32) if packed else None

    def run(*x):
        def loss(*y):
            o, _ = chunk_kda(*y, cu_seqlens=x[5], min_gate=bound, implementation="fused")
            return o.astype(jnp.float32).sum(), o

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(*x[:5])

    text = compile_for(run, *specs(1, 300 if packed else 600, 1, 2, K, K, dtype), cu_seqlens, chip=chip).as_text()
    assert "chunk_kda_fwd_c64" in text
    assert "chunk_kda_bwd_c64" in text


@pytest.mark.parametrize("chip", CHIPS)
def test_raw_gates_compile(chip):
    """Forward and backward; some chips pack the sequences, others bound the decay."""
    cu_seqlens = spec(4, dtype=jnp.int32) if chip in ("v5e", "v6e") else None
    law = dict(use_gate_in_kernel=True, lower_bound=None if chip in ("v5e", "tpu7x") else -5.0)

    def run(*x):
        def loss(*y):
            o, _ = chunk_kda(*y[:5], A_log=y[5], dt_bias=y[6], cu_seqlens=x[7], **law, implementation="fused")
            return o.astype(jnp.float32).sum(), o

        return jax.grad(loss, argnums=tuple(range(7)), has_aux=True)(*x[:7])

    q, k, v, g, beta = specs(1, 300, 1, 2, 128, 128, jnp.bfloat16)
    g = spec(*g.shape, dtype=jnp.bfloat16)
    text = compile_for(run, q, k, v, g, beta, spec(2), spec(2, 128), cu_seqlens, chip=chip).as_text()
    assert "chunk_kda_fwd_c64" in text
    assert "chunk_kda_bwd_c64" in text


@pytest.mark.parametrize("chip", CHIPS)
def test_split_tokens_compile(chip):
    """Tokens over the chips of a topology; some chips pack documents, others have a law.

    There are four launches, each once, also under a policy of `jax.checkpoint` that saves what they keep.
    """
    packed, dtype = chip in ("v6e", "v5e"), jnp.float32 if chip == "v5p" else jnp.bfloat16
    others = [spec(2), spec(2, 64)], spec(3 if packed else 1, 2, 64, 100), spec(4, dtype=jnp.int32) if packed else None

    def run(x, others):
        law, state, cu_seqlens = others
        options = dict(use_gate_in_kernel=not packed, lower_bound=-5.0 if chip == "v5p" else None, chunk_size=16)

        def forward(x, law, state):
            A_log, dt_bias = (None, None) if packed else law
            return chunk_kda(
                *x, None, state, True, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens, **options,
                implementation="fused", sharding=PartitionSpec(None, "tokens"),
            )  # fmt: skip

        results, pull = jax.vjp(jax.checkpoint(forward, policy=KEEPING), x, law, state)
        return results, pull(results)

    launches = compile_over_tokens(run, specs(1, 256, 1, 2, 64, 100, dtype), others, chip)
    assert launches == [f"chunk_kda_{kind}_c16" for kind in ("bwd", "bwd_state", "fwd", "summary")]
