"""mLSTM on a simulated TPU: its kernels read the weights of tokens in parts."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.pipeline import MlstmState, chunk_mlstm, recurrent_mlstm
from chunkwise.shared.testing import inputs
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, TOLERANCE, assert_close

THOROUGH = dict(test_mlstm=True)


def test_mlstm():
    """Both launches over a pack with states, whose weights are in parts, against mLSTM token by token in plain JAX."""
    x = inputs.make_inputs(1, 26, 1, 1, 12, 20, num_states=4, dtype=jnp.bfloat16)
    state = MlstmState(x.pop("initial_state"), jnp.ones((4, 1, 12)), jnp.zeros((4, 1)))
    x = {name: x[name] for name in ("q", "k", "v")} | dict(i=x["beta"], f=x["g"], initial_state=state)

    def run(call, x):
        call = functools.partial(call, cu_seqlens=inputs.boundaries(3, 0, 17, 4), output_final_state=True)
        loss = lambda x: jnp.sum(jnp.sin(call(**x)[0].astype(jnp.float32)))
        return *call(**x), jax.grad(loss)(x)

    simulated = run(functools.partial(chunk_mlstm, chunk_size=16, implementation="fused"), x)
    wide = jax.tree.map(lambda y: y.astype(jnp.float32), x)
    expected = run(functools.partial(recurrent_mlstm, implementation="xla"), wide)
    for limit, *results in zip((TOLERANCE, TOLERANCE, GRADIENT_TOLERANCE), simulated, expected, strict=True):
        for found, want in zip(*map(jax.tree.leaves, results), strict=True):
            assert_close("result", found, want, limit["bfloat16"])
