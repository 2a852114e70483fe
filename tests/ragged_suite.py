"""What the tests of serving steps share: the operators, and random tokens of a stream by name."""

import functools

import jax.numpy as jnp
import numpy as np

from chunkwise import pipeline
from chunkwise.pipeline.operators import COMPOSED
from chunkwise.pipeline.operators import OPERATORS as ENTRIES
from tests.engine import linear_attention

H, HV, K, V = 2, 4, 24, 40
# Those of other kernels are thorough tests here: see conftest.py.
NAMES = ("gated_delta_rule", "kda", "simple_gla", "gdn2", "comba")
# Operators that run another one, and how many of its tokens a token takes.
STEPS = {"gated_delta_product": 2, "dplr_delta_rule": 2}
# The operators whose gates are raw here, and the arrays of their law.
RAW = ("kda", "gated_delta_product")
A_LOG = np.linspace(-1.0, 0.5, HV, dtype=np.float32)


def _function(name: str):
    """Return the serving step of an operator that takes the tokens of `make_tokens`."""
    function = getattr(pipeline, f"ragged_{name}")
    if name in RAW:
        function = functools.partial(_raw, function)
    return functools.partial(_product, function) if name == "gated_delta_product" else function


def _raw(function, *, v, **more):
    """Run a step with raw gates."""
    return function(v=v, use_gate_in_kernel=True, A_log=jnp.asarray(A_LOG[: v.shape[2]]), **more)


def _product(function, *, k, v, beta, **more):
    """Run a step of Gated DeltaProduct, whose tokens have n keys, values and step sizes each, [1, T, n, ...]."""
    k, v, beta = (y.reshape(1, -1, *y.shape[3:]) for y in (k, v, beta))
    return function(k=k, v=v, beta=beta, num_householder=STEPS["gated_delta_product"], **more)


OPERATORS = {name: _function(name) for name in (*NAMES, *STEPS)}
_ENTRIES = {name: (ENTRIES | COMPOSED)[f"recurrent_{name}"] for name in OPERATORS}
PER_CHANNEL = {name for name, entry in _ENTRIES.items() if entry.per_channel}


def make_tokens(
    operator: str, rng: np.random.Generator, T: int, used: int, sizes=(K, V), heads=(H, HV)
) -> dict[str, np.ndarray]:
    """Return the tensors [1, T, ...] of an operator, NaN after the tokens that are used."""
    (K, V), (H, HV), entry = sizes, heads, _ENTRIES[operator]
    normal = lambda *shape: rng.standard_normal((1, T, *shape)).astype(np.float32)
    sigmoid = lambda *shape: 1 / (1 + np.exp(-normal(*shape)))
    unit = lambda y: y / np.linalg.norm(y, axis=-1, keepdims=True)
    n = (STEPS[operator],) if operator == "gated_delta_product" else ()
    tokens = dict(q=normal(H, K), k=unit(normal(*n, H, K)), v=normal(*n, HV, V))
    gate = normal(HV, K) if entry.per_channel else normal(HV)
    gate = gate if operator in RAW else -np.abs(gate)
    if operator == "dplr_delta_rule":
        erase = unit(normal(H, K))
        tokens |= dict(gk=gate, a=-erase, b=erase * sigmoid(H, K))
    else:
        tokens["g"] = gate
    if entry.erase == "gate":
        tokens |= dict(b=sigmoid(HV, K), w=sigmoid(HV, V))
    elif entry.delta and "gk" not in tokens:
        tokens |= dict(beta=sigmoid(*n, HV))
    if entry.erase == "key":
        tokens["p"] = tokens["k"] + normal(H, K) * np.float32(0.25 * K**-0.5)
    for x in tokens.values():
        x[:, used:] = np.nan
    return tokens


def token_of(operator: str):
    """Return the recurrence of an operator, a `token` function of `engine.Oracle`."""
    others = dict(gated_delta_product=_of_product, dplr_delta_rule=_of_dplr, comba=_of_comba)
    run = others.get(operator, linear_attention)
    if operator not in RAW:
        return run

    def token(S: np.ndarray, *, g, **x) -> tuple[np.ndarray, np.ndarray]:
        rate = np.exp(A_LOG[: len(g)].astype(np.float64)).reshape(-1, *(1,) * (g.ndim - 1))
        return run(S, g=-rate * np.logaddexp(0.0, g), **x)

    return token


def _of_product(S: np.ndarray, *, q, k, v, g, beta) -> tuple[np.ndarray, np.ndarray]:
    """Return the state and the output after n steps of the delta rule, of which the first decays the state."""
    for i in range(len(k)):
        S, o = linear_attention(S, q=q, k=k[i], v=v[i], g=g if i == 0 else np.zeros_like(g), beta=beta[i])
    return S, o


def _of_comba(S: np.ndarray, *, v, beta, p, **x) -> tuple[np.ndarray, np.ndarray]:
    """Return the state and the output after a token whose erase key reads the state before its decay."""
    read = np.einsum("hkv,hk->hv", S, np.repeat(p, len(S) // len(p), axis=0))
    return linear_attention(S, v=beta[:, None] * (v - read), **x)


def _of_dplr(S: np.ndarray, *, q, k, v, a, b, gk) -> tuple[np.ndarray, np.ndarray]:
    """Return the state and the output after a token whose erase key reads the state before its decay."""
    a, b = (np.repeat(y, len(S) // len(y), axis=0) for y in (a, b))
    read = np.einsum("hkv,hk->hv", S, a)
    S = np.exp(gk)[:, :, None] * S + b[:, :, None] * read[:, None]
    return linear_attention(S, q=q, k=k, v=v, g=np.zeros(len(S)))
