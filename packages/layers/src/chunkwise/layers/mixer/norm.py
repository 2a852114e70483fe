"""The norm at the end of a layer."""

from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.layers import config
from chunkwise.layers.devices import division
from chunkwise.layers.mixer import running
from chunkwise.norm_gated import rms_norm_gated
from chunkwise.shared.kernels import activations


def norm_heads(run: running.Run, o, z, weight, *, activation: str | None = None, eps: float):
    """Return the RMSNorm of every head of o [B, T, HV, V], with one weight [V] and gates z [B, T, HV V], or no gate."""
    HV = o.shape[2]
    return rms_norm_gated(
        o, _by_head(z, HV), weight, activation=activation, eps=eps,
        implementation=running.AROUND[run.implementation],
        sharding=division.split_heads(run.sharding, HV),
    )  # fmt: skip


def _by_head(z, heads: int):
    """Return gates [B, T, HV V] by head, or None for no gates."""
    return None if z is None else running.by_head(z, heads)


def norm_groups(
    run: running.Run, o, z, weight, groups: int, *, activation: str | None, norm_before_gate: bool, eps: float
):
    """Return the RMSNorm of o [B, T, HV, V] with gates z [B, T, HV V], or no gate; a norm goes over a group of heads.

    The weight [HV V] has an entry for every channel of every head.
    """
    options: dict[str, Any] = dict(activation=activation, norm_before_gate=norm_before_gate, eps=eps)
    if groups % division.devices_of_heads(run.sharding, o):
        return _norm_over_devices(o, z, weight, groups, **options)
    flat = o.reshape(*o.shape[:2], -1)
    options |= dict(implementation=running.AROUND[run.implementation], in_place=True)
    if groups == 1:
        y = rms_norm_gated(flat, z, weight, **options, sharding=division.split_heads(run.sharding, 1))
        return y.reshape(o.shape)
    y = rms_norm_gated(
        running.by_head(flat, groups), _by_head(z, groups), weight.reshape(groups, -1), **options,
        sharding=division.split_heads(run.sharding, groups),
    )  # fmt: skip
    # Flat first: JAX takes no groups of divided heads apart into heads.
    return y.reshape(flat.shape).reshape(o.shape)


def is_local(run: running.Run, v, config: config.LayerConfig, groups: int) -> bool:
    """Return whether no group of heads lies on several devices; v is [B, T, HV V]."""
    return groups % division.devices_of_heads(run.sharding, running.by_head(v, config.HV)) == 0


def _norm_over_devices(o, z, weight, groups: int, *, activation: str | None, norm_before_gate: bool, eps: float):
    """Return the norm of `norm_groups` if a group of heads lies on several devices, over which XLA adds up."""
    HV, V = o.shape[2:]
    gate = 1.0 if z is None else activations.activate(running.by_head(z, HV).astype(jnp.float32), activation)
    u = o.astype(jnp.float32) if norm_before_gate else o.astype(jnp.float32) * gate
    # A product with a table of groups adds up heads, because a group may begin or end between the heads of a device.
    member = jnp.arange(HV)[:, None] // (HV // groups) == jnp.arange(groups)[None]  # [HV, groups]
    squares = jnp.sum(u * u, axis=-1)[..., None]
    mean = jnp.sum(jnp.where(member, squares, 0.0), axis=2) * (groups / (HV * V))  # [B, T, groups]
    factor = jnp.repeat(jax.lax.rsqrt(mean + eps), HV // groups, axis=2)
    y = weight.reshape(HV, V) * (u * factor[..., None])
    return (y * gate if norm_before_gate else y).astype(o.dtype)


def sum_heads(run: running.Run, y, heads: int, channels: int | None = None) -> jax.Array:
    """Return the sum over every head of y [B, T, heads size] float32, in each of its `channels`, which are `size`.

    A TPU copies y to take narrow heads apart, because the lanes of a register are 128. Products with a table of heads
    sum flat channels as they lie.
    """
    devices = division.devices_of_heads(run.sharding, running.by_head(y, heads))
    parts, each = running.by_head(y, devices), heads // devices

    def table(size: int) -> jax.Array:
        member = jnp.arange(each * size)[:, None] // size == jnp.arange(each)[None]
        return member.astype(jnp.float32)

    size, exact = y.shape[2] // heads, jax.lax.Precision.HIGHEST
    sums = jnp.einsum("btdc,ch->btdh", parts, table(size), precision=exact)
    sums = jnp.einsum("btdh,ch->btdc", sums, table(channels or size), precision=exact)
    return sums.reshape(*y.shape[:2], -1)


def mean_heads(run: running.Run, y, heads: int) -> jax.Array:
    """Return the mean of every head of y [B, T, heads size] float32, in each of its channels."""
    return sum_heads(run, y, heads) * (heads / y.shape[2])


def centre_heads(run: running.Run, o, heads: int) -> jax.Array:
    """Return o [B, T, HV V] without the mean of every head, in float32."""
    y = o.astype(jnp.float32)
    return y - mean_heads(run, y, heads)


def layer_norm_heads(run: running.Run, o, weight, bias, heads: int, eps: float) -> jax.Array:
    """Return the layer norm of every head of o [B, T, HV V] in float32, with weights and biases [HV V]."""
    channels = lambda y: y.astype(jnp.float32)[None, None]
    centred = centre_heads(run, o, heads)
    return centred * jax.lax.rsqrt(mean_heads(run, centred * centred, heads) + eps) * channels(weight) + channels(bias)
