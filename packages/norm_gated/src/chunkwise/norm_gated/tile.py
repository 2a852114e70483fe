"""The mathematics of a tile of rows: several groups of D channels side by side in the lanes, each normed by itself."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import activations, packed


class NormStatic(NamedTuple):
    """The static description of a norm.

    Attributes:
      D: channels of a group, over which the mean is taken.
      activation: the activation of the gate.
      norm_before_gate: whether x is normed before the gate multiplies it, or after.
      eps: added to the mean of the squares.
    """

    D: int
    activation: str | None
    norm_before_gate: bool
    eps: float


def group_mean(x: jax.Array, D: int) -> jax.Array:
    """Return the mean of every group of D lanes, in all lanes of the group: float32 [rows, lanes] -> the same.

    A register of 128 lanes may hold parts of several groups. So the sum of a group goes over all registers that it
    touches, with zeros in the lanes of other groups.
    """
    rows, width = x.shape
    if D % packed.LANES == 0 or width == D:
        means = [jnp.mean(x[:, i : i + D], axis=1, keepdims=True) for i in range(0, width, D)]
        return jnp.concatenate([jnp.broadcast_to(y, (rows, D)) for y in means], axis=1)
    means = []
    for begin in range(0, width, D):
        first, last = begin // packed.LANES * packed.LANES, min(packed.pad_lanes(begin + D), width)
        lane = lax.broadcasted_iota(jnp.int32, (rows, last - first), 1) + jnp.int32(first)
        inside = jnp.where((lane >= jnp.int32(begin)) & (lane < jnp.int32(begin + D)), x[:, first:last], 0.0)
        means.append(jnp.sum(inside, axis=1, keepdims=True) * jnp.float32(1.0 / D))  # [rows, 1]
    registers = []
    for first in range(0, width, packed.LANES):
        shape = (rows, min(packed.LANES, width - first))
        lane = lax.broadcasted_iota(jnp.int32, shape, 1) + jnp.int32(first)
        mean, *others = range(first // D, -(-(first + shape[1]) // D))
        register = jnp.broadcast_to(means[mean], shape)
        for group in others:
            register = jnp.where(lane >= jnp.int32(group * D), means[group], register)
        registers.append(register)
    return jnp.concatenate(registers, axis=1)


def norm(x: jax.Array, z: jax.Array | None, s: NormStatic) -> tuple[Any, ...]:
    """Norm a tile: n = u r with r = 1 / sqrt(mean(u^2) + eps); u is x, or x times the gate if the gate comes first.

    Returns:
      n, r, the gate, which is the activation of z, and the slope of the activation, all float32 [rows, lanes]; without
      z the gate is 1.
    """
    gate, slope = (1.0, 0.0) if z is None else activations.activate_with_slope(z, s.activation)
    u = x if s.norm_before_gate else x * gate
    r = lax.rsqrt(group_mean(u * u, s.D) + jnp.float32(s.eps))
    return u * r, r, gate, slope


def forward(x: jax.Array, z: jax.Array | None, weight: jax.Array, s: NormStatic) -> jax.Array:
    """Return y for x, z [rows, lanes] and weight [1, lanes], all float32."""
    n, _, gate, _ = norm(x, z, s)
    y = weight * n
    return y * gate if s.norm_before_gate else y


def backward(x: jax.Array, z: jax.Array | None, weight: jax.Array, dy: jax.Array, s: NormStatic):
    """Return dx, dz and every row's gradient of the weight, all [rows, lanes], for the gradient dy of y."""
    n, r, gate, slope = norm(x, z, s)
    below = dy * weight
    dn = below * gate if s.norm_before_gate else below
    du = r * (dn - n * group_mean(dn * n, s.D))
    if s.norm_before_gate:
        return du, below * n * slope, dy * n * gate
    return du * gate, du * x * slope, dy * n
