"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed.

Those of the values of a serving step have arrays for what is checked.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from chunkwise.causal_conv1d import Config, causal_conv1d, causal_conv1d_update
from chunkwise.shared.testing.inputs import spec

GOOD = dict(x=spec(2, 8, 16), weight=spec(16, 4))
ONE = dict(x=spec(1, 8, 16))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(x=[1.0]), "`x` must be an array [B, T, D]; got list."),
        (dict(x=spec(2, 8, 16, dtype=jnp.int32)), "`x` must be float32, bfloat16 or float16; got int32."),
        (dict(weight=spec(8, 4)), "`weight` must have shape [D, W] = (16, any); got (8, 4)."),
        (dict(weight=spec(16, 1)), "`weight` must have a width of 2 to 8; got 1."),
        (dict(weight=spec(16, 9)), "`weight` must have a width of 2 to 8; got 9."),
        (dict(bias=spec(4)), "`bias` must have shape [D] = (16); got (4,)."),
        (dict(initial_state=spec(2, 16, 3)),
         "`initial_state` must have shape [N, W-1, D] = (2, 3, 16); got (2, 16, 3)."),
        (dict(initial_state=spec(2, 8, 16)),
         "got (2, 8, 16), the shape of `x`, which `residual` has, the fourth argument"),
        (dict(output_final_state="yes"), "`output_final_state` must be True or False"),
        (dict(activation="relu"), "`activation` must be one of ('silu', 'sigmoid', None); got 'relu'."),
        (dict(segment_ids=spec(2, 8)), "`segment_ids` must be int32 of shape (2, 8); got float32 (2, 8)."),
        (ONE | dict(cu_seqlens=jnp.array([0, 8]), segment_ids=spec(1, 8, dtype=jnp.int32)),
         "`segment_ids` must be None if `cu_seqlens` is given; got both."),
        (dict(config=()), "`config` must be None or a chunkwise.causal_conv1d.Config; got ()."),
        (dict(config=Config(20, 128)), "`config` must have multiples of 16 tokens and of 128 channels"),
    ],
)  # fmt: skip
def test_value_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_conv1d(**GOOD | wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(states=spec(3, 3, 16)), "`states` must have shape [slots, W-1, D] = (2, 3, 16); got (3, 3, 16)."),
        (dict(state_indices=spec(3, dtype=jnp.int32)), "`state_indices` must be int32 of shape (2,); got int32 (3,)."),
        (dict(has_initial_state=spec(2)), "`has_initial_state` must be bool of shape (2,); got float32 (2,)."),
        (dict(activation="relu"), "`activation` must be one of ('silu', 'sigmoid', None); got 'relu'."),
        (dict(state_indices=jnp.array([0, 2])),
         "`state_indices` must be below 2, the number of slots of `states`; got 2."),
        (dict(state_indices=jnp.array([1, 1])),
         "`state_indices` must name a slot only once, but for negative ones; got 1 twice."),
    ],
)  # fmt: skip
def test_value_error_of_the_update(wrong, message):
    good = GOOD | dict(x=spec(2, 1, 16), states=spec(2, 3, 16))
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_conv1d_update(**good | wrong)


def int32(*values):
    return jnp.array(values, jnp.int32)


# One decode of two tokens, and one prefill of four.
STEP = dict(
    x=spec(1, 8, 16), weight=spec(16, 4), states=spec(6, 3, 16), cu_seqlens=int32(0, 2, 6),
    state_indices=int32([0, 1], [2, -1]), num_decodes=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(states=spec(6, 16, 3)), "`states` must have shape [slots, W-1, D] = (any, 3, 16); got (6, 16, 3)."),
        (dict(states=spec(6, 3)), "`states` must have shape [slots, W-1, D]; got (6, 3)."),
        (dict(states=spec(6, 3, 16, dtype=jnp.int32)), "`states` must be float32, bfloat16 or float16; got int32."),
        (dict(cu_seqlens=None), "`cu_seqlens` must be given in a serving step; got None."),
        *(
            (
                dict(state_indices=wrong, states=spec(2, 3, 16)),
                f"`state_indices` must be int32 of shape [N] or [N, W] with N = 2; got {got}.",
            )
            for wrong, got in (
                (None, "NoneType"),
                (spec(2, 0, dtype=jnp.int32), "int32 (2, 0)"),
                (spec(2, 2, 1, dtype=jnp.int32), "int32 (2, 2, 1)"),
            )
        ),
        *(
            ({name: spec(3, dtype=jnp.int32)}, f"`{name}` must be int32 of shape (2,); got int32 (3,).")
            for name in ("read_indices", "num_accepted_tokens")
        ),
        (dict(has_initial_state=spec(3, dtype=bool)), "`has_initial_state` must be bool of shape (2,); got bool (3,)."),
        (dict(num_decodes=3), "`num_decodes` must be from 0 to 2; got 3."),
        (dict(num_sequences=spec(2, dtype=jnp.int32)), "`num_sequences` must be int32 of shape (); got int32 (2,)."),
        *(
            (
                dict(block_state_indices=spec(2, 1, dtype=jnp.int32), block_size=wrong),
                f"`block_size` must be a positive number of tokens{rest}",
            )
            for wrong, rest in (
                (0, "; got 0."),
                (2.0, "; got 2.0."),
                (jnp.int32(4), ", known when the program is built; got an array int32 ()."),
            )
        ),
        (dict(block_size=4), "`block_size` and `block_state_indices` must come together; got one of them."),
        (dict(block_state_indices=spec(3, 1, dtype=jnp.int32), block_size=4),
         "`block_state_indices` must be int32 of shape (2, 1); got int32 (3, 1)."),
    ],
)  # fmt: skip
def test_value_error_of_a_step(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_conv1d_update(**STEP | wrong)


def test_a_step_over_a_float16_pool():
    """A kernel that the user names is never replaced by plain JAX; without a name plain JAX copies the rows."""
    run = lambda implementation: causal_conv1d_update(
        **STEP | dict(states=jnp.zeros((6, 3, 16), jnp.float16), x=jnp.zeros((1, 8, 16)), weight=jnp.zeros((16, 4))),
        implementation=implementation,
    )
    with pytest.raises(NotImplementedError, match='"pallas" takes serving steps over pools of float32 and bfloat16'):
        run("pallas")
    assert run(None)[1].dtype == jnp.float16


def test_block_size_without_a_step():
    good = GOOD | dict(x=spec(2, 1, 16), states=spec(2, 3, 16))
    with pytest.raises(ValueError, match="`cu_seqlens` must be given in a serving step; got None"):
        causal_conv1d_update(**good, block_size=4)


ONCE = "must name a slot that is written only once; got"
RISES = "`cu_seqlens` must rise from 0 to at most T = 8; got"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(state_indices=int32([0, 1], [1, -1])), f"`state_indices` {ONCE} 1 for sequence 0 and for sequence 1."),
        (dict(block_state_indices=int32([-1], [2]), block_size=2),
         f"`state_indices` and `block_state_indices` {ONCE} 2 for sequence 1 and for sequence 1."),
        (dict(cu_seqlens=int32(0, 2, 1), num_sequences=2), f"{RISES} 1 at [2]."),
    ],
)  # fmt: skip
def test_wrong_values_of_a_step(wrong, message):
    """Known values are checked: outside of jit, and also in a program whose other arguments are traced."""
    shapes = {name: y for name, y in STEP.items() if name in ("x", "weight", "states")}
    values = {name: y for name, y in STEP.items() if name not in shapes} | wrong
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_conv1d_update(**shapes, **values)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(lambda given: causal_conv1d_update(**given, **values), shapes)


def test_right_values_of_a_step():
    """As constants of a program; sequences that do not exist may have any."""
    shapes = {name: y for name, y in STEP.items() if name in ("x", "weight", "states")}
    values = {name: y for name, y in STEP.items() if name not in shapes}
    more = dict(cu_seqlens=int32(0, 2, 1), state_indices=int32([0, 1], [9, 1]), num_sequences=1)
    for each in (values, values | more):
        y, states = jax.eval_shape(lambda given, each=each: causal_conv1d_update(**given, **each), shapes)
        assert (y.shape, states.shape) == ((1, 8, 16), (6, 3, 16))


def test_what_int32_does_not_count():
    """Tokens and slots are counted in int32."""
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(ValueError, match="`x` must have T of at most 2147483647, which int32 counts"):
        jax.eval_shape(causal_conv1d, spec(1, 2**31, 8), spec(8, 4))
    step = dict(cu_seqlens=int32(0, 4), state_indices=int32(0))
    update = lambda x, states, weight: causal_conv1d_update(x, states, weight, **step)
    with pytest.raises(ValueError, match="`states` must have slots of at most 2147483647"):
        jax.eval_shape(update, spec(1, 4, 8), spec(2**31, 3, 8), spec(8, 4))
