"""Test set-up for every package: the environment that libtpu reads, before jax is imported."""

from chunkwise.shared import tpu

tpu.setup()
