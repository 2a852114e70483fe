"""Ours in the place of flash-linear-attention's operators, for its tests, on a CPU and without its kernels.

Its kernels are Triton's. So `fla` is a package here that has nothing but ours under the names of its operators, and its
references of plain torch, out of the wheel of fla-core. Arrays of torch become arrays of JAX, and gradients go back.
"""

import functools
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunkwise import pipeline
from tests_e2e.hosts.host import load, parts_of, path_of, put
from tests_e2e.hosts.suite import compiled
from tests_e2e.hosts.torch_arrays import Ours, to_jax

# By its names: our operator, and the arrays that may follow q, k and v without a name.
OPERATORS = {
    "gated_delta_rule": ("gated_delta_rule", ("g", "beta")),
    "kda": ("kda", ("g", "beta")),
    "gdn2": ("gdn2", ("g", "b", "w")),
    "comba": ("comba", ("p", "g", "beta")),
    "delta_rule": ("delta_rule", ("beta",)),
    "gla": ("gla", ("g",)),
    "simple_gla": ("simple_gla", ("g",)),
    "retention": ("simple_gla", ()),
    "lightning_attn": ("simple_gla", ()),
    "linear_attn": ("simple_gla", ()),
}
KINDS = {"chunk": "chunk", "fused_chunk": "chunk", "parallel": "chunk", "fused_recurrent": "recurrent"}
# What changes nothing but how a kernel of theirs computes, and what ours lacks.
UNREAD = ("safe_gate", "disable_recompute", "cu_seqlens_cpu")
LACKING = ("output_attentions", "return_intermediate_states", "reverse", "gv")
# Theirs takes fewer sizes of chunks.
CHUNK_SIZES = {"kda": (32, 64), "gdn2": (64,)}
GATES = {"gated_delta_rule": ("naive_gdn_gate",), "kda": ("naive_kda_gate", "naive_kda_lowerbound_gate")}
NAIVE = ("gated_delta_rule", "kda", "gdn2", "comba", "gla", "simple_gla", "linear_attn")
NVIDIA = ("IS_NVIDIA", *(f"IS_NVIDIA_{name}" for name in ("BLACKWELL", "HOPPER", "SM100", "SM120")))
FLAGS = ("IS_NPU", "IS_INTEL_ALCHEMIST", *NVIDIA)


def _decays(name: str, H: int, layer_idx: int = 0, num_layers: int = 1) -> torch.Tensor:
    """Return the decays of heads that never change, in nats."""
    heads = torch.arange(H, dtype=torch.float32)
    if name == "retention":
        return torch.log1p(-torch.exp2(-5 - heads))
    return -8 / H * (1 - layer_idx / num_layers) * heads if name == "lightning_attn" else 0 * heads


def _ours(name: str, kind: str, q, k, v, gates: tuple, options: dict) -> tuple[Callable, dict]:
    """Return our operator with what is static, and arrays by our names; skip a test of what only theirs has."""
    ours, order = OPERATORS[name]
    options = dict(zip(order, gates, strict=False)) | {n: x for n, x in options.items() if n not in UNREAD}
    lacking = [n for n in LACKING if options.get(n)]
    # Their operator of no gates divides by a sum unless it is told not to.
    if lacking or options.pop("normalize", name == "linear_attn"):
        pytest.skip(f"Ours has none of {lacking or 'normalize'}.")
    if options.get("chunk_size", 64) not in CHUNK_SIZES.get(name, (16, 32, 64, 128)):
        pytest.skip("Theirs has fewer sizes of chunks.")
    options = {n: x for n, x in options.items() if x is not None and x is not False}
    if "gk" in options:
        options["g"] = options.pop("gk")
    if "lower_bound" in options and "use_gate_in_kernel" not in options:
        # A promise about gates in nats.
        options["min_gate"] = options.pop("lower_bound")
    if ours == "simple_gla" and name != ours:
        places = {n: options.pop(n) for n in ("layer_idx", "num_layers") if n in options}
        options["g_gamma"] = _decays(name, q.shape[2], **places)
    if name == "delta_rule":
        options["g"] = torch.zeros(q.shape[:3])
    options |= dict(q=q, k=k, v=v)
    arrays = {n: x for n, x in options.items() if torch.is_tensor(x)}
    static = {n: x for n, x in options.items() if n not in arrays}
    return compiled(getattr(pipeline, f"{KINDS[kind]}_{ours}"), **static), arrays


def call(
    name: str, kind: str, count: Callable[[], None], q, k, v, *gates, state_v_first=False, transpose_state_layout=None,
    **options,
) -> tuple:  # fmt: skip
    """Run ours for an operator of flash-linear-attention, with its arguments."""
    if transpose_state_layout is not None:
        # A name that theirs no longer has.
        if state_v_first:
            raise ValueError("Both are the same.")
        warnings.warn("transpose_state_layout", DeprecationWarning, stacklevel=2)
        state_v_first = transpose_state_layout
    operator, arrays = _ours(name, kind, q, k, v, gates, options)
    count()
    turned = lambda x: x.transpose(-1, -2) if state_v_first else x
    if "initial_state" in arrays:
        arrays["initial_state"] = turned(arrays["initial_state"])
    boundaries = to_jax(arrays.pop("cu_seqlens")) if "cu_seqlens" in arrays else None

    def run(**x):
        o, state = operator(**x, cu_seqlens=boundaries)
        return (o,) if state is None else (o, state)

    o, *state = Ours.apply(run, tuple(arrays), *arrays.values())
    return o, turned(state[0]) if state else None


class Package(types.ModuleType):
    """A module of theirs: what is not given is a function that we do not have."""

    __path__: tuple = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **options):
            pytest.skip(f"{name} of flash-linear-attention is not replaced.")

        return missing


def install(count: Callable[[], None]) -> None:
    """Make the package `fla`, of ours and its references, and count the calls of ours."""
    # Many tests ask for CUDA, by which they mean its kernels; and some for a backend that has no groups of heads.
    torch.cuda.is_available = lambda: True
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    known = dict(torch=torch, F=torch.nn.functional)
    errors, quiet = ("get_abs_err", "get_err_ratio", "assert_close"), types.SimpleNamespace(info=lambda message: None)
    checks = parts_of(
        path_of("fla-core", "fla/utils/testing.py"), errors, known | dict(FLA_CI_ENV=False, logger=quiet)
    )  # fmt: skip
    platform = dict.fromkeys(FLAGS, False) | dict(device="cpu", device_platform="cpu", device_torch_lib=torch.cpu)
    _put("fla.utils", vars(checks) | platform)
    _put("fla.ops.utils.cache", dict(FLA_CACHE_MODE="disabled"))
    _put("fla.layers", {})
    _put("triton", dict(next_power_of_2=lambda n: 1 << (n - 1).bit_length()))
    for name in OPERATORS:
        found = {f"{kind}_{name}": functools.partial(call, name, kind, count) for kind in KINDS}
        for module in ("", ".chunk", ".fused_chunk", ".fused_recurrent", ".parallel", ".utils", ".wy_fast"):
            _put(f"fla.ops.{name}{module}", found)
    for name, functions in GATES.items():
        _put(f"fla.ops.{name}.gate", vars(parts_of(path_of("fla-core", f"fla/ops/{name}/gate.py"), functions, known)))
    for name in NAIVE:
        full = f"fla.ops.{name}"
        naive = load("fla-core", f"{full}.naive")
        vars(sys.modules[full]).update({n: x for n, x in vars(naive).items() if n.startswith("naive_")})


def _put(name: str, found: dict) -> None:
    """Make a module of theirs, with what is found in it."""
    module = Package(name)
    vars(module).update(found)
    put({name: module})
