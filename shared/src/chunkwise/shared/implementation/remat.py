"""The name of the output and the residuals of a forward kernel, for the policies of jax.checkpoint."""

import jax
from jax.ad_checkpoint import checkpoint_name

# A policy that saves this name spares the backward a second forward.
RESIDUAL_NAME = "chunkwise_residuals"


def save_for_backward(tree):
    """Return arrays, in any structure, under the name by which a policy keeps them."""
    return jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL_NAME), tree)
