"""`check_inputs` finds wrong values of a training batch, outside of jit and by checkify."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from chunkwise.pipeline import check_inputs
from chunkwise.pipeline.operators import CHUNKED, OPERATORS, operator_inputs
from chunkwise.shared.testing.inputs import make_inputs, poison_padding

B, T, H, HV, K = 2, 6, 1, 2, 4
X = make_inputs(B, T, H, HV, K, K, num_states=B)
RAW = dict(use_gate_in_kernel=True, A_log=jnp.zeros(HV), dt_bias=jnp.zeros(HV))
IDS = jnp.array([[1, 1, 2, 2, 0, 0], [0, 0, 0, 5, 5, -1]], jnp.int32)
ONE_ROW = {name: y[:1] for name, y in X.items()}


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(checkify.checkify)
def checked(arrays, flags):
    check_inputs(**arrays, **dict(flags))


def under_jit(x):
    flags = {name: y for name, y in x.items() if not hasattr(y, "shape")}
    return checked({name: y for name, y in x.items() if name not in flags}, tuple(flags.items()))[0]


def put(name, index, value):
    return {name: X[name].at[index].set(value)}


WRONG = {
    "`q` must be finite; got nan at [1, 2, 0, 3].": put("q", (1, 2, 0, 3), jnp.nan),
    "`k` must be finite; got inf at [0, 5, 0, 0].": put("k", (0, 5, 0, 0), jnp.inf),
    "`v` must be finite; got -inf at [1, 0, 1, 1].": put("v", (1, slice(0, 3), 1, 1), -jnp.inf),
    "`beta` must be finite; got nan at [0, 0, 1].": put("beta", (0, 0, 1), jnp.nan),
    "`initial_state` must be finite; got nan at [1, 0, 2, 3].": put("initial_state", (1, 0, 2, 3), jnp.nan),
    "`g` must be finite; got inf at [0, 1, 0].": put("g", (0, 1, 0), jnp.inf) | RAW,
    "`A_log` must be finite; got inf at [1].": RAW | {"A_log": jnp.array([0, jnp.inf])},
    "`g` must be at most 0, the log of a decay; got 0.25 at [1, 3, 0].": put("g", (1, 3, 0), 0.25),
    "`g` must be at most 0, the log of a decay; got nan at [0, 0, 0].": put("g", (0, 0, 0), jnp.nan),
    "`g` must be at most 0, the log of a decay; got 0.5 at [0, 0, 0], and all entries are from 0 to 1: take the log of "
    "a decay.": dict(g=jnp.full((B, T, HV), 0.5)),
    "`beta` must be from 0 to 1, or to 2 with `allow_neg_eigval`; got 1.5 at [1, 5, 1].": put("beta", (1, 5, 1), 1.5),
    "`beta` must be from 0 to 2; got 2.5 at [1, 5, 1].": put("beta", (1, 5, 1), 2.5) | dict(allow_neg_eigval=True),
    "`beta` must be from 0 to 1, or to 2 with `allow_neg_eigval`; got -0.5 at [0, 0, 0].": put("beta", 0, -0.5),
    "`k` must have |k|^2 beta of at most 2, or states grow; got 4 at [0, 2, 1]; `use_qk_l2norm_in_kernel` makes keys "
    "of unit length.": dict(k=X["k"].at[0, 2].set(1.0), beta=jnp.zeros((B, T, HV)).at[:, :, 1].set(1.0)),
    "`segment_ids` must be below 0 for padding, because 0 is a document; got 0 at [0, 4], the first of the zeros that "
    "end a row.": dict(segment_ids=IDS),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_values(message):
    x = X | WRONG[message]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_inputs(**x)
    assert under_jit(x).get().startswith(message)


@pytest.mark.parametrize(
    ("boundaries", "value", "index"), [([0, 4, 3], 3, 2), ([0, 4, 7], 7, 2), ([1, 4, 6], 1, 0), ([0, -1, 6], -1, 1)]
)
def test_wrong_boundaries(boundaries, value, index):
    """Outside of jit it is the error of every operator."""
    x = ONE_ROW | dict(cu_seqlens=jnp.array(boundaries, jnp.int32), initial_state=X["initial_state"])
    with pytest.raises(ValueError, match="`cu_seqlens` must rise from 0 to at most T = 6; got"):
        check_inputs(**x)
    message = f"`cu_seqlens` must rise from 0 to at most T = 6; got {value} at [{index}]."
    assert under_jit(x).get().startswith(message)


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_right_values_of_every_operator(operator):
    """Padding may hold anything."""
    x = operator_inputs(operator, B, T, H, HV, K, K)
    row = {name: y[:1] if y.ndim > 1 else y for name, y in x.items()}
    ids = jnp.array([[3, 3, -1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], jnp.int32)
    boundaries = jnp.array([0, 2, 2, 4], jnp.int32)
    for batch in (
        x,
        poison_padding(x, segment_ids=ids) | dict(segment_ids=ids),
        poison_padding(row, boundaries) | dict(cu_seqlens=boundaries),
    ):
        check_inputs(**batch)


def test_right_values():
    assert under_jit(X).get() is None
    check_inputs(**X | dict(g=jnp.full_like(X["g"], -jnp.inf)))
    # A unit key is as long as its type can tell, and a step of up to 2 is right where it is asked for.
    keys = make_inputs(1, 64, 1, K=256, V=4, dtype=jnp.bfloat16, beta=2.0)
    check_inputs(**keys, allow_neg_eigval=True)
    raw = RAW | dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    check_inputs(**X | raw | {name: 9 * X[name] for name in ("g", "beta", "k")}, use_qk_l2norm_in_kernel=True)


def test_constant_gates():
    x = operator_inputs(OPERATORS["chunk_simple_gla"], B, T, H, HV, K, K)
    message = r"`g_gamma` must be at most 0, the log of a decay; got 0.9 at \[0\], and all entries are from 0 to 1"
    with pytest.raises(ValueError, match=message):
        check_inputs(**x | dict(g_gamma=jnp.array([0.9, 0.99])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(v=X["v"][:, 1:]), r"`v` must have shape .* = \(2, 6, any, any\); got \(2, 5, 2, 4\)"),
        (dict(g=None), r"`g` must be an array \[B, T, HV\]; got NoneType"),
        (dict(beta=None) | RAW, r"`beta` must be an array \[B, T, HV\] where gates or step sizes are raw; got None"),
        (dict(initial_state=X["initial_state"][:1]), r"`initial_state` must have shape .* = \(2, 2, 4, 4\); got"),
        (dict(allow_neg_eigval="yes"), "`allow_neg_eigval` must be True or False"),
        (dict(use_qk_l2norm_in_kernel=1), "`use_qk_l2norm_in_kernel` must be True or False"),
        (dict(A_log=jnp.zeros(HV)), "`A_log` must be None without `use_gate_in_kernel`"),
        (dict(segment_ids=IDS.astype(jnp.float32)), "`segment_ids` must be int32 of shape"),
    ],
)
def test_wrong_types(change, message):
    with pytest.raises(ValueError, match=message):
        check_inputs(**X | change)


def test_erase_gates_and_keys():
    """Erase gates have a range of their own, and with erase keys it is their product with keys that must not grow."""
    x = make_inputs(B, T, H, HV, K, K, per_channel=True, erase="gate")
    check_inputs(**x | dict(b=2 * x["b"]), allow_neg_eigval=True)
    with pytest.raises(
        ValueError, match=r"^`b` must be from 0 to 1, or to 2 with `allow_neg_eigval`; got 1.5 at \[0, "
    ):
        check_inputs(**x | dict(b=jnp.full_like(x["b"], 1.5)))
    x = make_inputs(B, T, H, HV, K, K, erase="key")
    with pytest.raises(ValueError, match=r"^`k` must have \|k . p\| of at most 2, or states grow; got "):
        check_inputs(**x | dict(p=9 * x["p"], beta=jnp.ones_like(x["beta"])))
