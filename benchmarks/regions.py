"""The bundles that a kernel runs, from the code that the TPU compiler dumps, if tables say how often its parts run.

The compiler's profile counts every `pl.when` of a kernel as not taken. Here every part of the loop over the grid counts
as often as a batch runs it. Waits are not counted.
"""

import glob
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

# Bundles after a branch that run whether it is taken or not.
DELAY = 4
# A number of bundles above any code that cuts a block at the end of an array, and below any part of a kernel.
CUT = 40


class Region(NamedTuple):
    """A part of a kernel's loop over the grid that a branch may skip, or an inner loop whose iterations tables tell.

    Attributes:
      start, stop: its bundles.
      bundles: the bundles of one run or one iteration: loops inside count for all their iterations, regions inside not
        at all.
    """

    start: int
    stop: int
    bundles: int


class Loop(NamedTuple):
    """A kernel's loop over its grid.

    Attributes:
      turns: its iterations: two more than the grid has steps.
      always: bundles of an iteration that no branch skips.
      body: bundles that every step of the grid runs.
      regions: the parts that a step may skip, in the order of the kernel's text; a region comes before regions inside
        it.
    """

    turns: int
    always: int
    body: int
    regions: list[Region]


class _Bundle(NamedTuple):
    label: str
    depth: int
    text: str


def _bundles(text: str) -> list[_Bundle]:
    """Return the bundles of a dump, each with the comments that follow it."""
    found: list[_Bundle] = []
    for line in text.splitlines():
        if match := re.match(r"\s*(?:0x[0-9a-f]+|0)\s+([A-Z, ]*):\s*((?:> ?)*)\{(.*)", line):
            depth = match[2].count(">")
            # Empty bundles have no depth in the text.
            if not match[3].startswith("}") or not found:
                found.append(_Bundle(match[1], depth, match[3]))
            else:
                found.append(_Bundle(match[1], found[-1].depth, match[3]))
        elif found:
            found[-1] = found[-1]._replace(text=f"{found[-1].text}\n{line}")
    return found


def _exit(bundles: list[_Bundle]) -> int | None:
    """Return how often a loop turns by the constant in its exit test, None if there is no single one."""
    text = "\n".join(bundle.text for bundle in bundles)
    found = re.findall(r"%(\w+), (\d+) /\* loop exit test", text)
    if len(found) != 1:
        return None
    ((counter, last),) = found
    # A loop that is unrolled counts by more than one.
    step = re.search(rf"%{counter} = sadd\.s32 (\d+), ", text)
    return int(last) // int(step[1] if step else 1)


def _inner_trips(code: list[_Bundle]) -> int:
    """Return how often the loop in a loop turns."""
    trips = _exit([bundle for bundle in code if bundle.depth > 2])
    if trips is None or any(bundle.depth > 3 for bundle in code):
        raise ValueError("A loop in a kernel has several loops in it, or one whose turns are not known.")
    return trips


def _turned(code: list[_Bundle], start: int, stop: int) -> int:
    """Return where a loop ends that starts at a bundle: after the branch back, and what runs with it."""
    names = re.findall(r"Start region (\d+)", code[start].text)
    back = [re.compile(rf"sbr\.rel \(!?%\w+\) target = \$region{name}\b") for name in names]
    ends = [n + 1 + DELAY for n in range(start, stop) if any(x.search(code[n].text) for x in back)]
    return min(ends[0], stop) if ends else start


def read_loop(text: str, turns: int | None = None) -> Loop:
    """Return the loop over the grid of a kernel, from the text of its final bundles.

    `turns` are its iterations where the text does not say them, because only the run tells the size of the grid.
    """
    code = _bundles(text)
    inside = [n for n, bundle in enumerate(code) if bundle.depth]
    first, stop = inside[0], inside[-1] + 1
    # How often a bundle runs in an iteration; more than once if it is in an inner loop.
    times = [1] * len(code)
    outer, spans, n = [], [], first
    while n < stop:
        end = n
        while end < stop and code[end].depth > 1 and (end == n or "L" not in code[end].label):
            end += 1
        if end > n:
            # Of the bundles of a loop some carry the depth of what follows it, from which they come.
            end = max(end, _turned(code, n, stop))
        if end == n:
            outer.append(code[n])
            n += 1
            continue
        for inner in range(n, end):
            if code[inner].depth > 2:
                times[inner] = _inner_trips(code[n:end])
        trips = _exit([bundle for bundle in code[n:end] if bundle.depth <= 2])
        if trips is None:
            spans.append((n, end))
        else:
            times[n:end] = [trips * x for x in times[n:end]]
        n = end
    turns = _exit(outer) or turns
    if turns is None:
        raise ValueError("The loop over the grid has no known number of turns.")
    for n in range(first, stop):
        for target in re.findall(r"sbr\.rel \(!?%\w+\) target = \$region(\d+)", code[n].text):
            label = re.compile(rf"Start(?:/End empty)? region {target}\b")
            end = next((m for m in range(n + 1, stop) if label.search(code[m].text)), None)
            if end is not None:
                spans.append((n + 1 + DELAY, end))
    own = []
    for start, end in sorted(set(spans), key=lambda span: (span[0], -span[1])):
        nested = {m for a, b in spans if (a, b) != (start, end) and start <= a and b <= end for m in range(a, b)}
        own.append(Region(start, end, sum(times[m] for m in range(start, end) if m not in nested)))
    within = lambda x: [y for y in own if y is not x and x.start <= y.start and y.stop <= x.stop]
    # The body of a grid step is the largest region, because iterations that only copy skip it. Regions beside it copy
    # blocks, some of them only if the next block is another one or reaches past the end of an array. They are counted
    # in every iteration, which is too often.
    body = max(own, key=lambda x: x.stop - x.start)
    always = sum(times[first:stop]) - sum(times[body.start : body.stop])
    return Loop(turns, always, body.bundles, within(body))


def whole_bundles(text: str) -> tuple[int, int] | None:
    """Return the bundles of a kernel and the steps of its grid, from the text of its final bundles.

    Every bundle in the loop over the grid counts for all iterations of its loops, even if a branch may skip it. None if
    the code does not say how many iterations a loop has.
    """
    code = _bundles(text)
    inside = [n for n, bundle in enumerate(code) if bundle.depth]
    if not inside:
        return len(code), 1
    # The loops around a bundle, the outermost first, each with the bundles that are in no inner loop.
    stack: list[list[_Bundle]] = []
    loops: list[tuple[int, list[_Bundle], list]] = []
    for bundle in code[inside[0] : inside[-1] + 1]:
        # A branch of the outermost loop may have no depth in the text.
        depth = max(bundle.depth, 1)
        while len(stack) > depth or (len(stack) == depth and "L" in bundle.label):
            stack.pop()
        while len(stack) < depth:
            stack.append([])
            loops.append((len(stack), stack[-1], [*stack]))
        stack[-1].append(bundle)
    turns = {id(own): _exit(own) for _, own, _ in loops}
    if None in turns.values() or sum(depth == 1 for depth, _, _ in loops) != 1:
        return None
    # Two more iterations copy blocks: one before the first step, and one after the last step.
    steps = turns[id(loops[0][1])] - 2
    turns[id(loops[0][1])] = steps
    return sum(len(own) * math.prod(turns[id(x)] for x in outer) for _, own, outer in loops), steps


def turn_bundles(text: str) -> int:
    """Return the bundles of one turn of a kernel's longest loop, if tables say how often it turns.

    Branches skip nothing. Loops inside of it are left out, because tables tell their turns too.
    """
    code = _bundles(text)
    loops = [[*bundles] for inside, bundles in itertools.groupby(code, lambda bundle: bundle.depth > 0) if inside]
    return sum(bundle.depth == 1 for bundle in max(loops, key=len))


def kernel_bundles(loop: Loop, steps: int, runs: Sequence[float]) -> int:
    """Return the bundles of a kernel.

    Args:
      loop: its loop over the grid.
      steps: steps of the grid for one block of heads.
      runs: how many of these run each region, on average.
    """
    blocks, rest = divmod(loop.turns - 2, steps)
    # The last block may reach past the end of an array; the code that cuts it is counted in every step.
    cuts = loop.regions[len(runs) :]
    runs = [*runs, *[steps] * len(cuts)]
    if rest or len(runs) != len(loop.regions) or any(region.bundles > CUT for region in cuts):
        raise ValueError(f"A kernel has {loop.turns - 2} steps and {len(loop.regions)} regions; {steps}, {runs}.")
    regions = sum(region.bundles * n for region, n in zip(loop.regions, runs, strict=True))
    return round(loop.turns * loop.always + blocks * (steps * loop.body + regions))


def kernel_text(folder: str, launch: str) -> str:
    """Return the final bundles of a kernel."""
    name = re.compile(rf"\d+-{re.escape(launch)}-\d+-final_bundles\.txt")
    (path,) = [path for path in glob.glob(f"{folder}/*-final_bundles.txt") if name.fullmatch(os.path.basename(path))]
    with open(path, errors="replace") as text:
        return text.read()
