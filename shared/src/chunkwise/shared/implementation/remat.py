"""What `jax.checkpoint` keeps of a forward kernel, and how much of the kernel it runs again before the backward."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from chunkwise.shared import compat

# A policy that saves this name spares the backward a second forward.
RESIDUAL_NAME = "chunkwise_residuals"


def save_for_backward(tree):
    """Return arrays, in any structure, under the name by which a policy keeps them."""
    return jax.tree.map(functools.partial(checkpoint_name, name=RESIDUAL_NAME), tree)


def recompute_if_unused(whole: Callable, part: Callable, *args: object) -> tuple[Any, Any]:
    """Return the pair (kept, rest) of whole(*args); a program that does not read `rest` runs part(*args) instead.

    JAX drops results that nobody reads, but not of a kernel launch: if one result is read, all are computed. This is
    for the forward rule of a custom_vjp whose one launch makes the residuals and the output: when `jax.checkpoint` runs
    it again before the backward, nobody reads the output. It works under jit, vmap, shard_map and remat, and is not
    differentiable.

    It is made from `optimize_remat` of JAX: where nobody reads the residuals of a custom_vjp, the function itself runs
    in the place of its forward rule. `rest` has to be such a residual, and yet a result. So it takes this way::

        forward rule:   args -> whole(*args) -> kept, and rest as the residual
        backward rule:  rest -> the cotangent of `spare`, which is an argument of the shape of rest that nothing reads

    The pullback is called at once, with zeros: its result is `rest`. If nobody reads this result, nobody reads the
    residual, and JAX runs part(*args).

    Args:
      whole: returns (kept, rest), trees of arrays of floating type.
      part: returns kept. It must read all arguments that `whole` reads, or vmap over an argument would batch the result
        of one of them only.
      *args: trees of arrays.
    """
    # With jit, the trace that finds the shapes of `rest` serves the forward rule, too.
    whole = jax.jit(whole, inline=True)
    rest = jax.eval_shape(whole, *args)[1]
    spare = jax.tree.map(lambda x: compat.varying_zeros(x.shape, *jax.tree.leaves(args)).astype(x.dtype), rest)

    @jax.custom_vjp
    def kept(spare, args):
        return part(*args)

    kept.defvjp(lambda spare, args: whole(*args), lambda rest, _: (rest, None), optimize_remat=True)
    out, pullback = jax.vjp(lambda spare: kept(spare, args), spare)
    return out, pullback(jax.tree.map(jnp.zeros_like, out))[0]
