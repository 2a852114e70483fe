"""The map of the states of KDA, which tokens that are split over devices begin with."""

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise import kda
from chunkwise.kda.operator import OPERATOR as KDA
from chunkwise.shared.call import arguments
from chunkwise.shared.testing import compare, inputs, oracle


def test_map_of_two_chunks_a_grid_step():
    """The final state of zeros, and of any state: 8 chunks of a pack of heads, some channels with strong gates."""
    x = inputs.make_inputs(1, 512, 1, 2, 72, 60, dtype=jnp.bfloat16, per_channel=True, gate="zero", num_states=1)
    x["g"] = (x["g"] - 0.004).at[:, 70::97, :, :20].set(-200.0)
    start, options = x["initial_state"], arguments.Options(True, chunk_size=64, scale=0.3, config=kda.Config(2, 2))
    x["initial_state"] = jnp.zeros_like(start)
    found = jax.jit(lambda x: KDA.implementations["fused"].state_map(arguments.Arguments(**x), options, True)[0])(x)
    want, of_start = (oracle.reference(**x | dict(initial_state=S))[1] for S in (None, start))
    compare.assert_close("N", found.N, want, 4e-3)
    M_S = of_start - want
    assert np.abs(M_S).max() > 1e-2
    compare.assert_close("M S", jnp.matmul(found.M, start, precision="highest"), M_S, 4e-3)
