"""What the gated delta rule has no errors of; the arguments are shapes only, so nothing can have been computed."""

import re
from unittest import mock

import jax
import pytest

from chunkwise.fused_gla import Config, recurrent_gla, recurrent_simple_gla
from chunkwise.fused_gla.operator import SIMPLE_GLA
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import text_for_tpu
from tests.either_gla import chunk_either_gla

GOOD = dict(q=spec(2, 64, 2, 8), k=spec(2, 64, 2, 8), v=spec(2, 64, 2, 4), g=spec(2, 64, 2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(q=spec(2, 64, 1, 8)), "`q` must have shape [B, T, H, K] = (2, 64, 2, 8); got (2, 64, 1, 8)."),
        (dict(g=spec(2, 64, 1)), "`g` must have shape [B, T, HV] = (2, 64, 2); got (2, 64, 1)."),
        (dict(g=spec(2, 64, 2, 4)), "`g` must have shape [B, T, HV, K] = (2, 64, 2, 8); got (2, 64, 2, 4)."),
        (dict(g_gamma=spec(3)), "`g_gamma` must have shape [HV] = (2); got (3,)."),
        (
            dict(initial_state=spec(1, 2, 8, 4)),
            "`initial_state` must have shape [N, HV, K, V] = (2, 2, 8, 4); got (1, 2, 8, 4).",
        ),
        (
            dict(config=Config(3, 1, 1), implementation="fused"),
            "`config.heads` must divide 2 value heads in whole groups of 1 or inside of one, and with K = 16 and "
            "V = 16 in multiples of 128 channels or all heads; got 3.",
        ),
    ],
)
def test_value_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chunk_either_gla(**GOOD | wrong)


def test_recurrent():
    with pytest.raises(ValueError, match=re.escape("`g` must have shape [B, T, HV, K]; got (2, 64, 2).")):
        recurrent_gla(**GOOD)
    message = "`implementation` must be None or one of ('fused', 'xla') for this operator; got 'staged'."
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        recurrent_simple_gla(**GOOD, implementation="staged")


def test_heads_that_are_too_large_for_the_kernels(monkeypatch):
    large = dict(q=spec(1, 64, 2, 2048), k=spec(1, 64, 2, 2048), v=spec(1, 64, 2, 2048))
    message = '"fused" keeps the states of a head in VMEM; K = 2048 and V = 2048 need more of it than there is: use '
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        chunk_either_gla(**large, implementation="fused")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with mock.patch.dict(SIMPLE_GLA.implementations):
        # The chain of stages, which the pipeline registers, comes before plain JAX.
        SIMPLE_GLA.implementations.pop("staged", None)
        assert "tpu_custom_call" not in text_for_tpu(lambda x: chunk_either_gla(**x)[0], large)
    assert "tpu_custom_call" in text_for_tpu(lambda x: chunk_either_gla(**x)[0], GOOD)
