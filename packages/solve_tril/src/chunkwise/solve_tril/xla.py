"""The same inverse in plain JAX, by blocks. It is shared: the delta rules in plain JAX start from it too."""

from chunkwise.shared.plain.block_inverse import block_inverse as inverse
from chunkwise.shared.plain.block_inverse import known_inverse

__all__ = ["inverse", "known_inverse"]
