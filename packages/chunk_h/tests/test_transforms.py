"""Under jit, vmap, remat, grad, eval_shape and export."""

import functools

import pytest

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.shared import stage_reference
from chunkwise.shared.testing import (
    TRANSFORMS,
    Case,
    assert_gradients,
    assert_traced_once,
    assert_transform,
    boundaries,
)

NAMES = ("k", "w", "u", "g_cum", "initial_state")
both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


def arguments(**sizes):
    x = Case(**dict(T=20, HV=2, K=3, V=2, chunk_size=16) | sizes).arguments()
    return {name: x[name] for name in NAMES}


def run(implementation, **cut):
    return functools.partial(
        chunk_gated_delta_rule_fwd_h, output_final_state=True, chunk_size=16, implementation=implementation, **cut
    )


@both
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, implementation):
    assert_transform(transform, run(implementation), tuple(arguments(B=2).values()))


@both
@pytest.mark.parametrize("lengths", [None, (1, 0, 17)], ids=["fixed", "packed"])
def test_gradients(lengths, implementation):
    cut = dict(cu_seqlens=None if lengths is None else boundaries(*lengths))
    definition = functools.partial(stage_reference.states, chunk_size=16, **cut)
    x = arguments(HV=1) if lengths is None else arguments(HV=1, T=18, lengths=lengths)
    assert_gradients(run(implementation, **cut), definition, x)


@both
@pytest.mark.parametrize("gate", ["g_cum", "gk_cum"])
def test_gradients_of_linear_attention(gate, implementation):
    x = Case(T=20, HV=2, K=3, V=2, chunk_size=16).arguments()
    args = dict(k=x["k"], v=x["v"], initial_state=x["initial_state"])
    # Any decreasing gates per channel will do.
    args[gate] = x["g_cum"] if gate == "g_cum" else x["g_cum"][..., None] * (1 + x["k"] ** 2)

    def definition(k, v, initial_state, **gates):
        h, _, final_state = stage_reference.states(k, None, v, *gates.values(), initial_state, 16)
        return h, final_state

    linear = functools.partial(chunk_fwd_h, output_final_state=True, chunk_size=16, implementation=implementation)
    assert_gradients(linear, definition, args)


@both
def test_boundaries_are_traced(implementation):
    x = arguments(T=20, lengths=(1, 0, 19))
    batches = [(x, boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]]
    assert_traced_once(lambda x, cu_seqlens: run(implementation, cu_seqlens=cu_seqlens)(**x), *batches)
