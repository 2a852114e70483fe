"""Rotary positions: where tokens are in their sequences, and pairs of channels turned by an angle for each token."""

import dataclasses

import jax
import jax.numpy as jnp

from chunkwise.layers.devices import division
from chunkwise.layers.mixer import running
from chunkwise.shared import compat
from chunkwise.shared.call import checks
from chunkwise.shared.kernels import derivatives


def positions(run: running.Run, i: int, x) -> running.Convolved:
    """Return the position of each token of x [B, T, D], float32 [B or 1, T], and part i of the cache after the tokens.

    This part counts the tokens of a sequence, float32 [N, 1, 1]: positions go on from the count in a cache or a slot,
    and otherwise begin with 0. It passes through a convolution that returns the older one of two tokens, so a serving
    step writes it wherever it writes a convolution's inputs.
    """
    dtype = jnp.float32 if run.own_cache[1] is None else run.own_cache[1].conv[i].dtype
    rule = f"`{run.own_cache[0]}.conv[{i}]`, which counts tokens, must be float32; got {dtype}."
    checks.check(dtype == jnp.float32, rule)
    # A count has one channel, which no kernel takes.
    plain = dataclasses.replace(run, implementation="xla")
    found = plain.positions(i, x)
    # It is split over devices as x is.
    count = jnp.zeros_like(x[..., :1], jnp.float32) + (found + 1.0)[..., None]
    return found, plain.convolve(i, count, running.OLDER[None], None, 1, None)[1]


def turn(
    run: running.Run, x: jax.Array, position: jax.Array, frequencies: tuple[float, ...], scale: float
) -> jax.Array:  # fmt: skip
    """Return x [B, T, H, K] with the pairs of channels c and c + n turned, for the n frequencies in radians a token.

    The turned channels are multiplied by a scale; channels from 2 n on stay as they are.
    """
    n, K, devices = len(frequencies), x.shape[3], division.devices_of_heads(run.sharding, x)
    # The heads of a device stay flat, because a TPU would copy x to take their channels apart.
    flat = running.by_head(x.reshape(*x.shape[:2], -1), devices)
    channel = jnp.arange(flat.shape[3]) % K
    # A product gives every head the same angles, for which a broadcast would lay out one array a head.
    member = (jnp.arange(K)[:, None] == channel[None]).astype(jnp.float32)
    angle = position[..., None] * jnp.array(frequencies, jnp.float32)[None, None]  # [B, T, n]
    flat, angle, member, is_first = compat.vary_alike(flat, angle, member, channel < n)
    of_heads = lambda y: jnp.einsum("btk,kc->btc", y, member, precision=jax.lax.Precision.HIGHEST)[:, :, None]
    filled = lambda y, fill: jax.lax.pad(y, jnp.float32(fill), [(0, 0, 0), (0, 0, 0), (0, K - 2 * n, 0)])

    def turned(y: jax.Array, scale: float, sign: int = 1) -> jax.Array:
        """Return y turned by the angles or, with sign -1, by the opposite ones."""
        c, s = scale * jnp.cos(angle), sign * scale * jnp.sin(angle)
        moved = lambda lanes: jax.lax.pad(y, jnp.zeros((), y.dtype), [(0, 0, 0)] * 3 + [(lanes, -lanes, 0)])
        other = jnp.where(is_first, moved(-n), moved(n)).astype(jnp.float32)
        pairs = ((c, c), 1.0), ((-s, s), 0.0)
        cos, sin = (of_heads(filled(jnp.concatenate(z, axis=2), rest)) for z, rest in pairs)
        return (y.astype(jnp.float32) * cos + other * sin).astype(y.dtype)

    # The transpose is the turn by the opposite angle, which a TPU computes in one pass; JAX's own writes four arrays.
    y = derivatives.linear(
        flat, lambda y: turned(y, scale, -1), lambda y: turned(y, scale), lambda y: turned(y, 1 / scale, -1)
    )
    return y.reshape(*x.shape[:2], -1).reshape(x.shape)
