"""The inverse in plain JAX, by blocks. The code is in shared, because the delta rules in plain JAX need it, too."""

from chunkwise.shared.plain.block_inverse import block_inverse as inverse
from chunkwise.shared.plain.block_inverse import known_inverse

__all__ = ["inverse", "known_inverse"]
