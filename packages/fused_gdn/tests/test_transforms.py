"""Gradients against float64, and the kernels under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gdn import Config, chunk_gated_delta_rule
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference
from tests.recurrence import assert_recurrence
from tests.traced import launches

CUTS = [0, 1, 64, 64, 70, 128, 200]
QUICK = ((jnp.float32, "logsigmoid"),)
THOROUGH = dict(
    test_gradients=lambda dtype, gate: (dtype, gate) not in QUICK,
    test_types_may_differ=True,
)


@pytest.mark.parametrize(
    ("dtype", "gate", "T", "H", "HV", "K", "V", "C", "states", "packed"),
    [
        (jnp.float32, "logsigmoid", 50, 2, 6, 60, 100, 32, True, False),
        (jnp.float32, "spikes", 256, 2, 2, 64, 64, 64, False, True),
        (jnp.bfloat16, "zero", 150, 1, 2, 128, 128, 64, False, False),
        (jnp.bfloat16, "logsigmoid/10", 210, 1, 2, 64, 128, 64, True, True),
        (jnp.bfloat16, "strong", 130, 1, 1, 256, 64, 128, False, False),
        # Gradients of e^-30: what no gate decays must not be added and taken away again.
        (jnp.float32, "strong", 41, 1, 1, 16, 16, 16, True, False),
    ],
)
def test_gradients(dtype, gate, T, H, HV, K, V, C, states, packed):
    N = (len(CUTS) - 1 if packed else 1) * states
    cu_seqlens = jnp.array(CUTS, jnp.int32) if packed else None
    x = make_inputs(1, T, H, HV, K, V, dtype=dtype, gate=gate, num_states=N)
    options = dict(chunk_size=C, use_qk_l2norm_in_kernel=not packed, implementation="fused")
    assert_recurrence(chunk_gated_delta_rule, x, cu_seqlens=cu_seqlens, **options)


def test_types_may_differ():
    """In a pack whose padding begins inside of a chunk, with a key head repeated for two steps."""
    x = make_inputs(1, 40, 1, 2, 128, 128)
    x |= {n: x[n].astype(t) for n, t in dict(q=jnp.bfloat16, k=jnp.float16, v=jnp.float16, g=jnp.bfloat16).items()}
    options = dict(chunk_size=16, config=Config(heads=1, heads_bwd=1), implementation="fused")
    assert_recurrence(chunk_gated_delta_rule, x, cu_seqlens=jnp.array([0, 5, 21], jnp.int32), **options)


def test_new_boundaries_do_not_trace_again():
    traces = []

    @jax.jit
    def run(x, cu_seqlens):
        traces.append(1)
        return chunk_gated_delta_rule(**x, cu_seqlens=cu_seqlens, chunk_size=16, implementation="fused")[0]

    x = make_inputs(1, 40, 1, 1, 16, 16)
    for cuts in ([0, 5, 40], [0, 31, 33]):
        cu_seqlens = jnp.array(cuts, jnp.int32)
        assert_close("o", run(x, cu_seqlens), reference(**x, cu_seqlens=cu_seqlens)[0], TOLERANCE["float32"])
    assert len(traces) == 1


@pytest.mark.parametrize(("packed", "disable_recompute"), [(False, False), (True, False), (True, True)])
def test_kept_for_the_backward_holds_no_padding(packed, disable_recompute):
    """The inputs in their types, the inverse of every step, and what says how sequences lie in chunks.

    If nothing is made again, the states and the new values are kept, too.
    """
    x = make_inputs(1, 40, 1, 2, 64, 112, dtype=jnp.bfloat16)
    cu_seqlens = jnp.array([0, 5, 21], jnp.int32) if packed else None
    run = lambda x: chunk_gated_delta_rule(
        **x, cu_seqlens=cu_seqlens, chunk_size=16, implementation="fused", disable_recompute=disable_recompute
    )[0]
    # JAX keeps a few scalars as well, such as the number that it pads with.
    kept = [y for y in jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(run, x)[1], x)) if y.shape]
    inverse, tables = 4 * 3 * 16 * 32, 4 * packed * (3 * 32 + 4 + 3)
    size = lambda y: y.size * y.dtype.itemsize
    more = (3 * 2 * 64 * 112 * 2 + 40 * 2 * 112 * 4) * disable_recompute
    assert 0 <= sum(map(size, x.values())) + inverse + tables + more - sum(map(size, kept)) <= tables


@pytest.mark.parametrize("chunks", [1, 3])
def test_nothing_is_made_again(chunks):
    """The gradients keep every bit; `jax.checkpoint` makes all that the backward reads in one launch."""
    x = make_inputs(1, 200, 1, 2, 24, 40, dtype=jnp.bfloat16)

    def run(x, disable_recompute):
        return chunk_gated_delta_rule(
            **x, chunk_size=16, implementation="fused", config=Config(2, 2, chunks), disable_recompute=disable_recompute
        )[0]  # fmt: skip

    def gradients(run, disable_recompute):
        return lambda x: jax.value_and_grad(lambda x: jnp.sum(run(x, disable_recompute).astype(jnp.float32) ** 2))(x)

    kinds = lambda run: [x.name.split("_")[4] for x in launches(gradients(run, True), x)]
    assert kinds(run) == ["fwd", "bwd"]
    assert kinds(jax.checkpoint(run, static_argnums=1)) == ["fwd", "states", "bwd"]
    jax.tree.map(np.testing.assert_array_equal, gradients(run, True)(x), gradients(run, False)(x))
