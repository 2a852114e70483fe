"""The kernel compiles for every TPU generation; A does not depend on K and V."""

import functools

import jax
import jax.numpy as jnp
import pytest

from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu
from chunkwise.solve_tril import solve_tril

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]


# A packed batch has more chunks for the same kernel: only its tables are new, and they compile longer than the kernel.
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("C", "packed"), [(64, False), (128, False), (128, True)])
def test_compiles(C, packed, chip):
    cu_seqlens = spec(4, dtype=jnp.int32) if packed else None
    run = functools.partial(solve_tril, implementation="pallas")
    text = compile_for(run, spec(1, 300, 4, C), cu_seqlens, chip=chip).as_text()
    assert "tpu_custom_call" in text
    assert f"solve_tril_fwd_c{C}" in text


def test_compiles_under_x64():
    """Under x64 a Python number in an index map, or as a rotation, would be an int64, which no TPU kernel takes."""
    with jax.enable_x64(True):
        text = compile_for(functools.partial(solve_tril, implementation="pallas"), spec(1, 300, 4, 64)).as_text()
    assert "solve_tril_fwd_c64" in text
