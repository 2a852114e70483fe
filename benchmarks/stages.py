"""The stages of the gated delta rule one by one; a stage gets the results of earlier stages from plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from chunkwise.command.models import Layer
from chunkwise.pipeline.stages import STAGES, Stage
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, STAGE_TOLERANCE, TOLERANCE

C = 64


def function(stage: Stage, implementation: str):
    """Return the stage as a function from its inputs by name, and cu_seqlens or None, to its results by name."""

    def run(x, cu_seqlens):
        return stage.by_name(stage.run(x, C, cu_seqlens=cu_seqlens, implementation=implementation))

    return run


def all_arguments(case: Layer, T: int, dtype) -> dict:
    """Return the inputs and results of all stages by name."""
    x, cu_seqlens = case.inputs(T, dtype), case.boundaries(T)
    x["initial_state"] = jnp.zeros((max(1, case.sequences), case.HV, case.K, case.V))
    for stage in STAGES:
        if stage.name != "chunk_fwd_h":
            x |= jax.jit(function(stage, "xla"))(x, cu_seqlens)
    return x


def last_group(case: Layer, x: dict) -> dict:
    """Return the last key head and its value heads in float64; this is enough, because heads do not mix."""
    group, part = case.HV // case.H, {}
    for name, y in x.items():
        heads = 1 if name in ("q", "k") else group
        y = np.asarray(y, np.float64)
        part[name] = y[:, -heads:] if name.endswith("_state") else y[:, :, -heads:]
    return part


def gradient_errors(case: Layer, stage: Stage, x: dict, cotangents: dict, gradients: dict, cu_seqlens):
    """Yield the error of every gradient along one random direction, against a central difference in float64."""
    x, cotangents, gradients = (last_group(case, y) for y in (x, cotangents, gradients))
    rng, step = np.random.default_rng(2), 1e-4

    def loss(x):
        results = stage.by_name(stage.definition(x, cu_seqlens, C))
        return sum(np.sum(cotangents[name] * y) for name, y in results.items())

    for name, dx in gradients.items():
        # The direction is mostly the sign of the gradient, so that little cancels and the difference is large.
        direction = np.where(rng.random(dx.shape) < 0.8, np.sign(dx), 0.0)
        forward, back = (loss(x | {name: x[name] + side * step * direction}) for side in (1, -1))
        expected = (forward - back) / (2 * step)
        yield abs(np.sum(dx * direction) - expected) / max(abs(expected), 1e-30)


def measure(case: Layer, stage: Stage, T: int, dtype, implementations, backward: bool, repeats: int, x: dict):
    """Return a row for every implementation; `x` holds all arguments."""
    cu_seqlens = case.boundaries(T)
    x = {name: x[name] for name in stage.reads}
    part = last_group(case, x)
    expected = stage.by_name(stage.definition(part, cu_seqlens, C))
    shapes = jax.eval_shape(function(stage, "xla"), x, cu_seqlens)
    rng = np.random.default_rng(1)
    cotangents = {name: jnp.asarray(rng.standard_normal(y.shape), y.dtype) for name, y in shapes.items()}
    rounded = stage.rounds and dtype != jnp.float32
    limit = TOLERANCE[jnp.dtype(dtype).name] if rounded else STAGE_TOLERANCE
    pulled = cotangents if backward else None
    runs = [timing.compiled(name, function(stage, name), x, cu_seqlens, pulled) for name in implementations]

    def verdict(results):
        got = last_group(case, {name: results[name] for name in expected})
        err, correct = timing.worst(got, expected, dict.fromkeys(expected, limit))
        if backward:
            gradients = {name: results[f"d{name}"] for name in x}
            errors = gradient_errors(case, stage, x, cotangents, gradients, cu_seqlens)
            correct = correct and all(e <= GRADIENT_TOLERANCE[jnp.dtype(dtype).name] for e in errors)
        return err, correct

    sizes = dict(B=1, T=T, H=case.H, HV=case.HV, K=case.K, V=case.V, C=C, itemsize=jnp.dtype(dtype).itemsize)
    costs = [stage.cost(**sizes, backward=way) for way in (False, True)[: 1 + backward]]
    flops, moved = (sum(getattr(x, name) for x in costs) for name in ("flops", "bytes_accessed"))
    return timing.measure(runs, [], verdict, flops, moved, timing.machine_peaks(dtype), repeats)
