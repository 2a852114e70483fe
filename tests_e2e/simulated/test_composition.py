"""Operators by composition on a simulated TPU: a pack with states and gradients, against the definitions in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import fused_gdn, kda
from chunkwise.pipeline.operators import COMPOSED
from chunkwise.shared.testing import compare, inputs

CONFIGS = {"chunk_gated_delta_product": fused_gdn.Config(1, 1), "chunk_dplr_delta_rule": kda.Config(1, 1)}
# The kernels are those of other operators, of which a sample runs in every session.
THOROUGH = dict(test_operator=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_operator(name):
    entry, pack = COMPOSED[name], inputs.boundaries(3, 0, 17, 4)
    x = entry.source.inputs(1, 26, 1, 2, 12, 20, num_states=4)

    def run(x, cu_seqlens):
        o, state = entry.function(
            **x, **entry.static, cu_seqlens=cu_seqlens, output_final_state=True, chunk_size=16, implementation="fused",
            config=CONFIGS[name],
        )  # fmt: skip
        return dict(o=o, final_state=state)

    rng = np.random.default_rng(1)
    do, dht = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 26, 2, 20), (4, 2, 12, 20)))
    got = compare.gradient_program(run)(inputs.poison_padding(x, pack), pack, dict(o=do, final_state=dht))
    o, state, gradients = entry.source.reference(x, cu_seqlens=pack, do=do, dht=dht)
    want = dict(o=o, final_state=state) | {f"d{key}": y for key, y in gradients.items()}
    for key, y in want.items():
        compare.assert_close(key, got[key], y, compare.tolerance(key, "float32"))
