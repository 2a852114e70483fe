"""The convolution where tokens are split over the devices of a mesh axis, consecutive tokens on each.

The convolution of a device's tokens needs the W - 1 inputs before them, its *halo*, which the left neighbour sends.
They become the initial state of the sequence that has the device's first token; the rest is the convolution on one
device.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared import compat
from chunkwise.shared.plain import affine_scan, stream

# The arguments that take the place of the arguments for all tokens on one device: the inputs before its sequences,
# float32 [N, W - 1, D]; cu_seqlens and segment_ids of its tokens, or None; and bool [N], whether this device, and no
# other, has the final state of a sequence, or None if nobody asks for it.
Part = tuple[jax.Array, jax.Array | None, jax.Array | None, Any]


def find_part(x: jax.Array, states, cu_seqlens, segment_ids, W: int, final: bool, axis: tuple[str, ...]) -> Part:
    """Return the part of this device.

    Args:
      x: [B, T, D], the tokens of this device, T at least W - 1. segment_ids are of the same tokens.
      states, cu_seqlens, segment_ids: the other arguments of `causal_conv1d`.
      W: width.
      final: whether final states are asked for.
      axis: the axes of the mesh.
    """
    (B, T, D), S = x.shape, W - 1
    given = (x, states, cu_seqlens, segment_ids)
    x, states, cu, ids = compat.vary_over(compat.varying_axes(*given).union(axis), given)
    # The first device has no device before it, and gets zeros.
    halo = affine_scan.shift(x[:, T - S :], axis).astype(jnp.float32)
    if states is None and final:
        states = jnp.zeros((B if cu is None else cu.shape[0] - 1, S, D), jnp.float32)
    if cu is not None and states is not None:
        return _documents(halo, states, cu, T, axis)
    if cu is not None:
        # If documents have no states, their numbers can serve as ids of segments.
        return _segments(halo, None, stream.document_ids(cu, T, axis, before=S), axis)
    first = lax.axis_index(axis) == 0
    if ids is not None:
        before = jnp.where(first, jnp.int32(-1), affine_scan.shift(ids[:, T - S :], axis))
        return _segments(halo, states, jnp.concatenate([before, ids], axis=1), axis)
    states = halo if states is None else jnp.where(first, states.astype(jnp.float32), halo)
    last = lax.axis_index(axis) == lax.axis_size(axis) - 1
    return states, None, None, jnp.broadcast_to(last, (B,))


def _segments(halo: jax.Array, states: jax.Array | None, ids: jax.Array, axis) -> Part:
    """Return the part of rows of segments.

    Args:
      halo: float32 [B, W - 1, D].
      states: [B, W - 1, D], the inputs before the first segment of every whole row; None for zeros, if nobody asks for
        final states.
      ids: int32 [B, W - 1 + T], the ids of the halo and of the device's tokens.
      axis: the axes of the mesh.
    """
    S = halo.shape[1]
    before, ids = ids[:, :S], ids[:, S:]
    continues = (before == ids[:, :1]) & (ids[:, :1] >= 0)
    # How many of the halo's last tokens are in the segment of the device's first token.
    count = jnp.sum(lax.cumprod(continues.astype(jnp.int32), axis=1, reverse=True), axis=1, dtype=jnp.int32)
    if states is None:
        return _join(halo, jnp.zeros_like(halo), count), None, ids, None
    valid = lax.all_gather(jnp.sum((ids >= 0).astype(jnp.int32), axis=1, dtype=jnp.int32), axis)  # [devices, B]
    device, rank = jnp.arange(valid.shape[0], dtype=jnp.int32)[:, None], lax.axis_index(axis)
    earlier = jnp.sum(jnp.where(device < rank, valid, 0), axis=0, dtype=jnp.int32)
    # If all valid tokens before this device are in this segment, the segment is the first one of the row.
    opening = (earlier == count)[:, None, None]
    # If the whole row is padding, its state stays as it is, and any device can return it.
    last = jnp.max(jnp.where(valid > 0, device, 0), axis=0)
    return _join(halo, jnp.where(opening, states.astype(jnp.float32), 0.0), count), None, ids, last == rank


def _documents(halo: jax.Array, states: jax.Array, cu_seqlens: jax.Array, T: int, axis) -> Part:
    """Return the part of a packed batch with a state [N, W - 1, D] for every document."""
    S, start, states = halo.shape[1], stream.first_token(T, axis), states.astype(jnp.float32)
    # N if the first token is padding; then nothing is written below.
    n = stream.document_of(start[None], cu_seqlens)
    count = jnp.clip(start - cu_seqlens[n], 0, S)
    entering = _join(halo, states.at[n].get(mode="clip"), count)
    states = states.at[n].set(entering, mode="drop")
    return states, stream.local_boundaries(cu_seqlens, T, axis), None, stream.documents_end(cu_seqlens, T, axis)


def _join(halo: jax.Array, before: jax.Array, count: jax.Array) -> jax.Array:
    """Return the W - 1 inputs before the first token of this device.

    Args:
      halo: [B, W - 1, D].
      before: [B, W - 1, D], the inputs before the sequence of the first token.
      count: int32 [B], how many of the halo's last tokens are in that sequence.
    """
    S = halo.shape[1]
    row = jnp.arange(S, dtype=jnp.int32)[None]
    at = jnp.minimum(row + count[:, None], S - 1)
    older = jnp.take_along_axis(before, at[:, :, None], axis=1)
    return jnp.where((row >= S - count[:, None])[:, :, None], halo, older)
