"""Whole operators, judged by the float64 recurrence, beside other people's where these are installed."""

import importlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import timing
from benchmarks.timing import Run, compiled
from chunkwise.command.models import Layer

# The scan keeps a state per token for its backward; cases that need more bytes than this are not compared.
_SCAN_STATES = 2**31


# The plain forms of others in JAX: by package and operator their module, and o by this module from the inputs.
_PLAIN: dict[str, dict[str, tuple[str, Callable]]] = {
    "jax-linear-attention": {
        "gated_delta_product": ("jla.ops.chunked", lambda theirs, **x: theirs.gated_delta_product(**x)[0]),
        "dplr_delta_rule": (
            "jla.ops.rwkv7",
            lambda theirs, q, gk, **x: theirs.rwkv7_chunked(q, w=gk, scale=q.shape[3] ** -0.5, **x)[0],
        ),
        "mlstm": ("jla.ops.chunked", lambda theirs, f, **x: theirs.mlstm(g=jax.nn.log_sigmoid(f), **x)[0]),
    },
    "mlstm_kernels": {
        "mlstm": (
            "mlstm_kernels.jax.chunkwise.native",
            lambda theirs, **x: _heads_first(
                theirs.mlstm_chunkwise__native_autograd(**{name: _heads_first(y) for name, y in x.items()})
            ),
        )
    },
}
# The peers on a CPU.
NAMES = ("transformers", "scan", *_PLAIN)


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
    runs = [compiled(name, case.function(name), x, cu_seqlens, cotangents, devices) for name in implementations]
    others = available(case, x, cu_seqlens, do if backward else None, devices, beside)
    verdict = lambda results: timing.worst(case.part(results, last), expected, limits)
    return timing.measure(runs, others, verdict, repeats)


def available(case: Layer, x: dict, cu_seqlens, do, devices: int, beside=()) -> list[Run]:
    """Return the peers that can run a case here, of which some have to; with do, forward and backward."""
    cpu = _transformers, partial(_scan, devices=devices), *(partial(_plain, name) for name in _PLAIN)
    found = [peer(case, x, cu_seqlens, do) for peer in ((_fla, _jla) if jax.default_backend() == "gpu" else cpu)]
    runs = [run for run in found if run is not None]
    if lacking := set(beside) - {run.name for run in runs}:
        rule = "`--beside` must name packages that are installed and have the operator of the case"
        raise ValueError(f"{rule}; got {', '.join(sorted(lacking))} for {case.operator}.")
    return runs


def _heads_first(y: jax.Array) -> jax.Array:
    return jnp.swapaxes(y, 1, 2)


def _plain(name: str, case: Layer, x: dict, cu_seqlens, do) -> Run | None:
    """The plain form of a package for one sequence."""
    if cu_seqlens is not None or case.operator not in _PLAIN[name]:
        return None
    module, function = _PLAIN[name][case.operator]
    try:
        theirs = importlib.import_module(module)
    except ImportError:
        return None
    run = lambda x, _: {"o": function(theirs, **x)}
    return compiled(name, run, x, None, None if do is None else {"o": do})


def _scan(case: Layer, x: dict, cu_seqlens, do, devices: int) -> Run | None:
    """The recurrence as a user would write it in JAX: `lax.scan` over tokens, for all heads and sequences at once."""
    tokens, N = x["v"].shape[1], max(1, case.sequences)
    if case.ragged or tokens % N or case.table.erase or case.table.composition:
        return None
    if do is not None and 4 * tokens * case.HV * case.K * case.V > _SCAN_STATES:
        return None

    def token(S, x):
        q, k, v, g, beta = x
        S = jnp.exp(g)[..., None] * S
        if beta is not None:
            v = beta[..., None] * (v - jnp.einsum("nhk,nhkv->nhv", k, S))
        S = S + k[..., None] * v[..., None, :]
        return S, jnp.einsum("nhk,nhkv->nhv", q, S)

    def run(x, cu_seqlens):
        def by_time(y):
            y = y.astype(jnp.float32).reshape(N, tokens // N, *y.shape[2:])
            return jnp.moveaxis(y, 1, 0)

        q, k = (by_time(jnp.repeat(x[name], case.HV // case.H, axis=2)) for name in "qk")
        g = by_time(x["g"])
        beta = by_time(x["beta"]) if case.table.delta else None
        S = jnp.zeros((N, x["v"].shape[2], case.K, case.V))
        gate = g if case.table.per_channel else g[..., None]
        _, o = lax.scan(token, S, (q * case.K**-0.5, k, by_time(x["v"]), gate, beta))
        return {"o": jnp.moveaxis(o, 0, 1).reshape(x["v"].shape).astype(x["v"].dtype)}

    return compiled("scan", run, x, cu_seqlens, None if do is None else {"o": do}, devices)


def _jla(case: Layer, x: dict, cu_seqlens, do) -> Run | None:
    """The kernels of jax-linear-attention for Hopper GPUs, as the implementation "jla"."""
    try:
        import jla  # noqa: F401

        from chunkwise.integrations import jax_linear_attention
    except ImportError:
        return None
    put_back = jax_linear_attention.install()
    try:
        return compiled("jax-linear-attention", case.function("jla"), x, cu_seqlens, None if do is None else {"o": do})
    finally:
        put_back()


def _fla(case: Layer, x: dict, cu_seqlens, do) -> Run | None:
    """The kernels of flash-linear-attention, in Triton, with key heads repeated where an operator has no groups."""
    try:
        import torch

        module = importlib.import_module(f"fla.ops.{case.operator}")
    except ImportError:
        return None
    operator, group = getattr(module, f"chunk_{case.operator}"), case.HV // case.H
    more = {} if cu_seqlens is None else {"cu_seqlens": torch.tensor(np.asarray(cu_seqlens, np.int64), device="cuda")}
    if case.normalise:
        more["use_qk_l2norm_in_kernel"] = True

    def function(q, k, **others):
        if not case.table.delta:
            q, k = (y.repeat_interleave(group, dim=2) for y in (q, k))
        return operator(q, k, **others, **more)

    return _torch_run("flash-linear-attention", function, x, do, "cuda")


def _to_torch(x: jax.Array, device: str):
    import torch

    tensor = torch.tensor(np.asarray(x, np.float32), device=device)
    return tensor.to(torch.bfloat16) if x.dtype == jnp.bfloat16 else tensor


def _torch_run(name: str, function, x: dict, do, device: str = "cpu") -> Run:
    """Return the run of function(**tensors) -> (o, ...), with autograd if there is a do; a call waits for a GPU."""
    import torch

    tensors = {n: _to_torch(y, device) for n, y in x.items()}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def forward():
        with torch.no_grad():
            o = function(**tensors)[0]
        wait()
        return {"o": o}

    if do is None:
        return Run(name, forward)
    cotangent = _to_torch(do, device)

    def forward_and_backward():
        leaves = {n: y.requires_grad_(True) for n, y in tensors.items()}
        o = function(**leaves)[0]
        gradients = torch.autograd.grad(o, list(leaves.values()), cotangent)
        wait()
        return {"o": o.detach()} | {f"d{n}": dy for n, dy in zip(leaves, gradients, strict=True)}

    return Run(name, forward_and_backward)


def _transformers(case: Layer, x: dict, cu_seqlens, do) -> Run | None:
    """The function of Qwen3-Next in transformers, in torch on the CPU with 2 threads, with key heads repeated."""
    if case.operator != "gated_delta_rule" or cu_seqlens is not None or x["v"].dtype != jnp.float32:
        return None
    try:
        import torch

        model = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    except ImportError:
        return None
    torch.set_num_threads(2)
    group = case.HV // case.H

    def function(q, k, v, g, beta):
        q, k = (y.repeat_interleave(group, dim=2) for y in (q, k))
        return model.torch_chunk_gated_delta_rule(q, k, v, g, beta)

    return _torch_run("transformers", function, x, do)
