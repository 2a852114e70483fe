"""Whole operators beside their peers, judged by the float64 recurrence."""

import jax.numpy as jnp
import numpy as np

from benchmarks import peers, timing
from chunkwise.command.models import Layer


def measure(case: Layer, T: int, dtype, implementations, backward: bool, repeats: int, devices: int, beside=()):
    """Return a row for every implementation and for every peer that is installed and takes the case, as some have to.

    Heads are split over `devices`, also for the scan. The check covers every token of the last sequence in the last key
    head's group, in the same arrays that are timed.
    """
    x, cu_seqlens = case.inputs(T, dtype), case.boundaries(T)
    do = jnp.asarray(np.random.default_rng(1).standard_normal((1, T, case.HV, case.V)), dtype)
    cotangents = {"o": do} if backward else None
    last = slice(None) if cu_seqlens is None else slice(int(cu_seqlens[-2]), int(cu_seqlens[-1]))
    expected = case.expected(case.part(x, last), case.part({"do": do}, last)["do"] if backward else None)
    limits = {name: case.tolerance(name, x["v"].dtype.name) for name in expected}
    runs = [timing.compiled(name, case.function(name), x, cu_seqlens, cotangents, devices) for name in implementations]
    others = peers.available(case, x, cu_seqlens, do if backward else None, devices, beside)
    verdict = lambda results: timing.worst(case.part(results, last), expected, limits)
    return timing.measure(runs, others, verdict, repeats)
