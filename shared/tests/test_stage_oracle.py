"""The stage oracles, chained, are the token recurrence."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.compare import error
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("lengths", [None, (1, 0, 17, 64, 65, 3)], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", ["logsigmoid", "strong", "zero"])
def test_chain(chunk_size, lengths, gate):
    B, T = (2, 70) if lengths is None else (1, sum(lengths) + 5)
    cu_seqlens = None if lengths is None else np.cumsum([0, *lengths], dtype=np.int32)
    N = B if lengths is None else len(lengths)
    x = make_inputs(B, T, H=1, HV=2, K=6, V=4, gate=gate, num_states=N)
    stage = stage_oracle.chain(**x, chunk_size=chunk_size, cu_seqlens=cu_seqlens)
    cu_seqlens = None if lengths is None else jnp.asarray(cu_seqlens)
    expected_o, expected_final = reference(**x, cu_seqlens=cu_seqlens)
    assert error(stage["o"], expected_o) < 1e-12
    assert error(stage["final_state"], expected_final) < 1e-12
