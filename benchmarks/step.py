"""A serving step: measured on this machine, and estimated by the TPU compiler.

The arrays that describe a step are traced, so the compiler does not know which parts of the program run: its profile
counts every `pl.when` of a kernel as not taken, and both branches of every condition. So a step is counted here from
the code:

- For a kernel: the bundles of its loop over the grid, with every region as often as this mixture runs it, but at least
  the time to move its bytes at the peak bandwidth of the memory.
- For the operations around the kernels: the compiler's estimated cycles of the operations that this mixture runs. They
  come from a second compilation, in which kernels do nothing, because the compiler cannot profile all kernels.
"""

import contextlib
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from benchmarks import hlo, timing, tpu, turns
from benchmarks.regions import Loop, kernel_bundles, kernel_text, read_loop
from chunkwise.command import times
from chunkwise.command.models import Layer, Mixture, moved_bytes, serving_step
from chunkwise.fused_gla.config import default_for
from chunkwise.shared import tuning
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.kernels import launcher
from chunkwise.shared.kernels.chunking import num_chunks
from chunkwise.shared.kernels.spans.chunk_spans import Piece, pool_spans
from chunkwise.shared.serving import run as serving_run
from chunkwise.shared.serving import step_table
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.tpu import launches
from tests import traced

# The slots of the pool of a program that is only compiled.
SLOTS = 1024


_RAGGED = tuple(8192 * (n + 1) // 136 for n in range(15))
MIXTURES = {
    "decode-32": Mixture(32),
    "decode-64": Mixture(64),
    "decode-64-bfloat16": Mixture(64, pool="bfloat16"),
    "decode-64-float16": Mixture(64, pool="float16"),
    "decode-256": Mixture(256),
    "decode-256-bfloat16": Mixture(256, pool="bfloat16"),
    "speculate-64x3": Mixture(64, W=3),
    "speculate-64x3-bfloat16": Mixture(64, W=3, pool="bfloat16"),
    "decode-64-int8": Mixture(64, pool="int8"),
    "decode-64-ring": Mixture(64, replay=16),
    "decode-64-ring-8": Mixture(64, replay=8),
    "decode-64-ring-32": Mixture(64, replay=32),
    "decode-64-bfloat16-ring": Mixture(64, pool="bfloat16", replay=16),
    "decode-64-bfloat16-ring-8": Mixture(64, pool="bfloat16", replay=8),
    "decode-64-bfloat16-ring-32": Mixture(64, pool="bfloat16", replay=32),
    "decode-64-int8-ring": Mixture(64, pool="int8", replay=16),
    "decode-64-int8-ring-8": Mixture(64, pool="int8", replay=8),
    "decode-64-int8-ring-32": Mixture(64, pool="int8", replay=32),
    "decode-256-bfloat16-ring": Mixture(256, pool="bfloat16", replay=16),
    "decode-256-int8-ring": Mixture(256, pool="int8", replay=16),
    "speculate-64x3-ring": Mixture(64, W=3, replay=16),
    "speculate-64x3-bfloat16-ring": Mixture(64, W=3, pool="bfloat16", replay=16),
    "prefill-4096": Mixture(prefills=(4096,)),
    "decode-32-prefill-4096": Mixture(32, prefills=(4096,)),
    "decode-32-prefill-2x512-bfloat16": Mixture(32, prefills=(512, 512), pool="bfloat16"),
    "prefill-8192": Mixture(prefills=(8192,)),
    "prefill-8192-ragged": Mixture(prefills=(*_RAGGED, 8192 - sum(_RAGGED))),
}


def measure(case: Layer, mixture: Mixture, dtype, implementations, repeats: int) -> list[dict]:
    """Return a row for every implementation: the time of a step on this machine whose pool is donated.

    The check covers the output and the state of the last sequence, in the group of the last key head.
    """
    x, step, rng = case.inputs(mixture.T, dtype), mixture.step(), np.random.default_rng(2)
    if not mixture.over_array:
        raise ValueError("Only pools that are arrays are measured on this machine.")
    pool = rng.standard_normal((mixture.N * mixture.W, case.HV, case.K, case.V)).astype(jnp.dtype(mixture.pool))
    cu, group = step["cu_seqlens"], case.HV // case.H
    last, slots = slice(int(cu[-2]), int(cu[-1])), step["state_indices"].reshape(mixture.N, mixture.W)[-1]
    final = int(slots[0] if mixture.prefills else slots[-1])
    normalise = {"use_qk_l2norm_in_kernel": True} if case.table.delta else {}
    o, state = reference(**case.part(x, last), initial_state=pool[slots[:1], -group:].astype(np.float64), **normalise)
    expected = {"o": o, "states": state}
    runs = []
    for name in implementations:
        fn = jax.jit(serving_step(case, name), donate_argnums=1)
        held = [jnp.asarray(pool)]

        def call(fn=fn, held=held):
            o, held[0] = fn(x, held[0], step)
            return {"o": o, "states": held[0]}

        runs.append(timing.Run(name, call))

    def verdict(results):
        some = case.part({"o": results["o"]}, last) | {"states": results["states"][final : final + 1, -group:]}
        # The tolerance of a state follows from the coarser one of the two types to which it is rounded.
        coarser = max((x["v"].dtype.name, mixture.pool), key=lambda name: jnp.finfo(name).eps)
        limits = {"o": case.tolerance("o", x["v"].dtype.name), "states": case.tolerance("o", coarser)}
        return timing.worst(some, expected, limits)

    rows = timing.measure(runs, [], verdict, repeats)
    kept = ("implementation", "error", "correct", "median_ms", "spread_ms", "cpu_ms")
    tokens = {"tokens": mixture.T}
    return [{k: row[k] for k in kept} | tokens | {"tokens_s": mixture.T / row["median_ms"] * 1e3} for row in rows]


def decode_runs(loop: Loop, mixture: Mixture) -> tuple[int, list[float]]:
    """Return the steps of the kernel of decodes of one token and how many run each of its regions.

    The first step begins the table of sequences. Copies of the next and of the earlier steps are counted in every step.
    Then comes a region with one for each sequence in it, which puts zeros where a sequence starts from none, as none
    does here; for one sequence a step the compiler makes one region of both. Over rings the next region goes over
    sequences where any of them folds, and the one in it is the fold of each. The last step awaits its copies and stores
    the outputs.
    """
    steps = loop.turns - 2
    within = lambda x: sum(x.start <= y.start and y.stop <= x.stop for y in loop.regions) - 1
    # The sequences of a step, of which the last step may have fewer.
    taken = next(n for n in [*map(within, loop.regions[1:]), 1] if n and -(-mixture.N // n) == steps)
    inside = taken if taken > 1 else 0
    clears = next(n for n, x in enumerate(loop.regions) if n and within(x) == inside)
    runs: list[float] = [1, *[steps] * (clears - 1), *[0] * (1 + inside)]
    if mixture.replay:
        folded = 1 / mixture.folds_every
        runs += [steps * (1 - (1 - folded) ** taken), steps * folded]
    return steps, runs + [1] * (len(loop.regions) - len(runs))


def prefill_runs(case: Layer, mixture: Mixture, C: int) -> tuple[int, list[int]]:
    """Return the grid steps of the prefill kernel for one block of heads, and how many of them run each region.

    Regions are in the order of the kernel's text.
    """
    step: dict[str, Any] = {name: jnp.asarray(y) for name, y in mixture.step().items()}
    tokens, T, block, chunks, stages = mixture.W if mixture.replay else None, mixture.T, C, 1, 2
    routes = step_table.find_step(step.pop("cu_seqlens"), Slots(**step), None, T, tokens).prefills
    if not case.table.delta:
        # A grid step is a piece of several chunks.
        config = default_for(case.H, case.HV, case.K, case.V, C, num_chunks(T, C), 2, per_channel=False)
        assert config is not None
        block *= tuning.largest_divisor(num_chunks(T, C), config.num_steps)
    else:
        chunks, stages = turns.piece_chunks(case, T, mixture.N, C)
        block *= chunks
    table, count = pool_spans(T, block, routes)
    table = np.asarray(table)[:, : int(count)]
    at = lambda n: Piece(table, n, block)
    if case.table.delta:
        second = turns.second_path(case, C, chunks)
        number, regions = turns.delta_rule_runs(at, table.shape[1], block, second, stages)
        steps = at(turns.passing(table.shape[1], stages)[-1])
    else:
        number, steps = table.shape[1], at(np.s_[:])
        regions = turns.gla_runs(steps, block, C, "fwd")[1:]
    runs = steps.first, at(0).sequence == at(0).target, *regions, steps.last
    return number, [int(np.sum(x)) for x in runs]


def branch_cycles(text: str, cycles: Mapping[str, int], wanted: set[str]) -> int:
    """Return the cycles of a program's operations, without kernels, if only the kernels in `wanted` run.

    A condition takes the branch that has a wanted kernel, or else a branch without kernels, or else the most expensive
    one. Of operations with the same code the compiler profiles only one, so an operation without a profile counts as
    one with the same name and type.
    """
    parts, entry = hlo.computations(text)
    kernels, everything = set(launches(text)), [x for part in parts.values() for x in part]
    alike = {(x.name.split(".")[0], x.result): cycles[x.name] for x in everything if x.name in cycles}

    def found(part: str) -> set[str]:
        here = {x.name for x in parts[part]} & kernels
        return here.union(*(found(branch) for x in parts[part] for branch in x.branches))

    def count(x: hlo.Operation) -> int:
        if x.name in kernels:
            return 0
        if x.kind in ("while", "call"):
            raise ValueError(f"The step has an operation whose parts are not counted: {x.name}.")
        if x.kind == "conditional":
            chosen = [y for y in x.branches if found(y) & wanted] or [y for y in x.branches if not found(y)]
            return max(map(total, chosen or x.branches))
        return cycles.get(x.name, alike.get((x.name.split(".")[0], x.result), 0))

    def total(part: str) -> int:
        return sum(map(count, parts[part]))

    return total(entry)


def leave_out_prefills(leave_out: bool) -> contextlib.AbstractContextManager:
    """In this context all prefills are those of a mixture without prefills, if `leave_out` is True.

    The reason is that the compiler takes minutes and 16 GB to dump the gathers of a ring, although not to compile them.
    """
    return mock.patch.object(serving_run, "_prefill", _without_prefills) if leave_out else contextlib.nullcontext()


def _without_prefills(plan, x, pool, *_):
    """Replace the prefills of a mixture without prefills by a kernel of their kind that does nothing."""
    return hollow(None, x.v, name="nothing_c0", out_shape=[jax.ShapeDtypeStruct(x.v.shape, x.v.dtype)])[0], pool


def trace_step(case: Layer, mixture: Mixture, chip: str, flags: str = ""):
    """Return the step, traced for a chip, to be compiled with these flags; in a fresh process only."""
    from chunkwise.shared.testing import tpu as compiler

    compiler.setup(flags)
    shapes = case.specs(mixture.T, jnp.bfloat16)
    # Tokens are flat, as after projections.
    flat = {name: jax.ShapeDtypeStruct((1, mixture.T, x.size // mixture.T), x.dtype) for name, x in shapes.items()}
    pool = jax.eval_shape(lambda: mixture.make_pool(case, SLOTS))
    step = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), mixture.step())

    def run(flat, pool, step):
        x = {name: y.reshape(shapes[name].shape) for name, y in flat.items()}
        o, pool = serving_step(case, "fused", mixture)(x, pool, step)
        return o.reshape(1, mixture.T, -1), pool

    with leave_out_prefills(not mixture.over_array and not mixture.prefills):
        return compiler.trace_for(run, flat, pool, step, chip=chip, auto_layout=True, donate_argnums=(1,))


def _kind(launch: str) -> str:
    """Return the kind of a launch, prefills or decodes: its name has a chunk size if it goes chunk by chunk."""
    return "prefill" if re.search(r"_c\d+", launch) else "decode"


def _wanted(mixture: Mixture, text: str) -> list[str]:
    """Return the launches of a compiled program that run in this mixture."""
    runs = {"decode": mixture.decodes > 0, "prefill": bool(mixture.prefills)}
    return [launch for launch in launches(text) if runs[_kind(launch)]]


def count_kernels(case: Layer, mixture: Mixture, chip: str) -> tuple[dict[str, int], str]:
    """Return the bundles of both kernels in this mixture, 0 for a kernel that does not run, and the program's digest.

    Call this in a fresh process only.
    """
    counts = {"decode": 0, "prefill": 0}
    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:
        program = trace_step(case, mixture, chip, tpu.dump_flags(folder))
        text = program.lower().compile().as_text()
        # This computes, so it comes after the compiler's flags are set, which are read before the first computation.
        steps = grid_steps(case, mixture)
        for launch in _wanted(mixture, text):
            loop = read_loop(kernel_text(folder, launch), steps["prefill"] + 2)
            chunk = re.search(r"_c(\d+)", launch)
            runs = prefill_runs(case, mixture, int(chunk[1])) if chunk else decode_runs(loop, mixture)
            if chunk and not case.table.delta and len(runs[1]) == len(loop.regions) + 1:
                # Between a loop and the branch that skips it there may be no code of its own.
                del runs[1][-5]
            counts[_kind(launch)] += kernel_bundles(loop, *runs)
    return counts, tpu.digest(program)


def grid_steps(case: Layer, mixture: Mixture) -> dict[str, int]:
    """Return the grid steps of both kernels in this mixture, 0 for a kernel that does not run.

    A trace says those of decodes, and how many blocks of heads prefills have, whose steps tables tell.
    """
    shapes = case.specs(mixture.T, jnp.bfloat16)
    pool = jax.eval_shape(lambda: mixture.make_pool(case, SLOTS))
    step = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), mixture.step())
    counts = {"decode": 0, "prefill": 0}
    for launch in traced.launches(serving_step(case, "fused", mixture), shapes, pool, step):
        chunk = re.search(r"_c(\d+)", launch.name)
        if chunk and mixture.prefills:
            counts["prefill"] += launch.steps * prefill_runs(case, mixture, int(chunk[1]))[0]
        elif not chunk and mixture.decodes:
            counts["decode"] += launch.steps
    return counts


def hollow(_, *operands, name: str, out_shape, input_output_aliases=None, **__):
    """Replace `pallas_call`: launch a kernel with the same name, operands and results that does nothing."""
    operands = [x for x in operands if x is not None]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        lambda *refs: None, name=name, out_shape=out_shape, in_specs=[anywhere] * len(operands),
        out_specs=jax.tree.map(lambda _: anywhere, out_shape), input_output_aliases=input_output_aliases or {},
    )(*operands)  # fmt: skip


def count_around(case: Layer, mixture: Mixture, chip: str) -> int:
    """Return the estimated cycles of the operations around the kernels in this mixture; in a fresh process only."""
    build = lambda flags: trace_step(case, mixture, chip, flags).lower().compile().as_text()
    return cycles_around(build, lambda text: _wanted(mixture, text))


def cycles_around(build: Callable[[str], str], wanted: Callable[[str], list[str]]) -> int:
    """Return the `branch_cycles` of a program by the compiler's profile; its kernels do nothing.

    Args:
      build: from flags of libtpu to the text of the compiled program.
      wanted: from this text to the kernels that run.
    """
    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:
        with mock.patch.object(launcher, "pallas_call", hollow):
            text = build(tpu.profile_flags(folder))
        return branch_cycles(text, tpu.profiled(folder), set(wanted(text)))


def estimate(case: Layer, mixture: Mixture, chip: str, timeout: float) -> dict:
    """Return the estimated cost of a step on a chip that is not here; `failed` is set if the compiler gave no result.

    If it gave none for the operations around the kernels only, the other figures are there, but not their sum.
    """
    counts: dict[str, Any] = {}
    for name in ("count_kernels", "count_around"):
        code = (
            f"from benchmarks.step import Layer, Mixture, {name}; {{{name!r}: {name}({case!r}, {mixture!r}, {chip!r})}}"
        )
        counts |= tpu.result(code, timeout)
        if "count_kernels" not in counts:
            return counts
    (of_kernels, digest), around = counts.pop("count_kernels"), counts.pop("count_around", None)
    decode, prefill = of_kernels.values()
    floors = [tpu.cycles_to_move(n, chip) for n in moved_bytes(case, mixture)]
    steps = grid_steps(case, mixture)
    row = {
        "decode_bundles": decode or None,
        "decode_floor": floors[0] or None,
        "prefill_bundles": prefill or None,
        "prefill_floor": floors[1] or None,
        "decode_steps": steps["decode"] or None,
        "prefill_steps": steps["prefill"] or None,
        "around_cycles": around,
        "traced": digest,
    }
    if around is None:
        return row | counts
    cycles = max(decode, floors[0]) + max(prefill, floors[1]) + around
    row |= {"cycles": cycles, "to_floor": cycles / sum(floors)}
    return row | {"estimate_ms": step_ms(row, chip)}


def step_ms(row: dict, chip: str) -> float:
    """Return the time of a step on a chip from its row; decodes and prefills take at least the time of their bytes."""
    one = CHIPS[chip]
    of = lambda kind: (row.get(f"{kind}_{name}") or 0 for name in ("bundles", "steps", "floor"))
    launches = [
        times.Launch(bundles, steps, floor / one.clock_ghz / 1e6)
        for bundles, steps, floor in map(of, ("decode", "prefill"))
    ]
    return times.device_ms(one, launches, row["around_cycles"])
