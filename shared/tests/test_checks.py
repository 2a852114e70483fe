"""One sentence for every wrong argument."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.call import arguments, checks
from chunkwise.shared.call.checks import (
    check,
    check_array,
    check_chunk_size,
    check_cu_seqlens,
    check_delta_rule,
    check_flags,
    check_gates,
    check_heads,
    check_initial_state,
    check_scale,
    choose_chunk_size,
    choose_implementation,
)
from chunkwise.shared.testing.inputs import spec


def delta_rule(**others):
    """Return the tensors of a delta rule in order."""
    x = dict(q=spec(1, 5, 2, 8), k=spec(1, 5, 2, 8), v=spec(1, 5, 4, 6), g=spec(1, 5, 4), beta=spec(1, 5, 4))
    return (x | others).values()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_array("k", 1.0, "B T"), "`k` must be an array [B, T]; got float."),
        (lambda: check_array("k", spec(2), "B T"), "`k` must have shape [B, T]; got (2,)."),
        (lambda: check_array("k", spec(2, 0), "B T"), "`k` must not be empty; got (2, 0)."),
        (lambda: check_array("k", spec(2, 3), "B T", (None, 4)), "`k` must have shape [B, T] = (any, 4); got (2, 3)."),
        (lambda: check_array("k", spec(2, dtype=jnp.int32), "T"),
         "`k` must be float32, bfloat16 or float16; got int32."),
        (lambda: check_heads(2, 3, "beta"), "`beta` must have a multiple of the heads of `k`; got 3 value heads for 2"),
        (lambda: check_heads(2, 3), "`v` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads."),
        (lambda: check_chunk_size(65), "`chunk_size` must be one of (16, 32, 64, 128); got 65."),
        (lambda: check(False, "`x` must be right."), "`x` must be right."),
        (lambda: check_chunk_size(64.0), "`chunk_size` must be one of (16, 32, 64, 128); got 64.0."),
        (lambda: choose_chunk_size(True), "`chunk_size` must be one of (16, 32, 64, 128); got True."),
        (
            lambda: choose_chunk_size(spec(1)),
            "`chunk_size` must be one of (16, 32, 64, 128), known when the program is built; got an array float32 "
            "(1,).",
        ),
        (lambda: check_flags(a=True, flag="False"),
         "`flag` must be True or False, known when the program is built; got 'False'."),
        (lambda: jax.jit(lambda x: check_flags(flag=x))(True),
         "`flag` must be True or False, known when the program is built; got an array bool ()."),
        (lambda: check_gates("g_cum", spec(1, 2, 3), (1, 2, 4), 8),
         "`g_cum` must have shape [B, T, HV] = (1, 2, 4); got (1, 2, 3)."),
        (lambda: check_gates("g_cum", spec(1, 2, 4, 7), (1, 2, 4), 8),
         "`g_cum` must have shape [B, T, HV, K] = (1, 2, 4, 8); got (1, 2, 4, 7)."),
        (lambda: check_scale(True), "`scale` must be None, a number or a scalar array; got True."),
        (lambda: check_scale(1j), "`scale` must be None, a number or a scalar array; got 1j."),
        (lambda: check_scale(jnp.array(1j)), "`scale` must be None, a number or a scalar array; got ()."),
        (lambda: check_array("k", np.zeros((1, 2)), "B T"), "`k` must be float32, bfloat16 or float16; got float64."),
        (lambda: check_delta_rule(*delta_rule(g=spec(1, 5, 4, 8)), None),
         "`g` must have shape [B, T, HV]; got (1, 5, 4, 8)."),
        (lambda: check_delta_rule(*delta_rule(v=spec(1, 5, 3, 8)), None),
         "`v` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads."),
        (lambda: check_chunk_size("64"), "`chunk_size` must be one of (16, 32, 64, 128); got '64'."),
        (lambda: choose_implementation("gpu", ("pallas", "xla"), "pallas"),
         "`implementation` must be None or one of ('pallas', 'xla'); got 'gpu'."),
        (lambda: check_cu_seqlens([0, 1], 1, 1),
         "`cu_seqlens` must be an int32 array [N + 1]; got list, of which `jnp.array(cu_"),
        (lambda: check_cu_seqlens(jnp.zeros((1,), jnp.int32), 1, 1),
         "`cu_seqlens` must be int32 of shape [N + 1] with N >= 1; got int32 (1,)."),
        (lambda: check_cu_seqlens(jnp.zeros((2, 2), jnp.int32), 1, 1),
         "`cu_seqlens` must be int32 of shape [N + 1] with N >= 1; got int32 (2, 2)."),
        (lambda: check_cu_seqlens(jnp.array([0, 5]), 2, 5), "`cu_seqlens` must come with a batch of 1; got B = 2."),
        (lambda: check_cu_seqlens(jnp.array([1, 5]), 1, 5),
         "`cu_seqlens` must rise from 0 to at most T = 5; got [1, 5]."),
        (lambda: check_cu_seqlens(jnp.arange(12), 1, 5),
         "`cu_seqlens` must rise from 0 to at most T = 5; got [0, 1, 2, 3, 4, 5, 6, 7, '...']."),
        (lambda: check_initial_state(spec(1, 2, 3, 4), (1, 2, 4, 3)),
         "`initial_state` must have shape [N, HV, K, V] = (1, 2, 4, 3); got (1, 2, 3, 4)."),
    ],
)  # fmt: skip
def test_value_error(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_what_is_right_passes():
    assert check_array("k", spec(2, 3, dtype=jnp.bfloat16), "B T", (None, 3)) == (2, 3)
    assert choose_implementation(None, ("pallas", "xla"), "pallas") == "xla"
    assert check_delta_rule(*delta_rule(), None) == (1, 5, 2, 4, 8, 6)
    assert check_delta_rule(*delta_rule(g=spec(1, 5, 4, 8)), None, per_channel=True) == (1, 5, 2, 4, 8, 6)


def test_chunk_size():
    assert choose_chunk_size(None) == 64
    assert choose_chunk_size(None, "xla", 5000, per_channel=True) == 32
    assert choose_chunk_size(64, "xla", 5000, per_channel=True) == 64
    assert choose_chunk_size(np.int64(128)) == 128


def test_an_implementation_that_another_operator_has():
    message = "`implementation` must be None or one of ('xla',) for this operator; got 'staged'."
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        choose_implementation("staged", ("xla",), "xla")


def test_values_of_traced_boundaries_are_neither_checked_nor_changed():
    def checked(cu_seqlens):
        check_cu_seqlens(cu_seqlens, 1, 5)
        return cu_seqlens

    wrong = jnp.array([0, 6, 4], jnp.int32)
    np.testing.assert_array_equal(jax.jit(checked)(wrong), wrong)
    with pytest.raises(ValueError, match="`cu_seqlens` must rise"):
        checked(wrong)


class Tensor:
    """An array of another library."""

    shape, dtype, ndim = (2,), "torch.float32", 1


Tensor.__module__ = "torch"


@pytest.mark.parametrize(
    "refuse",
    [
        lambda x: checks.check_array("x", x, "B"),
        lambda x: checks.check_packed(x, 1),
        lambda x: checks.check_segment_ids(x, 1, 2, None),
        lambda x: checks.check_array_of_slots("x", x),
        lambda x: checks.check_scale(x),
        lambda x: checks.check_step_types(arguments.Slots(x), 2, None),
    ],
)
def test_arrays_of_another_library_are_named(refuse):
    text = r"must be an array of JAX or numpy, which `jnp.from_dlpack` makes of others; got torch.Tensor.$"
    with pytest.raises(ValueError, match=text):
        refuse(Tensor())


def test_wide_integers_of_numpy_are_taken_where_they_fit():
    wide = np.array([0, 3, 2**31 - 1])
    assert checks.as_int32(wide).dtype == np.int32
    for other in (np.array([2**31]), jnp.arange(3), wide.astype(np.float32), None, 5):
        assert checks.as_int32(other) is other
    assert checks.check_cu_seqlens(np.array([0, 3, 7]), 1, 7).dtype == np.int32
    boundaries = jnp.array([0, 0, 4], jnp.int32)
    assert checks.check_cu_seqlens(boundaries, 1, 5) is boundaries
    with pytest.raises(ValueError, match=r"`cu_seqlens` must be int32 of shape .* with N >= 1; got int64 \(2,\)"):
        checks.check_cu_seqlens(np.array([0, 2**40]), 1, 7)
