"""KDA at the shapes of kda-tpu-bench, a public benchmark of TPU kernels, beside its published times on a v6e.

A call has 24 heads of 128 channels in bfloat16, raw gates whose decay is bounded by -5, packed sequences of one length,
and their states in and out. The best of the benchmark's three kernels is from pull request 1550 of sglang-jax.
Published times are times of calls that wait for their results.
"""

import re

import jax
import jax.numpy as jnp

from benchmarks import tpu, turns
from chunkwise.command import times
from chunkwise.command.models import Layer
from chunkwise.kda import chunk_kda
from chunkwise.shared.chips import CHIPS

CHIP, HEADS, SIZE = "v6e", 24, 128
# The best published time in ms, by the number of sequences and the tokens of each.
PUBLISHED_MS = {(1, 8192): 3.874, (8, 1024): 4.208, (16, 512): 4.945, (64, 128): 7.079}


def build(sequences: int, T: int) -> tuple:
    """Return our function and its shapes, with the arguments that the benchmark gives sglang-jax's kernel."""
    spec = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    total = sequences * T
    tokens = spec(1, total, HEADS, SIZE, dtype=jnp.bfloat16)
    specs = [
        tokens, tokens, tokens, spec(1, total, HEADS, SIZE), spec(1, total, HEADS),
        spec(sequences, HEADS, SIZE, SIZE), spec(sequences + 1, dtype=jnp.int32), spec(HEADS), spec(HEADS, SIZE),
    ]  # fmt: skip

    def run(q, k, v, g, beta, states, cu_seqlens, A_log, dt_bias):
        return chunk_kda(
            q, k, v, g, beta, initial_state=states, output_final_state=True, cu_seqlens=cu_seqlens,
            use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, implementation="fused",
        )  # fmt: skip

    return run, specs


def estimate(sequences: int, T: int) -> dict:
    """Compile a shape of the benchmark and return the compiler's figures; in a fresh process only."""
    case = Layer("kda", H=HEADS, HV=HEADS, T=sequences * T, sequences=sequences)

    def of_launch(launch: str, loop) -> tuple[int, list[int]]:
        found = re.search(r"_(fwd|states)_c(\d+)", launch)
        assert found is not None
        return turns.turns(case, found[1], int(found[2]), promised=True)

    fn, specs = build(sequences, T)
    read = sum(x.size * x.dtype.itemsize for x in specs)
    written = specs[2].size * 2 + specs[5].size * 4
    floor = (read + written) / CHIPS[CHIP].bandwidth_tb_s / 1e9
    return tpu.figures(lambda: (fn, specs), CHIP, floor, profile=False, turns=of_launch)


def measure(sequences: int, T: int, timeout: float) -> list[dict]:
    """Return the row of a shape: the compiler's figures, and the predicted time of a call beside the published time."""
    found = tpu.first_result([f"from benchmarks.bench import estimate; estimate({sequences}, {T})"], timeout)
    row = {"published_ms": PUBLISHED_MS[sequences, T]} | found
    known = row.get("estimate_ms") is not None
    return [row | ({"call_ms": times.CALL_MS + row["estimate_ms"]} if known else {})]
