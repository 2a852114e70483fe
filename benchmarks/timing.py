"""Time on this machine: alternating runs, compilation apart, and no ratio for a result that is wrong."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Case
from chunkwise.shared.reference import reference
from chunkwise.shared.testing import TOLERANCE, error


def _seconds(run) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _torch(x: dict):
    """Return transformers' own chunked gated delta rule on the same inputs, and its backward; None if not installed."""
    try:
        import torch
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    except ImportError:
        return None
    torch.set_num_threads(2)
    groups = x["v"].shape[2] // x["q"].shape[2]
    tensors = {n: torch.tensor(np.asarray(y, np.float32)) for n, y in x.items()}
    tensors |= {n: tensors[n].repeat_interleave(groups, dim=2) for n in "qk"}
    names = ("q", "k", "v", "g", "beta")

    def forward():
        with torch.no_grad():
            return torch_chunk_gated_delta_rule(*(tensors[n] for n in names))[0]

    def backward():
        leaves = [tensors[n].clone().requires_grad_(True) for n in names]
        torch_chunk_gated_delta_rule(*leaves)[0].sum().backward()

    return forward, backward


def measure(case: Case, T: int, dtype, implementations, backward: bool, repeats: int) -> list[dict]:
    """Return a row for every implementation and for the peer of the gated delta rule that is installed."""
    x, cu_seqlens = case.inputs(T, dtype), case.boundaries(T)
    expected = reference(**x, cu_seqlens=cu_seqlens)[0]
    runs, rows = {}, []
    for name in implementations:
        forward = jax.jit(lambda x, name=name: case.run(name, x, cu_seqlens))
        gradient = jax.jit(jax.grad(lambda x, name=name: case.run(name, x, cu_seqlens).astype(jnp.float32).sum()))
        call, start = gradient if backward else forward, time.perf_counter()
        call = call.lower(x).compile()
        compile_seconds = time.perf_counter() - start
        err = error(jnp.asarray(forward(x), jnp.float32), expected)
        runs[name] = lambda call=call: call(x)
        rows.append({"implementation": name, "error": err, "compile_s": compile_seconds})
    peer = _torch(x) if case.operator == "gated_delta_rule" and cu_seqlens is None and dtype == jnp.float32 else None
    if peer is not None:
        runs["transformers"] = peer[1] if backward else peer[0]
        rows.append({"implementation": "transformers", "error": error(peer[0]().numpy(), expected), "compile_s": 0.0})
    times = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(_seconds(run))
    for row in rows:
        samples = times[row["implementation"]]
        row["median_s"], row["spread_s"] = statistics.median(samples), max(samples) - min(samples)
        row["correct"] = row["error"] <= TOLERANCE[jnp.dtype(dtype).name]
        row["gflops"] = case.flops(T) * (3 if backward else 1) / row["median_s"] / 1e9
    peers = [row for row in rows if row["implementation"] == "transformers" and row["correct"]]
    for row in rows:
        usable = peers and row["correct"] and row is not peers[0]
        row["times_peer"] = peers[0]["median_s"] / row["median_s"] if usable else None
    return rows
