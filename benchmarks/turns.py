"""The grid steps of our kernels that run each part of their code.

A kernel skips parts of its code by the table of its steps, which a compiler does not know: it counts none of them. So
these functions read the tables that a layer has.
"""

import itertools
import re
from collections.abc import Callable

import numpy as np

from benchmarks import regions
from chunkwise.command.models import Layer
from chunkwise.fused_gdn import config as gdn_config
from chunkwise.fused_gla.config import default_for
from chunkwise.kda import config as kda_config
from chunkwise.shared import tuning
from chunkwise.shared.kernels.chunking import num_chunks
from chunkwise.shared.kernels.packed import packing
from chunkwise.shared.kernels.spans.chunk_spans import Piece, Span, make_spans

# From the name of an operation and the kernel's loop to the steps of a block of heads and how many of them run each
# region, as for `regions.kernel_bundles`; None if every step runs all regions.
Turns = Callable[[str, regions.Loop], tuple[int, list[int]] | None]


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
        chunks = tuning.largest_divisor(NT, config.num_steps)
    table, block = make_spans(case.T, chunks * C, cu_seqlens, with_states=True)[0], chunks * C
    step = np.arange(num_chunks(case.T, block) if table is None else table.shape[1])
    at = lambda n: Span(n, case.T, block) if table is None else Piece(np.asarray(table), n, block)
    if case.table.delta:
        second = () if kind == "bwd" else second_path(case, C)
        steps, runs = delta_rule_runs(at, len(step), C, kind, cu_seqlens is not None, second)
    else:
        second = (0,) if case.table.per_channel and kind in ("fwd", "bwd") else ()
        steps, runs = len(step), gla_runs(at(step), block, C, kind, cu_seqlens is not None, second)
    return steps, [int(np.sum(x)) for x in runs]


def has_second_path(case: Layer) -> bool:
    """Return whether the forward has regions that make up for strong gates, as the kernels of KDA have."""
    return case.table.delta and (case.table.per_channel or case.table.erase == "key")


def config_of(case: Layer, C: int) -> kda_config.Config | gdn_config.Config:
    """Return the tile sizes of a delta rule."""
    if not has_second_path(case):
        return gdn_config.default_for(case.H, case.HV, C, case.K, case.V)
    return kda_config.default_for(case.H, case.HV, C, case.K, case.V, 2, gates=2 * (case.table.erase == "gate"))


def second_path(case: Layer, C: int, chunks: int = 1) -> tuple[int, ...]:
    """Return how many steps of a forward run the regions that make up for strong gates, of which none is strong here.

    There is one around the regions of all packs of heads, of all chunks of a step.
    """
    if not has_second_path(case):
        return ()
    config = config_of(case, C)
    return (0,) * (1 + chunks * config.heads // packing(C, config.heads, config.heads_bwd))


def piece_chunks(case: Layer, T: int, sequences: int, C: int) -> tuple[int, int]:
    """Return the chunks of a piece of a delta rule's forward, and the stages of its kernel."""
    chunks = tuning.piece_chunks(T // C, sequences, config_of(case, C).chunks, over_pool=True)
    return chunks, 3 if chunks > 1 and not has_second_path(case) else 2


def passing(steps: int, stages: int = 2) -> list[np.ndarray]:
    """Return for every grid step of a forward the steps of all its stages: the last one takes the state through it."""
    turn = np.arange(steps + stages - 1)
    return [np.clip(turn - stage, 0, steps - 1) for stage in range(stages)]


def delta_rule_runs(at, steps, C, kind, pieces, second, stages=2):
    """Return the grid steps of a delta rule, and which of them run each region; `at` gives some of its steps."""
    if kind == "bwd":
        each = (prev := at(np.arange(steps)),)
        # The first grid step clears results, too.
        begins = np.array(prev.last)
        begins[-1] = 1
        starts, turned = (begins,), steps
    else:
        *_, prev = each = [*map(at, passing(steps, stages))]
        # A forward selects the state that a sequence starts from, without a branch.
        starts, turned = (), steps + stages - 1
    if not pieces:
        return turned, (*starts, *second)
    unowned = (prev.closes if kind == "bwd" else prev.opens) & prev.unowned
    whole = np.logical_and.reduce([x.end - x.begin == C for x in each])
    empty = np.logical_and.reduce([x.begin == x.end for x in each])
    return turned, (*starts, whole, *second, ~whole, ~whole & unowned, ~whole & ~empty, *second)


def gla_runs(steps, block, C, kind, pieces, second=()):
    """Return which grid steps of a kernel of several chunks a step run each region, or how often."""
    begin, end = np.asarray(steps.begin), np.minimum(steps.end, block)
    # The chunks of every step: how many, how many of them are whole, and whether the last one is whole.
    chunks = np.where(begin < end, (end - 1) // C - begin // C + 1, 0)
    whole = np.maximum(end // C - -(-begin // C), 0) * (begin < end)
    last = (whole > 0) & (end % C == 0)
    starts = np.array(steps.first if kind != "bwd" else steps.last)
    starts[0 if kind != "bwd" else -1] = 1
    # A branch skips a loop over no chunks, which there can only be if steps are pieces.
    loop = lambda n, whole, *second: (n > 0, n, whole, *second, n - whole, *second) if pieces else (n, *second)
    # The backward first goes over all chunks but the last one, for their states.
    before = loop(np.maximum(chunks - 1, 0), whole - last) if kind == "bwd" else ()
    clear = ((steps.closes if kind == "bwd" else steps.opens) & steps.unowned,) if pieces else ()
    return starts, *clear, *before, *loop(chunks, whole, *second)


def turns_of(case: Layer) -> Turns:
    """Return how many steps of our kernels run each region, for a layer of one sequence and a launch of one row.

    The kernels of gated linear attention loop as often as their tables say. The kernels of KDA, and those of gated
    linear attention with gates per channel, have a second path for rows after strong gates; it counts as not taken.
    """

    def of_launch(launch: str, loop: regions.Loop) -> tuple[int, list[int]] | None:
        found = re.search(r"_([a-z]+)_c(\d+)", launch)
        if found is None:  # a convolution or a norm
            return None
        if case.table.delta and not (loop.regions and has_second_path(case)):
            # A state begins and ends once. In the backward it counts in every step.
            once = loop.regions and not has_second_path(case) and "_bwd_" not in launch
            return (loop.turns - 2, [1] * len(loop.regions)) if once else None
        if case.table.delta and "_bwd_" in launch:
            # The second path has regions of packs of heads inside; beside it the gradient of the state begins.
            inside = lambda x: any(x is not y and y.start <= x.start and x.stop <= y.stop for y in loop.regions)
            holds = lambda x: any(x is not y and x.start <= y.start and y.stop <= x.stop for y in loop.regions)
            return loop.turns - 2, [0 if inside(x) or holds(x) else loop.turns - 2 for x in loop.regions]
        if case.table.delta:
            # Steps of one block of heads or of all blocks: both do where no step runs a region.
            return loop.turns - 2, [0] * len(loop.regions)
        steps, runs = turns(case, found[1], int(found[2]))
        # A branch skips a loop without iterations, and this loop is a region in the branch's.
        nested = itertools.pairwise(loop.regions)
        passes = [n for n, (x, y) in enumerate(nested) if x.bundles <= regions.CUT and y.start < x.stop]
        for place in passes[: len(loop.regions) - len(runs)]:
            runs.insert(place, steps)
        # In the backward of Mamba-2 the gradient of the skip begins once.
        skip = "_bwd_" in launch and any(x.bundles > regions.CUT for x in loop.regions[len(runs) :])
        return steps, [1] * skip + runs

    return of_launch
