"""Whole operators from the mathematics of one chunk, `chunk` and `chunk_bwd` of a chunk.py, and the checks of the two.

Dims: B batch, T tokens, H heads, K and V key and value dimensions, C chunk size, NT = T / C chunks.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from chunkwise.shared.operators.recurrence import recurrence
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, TOLERANCE, assert_close, gradient_program
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference

# Options of `make_inputs` by the name of a case: gates of every strength, and keys that repeat.
CASES = {
    "weak": dict(gate="logsigmoid/10"),
    "medium": dict(gate="logsigmoid"),
    "strong": dict(gate="strong"),
    "spikes": dict(gate="spikes"),
    "resets": dict(gate="resets"),
    "repeated keys": dict(gate="logsigmoid/10", repeat_key=True),
    "repeated keys, beta 2": dict(gate="spikes", repeat_key=True, beta=2.0),
    "repeated keys, no gate": dict(gate="zero", repeat_key=True, beta=1.9),
}
SCALE = 0.3
TOKENS = ("q", "k", "v", "g", "beta")

Arrays = dict[str, jax.Array]


def make_case(case: str, T: int, *, per_channel: bool, delta_rule: bool = True) -> tuple[Arrays, Arrays]:
    """Return float32 inputs of an operator with initial states, and cotangents of o and final_state, for a case."""
    x = make_inputs(1, T, 2, K=16, V=24, num_states=1, per_channel=per_channel, **CASES[case])
    if not delta_rule:
        del x["beta"]
    rng = np.random.default_rng(1)
    results = dict(o=x["v"], final_state=x["initial_state"])
    return x, {name: jnp.asarray(rng.standard_normal(y.shape), y.dtype) for name, y in results.items()}


def scan_chunks(chunk: Callable, x: Arrays, C: int) -> tuple[Arrays, jax.Array]:
    """Return the results of an operator, o and final_state, and the states before all chunks [NT, B, H, K, V]."""
    heads = jax.vmap(jax.vmap(lambda *arguments: chunk(*arguments, SCALE)))

    def step(S, tokens):
        o, S_next = heads(*tokens, S)
        return S_next, (o, S)

    tokens = [_to_chunks(x[name], C) for name in TOKENS if name in x]
    final_state, (o, states) = lax.scan(step, x["initial_state"], tokens)
    return dict(o=_from_chunks(o), final_state=final_state), states


def scan_chunks_bwd(chunk_bwd: Callable, x: Arrays, states: jax.Array, cotangents: Arrays, C: int) -> Arrays:
    """Return the gradients of an operator by their names, such as "dq", from the states before all chunks."""
    heads = jax.vmap(jax.vmap(lambda *arguments: chunk_bwd(*arguments[:-2], SCALE, *arguments[-2:])))

    def step(dS_next, chunk):
        tokens, S, do = chunk
        *gradients, dS = heads(*tokens, S, do, dS_next)
        return dS, gradients

    names = [name for name in TOKENS if name in x]
    chunks = [_to_chunks(x[name], C) for name in names], states, _to_chunks(cotangents["o"], C)
    dS, gradients = lax.scan(step, cotangents["final_state"], chunks, reverse=True)
    gradients = {f"d{name}": _from_chunks(y) for name, y in zip(names, gradients, strict=True)}
    return gradients | dict(dinitial_state=dS)


def run_chunks(chunk: Callable, chunk_bwd: Callable, x: Arrays, cotangents: Arrays, C: int, dtype: str) -> Arrays:
    """Return the results of an operator and its gradients, computed by `chunk` and `chunk_bwd` in float32 or float64."""
    with jax.enable_x64(True):
        x, cotangents = jax.tree.map(lambda y: y.astype(dtype), (x, cotangents))
        found = _program(chunk, chunk_bwd, C)(x, cotangents)
    assert {name: y.dtype for name, y in found.items()} == dict.fromkeys(found, jnp.dtype(dtype))
    return found


def assert_results(found: Arrays, expected: Arrays, output_tolerance: float, gradient_tolerance: float) -> None:
    """Fail unless all results of an operator and all its gradients are close to the expected ones."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert_close(name, found[name], want, output_tolerance if name in ("o", "final_state") else gradient_tolerance)


def assert_chunk(chunk: Callable, chunk_bwd: Callable, x: Arrays, cotangents: Arrays, C: int) -> None:
    """Fail unless chunk and chunk_bwd give the results and the gradients of the token recurrence.

    In float64 these are those of the oracle, and the derivatives that JAX takes of the recurrence and of `chunk`.
    """
    o, final_state, gradients = reference(**x, scale=SCALE, do=cotangents["o"], dht=cotangents["final_state"])
    oracle = dict(o=o, final_state=final_state) | {f"d{name}": dx for name, dx in gradients.items()}
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda y: y.astype("float64"), (x, cotangents))
        by_token, by_chunk = (gradient_program(run)(wide[0], C, wide[1]) for run in (_recurrence, _forward(chunk)))
    found = run_chunks(chunk, chunk_bwd, x, cotangents, C, "float64")
    for expected in (oracle, by_token, by_chunk):
        assert_results(found, expected, 1e-12, 1e-10)
    narrow = run_chunks(chunk, chunk_bwd, x, cotangents, C, "float32")
    assert_results(narrow, oracle, TOLERANCE["float32"], GRADIENT_TOLERANCE["float32"])
