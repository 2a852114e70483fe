"""Whole operators beside their peers, judged by the float64 recurrence."""

import jax.numpy as jnp
import numpy as np

from benchmarks import peers, timing
from benchmarks.cases import Case
from chunkwise.pipeline.check import tolerance
from chunkwise.shared.testing import reference


def judged_part(case: Case, x: dict, tokens: slice) -> dict:
    """Return some tokens of the last key head with its value heads: heads and sequences do not mix."""
    heads = {"q": 1, "k": 1, "dq": 1, "dk": 1}
    group = case.HV // case.H
    return {name: y[:, tokens, -heads.get(name, group) :] for name, y in x.items()}


def measure(case: Case, T: int, dtype, implementations, backward: bool, repeats: int, devices: int) -> list[dict]:
    """Return a row for every implementation and for every peer that is installed and takes the case.

    Heads are split over `devices`, those of the scan too.
    The check covers every token of the last sequence in the last key head's group, in the very arrays that are timed.
    """
    x, cu_seqlens = case.inputs(T, dtype), case.boundaries(T)
    do = jnp.asarray(np.random.default_rng(1).standard_normal(x["v"].shape), dtype)
    cotangents = {"o": do} if backward else None
    runs = [timing.compiled(name, case.function(name), x, cu_seqlens, cotangents, devices) for name in implementations]

    last = slice(None) if cu_seqlens is None else slice(int(cu_seqlens[-2]), int(cu_seqlens[-1]))
    part = judged_part(case, x | {"do": do}, last)
    part_do = part.pop("do")
    o, _, *gradients = reference(**part, do=part_do if backward else None)
    expected = {"o": o} | ({f"d{name}": value for name, value in gradients[0].items()} if backward else {})
    limits = {name: tolerance(name, jnp.dtype(dtype).name) for name in expected}

    def verdict(results):
        return timing.worst(judged_part(case, results, last), expected, limits)

    return timing.measure(
        runs, peers.available(case, x, cu_seqlens, do if backward else None, devices), verdict,
        *case.cost(T, dtype, backward), timing.machine_peaks(dtype), repeats,
    )  # fmt: skip
