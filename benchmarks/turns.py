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
from chunkwise.shared.kernels.spans.chunk_spans import Piece, Span

# From the name of an operation and the kernel's loop to the steps of a block of heads and how many of them run each
# region, as for `regions.kernel_bundles`; None if every step runs all regions.
Turns = Callable[[str, regions.Loop], tuple[int, list[int]] | None]


def turns(case: Layer, kind: str, C: int) -> tuple[int, list[int]]:
    """Return the grid steps of gated linear attention for one block of heads, and how many run each of its regions.

    Regions are in the order of the kernel's text.

    Args:
      case: the layer, of one sequence.
      kind: "fwd", "states" or "bwd".
      C: tokens of a chunk.
    """
    NT = num_chunks(case.T, C)
    config = default_for(case.H, case.HV, case.K, case.V, C, NT, 2, case.table.per_channel)
    assert config is not None
    block = tuning.largest_divisor(NT, config.num_steps) * C
    steps, second = num_chunks(case.T, block), (0,) if case.table.per_channel and kind in ("fwd", "bwd") else ()
    runs = gla_runs(Span(np.arange(steps), case.T, block), block, C, kind, second)
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


def delta_rule_runs(at, steps, C, second, stages):
    """Return the grid steps of a delta rule's forward over pieces, and which run each region; `at` gives some steps."""
    *_, prev = each = [*map(at, passing(steps, stages))]
    whole = np.logical_and.reduce([x.end - x.begin == C for x in each])
    empty = np.logical_and.reduce([x.begin == x.end for x in each])
    # A forward selects the state that a sequence starts from, without a branch.
    runs = whole, *second, ~whole, ~whole & prev.opens & prev.unowned, ~whole & ~empty, *second
    return steps + stages - 1, runs


def gla_runs(steps, block, C, kind, second=()):
    """Return which grid steps of a kernel of several chunks a step run each region, or how often."""
    begin, end = np.asarray(steps.begin), np.minimum(steps.end, block)
    # The chunks of every step: how many there are, and how many of them are whole.
    chunks = np.where(begin < end, (end - 1) // C - begin // C + 1, 0)
    whole = np.maximum(end // C - -(-begin // C), 0) * (begin < end)
    if kind == "bwd":
        starts = np.array(steps.last)
        starts[-1] = 1
        # It first goes over all chunks but the last one, for their states.
        return starts, np.maximum(chunks - 1, 0), chunks, *second
    starts = np.array(steps.first)
    starts[0] = 1
    if not isinstance(steps, Piece):
        return starts, chunks, *second
    # A branch skips a loop over no chunks, which there can only be if steps are pieces.
    return starts, steps.opens & steps.unowned, chunks > 0, chunks, whole, *second, chunks - whole, *second


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
