"""Kernels that compute less where a program does not read all of their results.

JAX drops what nobody reads, but it cannot look into the launch of a kernel: one result in use keeps all of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.shared import compat


def unless_unread(whole: Callable, part: Callable, *args: Any) -> tuple[Any, Any]:
    """Return the pair (kept, rest) of whole(*args); a program that does not read `rest` computes part(*args) = kept.

    For the forward rule of a custom_vjp with one launch for what the backward reads and for the output, which under
    `jax.checkpoint` may have been read long before. Works under jit, vmap, shard_map and remat; not differentiable.

    What JAX has for this is `optimize_remat` of a custom_vjp: where nobody reads the residuals, the function stands in
    for its forward rule. So here the rest is the residual, and it is got out as the cotangent of an argument of the
    same shape, which nothing reads.

    Args:
      whole: returns (kept, rest), trees of arrays of floating type.
      part: returns kept. It must depend on the same arguments, or vmap of one that only `whole` reads would tell them
        apart.
      *args: trees of arrays.
    """
    # Its trace for the shapes of the rest serves the forward rule, too.
    whole = jax.jit(whole, inline=True)
    rest = jax.eval_shape(whole, *args)[1]
    slots = jax.tree.map(lambda x: compat.varying_zeros(x.shape, *jax.tree.leaves(args)).astype(x.dtype), rest)

    @jax.custom_vjp
    def kept(slots, args):
        return part(*args)

    kept.defvjp(lambda slots, args: whole(*args), lambda rest, _: (rest, None), optimize_remat=True)
    out, pullback = jax.vjp(lambda slots: kept(slots, args), slots)
    return out, pullback(jax.tree.map(jnp.zeros_like, out))[0]
