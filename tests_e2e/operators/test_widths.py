"""Heads of every usual width are read and written where projections leave them: XLA pads and copies no tokens.

An operator is a row of OPERATORS: its function, and the arrays that it takes beside q, k and v, by name.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from chunkwise import pipeline
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import tpu
from chunkwise.shared.testing.inputs import spec

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not tpu.has_libtpu(), reason="needs libtpu")]
B, T, H = 1, 512, 8
WIDTHS = (
    *((n, n) for n in (16, 32, 48, 64, 80, 96, 112, 160, 192, 256)), (128, 64), (128, 80), (96, 192), (64, 128),
    (80, 112),
)  # fmt: skip


def mamba2(q, k, v, dt, A, D, **options):
    return pipeline.chunk_mamba2(v, dt, A, k, q, D, dt_softplus=True, **options)


OPERATORS = {
    "simple_gla": (pipeline.chunk_simple_gla, lambda H, K: dict(g=spec(B, T, H))),
    "gla": (pipeline.chunk_gla, lambda H, K: dict(g=spec(B, T, H * K))),
    "mlstm": (pipeline.chunk_mlstm, lambda H, K: dict(i=spec(B, T, H), f=spec(B, T, H))),
    "mamba2": (mamba2, lambda H, K: dict(dt=spec(B, T, H), A=spec(H), D=spec(H))),
    "gated_delta_rule": (pipeline.chunk_gated_delta_rule, lambda H, K: dict(g=spec(B, T, H), beta=spec(B, T, H))),
    "kda": (pipeline.chunk_kda, lambda H, K: dict(g=spec(B, T, H * K), beta=spec(B, T, H))),
    "dplr": (pipeline.chunk_dplr_delta_rule, lambda H, K: {name: spec(B, T, H * K) for name in ("a", "b", "gk")}),
}
# OLMo-hybrid, whose tokens do not fill whole registers.
HEADS = {("gated_delta_rule", (96, 192)): 30}
QUICK = (("simple_gla", (64, 64)), ("simple_gla", (128, 80)), ("mamba2", (128, 64)))
THOROUGH = dict(
    test_nothing_stands_around_a_launch=lambda operator, widths, chip: (operator, widths) not in QUICK or chip != "v6e",
    test_steps_of_a_token=True,
)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda widths: "x".join(map(str, widths)))
@pytest.mark.parametrize("operator", OPERATORS)
def test_nothing_stands_around_a_launch(operator, widths, chip):
    (function, more), (K, V), heads = OPERATORS[operator], widths, HEADS.get((operator, widths), H)
    tokens = lambda width: spec(B, T, heads * width, dtype=jnp.bfloat16)
    x = dict(q=tokens(K), k=tokens(K), v=tokens(V)) | more(heads, K)

    def run(x, do):
        def flat(x):
            by_head = {name: y.reshape(B, T, heads, -1) if y.shape[-1] > heads else y for name, y in x.items()}
            return function(**by_head, implementation="fused")[0].reshape(B, T, -1)

        o, pullback = jax.vjp(flat, x)
        return o, pullback(do)[0]

    # In the layout that the compiler takes: of few lanes it would store the tokens of an argument side by side.
    text = tpu.compile_for(run, x, x["v"], chip=chip, auto_layout=True).as_text()
    assert not around_launches(text, B * T * heads * min(K, V))


@pytest.mark.parametrize("chip", CHIPS)
def test_steps_of_a_token(chip):
    """Gated DeltaProduct cuts the two keys and values of a token, which begin inside of registers, from its row."""
    H, K, V = 3, 80, 112
    rows = [spec(B, T, n * H * D, dtype=jnp.bfloat16) for n, D in ((1, K), (2, K), (2, V))]

    def run(q, k, v, g, beta):
        q, k, v = (x.reshape(B, -1, H, D) for x, D in ((q, K), (k, K), (v, V)))
        beta = beta.reshape(B, -1, H)
        o, _ = pipeline.chunk_gated_delta_product(q, k, v, g, beta, 2, implementation="fused")
        return o.reshape(B, T, -1)

    compiled = tpu.compile_for(run, *rows, spec(B, T, H), spec(B, T, 2 * H), chip=chip, auto_layout=True)
    assert not around_launches(compiled.as_text(), B * T * H * K)


def around_launches(text: str, size: int) -> list[str]:
    """Return the operations of a compiled program that make an array of so many numbers or more, but for kernels."""
    entry = re.search(r"^ENTRY .*?^}", text, re.MULTILINE | re.DOTALL)
    assert entry is not None
    assert tpu.launches(text)
    # A copy, or a slice, that starts and is done is one to fast memory, ahead of its launch.
    nothing = {"parameter", "bitcast", "get-tuple-element", "tuple", "custom-call", "constant"}
    nothing |= {"copy-start", "copy-done", "slice-start", "slice-done"}
    found = []
    for line in entry[0].splitlines():
        made = re.match(r"\s*(?:ROOT )?%?\S+ = (.*?) ([\w\-]+)\(", line)
        if made and made[2] not in nothing:
            arrays = re.findall(r"\w+\[([\d,]+)\]", made[1])
            if any(math.prod(map(int, sizes.split(","))) >= size for sizes in arrays):
                found.append(line.strip()[:200])
    return found
