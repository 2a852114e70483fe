"""A result does not depend on how a sequence is cut, batched or packed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.pipeline import ragged_gated_delta_rule
from chunkwise.pipeline.operators import CHUNKED
from chunkwise.shared.testing.inputs import make_inputs

THOROUGH = dict(
    # The others run the same kernels, or have no choice of products.
    test_no_bit_depends_on_later_tokens=lambda operator, implementation: (
        operator.name != "chunk_kda" or implementation != "fused"
    ),
    # A step has the same bits beside others, through the same stages.
    test_staged_has_the_same_bits_alone_and_packed=True,
    test_plain_jax_with_states_has_the_same_bits_alone_and_packed=lambda operator: "gated" not in operator.name,
    test_a_step_has_the_same_bits_beside_others=lambda implementation: implementation == "xla",
)


def cut(inputs, start, stop):
    return {name: x[:, start:stop] for name, x in inputs.items()}


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_staged_has_the_same_bits_alone_and_packed(operator):
    """Outputs, states and gradients: chunks of a sequence begin where it begins, and see nothing of its neighbours."""
    cuts = [0, 13, 40]
    x = operator.source.inputs(1, 40, 1, 2, 16, 24, num_states=2)
    constant = {name: x.pop(name) for name in ("g_gamma",) if name in x}
    start, do = x.pop("initial_state"), jnp.cos(jnp.arange(x["v"].size, dtype=jnp.float32)).reshape(x["v"].shape)
    options = {"implementation": "staged", "chunk_size": 16, "output_final_state": True}

    @jax.jit
    def run(x, start, do, cu_seqlens=None):
        def loss(x, start):
            o, state = operator.function(**x, **constant, initial_state=start, cu_seqlens=cu_seqlens, **options)
            return jnp.sum(do * o) + jnp.sum(jnp.sin(state)), (o, state)

        gradients, (o, state) = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, start)
        return gradients[0] | {"o": o}, {"state": state, "dstart": gradients[1]}

    tokens, states = run(x, start, do, jnp.array(cuts, jnp.int32))
    for n, (first, end) in enumerate(itertools.pairwise(cuts)):
        alone = run(cut(x, first, end), start[n : n + 1], do[:, first:end])
        for name, y in alone[0].items():
            np.testing.assert_array_equal(y, tokens[name][:, first:end], err_msg=name)
        for name, y in alone[1].items():
            np.testing.assert_array_equal(y, states[name][n : n + 1], err_msg=name)


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_plain_jax_with_states_has_the_same_bits_alone_and_packed(operator):
    """Outputs and states."""
    x = operator.source.inputs(1, 40, 1, 2, 16, 24)
    constant = {name: x.pop(name) for name in ("g_gamma",) if name in x}
    constant |= dict(chunk_size=16, output_final_state=True, implementation="xla")
    run = jax.jit(lambda x, ends: operator.function(**x, **constant, cu_seqlens=ends))
    o, states = run(x, jnp.array([0, 13, 40], jnp.int32))
    alone, state = run(cut(x, 13, 40), jnp.array([0, 27], jnp.int32))
    np.testing.assert_array_equal(alone, o[:, 13:])
    np.testing.assert_array_equal(state, states[1:])


# Kernels with gates per channel choose products by the gates of a chunk, or by a promise.
CASES = [(operator, name, None) for operator in CHUNKED for name in operator.implementations]
CASES += [(operator, "fused", -5.0) for operator in CHUNKED if operator.delta and operator.per_channel]


@pytest.mark.parametrize(("operator", "implementation", "bound"), CASES, ids=lambda x: getattr(x, "name", None))
def test_no_bit_depends_on_later_tokens(operator, implementation, bound):
    """Outputs, and gradients of queries, in the chunk of a token from which on all tokens are others, with resets."""
    sizes = dict(T=32, H=1, HV=2, K=8, V=8, dtype=jnp.bfloat16)
    options = dict(implementation=implementation, chunk_size=32) | ({} if bound is None else {"min_gate": bound})
    x = operator.source.inputs(**sizes)
    later = operator.source.inputs(**sizes, seed=1, gate="resets" if bound is None else "logsigmoid")
    constant = {name: x.pop(name) for name in ("g_gamma",) if name in x}
    do = jnp.cos(jnp.arange(x["v"].size, dtype=jnp.float32)).astype(jnp.bfloat16).reshape(x["v"].shape)

    @jax.jit
    def run(x):
        o, pull = jax.vjp(lambda x: operator.function(**x, **constant, **options)[0], x)
        return o, pull(do)[0]["q"]

    expected = run(x)
    for t in (1, 11, 14, 29):
        found = run({name: jnp.concatenate([y[:, :t], later[name][:, t:]], axis=1) for name, y in x.items()})
        for name, y, other in zip(("o", "dq"), expected, found, strict=True):
            np.testing.assert_array_equal(y[:, :t], other[:, :t], err_msg=f"{name}, {t}")


@pytest.mark.parametrize("implementation", ["xla", "staged"])
def test_a_step_has_the_same_bits_beside_others(implementation):
    """A decode and a prefill of one program, beside other sequences and without any."""
    x, pool = make_inputs(1, 75, 1, 2, 16, 16), jax.random.normal(jax.random.key(0), (6, 2, 16, 16))
    int32 = lambda *values: jnp.array(values, jnp.int32)

    @jax.jit
    def step(x, cu_seqlens, state_indices, num_decodes):
        return ragged_gated_delta_rule(
            **x, states=pool, cu_seqlens=cu_seqlens, state_indices=state_indices, num_decodes=num_decodes,
            has_initial_state=jnp.ones(4, bool), chunk_size=16, implementation=implementation,
        )  # fmt: skip

    o, after = step(x, int32(0, 1, 2, 39, 75), int32(0, 1, 2, 3), jnp.int32(2))
    for n, first, end in ((1, 1, 2), (2, 2, 39)):
        alone = {name: jnp.roll(y, -first, axis=1) for name, y in x.items()}
        bounds = int32(0, *[end - first] * 4)
        one, states = step(alone, bounds, int32(n, -1, -1, -1), jnp.int32(n == 1))
        np.testing.assert_array_equal(one[:, : end - first], o[:, first:end])
        np.testing.assert_array_equal(states[n], after[n])
