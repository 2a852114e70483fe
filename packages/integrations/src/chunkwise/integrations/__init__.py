"""chunkwise in other people's houses: one module for each host, which imports its host only when it is used."""

from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["levanter", "maxtext", "nnx", "sglang_jax", "tpu_inference"]
