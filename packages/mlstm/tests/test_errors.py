"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from chunkwise.mlstm import MlstmState, chunk_mlstm, recurrent_mlstm
from chunkwise.shared.testing.inputs import spec

STATE: Any = MlstmState._make(spec(2, 2, *tail) for tail in ((8, 4), (8,), ()))
GOOD: dict[str, Any] = dict(
    q=spec(2, 64, 2, 8), k=spec(2, 64, 2, 8), v=spec(2, 64, 2, 4), i=spec(2, 64, 2), f=spec(2, 64, 2),
    initial_state=STATE,
)  # fmt: skip


@pytest.mark.parametrize("function", [chunk_mlstm, recurrent_mlstm])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(q=spec(2, 64, 1, 8)), "`q` must have shape [B, T, H, K] = (2, 64, 2, 8); got (2, 64, 1, 8)."),
        (dict(i=spec(2, 64, 1)), "`i` must have shape [B, T, HV] = (2, 64, 2); got (2, 64, 1)."),
        (dict(f=spec(2, 2, 64)), "`f` must have shape [B, T, HV] = (2, 64, 2); got (2, 2, 64)."),
        (dict(f=None), "`f` must be an array [B, T, HV]; got NoneType."),
        (
            dict(initial_state=spec(2, 2, 8, 4)),
            "`initial_state` must be None or a tuple MlstmState (C, n, m); got an array float32 (2, 2, 8, 4).",
        ),
        (
            dict(initial_state=[*STATE]),
            "`initial_state` must be None or a tuple MlstmState (C, n, m); got a list with arrays.",
        ),
        (
            dict(initial_state=STATE._replace(n=spec(2, 2, 4))),
            "`initial_state.n` must have shape [N, HV, K] = (2, 2, 8); got (2, 2, 4).",
        ),
        (
            dict(initial_state=STATE._replace(m=spec(2, 2, 1))),
            "`initial_state.m` must have shape [N, HV]; got (2, 2, 1).",
        ),
        (dict(eps=-1.0), "`eps` must be a finite number of at least 0; got -1.0."),
        (
            dict(eps=jnp.ones(())),
            "`eps` must be a finite number of at least 0, known when the program is built; got an array float32 ().",
        ),
        (dict(sharding="x"), "`sharding` must be None, a NamedSharding or a PartitionSpec; got str."),
        (dict(context_axis="x"), "`context_axis` must name axes of the `shard_map` around the call, which has ()"),
    ],
)
def test_errors(function, wrong, message):
    named = GOOD | wrong
    arrays = {name: x for name, x in named.items() if isinstance(x, jax.ShapeDtypeStruct | MlstmState)}
    rest = {name: x for name, x in named.items() if name not in arrays}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        jax.eval_shape(lambda arrays: function(**arrays, **rest), arrays)


def test_no_pool():
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'state_indices': the recurrent and ragged functions"
    ):
        functools.partial(recurrent_mlstm, **GOOD)(state_indices=jnp.zeros(2, jnp.int32))


def test_errors_have_its_name():
    """What a kernel lacks is said of the function that was called."""
    x: dict[str, Any] = {name: jnp.zeros(y.shape) for name, y in GOOD.items() if name != "initial_state"}
    run = lambda q: chunk_mlstm(**x | dict(q=q), implementation="fused")[0]
    with pytest.raises(NotImplementedError, match="chunk_mlstm has no forward-mode derivative"):
        jax.jvp(run, (x["q"],), (x["q"],))
