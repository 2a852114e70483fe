"""What is not finite in one sequence changes no bit of another, nor of another row of a batch.

Every input of every sequence is poisoned in turn, and every cotangent; outputs, states and gradients are compared.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import fused_gdn, fused_gla
from chunkwise.pipeline.operators import CHUNKED, OPERATORS
from chunkwise.shared.testing.inputs import boundaries
from tests.poison import assert_operator_isolated

# An empty sequence, three that end in the first chunk, one that begins there and ends where the third chunk begins, one
# of this chunk, and padding.
LENGTHS = (3, 0, 4, 25, 16)
FORMS = "sequences", "sequences with states", "rows with states"
STEPS = fused_gla.Config(2, 2, 2)
BLOCKS = fused_gdn.Config(heads=1, heads_bwd=2)
# An operator, an implementation, what the sequences are, a type and options.
CASES = [(x.name, how, of, "float32", {}) for x in CHUNKED for how in x.implementations for of in FORMS]
CASES += [
    # A block of one of two heads is whole registers.
    ("chunk_gated_delta_rule", "fused", "sequences", "bfloat16", dict(config=BLOCKS)),
    # One product over blocks of 8 rows, in the backward too, or in the forward of bfloat16 alone.
    *(("chunk_kda", how, "sequences", "float32", dict(min_gate=-5.0)) for how in ("xla", "fused")),
    *((f"chunk_{name}", "fused", of, "bfloat16", {}) for name in ("kda", "gdn2", "comba") for of in FORMS),
    # The kernels have a product for all pairs in bfloat16.
    *(("chunk_gla", "fused", of, "bfloat16", dict(config=STEPS)) for of in FORMS[:2]),
    *(("chunk_simple_gla", "fused", of, "float32", dict(config=STEPS)) for of in FORMS[:2]),
]
# Every stage has a quick test of its own, and the other kernels keep sequences apart in the same way.
QUICK = ("chunk_gated_delta_rule", "fused", "sequences", "float32")
THOROUGH = dict(
    test_isolated=lambda name, implementation, of, dtype: (name, implementation, of, dtype) != QUICK,
    test_a_spoilt_sequence_stays_so=True,
)


@pytest.mark.parametrize(("name", "implementation", "of", "dtype", "options"), CASES)
def test_isolated(name, implementation, of, dtype, options):
    """Heads of one sequence may spoil one another."""
    operator, D = OPERATORS[name], 128 if options.get("config") == BLOCKS else 16
    options = dict(use_qk_l2norm_in_kernel=operator.delta and implementation == "staged") | options
    if not operator.delta:
        del options["use_qk_l2norm_in_kernel"]
    make = functools.partial(operator.source.inputs, H=1, HV=2, K=D, V=D // 2 if D == 16 else D, dtype=jnp.dtype(dtype))
    bounded = lambda *sizes, **more: (x := make(*sizes, **more)) | dict(g=jnp.maximum(x["g"], -5.0))
    made = bounded if "min_gate" in options else make
    assert_operator_isolated(operator.function, made, of, LENGTHS, implementation=implementation, **options)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_a_spoilt_sequence_stays_so(implementation):
    """From the first chunk that is not finite to its last token, over chunks that it shares and chunks of its own."""
    operator = OPERATORS["chunk_gated_delta_rule"]
    x = operator.source.inputs(1, 52, 1, 2, 16, 16)
    x["v"] = x["v"].at[0, 6, 0, 3].set(jnp.nan)
    o, _ = operator.function(**x, cu_seqlens=boundaries(5, 40), chunk_size=16, implementation=implementation)
    spoilt = np.isnan(np.asarray(o[0])).any(axis=(1, 2))
    np.testing.assert_array_equal(spoilt, [5 <= t < 45 for t in range(52)])
