"""Eight simulated devices. They need more threads than this machine may have cores, or collectives wait for ever."""

import os

os.environ.setdefault("NPROC", "16")

import jax
import pytest

DEVICES = 8

jax.config.update("jax_num_cpu_devices", DEVICES)


@pytest.fixture(autouse=True, scope="session")
def _eight_devices():
    assert jax.device_count() == DEVICES, "run this folder in a process of its own, as nox -s tests does"
