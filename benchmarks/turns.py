"""The grid steps of our kernels that run each part of their code.

A kernel skips parts of its code by the table of its steps, which a compiler does not know: it counts none of them. So
these functions read the tables that a layer has.
"""

import re
from collections.abc import Callable

import numpy as np

from benchmarks import regions
from chunkwise.command.models import Layer
from chunkwise.fused_gla.config import default_for
from chunkwise.kda import config as kda_config
from chunkwise.shared.kernels.chunking import num_chunks
from chunkwise.shared.kernels.layout import BEGIN, CLOSES, END, FIRST, LAST, MIXED, OPENS, make_steps
from chunkwise.shared.kernels.packed import packing
from chunkwise.shared.tuning import largest_divisor

# From the name of an operation and the kernel's loop to the steps of a block of heads and how many of them run each
# region, as for `regions.kernel_bundles`; None if every step runs all regions.
Turns = Callable[[str, regions.Loop], tuple[int, list[int]] | None]


def turns(case: Layer, kind: str, C: int, promised: bool = False) -> tuple[int, list[int]]:
    """Return the grid steps of a launch for one block of heads, and how many of them run each of its regions.

    Regions are in the order of the kernel's text.

    Args:
      case: the layer.
      kind: "fwd", "states" or "bwd".
      C: tokens of a chunk.
      promised: whether a bound promises that no gate is strong.
    """
    chunks, cu_seqlens = 1, case.boundaries(case.T)
    if not case.table.delta:
        NT = num_chunks(case.T, C)
        config = default_for(case.H, case.HV, case.K, case.V, C, NT, 2, case.table.per_channel)
        assert config is not None
        chunks = largest_divisor(NT, config.num_steps)
    table = np.asarray(make_steps(1, case.T, chunks * C, cu_seqlens, with_states=True).table)
    if case.table.delta:
        steps, runs = _delta_rule_runs(
            table, C, kind, cu_seqlens is not None, () if promised or kind == "bwd" else second_path(case, C)
        )
    else:
        steps, runs = _gla_runs(table, C, kind, cu_seqlens is not None)
    return steps, [int(np.sum(x)) for x in runs]


def second_path(case: Layer, C: int) -> tuple[int, ...]:
    """Return how many steps of a forward run the regions that make up for strong gates, of which none is strong here.

    There is one around the regions of all packs of heads, where every channel has a gate.
    """
    if not case.table.per_channel:
        return ()
    config = kda_config.default_for(case.H, case.HV, C, case.K, case.V, 2, gates=2 * (case.table.erase == "gate"))
    return (0,) * (1 + config.heads // packing(C, config.heads, config.heads_bwd))


def _passing(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for every grid step of a forward the step that it prepares, and the step that the state goes through."""
    turn = np.arange(table.shape[1] + 1)
    return table[:, np.minimum(turn, len(turn) - 2)], table[:, np.maximum(turn - 1, 0)]


def _delta_rule_runs(table, C, kind, pieces, second):
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


def turns_of(case: Layer) -> Turns:
    """Return how many steps of our kernels run each region, for a layer of one sequence.

    The kernels of gated linear attention loop as often as their tables say. The forwards of delta rules with gates per
    channel have a second path for rows after strong gates; it counts as not taken.
    """

    def of_launch(launch: str, loop: regions.Loop) -> tuple[int, list[int]] | None:
        if case.table.delta and not (loop.regions and case.table.per_channel and "_bwd_" not in launch):
            return None
        found = re.search(r"_([a-z]+)_c(\d+)", launch)
        assert found is not None
        steps, runs = turns(case, found[1], int(found[2]))
        if case.table.delta:
            return steps, [0] * len(loop.regions)
        # A branch skips a loop without iterations.
        passes = [n for n, x in enumerate(loop.regions) if x.bundles <= regions.CUT]
        for place in passes[: len(loop.regions) - len(runs)]:
            runs.insert(place, steps)
        return steps, runs

    return of_launch
