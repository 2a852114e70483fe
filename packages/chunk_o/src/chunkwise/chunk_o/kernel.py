"""The kernel of the output: its launcher."""

import jax

from chunkwise.chunk_o import config, cost, tile
from chunkwise.shared.kernels import chunk_map, gating


def launch(q, k, v, h, g, scale: jax.Array, config: config.Config) -> jax.Array:
    """Run the kernel on chunks.

    q, k [NC, H, C, K], v [NC, HV, C, V], h [NC, HV, K, V], g rows or channels, scale float32 [1] ->
    o [NC, HV, C, V] in the type of v.
    """
    NC, HV, C, V = v.shape
    H, K = k.shape[1], k.shape[3]
    kind, itemsize = gating.gate_kind(g), v.dtype.itemsize
    (o,) = chunk_map.map_chunks(
        tile.output_gates_tile,
        q,
        k,
        v,
        h,
        g,
        scalars=(scale,),
        name=f"chunk_fwd_o_fwd_c{C}{kind}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, V), v.dtype)],
        cost=cost.cost(B=NC, T=C, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, per_channel=bool(kind)),
    )
    return o
