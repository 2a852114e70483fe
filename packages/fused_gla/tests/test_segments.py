"""Rows of segments: values, gradients, isolation, and that there is one launch and one program for all ids."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.tpu import has_libtpu
from tests.either_gla import chunk_either_gla
from tests.segment_suite import SEGMENT_IDS, SegmentTests, compile_segments


class TestSegments(SegmentTests):
    operator = staticmethod(chunk_either_gla)
    launches = (1, 2)
    shared = ("g_gamma",)

    def inputs(self, B=SEGMENT_IDS.shape[0], T=SEGMENT_IDS.shape[1], K=8, dtype=jnp.float32, per_channel=False):
        x = make_inputs(B, T, 1, 2, K, K, dtype=dtype, per_channel=per_channel, num_states=B)
        x.pop("beta")
        return x if per_channel else x | {"g_gamma": jnp.array([-0.1, -0.4])}

    @pytest.mark.tpu
    @pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")
    @pytest.mark.parametrize("chip", CHIPS)
    @pytest.mark.parametrize("per_channel", [False, True])
    def test_compiles(self, per_channel, chip):
        """Forward and backward with states, by masks and without."""
        x = self.inputs(2, 200, 128, jnp.bfloat16, per_channel)
        assert "tpu_custom_call" in compile_segments(self.run("fused"), x, chip).as_text()


def test_one_product_of_pairs():
    """Beside bfloat16 tensors; pairs of later sequences of a chunk do not read the state before it."""
    x = make_inputs(*SEGMENT_IDS.shape, 1, 2, 8, 8, dtype=jnp.bfloat16, per_channel=True)
    del x["beta"]
    segments, options = dict(segment_ids=jnp.asarray(SEGMENT_IDS)), dict(chunk_size=16, implementation="fused")
    run = lambda x: chunk_either_gla(**x, **segments, **options)[0]
    o, gradients = jax.jit(lambda x: (run(x), jax.vjp(run, x)[1](x["v"])[0]))(x)
    want, _, wanted = reference(**x, segment_ids=SEGMENT_IDS, do=x["v"])
    assert_close("o", o, want, 4e-3)
    for name, y in gradients.items():
        assert_close(f"d{name}", y, wanted[name], 5e-3)
