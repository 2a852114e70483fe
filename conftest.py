"""Test set-up for every package: the environment that libtpu reads, and compiled programs dropped after each file."""

import jax
import pytest

from chunkwise.shared import tpu

tpu.setup()


@pytest.fixture(autouse=True, scope="module")
def _drop_compiled_programs():
    yield
    jax.clear_caches()
