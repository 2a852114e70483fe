"""chunkwise inside of other projects: one module for each host project, which imports the host only when it is used."""

from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["jax_linear_attention", "keras_hub", "levanter", "maxtext", "nnx", "sglang_jax", "tpu_inference"]
