"""The kernel of the interaction matrix: its launcher."""

import jax
import jax.numpy as jnp

from chunkwise.kkt.config import Config
from chunkwise.kkt.cost import cost
from chunkwise.kkt.tile import kkt_tile
from chunkwise.shared.kernels import gate_kind, map_chunks


def launch(k: jax.Array, beta: jax.Array, g: jax.Array, config: Config) -> jax.Array:
    """Run the kernel on chunks: k [NC, H, C, K], beta [NC, HV, 1, C], g rows or channels -> A [NC, HV, C, C]."""
    NC, H, C, K = k.shape
    HV, kind = beta.shape[1], gate_kind(g)
    (A,) = map_chunks(
        kkt_tile,
        k,
        beta,
        g,
        name=f"chunk_scaled_dot_kkt_fwd_c{C}{kind}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, C), jnp.float32)],
        cost=cost(B=NC, T=C, H=H, HV=HV, K=K, C=C, itemsize=k.dtype.itemsize, per_channel=bool(kind)),
    )
    return A
