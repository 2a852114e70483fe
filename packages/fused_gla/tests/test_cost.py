"""What docstrings promise is what the launches say they cost."""

import pytest

from chunkwise.fused_gla import chunk_simple_gla, recurrent_gla, recurrent_simple_gla
from chunkwise.fused_gla.cost import cost
from chunkwise.shared.serving.decode import launch
from tests.documents import documented_flops

SIZES = dict(B=2, T=64, K=8, V=4)


def test_chunked():
    sizes = SIZES | dict(H=3, HV=6, C=16)
    want = documented_flops(chunk_simple_gla, **sizes)
    assert cost(**sizes).flops == want
    # 2 C K for the scores, 2 C V for what they weight, 2 K V each for the update of the state and its reading.
    assert want == 2 * 64 * (3 * 2 * 16 * 8 + 6 * (2 * 16 * 4 + 4 * 8 * 4))
    # With gates per channel every value head has scores of its own.
    assert cost(**sizes, per_channel=True).flops - want == 2 * 64 * 3 * 2 * 16 * 8


def test_backward_and_states_alone():
    sizes = SIZES | dict(H=3, HV=3, C=16)
    assert cost(**sizes, output=False).flops == 2 * 64 * 3 * 2 * 8 * 4
    assert cost(**sizes, backward=True).flops > 2 * cost(**sizes).flops


@pytest.mark.parametrize("recurrence", [recurrent_gla, recurrent_simple_gla])
def test_recurrent(recurrence):
    sizes = SIZES | dict(H=1, HV=3)
    assert launch.flops(2 * 64, 3, 8, 4, delta=False) == documented_flops(recurrence, **sizes)
