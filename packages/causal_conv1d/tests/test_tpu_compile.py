"""The kernels compile for every TPU generation."""

import re

import jax
import jax.numpy as jnp
import pytest

from chunkwise.causal_conv1d import causal_conv1d, causal_conv1d_update
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]
THOROUGH = dict(
    test_compiles=lambda form: form != "packed",
    test_a_step_goes_through_no_loop=lambda tokens: tokens > 1,
)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("D", "W", "form"),
    [(512, 4, "packed"), (200, 2, "rows"), (512, 4, "rows"), (60, 8, "ids")],
)
def test_compiles(D, W, form, chip):
    B, T, N = (1, 300, 5) if form == "packed" else (2, 512, 2)
    cu_seqlens = spec(N + 1, dtype=jnp.int32) if form == "packed" else None
    ids = spec(B, T, dtype=jnp.int32) if form == "ids" else None
    state = None if form == "rows" else spec(N, W - 1, D)
    x = spec(B, T, D, dtype=jnp.bfloat16)

    def run(x, weight, bias, state, cu_seqlens, ids, dy):
        f = lambda *a: causal_conv1d(
            *a, activation="silu", cu_seqlens=cu_seqlens, segment_ids=ids, implementation="pallas"
        )[0]
        y, pull = jax.vjp(f, x, weight, bias, state)
        return y, *pull(dy)

    text = compile_for(run, x, spec(D, W), spec(D), state, cu_seqlens, ids, x, chip=chip).as_text()
    assert f"causal_conv1d_fwd_w{W}" in text
    assert f"causal_conv1d_bwd_w{W}" in text


def test_update_copies_no_pool():
    """A donated pool of 64 MiB is updated in place: the temporaries are those of the sequences."""
    x, pool = spec(8, 1, 512, dtype=jnp.bfloat16), spec(2048, 3, 512)

    def run(x, pool, weight, slots):
        return causal_conv1d_update(x, pool, weight, activation="silu", state_indices=slots)

    program = compile_for(run, x, pool, spec(512, 4), spec(8, dtype=jnp.int32), donate_argnums=(1,))
    assert program.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("D", "W", "tokens", "dtype"), [(512, 4, 1, "bfloat16"), (200, 2, 2, "float32")])
def test_a_step_goes_through_no_loop(D, W, tokens, dtype, chip):
    """XLA neither searches, scatters nor copies a pool that is in rows: two kernels copy the slots of a step."""
    x, pool = spec(1, 300, D, dtype=jnp.bfloat16), spec(2048, W - 1, D, dtype=jnp.dtype(dtype))
    slots = spec(8, dtype=jnp.int32) if tokens == 1 else spec(8, tokens, dtype=jnp.int32)

    def run(x, pool, weight, cu_seqlens, slots, decodes):
        return causal_conv1d_update(
            x, pool, weight, activation="silu", cu_seqlens=cu_seqlens, state_indices=slots, num_decodes=decodes,
            implementation="pallas",
        )  # fmt: skip

    given = x, pool, spec(D, W), spec(9, dtype=jnp.int32), slots, spec(dtype=jnp.int32)
    program = compile_for(run, *given, chip=chip, auto_layout=True, donate_argnums=(1,))
    text = program.as_text()
    assert "read_slots" in text
    assert "write_slots" in text
    assert not re.findall(r" (while|scatter|sort)\(", text)
    assert program.memory_analysis().temp_size_in_bytes < 2**21
