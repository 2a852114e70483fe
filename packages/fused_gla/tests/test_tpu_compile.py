"""The kernels compile for every TPU generation, within the memory that training has."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise.fused_gla import Config
from chunkwise.fused_gla.operator import GLA
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.implementation import implementations
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu
from tests.compiled import kernel_products
from tests.either_gla import chunk_either_gla

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]
THOROUGH = dict(
    # They differ from others in sizes alone.
    test_compiles=lambda case: case != "channel",
    test_launches_over_devices_compile=lambda case: case == "constant",
)


def unflattened(x, B, T, H, HV):
    """Return the arrays of an operator, by name, from those with tokens flat [B, T, heads * D]."""

    def unflatten(name, y):
        heads = H if name in "qk" else HV
        return y.reshape(B, T, heads, -1) if y.ndim == 3 and y.shape[:2] == (B, T) and y.shape[2] != heads else y

    return {name: unflatten(name, y) for name, y in x.items()}


def compile_gradient(x, chip, B, T, H, HV, layer=lambda fn: fn, **options):
    """Compile the gradients of x, whose q, k, v are flat [B, T, heads * D] as a projection leaves them, for do = v."""

    def run(x, cu_seqlens, do):
        def flat(x):
            x = unflattened(x, B, T, H, HV)
            o, state = chunk_either_gla(**x, cu_seqlens=cu_seqlens, implementation="fused", **options)
            return o.reshape(B, T, -1), state

        (o, state), pullback = jax.vjp(layer(flat), x)
        return pullback((do, state))[0], o if layer is jax.checkpoint else None

    packed = x.pop("cu_seqlens", None)
    return compile_for(run, x, packed, x["v"], chip=chip)


def tokens(B, T, H, K, V, HV=None, **more):
    lanes = H * K, H * K, (HV or H) * V
    return dict(zip("qkv", (spec(B, T, n, dtype=jnp.bfloat16) for n in lanes), strict=True)) | more


CASES = {
    "constant": (dict(B=1, T=65536, H=16, K=128, V=128), lambda: dict(g_gamma=spec(16)), {}),
    "constant, narrow": (dict(B=1, T=4096, H=8, K=48, V=64), lambda: dict(g_gamma=spec(8)), {}),
    "head, chunk 128": (dict(B=1, T=4096, H=2, K=256, V=128), lambda: dict(g=spec(1, 4096, 2)), dict(chunk_size=128)),
    "head, wide": (dict(B=1, T=4096, H=2, K=512, V=512), lambda: dict(g=spec(1, 4096, 2)), {}),
    "channel": (dict(B=1, T=4096, H=2, K=128, V=128), lambda: dict(g=spec(1, 4096, 256)), {}),
    "groups": (dict(B=1, T=1024, H=2, HV=16, K=128, V=64), lambda: dict(g=spec(1, 1024, 16)), {}),
    "large group, channel": (
        dict(B=1, T=256, H=2, HV=16, K=128, V=64), lambda: dict(g=spec(1, 256, 16 * 128)), dict(config=Config(4, 4, 1))
    ),
    "packed with states": (
        dict(B=1, T=300, H=2, K=64, V=100),
        lambda: dict(
            g=spec(1, 300, 2), cu_seqlens=spec(5, dtype=jnp.int32), initial_state=spec(4, 2, 64, 100)
        ),
        dict(output_final_state=True),
    ),
    "packed, head": (
        dict(B=1, T=300, H=2, K=128, V=128),
        lambda: dict(g=spec(1, 300, 2), cu_seqlens=spec(5, dtype=jnp.int32)),
        {},
    ),
    "packed, channel": (
        dict(B=1, T=300, H=2, K=128, V=128),
        lambda: dict(g=spec(1, 300, 256), cu_seqlens=spec(5, dtype=jnp.int32)),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", CASES)
def test_compiles(case, chip):
    sizes, more, options = CASES[case]
    x = tokens(**sizes, **more())
    heads = sizes["H"], sizes.get("HV", sizes["H"])
    text = compile_gradient(x, chip, sizes["B"], sizes["T"], *heads, jax.checkpoint, **options).as_text()
    for kernel in ("fwd", "states", "bwd"):
        assert f"chunk_gla_{kernel}_c" in text


# What is launched where tokens are split over devices has states in and out always.
SPLIT = {
    "packed, head": (
        dict(T=300, H=2, HV=4, K=64, V=100), lambda: dict(g=spec(1, 300, 4), cu_seqlens=spec(5, dtype=jnp.int32))
    ),
    "segments, channel": (
        dict(T=300, H=2, HV=2, K=128, V=128),
        lambda: dict(g=spec(1, 300, 256, dtype=jnp.bfloat16), segment_ids=spec(1, 300, dtype=jnp.int32)),
    ),
    "constant": (dict(T=320, H=2, HV=2, K=128, V=128), lambda: dict(g_gamma=spec(2))),
}  # fmt: skip


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", SPLIT)
def test_launches_over_devices_compile(case, chip):
    """The states alone, and the gradient of those before the tokens alone."""
    sizes, more = SPLIT[case]
    x = tokens(B=1, **sizes, **more())
    N = 4 if "cu_seqlens" in x else 1
    x["initial_state"] = spec(N, sizes["HV"], sizes["K"], sizes["V"])
    options = Options(True, chunk_size=64, scale=1.0)
    fused = GLA.implementations["fused"]

    def run(x):
        y = Arguments(**{"g": None} | unflattened(x, 1, sizes["T"], sizes["H"], sizes["HV"]))
        chosen = implementations.plan(fused, y, options, states=True).options
        return fused.state_map(y, chosen, True), fused.state_gradient(y, chosen, None, y.v, y.initial_state)

    text = compile_for(run, x, chip=chip).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    for kernel in ("summary", "bwd_state"):
        assert f"chunk_gla_{kernel}_c{128 if case == 'segments, channel' else 64}" in text


def test_memory_and_products_of_training():
    sizes = dict(B=2, T=4096, H=16, K=128, V=128)
    program = compile_gradient(tokens(**sizes, g_gamma=spec(16)), "v6e", 2, 4096, 16, 16)
    memory, text = program.memory_analysis(), program.as_text()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert total <= 256 * 2**20
    assert "chunk_gla_fwd" not in text, "nobody reads o"
    kernels = kernel_products(text)
    assert len(kernels) == 2
    assert {product for kernel in kernels for product in kernel} == {("bf16", "bf16", "")}
    assert " reverse(" not in text, "time runs backwards through the index maps"


def test_states_of_a_pack_compile_under_vmap():
    def run(x, cu_seqlens):
        one = lambda x: chunk_either_gla(**x, cu_seqlens=cu_seqlens, output_final_state=True, implementation="fused")
        out, pullback = jax.vjp(one, x)
        return pullback((x["v"], x["initial_state"])), out

    x = dict(zip("qkv", [spec(2, 1, 100, 1, 128)] * 3, strict=True)) | dict(initial_state=spec(2, 3, 1, 128, 128))
    text = compile_for(jax.vmap(run, in_axes=(0, None)), x, spec(4, dtype=jnp.int32)).as_text()
    assert "chunk_gla_bwd_c128_varlen" in text
