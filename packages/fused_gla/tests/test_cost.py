"""What launches say they cost; the pipeline compares it with the docstrings."""

from chunkwise.fused_gla.config import cost

SIZES = dict(B=2, T=64, K=8, V=4)


def test_chunked():
    sizes = SIZES | dict(H=3, HV=6, C=16)
    want = cost(**sizes).flops
    # 2 C K for the scores, 2 C V for what they weight, 2 K V each for the update of the state and its reading.
    assert want == 2 * 64 * (3 * 2 * 16 * 8 + 6 * (2 * 16 * 4 + 4 * 8 * 4))
    # With gates per channel every value head has scores of its own.
    assert cost(**sizes, per_channel=True).flops - want == 2 * 64 * 3 * 2 * 16 * 8


def test_backward_and_states_alone():
    sizes = SIZES | dict(H=3, HV=3, C=16)
    assert cost(**sizes, output=False).flops == 2 * 64 * 3 * 2 * 8 * 4
    assert cost(**sizes, backward=True).flops > 2 * cost(**sizes).flops
