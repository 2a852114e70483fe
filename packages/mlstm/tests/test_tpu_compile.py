"""The sizes of xLSTM-7B compile for every TPU generation."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise.mlstm import chunk_mlstm, recurrent_mlstm
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu, launches

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]
THOROUGH = dict(test_decode_compiles=lambda chip: chip != "v6e")


def tokens(B, T, H=8, K=256, V=512):
    x = {name: spec(B, T, H, n, dtype=jnp.bfloat16) for name, n in dict(q=K, k=K, v=V).items()}
    return x | {name: spec(B, T, H) for name in ("i", "f")}


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip):
    def gradients(x, do):
        o, pull = jax.vjp(lambda x: chunk_mlstm(**x, implementation="fused")[0], x)
        return o, pull(do)[0]

    x = tokens(1, 1024)
    text = compile_for(gradients, x, x["v"], chip=chip).as_text()
    assert len(launches(text)) == 2


@pytest.mark.parametrize("chip", CHIPS)
def test_decode_compiles(chip):
    x, state = tokens(4, 1), (spec(4, 8, 256, 512), spec(4, 8, 256), spec(4, 8))
    run = lambda x, state: recurrent_mlstm(**x, initial_state=state, output_final_state=True, implementation="fused")
    assert len(launches(compile_for(run, x, state, chip=chip).as_text())) == 1
