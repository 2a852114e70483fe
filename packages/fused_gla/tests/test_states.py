"""What is launched where tokens are split over devices: their map, and the gradient of the state before them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gla import Config
from chunkwise.fused_gla.operator import GLA, for_states
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation.implementations import plan
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import GATES, make_inputs, spec
from chunkwise.shared.testing.oracle import reference

THOROUGH = dict(test_map_and_gradient=lambda dtype, gate: gate not in ("logsigmoid/10", "resets"))
# Gates per channel, in two chunks of 128 tokens and the half of a third one.
SIZES = dict(B=1, T=300, H=1, HV=2, K=16, V=24, per_channel=True)


def arguments(**x):
    return Arguments(**dict.fromkeys(Arguments._fields) | x)


@pytest.mark.parametrize("gate", [*GATES, "resets"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_map_and_gradient(dtype, gate):
    x = make_inputs(**SIZES, dtype=jnp.dtype(dtype), gate=gate, num_states=1)
    del x["beta"]
    do, dht, tolerance = x["v"], x.pop("initial_state"), {"float32": 1e-5, "bfloat16": 4e-3}[dtype]
    fused, named = GLA.implementations["fused"], arguments(**x)
    options = plan(fused, named, Options(chunk_size=64, scale=0.3), states=True).options
    (M, N), _ = jax.jit(lambda x: (fused.state_map(arguments(**x), options, True)[0][:2], None))(x)
    dh0 = jax.jit(lambda x: fused.state_gradient(arguments(**x), options, None, do, dht))(x | dict(initial_state=dht))
    _, want = reference(**x)
    _, _, gradients = reference(**x, initial_state=dht, scale=0.3, do=do, dht=dht)
    assert_close("N", N, want, tolerance)
    assert_close("dh0", dh0, gradients["initial_state"], tolerance)
    decay = np.exp(np.sum(np.asarray(x["g"], np.float64), axis=1))
    assert_close("M", M.reshape(decay.shape), np.where(decay < np.finfo(np.float32).tiny, 0.0, decay), 1e-5)


def test_chunks():
    """They are not larger where a grid step would take fewer heads of them, nor where tile sizes are given."""
    options = Options(chunk_size=64)

    def chunk(T=8192, V=128, options=options, gate=(128,)):
        x = dict(zip("qkv", (spec(1, T, 16, n, dtype=jnp.bfloat16) for n in (128, 128, V)), strict=True))
        return for_states(arguments(**x, g=spec(1, T, 16, *gate)), options).chunk_size

    assert (chunk(), chunk(T=64), chunk(V=256), chunk(gate=())) == (128, 64, 64, 64)
    assert chunk(options=options._replace(config=Config(2, 2, 1))) == 64
