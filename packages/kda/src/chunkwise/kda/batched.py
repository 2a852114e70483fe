"""The chunk form of many chunks at once, for a GPU; `chunkwise.shared.plain.batched` runs it."""

import jax
import jax.numpy as jnp

from chunkwise.kda import tile, xla
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import chunking, tiles
from chunkwise.shared.plain import batched, state_scan


def make_form(
    options: arguments.Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    masks: chunking.StreamMasks | None,
    products: state_scan.Products,
    e: jax.Array | None = None,
) -> batched.Form:
    """Return the chunk form.

    Args:
      options: as the operator has them.
      q, k: [n, h, C, K].
      v: [n, HV, C, V].
      g: [n, HV, C, K] float32, or [n, HV, C] for gates per head.
      beta: [n, HV, C] float32.
      masks: of chunks that may hold several sequences, or None.
      products: of computed operands.
      e: erase keys [n, HV, C, K] float32, or None for k.
    """
    (n, HV, C, _), beta = v.shape, beta[..., None]
    g = g if g.ndim == 4 else jnp.broadcast_to(g[..., None], (*g.shape, k.shape[3]))
    flat = lambda y: y.reshape(n * HV, *y.shape[2:])
    q, k = (flat(jnp.repeat(y.astype(jnp.float32), HV // y.shape[1], axis=1)) for y in (q, k))
    e = k if e is None else flat(e)
    goes_on = None
    if masks is not None:
        goes_on = flat(jnp.broadcast_to(tile.continuing(masks.same)[:, None], (n, HV, C, 1)))
    base = tile.base_block(options.min_gate, jnp.float32)
    scores, M, decayed = jax.tree.map(
        lambda y: y.reshape(n, HV, *y.shape[1:]), xla.interactions(q, e, k, flat(g), base, goes_on)
    )
    if masks is not None:
        scores, M = (jnp.where(masks.same[:, None], y, 0.0) for y in (scores, M))
        column = lambda y: y[:, None, :, None]
        masks = masks._replace(
            carried=column(masks.carried), ending=column(masks.ending), through=column(masks.through[:, None])
        )
    q_start, e_start, k_end, through = tile.within_sequence(decayed[:2], decayed[2:3], decayed.through, masks)
    A = jnp.where(tiles.strictly_lower(C), beta * M, 0.0)
    w, u = batched.solve(products, A, (beta * e_start, beta * v.astype(jnp.float32)))
    return batched.Form(state_scan.Chunks(jnp.swapaxes(through, 2, 3), w, k_end), u, q_start, scores)
