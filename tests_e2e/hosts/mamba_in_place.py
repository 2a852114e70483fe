"""Ours in the place of the operators of Mamba-2's authors, for their tests, on a CPU and without their kernels.

Their kernels are Triton's. So `mamba_ssm` is a package here that has nothing but ours under their names, and their
references in torch, out of the folder of their repository that MAMBA_SOURCE names.
"""

import functools
import os
import types
from collections.abc import Callable
from pathlib import Path

import einops
import jax
import jax.numpy as jnp
import pytest
import torch
from torch.overrides import TorchFunctionMode

from chunkwise.norm_gated import rms_norm_gated
from chunkwise.pipeline import chunk_mamba2, ragged_mamba2
from tests_e2e.hosts.host import module_of, parts_of, put
from tests_e2e.hosts.suite import compiled
from tests_e2e.hosts.torch_arrays import Ours, to_jax, to_torch

SOURCE = Path(os.environ.get("MAMBA_SOURCE", ""))


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what tests ask for on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def mamba_chunk_scan_combined(count: Callable, x, dt, A, B, C, chunk_size, D=None, initial_states=None,
                              return_final_states=False):  # fmt: skip
    """Return the state space model of Mamba-2, whose state is transposed here."""
    count()
    arrays = dict(x=x, dt=dt, A=A, B=B, C=C) | ({} if D is None else dict(D=D))
    if initial_states is not None:
        arrays["initial_state"] = initial_states.transpose(-1, -2)
    operator = compiled(chunk_mamba2, chunk_size=chunk_size, output_final_state=True)
    o, state = Ours.apply(operator, tuple(arrays), *arrays.values())
    return (o, state.transpose(-1, -2)) if return_final_states else o


def layernorm_fn(count: Callable, x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True,
                 is_rms_norm=False):  # fmt: skip
    """Return the gated RMSNorm of x, over all channels or groups of them."""
    if z is None or bias is not None or not is_rms_norm:
        pytest.skip("Ours is an RMSNorm with a gate and without a bias.")
    count()
    norm = compiled(rms_norm_gated, norm_before_gate=norm_before_gate, eps=eps)

    def run(x, z, weight):
        if group_size is None:
            return (norm(x, z, weight),)
        groups = lambda y: y.reshape(*y.shape[:-1], -1, group_size)
        y = norm(groups(x), groups(z), jnp.ones(group_size, jnp.float32)).reshape(x.shape)
        return ((weight * y).astype(x.dtype),)

    return Ours.apply(run, ("x", "z", "weight"), x, z, weight)[0]


@functools.partial(jax.jit, static_argnames="dt_softplus")
def _decode(x, dt, B, C, z, A, pool, slots, D, dt_bias, dt_softplus):
    """Return one token of every sequence [N, HV, V], and the pool after it."""
    boundaries = jnp.arange(slots.shape[0] + 1, dtype=jnp.int32)
    x, dt, B, C, z = jax.tree.map(lambda y: y[None], (x, dt, B, C, z))
    o, pool = ragged_mamba2(
        x, dt, A, B, C, pool, boundaries, slots, num_decodes=slots.shape[0], D=D, z=z, dt_bias=dt_bias,
        dt_softplus=dt_softplus,
    )  # fmt: skip
    return o[0], pool


def selective_state_update(
    count: Callable, state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):  # fmt: skip
    """Write the states of a pool [slots, HV, V, K] after one token of each sequence, and return its outputs."""
    if state.ndim != 4 or dt.stride(-1) or A.stride(-1) or A.stride(-2):
        pytest.skip("Ours has one decay for a head, and theirs one for every entry of the state.")
    count()
    slots = torch.arange(len(x), dtype=torch.int32) if state_batch_indices is None else state_batch_indices
    bias = None if dt_bias is None else dt_bias[:, 0]
    arrays = (x, dt[..., 0], B, C, z, A[:, 0, 0], state.transpose(-1, -2), slots, D, bias)
    o, after = map(to_torch, _decode(*(None if y is None else to_jax(y) for y in arrays), dt_softplus))
    state.copy_(after.transpose(-1, -2))
    return o


def install(count: Callable[[], None]) -> None:
    """Make the package `mamba_ssm`, of ours and its references, and count the calls of ours."""
    OnCpu().__enter__()
    known = dict(torch=torch, F=torch.nn.functional, rearrange=einops.rearrange, repeat=einops.repeat)
    replaced = {
        "layernorm_gated": (layernorm_fn, "rms_norm_ref"),
        "selective_state_update": (selective_state_update, "selective_state_update_ref"),
        "ssd_combined": (mamba_chunk_scan_combined, None),
    }
    for name, (ours, reference) in replaced.items():
        module = types.ModuleType(f"mamba_ssm.ops.triton.{name}")
        setattr(module, ours.__name__, lambda *args, ours=ours, **options: ours(count, *args, **options))
        if reference:
            vars(module).update(vars(parts_of(SOURCE / f"mamba_ssm/ops/triton/{name}.py", (reference,), known)))
        put({module.__name__: module})
    listing = module_of(SOURCE / "mamba_ssm/modules/ssd_minimal.py", "mamba_ssm.modules.ssd_minimal")
    put({listing.__name__: listing})
