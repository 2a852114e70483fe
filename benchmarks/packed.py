"""The cost of a packed batch with states in and out of its sequences, from the TPU compiler's code.

Kernels then take a grid step for every piece of a chunk that belongs to one sequence, and skip parts of their code by a
table. So their bundles are counted as in a serving step: every part as often as this batch runs it, without waits.
Operations around the kernels are not counted.
"""

import dataclasses
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tpu
from benchmarks.regions import kernel_bundles, kernel_text, read_loop
from chunkwise.command.models import Layer
from chunkwise.fused_gla.config import default_for
from chunkwise.shared.kernels.chunking import num_chunks
from chunkwise.shared.kernels.layout import BEGIN, CLOSES, END, FIRST, LAST, MIXED, OPENS, make_steps
from chunkwise.shared.testing.compare import with_gradients
from chunkwise.shared.testing.tpu import launches
from chunkwise.shared.tuning import largest_divisor

OPERATORS = ("gated_delta_rule", "kda", "simple_gla", "gla")
# Ways to lay out the same tokens: how many sequences, of lengths in proportion to 1, 2, 3 and so on; 0 for not packed.
FORMS = {"16 sequences": 16, "one packed": 1, "one, not packed": 0}


def case_of(operator: str, sequences: int, T: int) -> Layer:
    """Return the layer that is counted, with the heads of Qwen3-Next, and for a delta rule keys of unit length."""
    case = Layer(operator, H=16, HV=32, T=T, sequences=sequences, ragged=True)
    return dataclasses.replace(case, normalise=case.table.delta)


def _compiled(case: Layer, chip: str, flags: str) -> str:
    """Compile both directions, with initial and final states and the gradients of both; in a fresh process only."""
    from chunkwise.shared.testing import tpu as compiler

    compiler.setup(flags)
    shapes, T = case.specs(case.T, jnp.bfloat16), case.T
    # Tokens are flat, as after projections.
    flat = {name: jax.ShapeDtypeStruct((1, T, x.size // T), x.dtype) for name, x in shapes.items()}
    state = jax.ShapeDtypeStruct((case.sequences or 1, case.HV, case.K, case.V), jnp.float32)
    cu_seqlens = jax.ShapeDtypeStruct((case.sequences + 1,), jnp.int32) if case.sequences else None
    normalise = {"use_qk_l2norm_in_kernel": True} if case.normalise else {}

    def run(x, cu_seqlens):
        tokens = {name: y.reshape(shapes[name].shape) for name, y in x.items() if name in shapes}
        o, final = case.table.function(
            **tokens, initial_state=x["initial_state"], output_final_state=True, cu_seqlens=cu_seqlens,
            implementation="fused", **normalise,
        )  # fmt: skip
        return {"o": o.reshape(1, T, -1), "final": final}

    do = jax.ShapeDtypeStruct((1, T, case.width), jnp.bfloat16)
    specs = flat | {"initial_state": state}, cu_seqlens, {"o": do, "final": state}
    return compiler.compile_for(with_gradients(run), *specs, chip=chip, auto_layout=True).as_text()


def turns(case: Layer, kind: str, C: int) -> tuple[int, list[int]]:
    """Return the grid steps of a launch for one block of heads, and how many of them run each of its regions.

    Regions are in the order of the kernel's text.

    Args:
      case: the layer.
      kind: "fwd", "states" or "bwd".
      C: tokens of a chunk.
    """
    chunks, cu_seqlens = 1, case.boundaries(case.T)
    if not case.table.delta:
        NT = num_chunks(case.T, C)
        config = default_for(case.H, case.HV, case.K, case.V, C, NT, 2, case.table.per_channel)
        assert config is not None
        chunks = largest_divisor(NT, config.num_steps)
    table = np.asarray(make_steps(1, case.T, chunks * C, cu_seqlens, with_states=True).table)
    if case.table.delta:
        steps, runs = _delta_rule_runs(table, C, kind, cu_seqlens is not None, case.table.per_channel)
    else:
        steps, runs = _gla_runs(table, C, kind, cu_seqlens is not None)
    return steps, [int(np.sum(x)) for x in runs]


def _passing(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for every grid step of a forward the step that it prepares, and the step that the state goes through."""
    turn = np.arange(table.shape[1] + 1)
    return table[:, np.minimum(turn, len(turn) - 2)], table[:, np.maximum(turn - 1, 0)]


def _delta_rule_runs(table, C, kind, pieces, per_channel):
    # The second path of a gate for every channel is not taken.
    second = (0,) if per_channel and kind == "fwd" else ()
    if kind == "bwd":
        # The first grid step clears results, too.
        begins = table[LAST].copy()
        begins[-1] = 1
        starts = (begins,)
        whole, empty = table[END] - table[BEGIN] == C, table[BEGIN] == table[END]
        unowned = table[CLOSES] & table[MIXED]
    else:
        cur, prev = _passing(table)
        # A forward selects the state that a sequence starts from, without a branch.
        starts, unowned = (), prev[OPENS] & prev[MIXED]
        whole = (cur[END] - cur[BEGIN] == C) & (prev[END] - prev[BEGIN] == C)
        empty = (cur[BEGIN] == cur[END]) & (prev[BEGIN] == prev[END])
    cut = (whole, *second, ~whole, ~whole & unowned, ~whole & ~empty, *second) if pieces else second
    return len(unowned), (*starts, *cut)


def _gla_runs(table, C, kind, pieces):
    begin, end = table[BEGIN], table[END]
    # The chunks of every step: how many, how many of them are whole, and whether the last one is whole.
    chunks = np.where(begin < end, (end - 1) // C - begin // C + 1, 0)
    whole = np.maximum(end // C - -(-begin // C), 0) * (begin < end)
    last = (whole > 0) & (end % C == 0)
    starts = table[FIRST].copy() if kind != "bwd" else table[LAST].copy()
    starts[0 if kind != "bwd" else -1] = 1
    # A branch skips a loop over no chunks, which there can only be if steps are pieces.
    loop = lambda n, whole: (n > 0, n, whole, n - whole) if pieces else (n,)
    # The backward first goes over all chunks but the last one, for their states.
    before = loop(np.maximum(chunks - 1, 0), whole - last) if kind == "bwd" else ()
    clear = (table[CLOSES if kind == "bwd" else OPENS] & table[MIXED],) if pieces else ()
    return table.shape[1], (starts, *clear, *before, *loop(chunks, whole))


def count(case: Layer, chip: str) -> dict[str, int]:
    """Return the bundles of both directions by kind of launch; in a fresh process only."""
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:
        text = _compiled(case, chip, tpu.dump_flags(folder, profile=False))
        for launch in launches(text):
            (found,) = re.finditer(r"_(fwd|states|bwd)_c(\d+)", launch)
            kind, C = found.groups()
            assert kind not in counts
            counts[kind] = kernel_bundles(read_loop(kernel_text(folder, launch)), *turns(case, kind, int(C)))
    return counts


def run_count(case: Layer, chip: str, timeout: float) -> dict:
    """Run `count` in a process of its own; `failed` is set where it gave no result."""
    return tpu.first_result([f"from benchmarks.packed import Layer, count; count({case!r}, {chip!r})"], timeout)


def measure(operator: str, T: int, chip: str, timeout: float) -> list[dict]:
    """Return a row for every form, with the ratio of its bundles to the bundles of the first form.

    The forward makes residuals; `failed` is set if the compiler gave no result.
    """
    rows: list[dict] = []
    for form, sequences in FORMS.items():
        counts = run_count(case_of(operator, sequences, T), chip, timeout)
        row = {"form": form, "sequences": sequences} | counts
        if "fwd" in counts:
            together = sum(counts.values())
            row = {"form": form, "sequences": sequences, "forward_bundles": counts["fwd"], "bundles": together}
        rows.append(row)
    first = rows[0]
    for row in rows:
        for name, ratio in (("forward_bundles", "forward_ratio"), ("bundles", "ratio")):
            if name in row and name in first:
                row[ratio] = first[name] / row[name]
    return rows
