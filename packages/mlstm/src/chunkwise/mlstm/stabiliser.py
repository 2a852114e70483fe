"""The stabilisers of mLSTM, and with them its gates as decays and weights that are at most 1.

The stabiliser m_t = max(log f_t + m_{t-1}, i_t) is a scan of maps m -> max(m + F, top); at a first token F is -inf.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import chunking
from chunkwise.shared.kernels.spans import segment_tables
from chunkwise.shared.plain import stream

# A divisor is at least e to the minus this: its square is a number of float32, and no sum of terms near 1 is below it.
_MOST = 40.0


class Stabilised(NamedTuple):
    """What the gates of all tokens become, float32."""

    decay: jax.Array  # [B, T, HV], log f_t + m_{t-1} - m_t, at most 0
    log_weight: jax.Array  # [B, T, HV], i_t - m_t, at most 0; NaN where a gate is no number, so that its fault shows
    least: jax.Array  # [B, T, HV], e^-m_t, the least divisor, which is above 0
    last: jax.Array  # [N, HV], m after every sequence
    valid: jax.Array | None  # bool [1 or B, T], False for padding; None if there can be no padding


def stabilise(
    i: jax.Array, f: jax.Array, before: jax.Array, cu_seqlens, segment_ids, axes: tuple[str, ...]
) -> Stabilised:
    """Return what the raw gates i and f [B, T, HV] of a device become; `before` is m before every sequence [N, HV].

    Tokens may be split over axes of a mesh, inside a `shard_map`. The results of mLSTM are the same for any m, but for
    eps, so m has no gradient.
    """
    # Under jit no traced index reads an array of numpy.
    cu_seqlens = None if cu_seqlens is None else jnp.asarray(cu_seqlens)
    begins, start, valid = _sequences(i.shape[1], before, cu_seqlens, segment_ids, axes)
    i, f = (y.astype(jnp.float32) for y in (i, f))
    # No sum and no maximum stops NaN, so the scan sees none; padding leaves a stabiliser as it is.
    wrong = chunking.select_tokens(valid, jnp.isnan(f) | jnp.isnan(i) | jnp.isposinf(i), False)
    skipped = wrong | ~chunking.select_tokens(valid, jnp.ones_like(wrong), False)
    log_f, i = jax.nn.log_sigmoid(jnp.where(skipped, jnp.inf, f)), jnp.where(skipped, -jnp.inf, i)
    top = jnp.where(begins, jnp.maximum(i, log_f + start), i)
    F, top = _scan(*map(lax.stop_gradient, (jnp.where(begins, -jnp.inf, log_f), top)), axis=1)
    m, entering, last = _over_devices(F, top, before, cu_seqlens, axes)
    previous = jnp.concatenate([jnp.broadcast_to(entering, m[:, :1].shape), m[:, :-1]], axis=1)
    previous = jnp.where(begins, start, previous)
    # A difference of infinities is not a number. The difference of stabilisers, which may be large, is exact.
    finite = lambda y: jnp.where(jnp.isneginf(y), 0.0, y)
    decay = log_f + (finite(previous) - finite(m))
    decay = jnp.where(jnp.isneginf(previous) | jnp.isneginf(m), -jnp.inf, decay)
    weight = jnp.where(jnp.isneginf(i), -jnp.inf, finite(i) - finite(m))
    return Stabilised(decay, jnp.where(wrong, jnp.nan, weight), jnp.exp(-jnp.minimum(m, _MOST)), last, valid)


def _sequences(T: int, before: jax.Array, cu_seqlens, segment_ids, axes) -> tuple[jax.Array, jax.Array, Any]:
    """Return the first tokens of sequences, bool [1 or B, T, 1], m before them, and the tokens that are not padding."""
    token = stream.first_token(T, axes) + jnp.arange(T, dtype=jnp.int32)
    if cu_seqlens is not None:
        owner, last = stream.document_of(token, cu_seqlens), jnp.int32(cu_seqlens.shape[0] - 2)
        valid, owner = (owner <= last)[None], jnp.minimum(owner, last)
        return (valid & (token == cu_seqlens[owner])[None])[..., None], before[owner][None], valid
    first, start = (token == 0)[None, :, None], before[:, None]
    if segment_ids is None:
        return first, start, None
    ids = lax.all_gather(segment_ids, axes, axis=1, tiled=True) if axes else segment_ids
    begins = lax.dynamic_slice_in_dim(segment_tables.find_segments(ids).begins, token[0], T, axis=1)[..., None]
    return begins | first, jnp.where(begins, -jnp.inf, start), segment_ids >= 0


def _over_devices(F: jax.Array, top: jax.Array, before: jax.Array, cu_seqlens, axes) -> tuple[jax.Array, ...]:
    """Return m of the tokens of this device, m before them, and m after every sequence, from the maps up to a token."""
    D, r, m, entering = lax.axis_size(axes), lax.axis_index(axes), top, jnp.full_like(top[:, :1], -jnp.inf)
    if axes:
        carried = _scan(*lax.all_gather((F[:, -1], top[:, -1]), axes), axis=0)[1]  # [D, B, HV]
        entering = jnp.where(r == 0, -jnp.inf, carried[jnp.maximum(r - 1, 0)])[:, None]
        m = jnp.maximum(top, F + entering)
    last, here = m[:, -1], r == D - 1
    if cu_seqlens is not None:
        at = jnp.clip(cu_seqlens[1:] - 1 - stream.first_token(m.shape[1], axes), 0, m.shape[1] - 1)
        last = jnp.where((cu_seqlens[1:] == cu_seqlens[:-1])[:, None], before, m[0, at])
        here = stream.documents_end(cu_seqlens, m.shape[1], axes)[:, None]
    return m, entering, lax.psum(jnp.where(here, last, 0.0), axes) if axes else last


def _scan(F: jax.Array, top: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Return the maps of all elements up to every element along an axis, in a logarithm of its length of steps.

    Along an axis of a length that an exported program leaves open there is a step for each element.
    """
    size, distance = F.shape[axis], 1
    if not isinstance(size, int):
        join = lambda before, now: (before[0] + now[0], jnp.maximum(now[1], now[0] + before[1]))
        rows = jnp.moveaxis(F, axis, 0), jnp.moveaxis(top, axis, 0)
        start = jnp.zeros_like(rows[0][0]), jnp.full_like(rows[1][0], -jnp.inf)
        F, top = lax.scan(lambda before, now: (join(before, now),) * 2, start, rows)[1]
        return jnp.moveaxis(F, 0, axis), jnp.moveaxis(top, 0, axis)
    while distance < size:
        F_before, top_before = _before(F, top, distance, axis)
        F, top = F + F_before, jnp.maximum(top, F + top_before)
        distance *= 2
    return F, top


def _before(F: jax.Array, top: jax.Array, distance: int, axis: int) -> tuple[jax.Array, ...]:
    """Return the maps of the elements so far before every element; where there are none, maps that change nothing."""
    size, moved = F.shape[axis], []
    for y, first in ((F, 0.0), (top, -jnp.inf)):
        none = jnp.full_like(lax.slice_in_dim(y, 0, distance, axis=axis), first)
        moved.append(jnp.concatenate([none, lax.slice_in_dim(y, 0, size - distance, axis=axis)], axis))
    return tuple(moved)
