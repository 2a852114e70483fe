"""The chunk form of many chunks at once, for a GPU; `chunkwise.shared.plain.batched` runs it."""

import jax
import jax.numpy as jnp

from chunkwise.fused_gdn import xla
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
) -> batched.Form:
    """Return the chunk form.

    Here beta multiplies the columns of A, so that its own gradient needs no division by it: w and u are
    beta (I + A)^-1 times the keys, decayed from the start, and the values.

    Args:
      options: as the operator has them; not read.
      q, k: [n, h, C, K].
      v: [n, HV, C, V].
      g, beta: [n, HV, C] float32.
      masks: of chunks that may hold several sequences, or None.
      products: of computed operands.
    """
    n, HV, C, _ = v.shape
    decays = xla.find_decays(g[:, :, None], masks)
    coarse, fine, from_start, to_end, through = (jnp.swapaxes(y, 2, 3) for y in decays)  # columns [n, HV, C, 1]
    row = lambda y: jnp.swapaxes(y, 2, 3)
    below = tiles.strictly_lower(C) if masks is None else tiles.strictly_lower(C) & masks.same[:, None]
    decay = tiles.masked_exp((coarse - row(coarse)) + (fine - row(fine)), below)
    repeat = lambda y: jnp.repeat(y, HV // y.shape[1], axis=1)
    kk, qk = repeat(products.dot_nt(k, k)), repeat(products.dot_nt(q, k))
    q, k = repeat(q), repeat(k)
    A, beta = decay * kk * beta[:, :, None], beta[..., None]
    # A token reads its own value undecayed.
    scores = jnp.where(tiles.row_index(C) == tiles.column_index(C), qk, decay * qk)
    w, u = batched.solve(products, A, (from_start * k, v.astype(jnp.float32)))
    return batched.Form(
        state_scan.Chunks(through, beta * w, to_end * k), beta * u, q_start=from_start * q, scores=scores
    )
