"""The times of a TPU's parts: what runs on it is compiled for every generation, and what reads a profile reads text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.profiler import ProfileData

from chunkwise.command import device, times
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import tpu

THOROUGH = dict(test_kernels=True)


PROFILE = """
planes {
  name: "/device:TPU:0"
  lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 2000000000 } }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 1000 } }
  event_metadata { key: 1 value { id: 1 name: "jit_run" } }
}
planes { name: "/host:CPU" lines { name: "XLA Modules" events { duration_ps: 5000 } } }
"""


def test_time_of_a_formula():
    chip = CHIPS["v6e"]
    cycles = lambda n: times.FACTOR * n / chip.clock_ghz / 1e6
    assert times.device_ms(chip, [times.Launch(1000, 10)], 100) == pytest.approx(cycles(1100) + times.STEP_US / 100)
    # A launch takes no less than its bytes, and a program no less than its own.
    bound = [times.Launch(1000, 10, floor_ms=7.0), times.Launch(2000, 0, floor_ms=cycles(1000))]
    assert times.device_ms(chip, bound, 100) == pytest.approx(7.0 + cycles(2100))
    assert times.device_ms(chip, bound, 100, floor_ms=9.0) == pytest.approx(9.0 + cycles(100))


def test_times_in_a_profile():
    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(PROFILE))
    assert device.module_ms(profile) == [2.0]


def test_a_profile_of_a_cpu_says_nothing():
    assert device.device_ms(lambda: jnp.ones(3) + 1) is None
    assert device.measure() == {"step_us": None, "clock_ghz": None}


def test_step_and_clock(monkeypatch):
    """The larger size takes more by its steps alone, whatever both take besides."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    size = {}
    fake = lambda name: lambda n: lambda x: size.update({name: n}) or x
    monkeypatch.setattr(device, "empty_steps", fake("steps"))
    monkeypatch.setattr(device, "straight_loop", fake("turns"))
    cycles = lambda: size.get("turns", 0) * device.BUNDLES_OF_A_TURN
    monkeypatch.setattr(device, "device_ms", lambda call: 0.5 + size.pop("steps", 0) * 3e-4 + cycles() / 2e6)
    found = device.measure()
    assert found["step_us"] == pytest.approx(0.3)
    assert found["clock_ghz"] == pytest.approx(2.0)


def test_kernels(monkeypatch):
    """They compute what they say, interpreted."""
    call = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, **options: call(*args, **options, interpret=True))
    x = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
    assert np.array_equal(device.empty_steps(3)(x), x)
    monkeypatch.setattr(device, "CHAIN", 2)
    assert device.straight_loop(2)(jnp.array([5], jnp.int32))[0] == 253


@pytest.mark.tpu
@pytest.mark.thorough
@pytest.mark.skipif(not tpu.has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("chip", CHIPS)
def test_they_compile(chip):
    tpu.setup()
    for make, spec in (
        (device.empty_steps, jax.ShapeDtypeStruct((8, 128), jnp.float32)),
        (device.straight_loop, jax.ShapeDtypeStruct((1,), jnp.int32)),
    ):
        assert len(tpu.launches(tpu.compile_for(make(1000), spec, chip=chip).as_text())) == 1
