"""The gated norm at the end of a layer."""

from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.layers import division, running
from chunkwise.norm_gated import rms_norm_gated
from chunkwise.shared.kernels import activations
from chunkwise.shared.operators import checks


def norm_heads(run: running.Run, o, z, weight, *, activation: str, eps: float):
    """Return the gated RMSNorm of every head of o [B, T, HV, V], with gates z [B, T, HV V] and one weight [V]."""
    HV = o.shape[2]
    return rms_norm_gated(
        o, running.by_head(z, HV), weight, activation=activation, eps=eps,
        implementation=running.AROUND[run.implementation],
        sharding=division.split_heads(run.sharding, HV),
    )  # fmt: skip


def norm_groups(run: running.Run, o, z, weight, groups: int, *, activation: str, norm_before_gate: bool, eps: float):
    """Return the gated RMSNorm of groups of heads of o [B, T, HV, V], each as one, with z [B, T, HV V].

    The weight [HV V] has an entry for every channel of every head.
    """
    devices, flat = division.devices_of_heads(run.sharding, o), o.reshape(z.shape)
    options: dict[str, Any] = dict(activation=activation, eps=eps)
    whole = groups % devices == 0
    checks.check(whole or groups == 1, f"`H` must be 1 or a multiple of the {devices} devices of heads; got {groups}.")
    if not whole:
        return _norm_over_devices(flat, z, weight, norm_before_gate=norm_before_gate, **options).reshape(o.shape)
    options |= dict(norm_before_gate=norm_before_gate, implementation=running.AROUND[run.implementation])
    if groups == 1:
        y = rms_norm_gated(flat, z, weight, **options, sharding=division.split_heads(run.sharding, 1))
        return y.reshape(o.shape)
    # The weight differs from group to group, so it is not that of the norm, which has one for all.
    size = flat.shape[2] // groups
    y = rms_norm_gated(
        running.by_head(flat, groups), running.by_head(z, groups), jnp.ones(size, jnp.float32), **options,
        sharding=division.split_heads(run.sharding, groups),
    )  # fmt: skip
    return (weight * y.reshape(z.shape)).astype(o.dtype).reshape(o.shape)


def _norm_over_devices(x, z, weight, *, activation: str, norm_before_gate: bool, eps: float):
    """Return the norm of rows [B, T, channels] whose channels lie on several devices: XLA sums over these."""
    u, gate = x.astype(jnp.float32), activations.activate(z.astype(jnp.float32), activation)
    u = u if norm_before_gate else u * gate
    y = weight * u * jax.lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + eps)
    return (y * gate if norm_before_gate else y).astype(x.dtype)
