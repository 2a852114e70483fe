"""The name of what a forward kernel makes for its user and for its backward, for the policies of jax.checkpoint."""

import jax
from jax.ad_checkpoint import checkpoint_name

# A policy that saves this name spares the backward a second forward.
KEPT_NAME = "chunkwise_kept"


def keep(tree):
    """Return arrays, in any structure, under the name by which a policy keeps them."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT_NAME), tree)
