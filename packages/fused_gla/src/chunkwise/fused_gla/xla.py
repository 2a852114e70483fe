"""GLA and simple GLA in plain JAX: the mathematics of their chunks, for `chunkwise.shared.plain.chunks`."""

import jax.numpy as jnp

from chunkwise.fused_gla import tile
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import tiles
from chunkwise.shared.plain import chunks, state_scan


def make_form(x: chunks.Tokens, options: arguments.Options, products: state_scan.Products) -> chunks.Form:
    """Return the chunk form of tokens with gates per head or per channel."""
    n, HV, C, _ = x.v.shape
    # Operands are float32, because JAX would round the gradient of a bfloat16 operand, which goes to the scores and the
    # states.
    wide = lambda y: tiles.repeat_heads(y.astype(jnp.float32), HV, axis=1)
    flat = lambda y: y.reshape(n * HV, *y.shape[2:])
    back = lambda y: y.reshape(n, HV, *y.shape[1:])
    same = None if x.masks is None else jnp.repeat(x.masks.same, HV, axis=0)
    decays = tile.decays(flat(x.g), 1.0, same)
    from_start, to_end, through = map(back, decays[1:4])
    if x.masks is not None:
        from_start = jnp.where(x.masks.carried[:, None, :, None], from_start, 0.0)
        to_end = jnp.where(x.masks.ending[:, None, :, None], to_end, 0.0)
        through = jnp.where(x.masks.through[:, None, None, None], through, 0.0)
    k, through = wide(x.k), jnp.swapaxes(through, 2, 3)
    if x.q is None:
        return chunks.Form(through, k * to_end, None, None)
    q = wide(x.q)
    return chunks.Form(through, k * to_end, q * from_start, back(tile.scores(flat(q), flat(k), decays, same)))


RULE = chunks.Rule(make_form, delta=False)
