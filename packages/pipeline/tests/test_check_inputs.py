"""`check_inputs` finds wrong values of a training batch, outside of jit and by checkify."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from chunkwise.pipeline import check_inputs
from chunkwise.pipeline.operators import CHUNKED, COMPOSITIONS, OPERATORS
from chunkwise.shared.testing.inputs import (
    NOT_TOKENS,
    make_dplr_inputs,
    make_inputs,
    make_mamba2_inputs,
    make_product_inputs,
    poison_padding,
)

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


def put(x, name, index, value):
    """Return inputs of an operator with another number somewhere."""
    changed = np.array(x[name])
    changed[index] = value
    return x | {name: jnp.asarray(changed)}


RANGE = "`beta` must be from 0 to 1, or to 2 with `allow_neg_eigval`; got"
WRONG = {
    "`q` must be finite; got nan at [1, 2, 0, 3].": put(X, "q", (1, 2, 0, 3), jnp.nan),
    "`k` must be finite; got inf at [0, 5, 0, 0].": put(X, "k", (0, 5, 0, 0), jnp.inf),
    "`v` must be finite; got -inf at [1, 0, 1, 1].": put(X, "v", (1, slice(0, 3), 1, 1), -jnp.inf),
    "`beta` must be finite; got nan at [0, 0, 1].": put(X, "beta", (0, 0, 1), jnp.nan),
    "`initial_state` must be finite; got nan at [1, 0, 2, 3].": put(X, "initial_state", (1, 0, 2, 3), jnp.nan),
    "`g` must be finite; got inf at [0, 1, 0].": put(X, "g", (0, 1, 0), jnp.inf) | RAW,
    "`A_log` must be finite; got inf at [1].": RAW | {"A_log": jnp.array([0, jnp.inf])},
    "`g` must be at most 0, the log of a decay; got 0.25 at [1, 3, 0].": put(X, "g", (1, 3, 0), 0.25),
    "`g` must be at most 0, the log of a decay; got nan at [0, 0, 0].": put(X, "g", (0, 0, 0), jnp.nan),
    "`g` must be at most 0, the log of a decay; got 0.5 at [0, 0, 0], and all entries are from 0 to 1: take the log of "
    "a decay.": dict(g=jnp.full((B, T, HV), 0.5)),
    f"{RANGE} 1.5 at [1, 5, 1].": put(X, "beta", (1, 5, 1), 1.5),
    "`beta` must be from 0 to 2; got 2.5 at [1, 5, 1].": put(X, "beta", (1, 5, 1), 2.5) | dict(allow_neg_eigval=True),
    f"{RANGE} -0.5 at [0, 0, 0].": put(X, "beta", 0, -0.5),
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


@pytest.mark.parametrize(("boundaries", "index"), [([0, 4, 3], 2), ([0, 4, 7], 2), ([1, 4, 6], 0), ([0, -1, 6], 1)])
def test_wrong_boundaries(boundaries, index):
    """Outside of jit it is the error of every operator."""
    x = ONE_ROW | dict(cu_seqlens=jnp.array(boundaries, jnp.int32), initial_state=X["initial_state"])
    with pytest.raises(ValueError, match="`cu_seqlens` must rise from 0 to at most T = 6; got"):
        check_inputs(**x)
    message = f"`cu_seqlens` must rise from 0 to at most T = 6; got {boundaries[index]} at [{index}]."
    assert under_jit(x).get().startswith(message)


def test_boundaries_that_stop_short():
    x = ONE_ROW | dict(cu_seqlens=jnp.array([0, 2, 4], jnp.int32), initial_state=X["initial_state"])
    message = "`cu_seqlens` must end at T = 6, or before it with `allow_padding`; got 4 at [2]."
    with pytest.raises(ValueError, match=re.escape(message)):
        check_inputs(**x)
    assert under_jit(x).get().startswith(message)
    check_inputs(**x, allow_padding=True)


SUMS = "`g` must be the log decay of each token alone; got gates that fall from token to token in every sequence"


@pytest.mark.parametrize("sums", ["of rows", "of chunks", "of documents"])
def test_cumulative_gates(sums):
    """As kernels of other libraries take them, for channels and documents too; the gates themselves pass."""
    x = make_inputs(2, 64, H, HV, K, K, per_channel=sums == "of chunks")
    ids = jnp.repeat(jnp.array([[0, 1, -1], [4, 4, 4]], jnp.int32), np.array([37, 20, 7]), axis=1)
    more = dict(segment_ids=ids) if sums == "of documents" else {}
    parts = {"of rows": [64], "of chunks": [16] * 4, "of documents": [37, 20, 7]}[sums]
    g = jnp.concatenate([jnp.cumsum(y, 1) for y in jnp.split(x["g"], np.cumsum(parts)[:-1], axis=1)], axis=1)
    if more:
        # The second row is one document, and the first one ends with padding.
        g = jnp.stack([g[0].at[57:].set(jnp.nan), jnp.cumsum(x["g"][1], 0)])
    check_inputs(**x, **more)
    with pytest.raises(ValueError, match=SUMS):
        check_inputs(**x | {"g": g}, **more)
    if more:
        assert under_jit(x | {"g": g} | more).get().startswith(SUMS)


def test_right_gates_that_fall():
    """Constant gates, resets, and short documents of which each has a falling gate or two."""
    g = jnp.broadcast_to(-jnp.arange(2.0), (1, 64, HV))
    x = {name: y[:1] for name, y in make_inputs(2, 64, H, HV, K, K).items()}
    check_inputs(**x | {"g": jnp.full_like(g, -0.1)})
    check_inputs(**x | {"g": jnp.full_like(g, -jnp.inf)})
    check_inputs(**x, cu_seqlens=jnp.arange(0, 65, 2, dtype=jnp.int32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gates_to_base_2(dtype):
    """With the bound of the law they are found; a bound in the type of the gates is within itself."""
    bound = -5.3
    g = (bound * jax.nn.sigmoid(9 * jax.random.normal(jax.random.key(0), (B, T, HV)))).astype(dtype)
    check_inputs(**X | {"g": g}, min_gate=bound)
    message = r"`g` must be at least `min_gate` = -5.3 nats; got -[67]\.\d+ at \[\d, \d, \d\]"
    base_2 = ", and all entries are at least -7.64628, as logs to base 2 are: multiply these by ln 2."
    with pytest.raises(ValueError, match=message + re.escape(base_2)):
        check_inputs(**X | {"g": g * jnp.asarray(1.4427, dtype)}, min_gate=bound)
    with pytest.raises(ValueError, match=r"`g` must be at least `min_gate` = -5.3 nats; got -99 at \[1, 0, 0\]\.$"):
        check_inputs(**X | {"g": g.at[1, 0, 0].set(-99)}, min_gate=bound)


def test_a_sigmoid_of_a_sigmoid():
    x = make_inputs(4, 16, H, HV, K, K)
    message = r"`beta` must be raw with `use_beta_sigmoid_in_kernel`; got .* at \[0, 0, 0\], and all entries are from 0"
    with pytest.raises(ValueError, match=message):
        check_inputs(**x, use_beta_sigmoid_in_kernel=True)
    check_inputs(**x | {"beta": x["beta"] - 0.5}, use_beta_sigmoid_in_kernel=True)


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_right_values_of_every_operator(operator):
    """Padding may hold anything."""
    x = operator.source.inputs(B, T, H, HV, K, K)
    row = {name: y[:1] if y.ndim > 1 else y for name, y in x.items()}
    ids = jnp.array([[3, 3, -1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], jnp.int32)
    boundaries = jnp.array([0, 2, 2, 4], jnp.int32)
    check_inputs(**x)
    check_inputs(**poison_padding(x, segment_ids=ids), segment_ids=ids)
    check_inputs(**poison_padding(row, boundaries), cu_seqlens=boundaries, allow_padding=True)


def test_right_values():
    assert under_jit(X).get() is None
    check_inputs(**X | dict(g=jnp.full_like(X["g"], -jnp.inf)))
    # A unit key is as long as its type can tell, and a step of up to 2 is right where it is asked for.
    keys = make_inputs(1, 64, 1, K=256, V=4, dtype=jnp.bfloat16, beta=2.0)
    check_inputs(**keys, allow_neg_eigval=True)
    raw = RAW | dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    check_inputs(**X | raw | {name: 9 * X[name] for name in ("g", "beta", "k")}, use_qk_l2norm_in_kernel=True)


def test_constant_gates():
    x = OPERATORS["chunk_simple_gla"].source.inputs(B, T, H, HV, K, K)
    message = r"`g_gamma` must be at most 0, the log of a decay; got 0.9 at \[0\], and all entries are from 0 to 1"
    with pytest.raises(ValueError, match=message):
        check_inputs(**x | dict(g_gamma=jnp.array([0.9, 0.99])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(v=X["v"][:, 1:]), r"`v` must have shape .* = \(2, 6, any, any\); got \(2, 5, 2, 4\)"),
        (dict(g=5.0), r"`g` must be an array \[B, T, HV\]; got float"),
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
    with pytest.raises(ValueError, match=r"^`b` must be from 0 to 1, or to 2 with `allow_neg_eigval`; got 1.5 at "):
        check_inputs(**x | dict(b=jnp.full_like(x["b"], 1.5)))
    x = make_inputs(B, T, H, HV, K, K, erase="key")
    growth = r"^`k` must have beta k . p from e\^g - 1 to e\^g \+ 1, or states grow; got "
    for factor in (9, -9):
        with pytest.raises(ValueError, match=growth):
            check_inputs(**x | dict(p=factor * x["p"], beta=jnp.ones_like(x["beta"])))
    # Without a decay a key against its erase key makes states grow, however small the product is.
    with pytest.raises(ValueError, match=rf"{growth}-0.01 at"):
        check_inputs(**x | dict(p=-0.01 * x["k"], beta=jnp.ones_like(x["beta"]), g=jnp.zeros_like(x["g"])))
    # Beside a strong gate a step of more than 1 is too large for keys of any kind.
    x |= dict(p=x["k"], beta=jnp.full_like(x["beta"], 1.5), g=jnp.full_like(x["g"], -9.0))
    raw = dict(g=-x["g"], use_gate_in_kernel=True, A_log=jnp.zeros(HV))
    for options in ({}, dict(use_qk_l2norm_in_kernel=True), raw):
        with pytest.raises(ValueError, match=rf"{growth}1."):
            check_inputs(**x | options, allow_neg_eigval=True)
    check_inputs(**x | dict(g=jnp.zeros_like(x["g"])), allow_neg_eigval=True)


PRODUCT = make_product_inputs(B, T, H, HV, K, K) | dict(num_householder=2)
DPLR = make_dplr_inputs(B, T, H, HV, K, K)
MLSTM = {name: X[name] for name in ("q", "k", "v")}
MLSTM |= dict(i=X["g"].at[:, ::2].set(-jnp.inf), f=10 * X["g"].at[:, 1].set(jnp.inf))
MAMBA2 = make_mamba2_inputs(B, T, H, HV, K, K) | dict(dt_softplus=True)
STATE = jnp.ones((B, HV, K, K)), jnp.ones((B, HV, K)), jnp.full((B, HV), -jnp.inf).at[1, 0].set(jnp.inf)


WRONG_COMPOSED = {
    "`i` must be a number below inf; got inf at [0, 3, 1].": put(MLSTM, "i", (0, 3, 1), jnp.inf),
    "`f` must be a number; got nan at [1, 2, 0].": put(MLSTM, "f", (1, 2, 0), jnp.nan),
    "`v` must be finite; got inf at [0, 1, 1, 2].": put(MLSTM, "v", (0, 1, 1, 2), jnp.inf),
    "`initial_state.m` must be a number below inf; got inf at [1, 0].": MLSTM | dict(initial_state=STATE),
    "`f` must have shape [B, T, HV] = (2, 6, 2); got (2, 6, 1).": MLSTM | dict(f=MLSTM["f"][:, :, :1]),
    "`B` must be finite; got nan at [1, 2, 0, 3].": put(MAMBA2, "B", (1, 2, 0, 3), jnp.nan),
    "`dt` must be finite; got inf at [0, 1, 1].": put(MAMBA2, "dt", (0, 1, 1), jnp.inf),
    "`dt` must be from 0 to inf; got -1 at [0, 1, 1].": put(
        MAMBA2 | dict(dt=jnp.ones((B, T, HV)), dt_bias=None, dt_softplus=False), "dt", (0, 1, 1), -1.0
    ),
    "`A` must be from -inf to 0; got 0.5 at [1].": put(MAMBA2, "A", (1,), 0.5),
    "`D` must have shape [HV, V] = (2, 4); got (2, 3).": MAMBA2 | dict(D=MAMBA2["D"][:, :3]),
    "`k` must be finite; got nan at [1, 11, 0, 3].": put(PRODUCT, "k", (1, 11, 0, 3), jnp.nan),
    f"{RANGE} 1.5 at [0, 7, 1].": put(PRODUCT, "beta", (0, 7, 1), 1.5),
    "`g` must have shape [B, T, HV] = (2, 6, 2); got (2, 12, 2).": PRODUCT | dict(g=jnp.zeros((B, 2 * T, HV))),
    "`a` must be finite; got inf at [0, 1, 0, 2].": put(DPLR, "a", (0, 1, 0, 2), jnp.inf),
    "`gk` must be at most 0, the log of a decay; got 0.5 at [1, 3, 0, 0].": put(DPLR, "gk", (1, 3, 0, 0), 0.5),
    "`b` must have a . b of at least -1 - max e^gk, or states grow; got -4 at [0, 2, 0].": put(
        put(DPLR, "a", (0, 2), -1.0), "b", (0, 2), 1.0
    ),
    "`b` must have a . b of at least -1 - max e^gk, or states grow; got -1.5 at [0, 2, 0].": put(
        put(put(DPLR, "a", (0, 2), -0.375), "b", (0, 2), 1.0), "gk", (0, 2), -9.0
    ),
    "`b` must have a . b of at most the sum of 1 - e^gk, or states grow; got 4 at [0, 2, 0].": put(
        put(DPLR, "a", (0, 2), 1.0), "b", (0, 2), 1.0
    ),
    "`b` must have shape [B, T, H, K] = (2, 6, 1, 4); got (2, 6, 2, 4).": DPLR | dict(b=jnp.zeros((B, T, HV, K))),
}


RECIPES = {x.chunk.__name__: x for x in COMPOSITIONS if x.values}
OF_RECIPES = {name: x.inputs(B, T, H, HV, K, K) for name, x in RECIPES.items()}
RWKV6, MAMBA3 = (OF_RECIPES[f"chunk_{name}"] for name in ("rwkv6", "mamba3"))
PRECOND = OF_RECIPES["chunk_precond_kda"]
WRONG_COMPOSED |= {
    "`w` must be at most 0, the log of a decay; got 0.5 at [1, 3, 0, 0].": put(RWKV6, "w", (1, 3, 0, 0), 0.5),
    "`u` must be finite; got nan at [0, 2].": put(RWKV6, "u", (0, 2), jnp.nan),
    "`u` must have shape [H, K] = (2, 4); got (2, 3).": RWKV6 | dict(u=RWKV6["u"][:, :3]),
    "`trap` must be from 0 to 1; got 1.5 at [0, 1, 1].": put(MAMBA3, "trap", (0, 1, 1), 1.5),
    "`dt` must be from 0 to inf; got -1 at [1, 1, 1].": put(MAMBA3, "dt", (1, 1, 1), -1.0),
    "`beta_atk` must be from 0 to 1; got 2 at [1, 5, 0].": put(PRECOND, "beta_atk", (1, 5, 0), 2.0),
    "`beta_atk` must come with all arrays of its operator; got ['beta', 'beta_atk', 'g', 'k', 'q', 'v'].": {
        name: y for name, y in PRECOND.items() if name not in ("g_atk", "log_atk_scale")
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG_COMPOSED)
def test_operators_by_composition(message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_inputs(**WRONG_COMPOSED[message])


def test_an_argument_that_a_recipe_lacks():
    message = r"chunk_rwkv6\(\) got an unexpected keyword argument 'use_qk_l2norm_in_kernel'"
    with pytest.raises(TypeError, match=message):
        check_inputs(**RWKV6, use_qk_l2norm_in_kernel=True)


COMPOSED = dict(product=PRODUCT, dplr=DPLR, mlstm=MLSTM, mamba2=MAMBA2) | OF_RECIPES


@pytest.mark.parametrize("x", COMPOSED.values(), ids=COMPOSED)
def test_padding_of_operators_by_composition_may_hold_anything(x):
    arrays = {name: y if name in NOT_TOKENS else y[:1] for name, y in x.items() if hasattr(y, "shape")}
    more = {name: y for name, y in x.items() if name not in arrays}
    boundaries = jnp.array([0, 2, 5], jnp.int32)
    check_inputs(**poison_padding(arrays, boundaries), **more, cu_seqlens=boundaries, allow_padding=True)
