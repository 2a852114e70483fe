"""Operators by composition on a simulated TPU: a pack with states and gradients, against the definitions in float64."""

import pytest

from chunkwise import fused_gdn, kda
from chunkwise.pipeline.operators import COMPOSED
from chunkwise.shared.testing import inputs
from tests.recurrence import assert_recurrence

CONFIGS = {"chunk_gated_delta_product": fused_gdn.Config(1, 1), "chunk_dplr_delta_rule": kda.Config(1, 1)}
# The kernels are those of other operators, of which a sample runs in every session.
THOROUGH = dict(test_operator=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_operator(name):
    entry, pack = COMPOSED[name], inputs.boundaries(3, 0, 17, 4)
    x = entry.source.inputs(1, 26, 1, 2, 12, 20, num_states=4)

    judge = lambda do=None, dht=None, cu_seqlens=None, **x: entry.source.reference(
        x, cu_seqlens=cu_seqlens, do=do, dht=dht
    )
    assert_recurrence(
        entry.function, x, expected=judge, cu_seqlens=pack, chunk_size=16, implementation="fused", config=CONFIGS[name],
        **entry.static,
    )  # fmt: skip
