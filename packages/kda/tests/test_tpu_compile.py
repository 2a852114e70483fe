"""The kernels compile for every TPU generation."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from chunkwise.kda import chunk_kda
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu
from tests.compilation import compile_gradient, tokens
from tests.compiled import compile_over_tokens
from tests.transforms import KEEPING

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]
# Plain kernels of chunks and those of the gated delta rule over devices are compiled every time.
THOROUGH = dict(
    test_split_tokens_compile=True,
    test_map_of_many_heads_compiles=True,
    # A gradient compiles the forward pass too, and a pack has all that a batch has.
    test_forward_and_backward_compile=lambda packed: not packed,
    test_raw_gates_compile=True,
    test_long_rows_compile=lambda chip: chip != "v6e",
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
    x = tokens(1, 300 if packed else 600, 1, 2, K, K, dtype, per_channel=True)
    text = compile_gradient(chunk_kda, x, cu_seqlens, chip, min_gate=bound)
    assert "chunk_kda_fwd_c64" in text
    assert "chunk_kda_bwd_c64" in text


@pytest.mark.parametrize("chip", CHIPS)
def test_widths_compile(chip):
    """Heads of two widths, and heads of 64 channels, which lie side by side."""
    widths = {"v5e": (80, 112), "v5p": (16, 160), "v6e": (96, 192), "tpu7x": (48, 256)}
    for K, V in ((64, 64), widths[chip]):
        compile_gradient(chunk_kda, tokens(1, 130, 2, 2, K, V, jnp.bfloat16, per_channel=True), None, chip)


@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_long_rows_compile(chip):
    """The inverses have a stage of their own."""
    x = tokens(1, 3072, 4, 4, 128, 128, jnp.bfloat16, per_channel=True)
    compile_for(lambda x: chunk_kda(**x, implementation="fused"), x, chip=chip)


@pytest.mark.parametrize("chip", CHIPS)
def test_raw_gates_compile(chip):
    """Forward and backward; some chips pack the sequences, others bound the decay."""
    cu_seqlens = spec(4, dtype=jnp.int32) if chip in ("v5e", "v6e") else None
    law = dict(use_gate_in_kernel=True, lower_bound=None if chip in ("v5e", "tpu7x") else -5.0)
    x = tokens(1, 300, 1, 2, 128, 128, per_channel=True)
    x |= dict(g=spec(*x["g"].shape, dtype=jnp.bfloat16), A_log=spec(2), dt_bias=spec(2, 128))
    text = compile_gradient(chunk_kda, x, cu_seqlens, chip, **law)
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
                **x, initial_state=state, output_final_state=True, A_log=A_log, dt_bias=dt_bias,
                cu_seqlens=cu_seqlens, **options, implementation="fused", sharding=PartitionSpec(None, "tokens"),
            )  # fmt: skip

        results, pull = jax.vjp(jax.checkpoint(forward, policy=KEEPING), x, law, state)
        return results, pull(results)

    launches = compile_over_tokens(run, tokens(1, 256, 1, 2, 64, 100, dtype, per_channel=True), others, chip)
    assert launches == [f"chunk_kda_{kind}_c16" for kind in ("bwd", "bwd_state", "fwd", "summary")]


@pytest.mark.parametrize("chip", CHIPS)
def test_map_of_many_heads_compiles(chip):
    """The map takes two chunks a grid step in long rows of many heads, where matrix units are wide."""
    run = lambda x, _: chunk_kda(**x, implementation="fused", sharding=PartitionSpec(None, "tokens"))
    launches = compile_over_tokens(run, tokens(1, 2048, 16, 16, 128, 128, per_channel=True), None, chip)
    assert launches == ["chunk_kda_fwd_c64", "chunk_kda_summary_c64"]
