"""The documentation states the flops of the one function of cost, which every launch uses."""

import pytest

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_h.cost import cost
from chunkwise.shared.testing.documents import documented_flops


@pytest.mark.parametrize("C", [16, 64, 128])
def test_documented_flops(C):
    sizes = dict(B=2, T=384, H=3, HV=6, K=96, V=80, C=C)
    for delta_rule, function in ((True, chunk_gated_delta_rule_fwd_h), (False, chunk_fwd_h)):
        forward = cost(**sizes, delta_rule=delta_rule)
        assert forward.flops == documented_flops(function, **sizes)
        assert cost(**sizes, delta_rule=delta_rule, backward=True).flops == 2 * forward.flops
