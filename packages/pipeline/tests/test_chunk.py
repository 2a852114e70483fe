"""chunk.py of every operator against the float64 recurrence, and the interpreted kernels against chunk.py.

Dims: B batch, T tokens, H heads, K and V key and value dimensions, C chunk size, NT = T / C chunks.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from chunkwise.fused_gdn import chunk as gdn
from chunkwise.fused_gla import chunk as gla
from chunkwise.kda import chunk as kda
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.plain import recurrence
from chunkwise.shared.testing import compare, inputs, oracle
from chunkwise.two_keys import chunk as two_keys

# Options of `inputs.make_inputs` by the name of a case: gates of every strength, and keys that repeat.
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
# One size, so that one program serves all cases: three chunks of 16 tokens.
T, C, SCALE = 48, 16, 0.3
# The largest errors of outputs and states, and of gradients.
FLOAT64 = dict(results=1e-12, gradients=1e-10)
FLOAT32 = dict(results=compare.TOLERANCE["float32"], gradients=compare.GRADIENT_TOLERANCE["float32"])
TOKENS = ("q", "k", "v", "g", "beta", "b", "w")

Arrays = dict[str, jax.Array]


def make_case(
    case: str, *, per_channel: bool, delta_rule: bool = True, erase: str | None = None
) -> tuple[Arrays, Arrays]:
    """Return float32 inputs of an operator, with initial states, and cotangents of o and final_state."""
    x = inputs.make_inputs(1, T, 2, K=16, V=24, num_states=1, per_channel=per_channel, erase=erase, **CASES[case])
    x = {name: y for name, y in x.items() if delta_rule or name != "beta"}
    rng, results = np.random.default_rng(1), dict(o=x["v"], final_state=x["initial_state"])
    return x, {name: jnp.asarray(rng.standard_normal(y.shape), y.dtype) for name, y in results.items()}


def scan_chunks(chunk: Callable, x: Arrays) -> tuple[Arrays, jax.Array]:
    """Return the results of an operator, o and final_state, and the states before all chunks [NT, B, H, K, V]."""
    heads = jax.vmap(jax.vmap(lambda *args: chunk(*args, SCALE)))

    def step(S, tokens):
        o, S_next = heads(*tokens, S)
        return S_next, (o, S)

    tokens = [_to_chunks(x[name]) for name in TOKENS if name in x]
    final_state, (o, states) = lax.scan(step, x["initial_state"], tokens)
    return dict(o=_from_chunks(o), final_state=final_state), states


def scan_chunks_bwd(chunk_bwd: Callable, x: Arrays, states: jax.Array, cotangents: Arrays) -> Arrays:
    """Return the gradients of an operator by name, such as "dq", from the states before all chunks."""
    heads = jax.vmap(jax.vmap(lambda *args: chunk_bwd(*args[:-2], SCALE, *args[-2:])))

    def step(dS_next, chunks):
        tokens, S, do = chunks
        *gradients, dS = heads(*tokens, S, do, dS_next)
        return dS, gradients

    names = [name for name in TOKENS if name in x]
    chunks = [_to_chunks(x[name]) for name in names], states, _to_chunks(cotangents["o"])
    dS, gradients = lax.scan(step, cotangents["final_state"], chunks, reverse=True)
    gradients = {f"d{name}": _from_chunks(y) for name, y in zip(names, gradients, strict=True)}
    return gradients | dict(dinitial_state=dS)


def run_chunks(chunk: Callable, chunk_bwd: Callable, x: Arrays, cotangents: Arrays, dtype: str) -> Arrays:
    """Return the results and gradients of an operator by name, computed in `dtype`, "float32" or "float64"."""
    with jax.enable_x64(True):
        found = _by_chunk(chunk, chunk_bwd)(*_cast((x, cotangents), dtype))
    assert {name: str(y.dtype) for name, y in found.items()} == dict.fromkeys(found, dtype)
    return found


def assert_recurrence(
    chunk: Callable, chunk_bwd: Callable, x: Arrays, cotangents: Arrays, erase_before_decay: bool = False
) -> None:
    """Fail unless chunk and chunk_bwd give the results and the gradients of the token recurrence.

    In float64 they are compared with the oracle, and with the derivatives that JAX takes of the recurrence and of
    `chunk`; in float32 with the oracle.
    """
    law, given = dict(erase_before_decay=erase_before_decay), dict(do=cotangents["o"], dht=cotangents["final_state"])
    o, final_state, gradients = oracle.reference(**x, **law, **given, scale=SCALE)
    by_token = dict(o=o, final_state=final_state) | {f"d{name}": dx for name, dx in gradients.items()}
    with jax.enable_x64(True):
        derived = _derived(chunk, erase_before_decay)(*_cast((x, cotangents), "float64"))
    found = run_chunks(chunk, chunk_bwd, x, cotangents, "float64")
    for expected in (by_token, *derived):
        _assert_all_close(found, expected, **FLOAT64)
    found = run_chunks(chunk, chunk_bwd, x, cotangents, "float32")
    _assert_all_close(found, by_token, **FLOAT32)


@functools.cache
def _by_chunk(chunk, chunk_bwd):
    """Return the program of the results and gradients by `chunk` and `chunk_bwd`; it is compiled once for all cases."""

    def run(x, cotangents):
        results, states = scan_chunks(chunk, x)
        return results | scan_chunks_bwd(chunk_bwd, x, states, cotangents)

    return jax.jit(run)


@functools.cache
def _derived(chunk, erase_before_decay):
    """Return the program of the results and derivatives of the token recurrence, and of `chunk`."""

    def by_token(x, _):
        q, k, v, g, beta, b, w = (x.get(name) for name in TOKENS)
        p, v, beta = (None, v, beta) if b is None else (b * k, w * v, jnp.ones(v.shape[:3]))
        o, final_state = recurrence.recurrence(
            q, k, v, g, beta, SCALE, x["initial_state"], jnp.float64, p, erase_before_decay=erase_before_decay
        )
        return dict(o=o, final_state=final_state)

    runs = (by_token, lambda x, _: scan_chunks(chunk, x)[0])
    return jax.jit(lambda x, cotangents: [compare.with_gradients(run)(x, None, cotangents) for run in runs])


@functools.cache
def _by_kernel(operator):
    """Return the program of the results and gradients of the kernels."""

    def run(x, _):
        o, final_state = operator(**x, scale=SCALE, output_final_state=True, chunk_size=C, implementation="fused")
        return dict(o=o, final_state=final_state)

    return jax.jit(lambda x, cotangents: compare.with_gradients(run)(x, None, cotangents))


def _assert_all_close(found: Arrays, expected: Arrays, results: float, gradients: float) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        compare.assert_close(name, found[name], want, results if name in ("o", "final_state") else gradients)


def _cast(tree, dtype: str):
    return jax.tree.map(lambda y: y.astype(dtype), tree)


def _to_chunks(x: jax.Array) -> jax.Array:
    """Return tokens [B, T, H, ...] as chunks [NT, B, H, C, ...]."""
    B, _, H = x.shape[:3]
    return jnp.moveaxis(x.reshape(B, -1, C, H, *x.shape[3:]), (1, 3), (0, 2))


def _from_chunks(x: jax.Array) -> jax.Array:
    """Return chunks [NT, B, H, C, ...] as tokens [B, T, H, ...]."""
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# The chunk.py of every operator, and what `make_case` makes its inputs of.
CHUNKS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "gated_delta_rule": (gdn, dict(per_channel=False)),
    "kda": (kda, dict(per_channel=True)),
    "gdn2": (two_keys, dict(per_channel=True, erase="gate")),
    "gla": (gla, dict(per_channel=True, delta_rule=False)),
    "simple_gla": (gla, dict(per_channel=False, delta_rule=False)),
}
# The kernels compute the same tiles, and every package compares its operator with the recurrence, but for the kernels
# of a layer with gates per channel, of which no other test is quick.
THOROUGH = dict(
    test_recurrence=True, test_kernels=lambda name: name != "gla", test_recurrence_of_erase_keys_before_the_decay=True
)
each_case = pytest.mark.parametrize("case", CASES)
each_operator = pytest.mark.parametrize("name", CHUNKS)


@each_case
@each_operator
def test_recurrence(name, case):
    module, options = CHUNKS[name]
    assert_recurrence(module.chunk, module.chunk_bwd, *make_case(case, **options))


@each_case
@each_operator
def test_kernels(name, case):
    """Fail unless the kernels, interpreted, give the results and the gradients of chunk.py."""
    (module, options), operator = CHUNKS[name], OPERATORS[f"chunk_{name}"].function
    x, cotangents = make_case(case, **options)
    found = _by_kernel(operator)(x, cotangents)
    expected = run_chunks(module.chunk, module.chunk_bwd, x, cotangents, "float64")
    _assert_all_close(found, expected, **FLOAT32)


BEFORE_DECAY = [functools.partial(f, erase_before_decay=True) for f in (two_keys.chunk, two_keys.chunk_bwd)]


@each_case
def test_recurrence_of_erase_keys_before_the_decay(case):
    assert_recurrence(*BEFORE_DECAY, *make_case(case, **CHUNKS["gdn2"][1]), erase_before_decay=True)
