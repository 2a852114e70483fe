"""Every kernel compiles for every TPU generation."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from chunkwise.fused_gdn import Config, chunk_gated_delta_rule
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import tpu
from tests.compiled import compile_over_tokens, kernel_products
from tests.transforms import KEEPING

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not tpu.has_libtpu(), reason="libtpu is not installed")]
THOROUGH = dict(
    test_forward_and_backward=lambda K, V: K != V and (K, V) != (96, 192),
    test_sixteen_long_sequences=True,
    test_states_and_float32=True,
    test_split_tokens=True,
)


def specs(T, H, HV, K, V, dtype=jnp.bfloat16, B=1):
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, HV, V)]
    return [*(jax.ShapeDtypeStruct(s, dtype) for s in shapes), *2 * [jax.ShapeDtypeStruct((B, T, HV), jnp.float32)]]


def assert_float32_accuracy(text, tensors):
    """Fail unless every product of float32 operands asks for float32 accuracy; the others have bfloat16 operands.

    The products of the inverse are of bfloat16 parts, three for float32 tensors and two for bfloat16 ones: a CPU
    multiplies these as a TPU does, so what tests of the inverse and of repeated keys measure holds there too.
    """
    for kernel in kernel_products(text):
        assert set(kernel) <= {("f32", "f32", "fp32"), ("bf16", "bf16", "")}
        assert (("f32", "f32", "fp32") if tensors == jnp.float32 else ("bf16", "bf16", "")) in kernel
    assert not re.search(r" (dot|convolution)\(", text), "no products but those of the kernels"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("C", "packed", "K", "V", "T", "disable_recompute", "config"),
    [
        (128, True, 128, 128, 600, False, Config(2, 2)),
        (64, False, 256, 256, 600, False, Config(2, 2, chunks=2)),
        (64, False, 128, 128, 600, True, Config(2, 2, chunks=2)),
        (64, False, 128, 128, 640, True, Config(2, 2, turns=2)),
        (64, False, 96, 192, 640, False, Config(2, 2, turns=2)),
        (64, True, 96, 192, 600, False, Config(2, 2)),
        (64, False, 80, 112, 600, False, Config(2, 2, chunks=2)),
        (64, False, 16, 48, 640, False, Config(2, 2, turns=2)),
        (64, False, 192, 64, 640, True, Config(2, 2, turns=2)),
        (128, False, 32, 160, 640, False, Config(2, 2, turns=2)),
    ],
)
def test_forward_and_backward(chip, C, packed, K, V, T, disable_recompute, config):
    """The rows that are not packed are long enough for a forward of several chunks a grid step."""

    def gradients(q, k, v, g, beta, cu_seqlens, do):
        def run(*x):
            return chunk_gated_delta_rule(
                *x, cu_seqlens=cu_seqlens, chunk_size=C, implementation="fused", config=config,
                use_qk_l2norm_in_kernel=True, disable_recompute=disable_recompute,
            )[0]  # fmt: skip

        o, pull = jax.vjp(run, q, k, v, g, beta)
        return o, pull(do)

    cu_seqlens = jax.ShapeDtypeStruct((5,), jnp.int32) if packed else None
    arguments = specs(T, 1, 2, K, V)
    text = tpu.compile_for(gradients, *arguments, cu_seqlens, arguments[2], chip=chip).as_text()
    # One launch forward; backward the states, unless they are kept, and the reverse pass.
    assert text.count('custom_call_target="tpu_custom_call"') == 3 - disable_recompute
    assert_float32_accuracy(text, jnp.bfloat16)


def test_gradient_under_x64():
    """Under x64 a Python number is a float64, of which a kernel makes a float32 only where that is the same number."""
    config = Config(2, 2, turns=2)

    def gradients(*x):
        o, pull = jax.vjp(lambda *x: chunk_gated_delta_rule(*x, implementation="fused", config=config)[0], *x)
        return pull(o)

    with jax.enable_x64(True):
        assert len(tpu.launches(tpu.compile_for(gradients, *specs(512, 1, 2, 128, 128)).as_text())) == 3


@pytest.mark.parametrize("chip", CHIPS)
def test_sixteen_long_sequences(chip):
    """16 x 16,384 tokens in one pack, forward and backward: memory is what the backward needs of the forward."""
    T, H, K, C = 16 * 16384, 16, 128, 64

    def run(q, k, v, g, beta, cu_seqlens, do):
        # As the projections of a model leave them: in any other layout XLA copies q, k and v first.
        heads = lambda x: x.reshape(1, T, H, K)
        forward = lambda q, k, v, g, beta: chunk_gated_delta_rule(
            heads(q), heads(k), heads(v), g, beta, cu_seqlens=cu_seqlens, implementation="fused"
        )[0].reshape(do.shape)
        o, pull = jax.vjp(forward, q, k, v, g, beta)
        return o, pull(do)

    x, gate = jax.ShapeDtypeStruct((1, T, H * K), jnp.bfloat16), jax.ShapeDtypeStruct((1, T, H), jnp.float32)
    compiled = tpu.compile_for(run, x, x, x, gate, gate, jax.ShapeDtypeStruct((17,), jnp.int32), x, chip=chip)
    inverse, written, states = 4 * T * H * C, 4 * T * H * K, 2 * T // C * H * K * K
    # Gates, beta and their gradients are padded to 128 lanes for every block of heads, and each core has a block.
    padded_gates = 4 * (2 if chip == "v5p" else 1) * 4 * T * 128
    assert compiled.memory_analysis().temp_size_in_bytes < 1.05 * (inverse + written + states + padded_gates)


@pytest.mark.parametrize("chip", CHIPS)
def test_states_and_float32(chip):
    """Forward and backward of a pack whose sequences hand in and out their states; no TPU loads float16."""

    def run(cu_seqlens, cotangents, *x):
        forward = lambda *x: chunk_gated_delta_rule(
            *x[:5], None, x[5], True, cu_seqlens=cu_seqlens, implementation="fused",
            config=Config(heads=2, heads_bwd=2),
        )  # fmt: skip
        results, pull = jax.vjp(forward, *x)
        return results, pull(cotangents)

    x = specs(300, 2, 2, 60, 100, jnp.float32)
    x = [y if i in (0, 2) else jax.ShapeDtypeStruct(y.shape, jnp.float16) for i, y in enumerate(x)]
    state, cu = jax.ShapeDtypeStruct((4, 2, 60, 100), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)
    text = tpu.compile_for(run, cu, (x[2], state), *x, state, chip=chip).as_text()
    assert_float32_accuracy(text, jnp.float32)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_split_tokens(dtype, chip):
    """Tokens over chips, for some of them packed: a map, the operator that gets its inverses, and the backward.

    The map of rows takes two chunks a grid step, of bfloat16 tensors in lock-step, and the map of a pack one. Under a
    policy of `jax.checkpoint` that saves what they keep, no launch of the forward is repeated.
    """
    packed = chip in ("v6e", "v5e")
    others = jax.ShapeDtypeStruct((3 if packed else 1, 4, 64, 100), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)

    def run(x, others):
        state, cu_seqlens = others

        def forward(x, state):
            return chunk_gated_delta_rule(
                *x, None, state, True, cu_seqlens=cu_seqlens if packed else None, implementation="fused",
                config=None if dtype == jnp.bfloat16 else Config(4, 4, turns=2),
                sharding=PartitionSpec(None, "tokens"),
            )  # fmt: skip

        results, pull = jax.vjp(jax.checkpoint(forward, policy=KEEPING), x, state)
        return results, pull(results)

    launches = compile_over_tokens(run, specs(2048, 2, 4, 64, 100, dtype), others, chip)
    kinds = "bwd", "bwd_state", "fwd", "states", "summary"
    assert launches == [f"chunk_gated_delta_rule_{kind}_c64" for kind in kinds]
