"""The cost of GDN-2: the cost of Kimi delta attention, and the bytes of erase and write gates, which are read once."""

from jax.experimental import pallas as pl

from chunkwise.kda import config as kda


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int, itemsize: int = 2, backward: bool = False
) -> pl.CostEstimate:
    """Return the cost of the chunk form; the arguments are as in `chunkwise.kda.config.cost`."""
    gates = B * T * HV * (K + V) * itemsize
    return kda.cost(B=B, T=T, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, backward=backward, more=gates)


def comba_cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int, itemsize: int = 2, backward: bool = False
) -> pl.CostEstimate:
    """Return the same for Comba, which reads erase keys, and one gate for every head."""
    moved = B * T * (H * K * itemsize - 4 * HV * (K - 1))
    return kda.cost(B=B, T=T, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, backward=backward, more=moved)
