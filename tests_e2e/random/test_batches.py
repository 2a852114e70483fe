"""Any operator, under any implementation, on any batch: outputs, states and gradients against the float64 recurrence.

Every batch is another program to compile, 120 of them: this is a search for mistakes, by `python -m nox -s random`, and
not for CI. What it finds becomes a test of its own.
"""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkwise.pipeline.operators import CHUNKED, COMPOSED, Entry
from chunkwise.shared.testing.inputs import GATES, boundaries
from tests.recurrence import assert_recurrence


@st.composite
def batches(draw, delta: bool, gates: tuple[str, ...]):
    """Draw the sizes, types and gates of a batch; packs may end before their last token."""
    H, T = draw(st.integers(1, 3)), draw(st.integers(1, 140))
    lengths = draw(st.none() | st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(lambda x: sum(x) <= T))
    return dict(
        B=draw(st.integers(1, 3)) if lengths is None else 1,
        T=T,
        lengths=lengths,
        H=H,
        HV=H * draw(st.integers(1, 4)),
        # Of one channel the norm leaves nothing but a sign, and its gradient is rounding.
        K=draw(st.sampled_from((2, 8, 33, 48, 64, 80, 96, 112, 192))),
        V=draw(st.sampled_from((1, 8, 32, 40, 64, 80, 96, 160, 192))),
        chunk_size=draw(st.sampled_from((16, 32, 64, 128))),
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        gate=draw(st.sampled_from(gates)),
        start=draw(st.booleans()),
        end=draw(st.booleans()),
        normalise=delta and draw(st.booleans()),
    )


def run(operator: Entry, implementation: str, b: dict) -> None:
    """Compare one batch with the oracle, NaN in its padding."""
    N = b["B"] if b["lengths"] is None else len(b["lengths"])
    x = operator.source.inputs(
        b["B"], b["T"], b["H"], b["HV"], b["K"], b["V"], dtype=jnp.dtype(b["dtype"]), gate=b["gate"],
        num_states=N * b["start"], normalise=not b["normalise"],
    )  # fmt: skip
    options = {} if b["lengths"] is None else {"cu_seqlens": boundaries(*b["lengths"])}
    if b["normalise"]:
        options["use_qk_l2norm_in_kernel"] = True

    def expected(do=None, dht=None, **named):
        told = {name: named.pop(name) for name in options if name in named}
        return operator.source.reference(named, do=do, dht=dht, **told)

    assert_recurrence(
        operator.function, x, **options, **operator.static, output_final_state=b["end"], chunk_size=b["chunk_size"],
        implementation=implementation, limit=lambda name, dtype, x: operator.source.tolerance(name, b["dtype"]),
        expected=expected, values=operator.source.values,
    )  # fmt: skip
    jax.clear_caches()


# A batch may have fewer tokens than heads.
@pytest.mark.filterwarnings("ignore:`q` should have shape .*head-first:UserWarning")
@pytest.mark.parametrize(
    ("operator", "implementation"),
    [pytest.param(x, i, id=f"{x.name}-{i}") for x in (*CHUNKED, COMPOSED["chunk_mamba2"]) for i in x.implementations],
)
def test_random_batches(operator, implementation):
    # Stages hand on a sum of gates as one float32: ten resets in a chunk cost it digits, errors are then about 1e-5.
    # The step sizes of Mamba-2 are finite.
    gates = GATES if implementation == "staged" or operator.name == "chunk_mamba2" else (*GATES, "resets")
    search = given(batches(operator.delta, gates))(lambda b: run(operator, implementation, b))
    settings(max_examples=10, deadline=None, database=None)(search)()
