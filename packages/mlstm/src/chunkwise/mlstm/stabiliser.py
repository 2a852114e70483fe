"""The stabilisers of mLSTM, and with them its gates as decays and weights that are at most 1.

The stabiliser m_t = max(log f_t + m_{t-1}, i_t) is a scan of maps m -> max(m + F, top). A sequence begins with
F = -inf.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import chunking, segment_tables
from chunkwise.shared.plain import stream

# Tokens of a block of the scan; the scan over blocks has as many elements fewer.
_BLOCK = 128


class Gates(NamedTuple):
    """What the gates of all tokens become, float32 [B, T, HV].

    Attributes:
      decay: log f_t + m_{t-1} - m_t, at most 0.
      weight: e^(i_t - m_t), at most 1; NaN where a gate is not a number, so that the sequence is marked.
      least: e^-m_t, the least divisor.
      last: [N, HV], the stabiliser after every sequence.
      valid: bool [1 or B, T], False for padding; None if there can be no padding.
    """

    decay: jax.Array
    weight: jax.Array
    least: jax.Array
    last: jax.Array
    valid: jax.Array | None


class _Sequences(NamedTuple):
    """Where sequences begin and end among the tokens of a device.

    Attributes:
      begins: bool [1 or B, T].
      owner: int32 [T], the state with which a token of a packed batch begins; None for the states of the rows.
      fresh: bool [B, T], tokens that begin without a state; None for no tokens.
      valid: bool [1 or B, T], False for padding; None if there can be no padding.
    """

    begins: jax.Array
    owner: jax.Array | None
    fresh: jax.Array | None
    valid: jax.Array | None


def stabilise(i: jax.Array, f: jax.Array, before: jax.Array, cu_seqlens, segment_ids, axes: tuple[str, ...]) -> Gates:
    """Return what the raw gates i and f [B, T, HV] become.

    The results of mLSTM are the same for any stabilisers, but for eps, so these have no gradient.

    Args:
      i, f: raw gates of the tokens of this device.
      before: float32 [N, HV], the stabiliser before every sequence, -inf for none.
      cu_seqlens, segment_ids: as in the operator; the boundaries count the tokens of all devices.
      axes: the axes of a mesh over which tokens are split, inside a `shard_map`.
    """
    T = i.shape[1]
    where = _sequences(T, cu_seqlens, segment_ids, axes)
    i, f = (y.astype(jnp.float32) for y in (i, f))
    # A product with 0 does not stop NaN, and no sum does, so the scan does not see it.
    wrong = jnp.isnan(f) | jnp.isnan(i) | jnp.isposinf(i)
    skipped = wrong if where.valid is None else wrong | ~where.valid[..., None]
    log_f, i = jax.nn.log_sigmoid(jnp.where(skipped, jnp.inf, f)), jnp.where(skipped, -jnp.inf, i)
    start = before[:, None] if where.owner is None else before[where.owner][None]
    if where.fresh is not None:
        start = jnp.where(where.fresh[..., None], -jnp.inf, start)
    begins = where.begins[..., None]
    found = jnp.where(begins, -jnp.inf, log_f), jnp.where(begins, jnp.maximum(i, log_f + start), i)
    F, top = _scan(*map(lax.stop_gradient, found))
    m, entering, last = _over_devices(F, top, axes)
    previous = jnp.concatenate([jnp.broadcast_to(entering, m[:, :1].shape), m[:, :-1]], axis=1)
    previous = jnp.where(begins, start, previous)
    unread = jnp.isneginf(previous) | jnp.isneginf(m)
    decay = jnp.where(unread, -jnp.inf, log_f + jnp.where(unread, 0.0, previous) - jnp.where(unread, 0.0, m))
    none = jnp.isneginf(i)
    weight = jnp.where(none, 0.0, jnp.exp(jnp.where(none, 0.0, i) - jnp.where(none, 0.0, m)))
    wrong = chunking.select_tokens(where.valid, wrong, False)
    last = last if cu_seqlens is None else _ends(m, before, cu_seqlens, axes)
    return Gates(decay, jnp.where(wrong, jnp.nan, weight), jnp.exp(-m), lax.stop_gradient(last), where.valid)


def _sequences(T: int, cu_seqlens, segment_ids, axes: tuple[str, ...]) -> _Sequences:
    token = stream.first_token(T, axes) + jnp.arange(T, dtype=jnp.int32)
    if cu_seqlens is not None:
        owner, last = stream.document_of(token, cu_seqlens), jnp.int32(cu_seqlens.shape[0] - 2)
        valid, owner = owner <= last, jnp.minimum(owner, last)
        return _Sequences((valid & (token == cu_seqlens[owner]))[None], owner, None, valid[None])
    first = (token == 0)[None]
    if segment_ids is None:
        return _Sequences(first, None, None, None)
    ids = lax.all_gather(segment_ids, axes, axis=1, tiled=True) if axes else segment_ids
    begins = lax.dynamic_slice_in_dim(segment_tables.find_segments(ids).begins, token[0], T, axis=1)
    return _Sequences(begins | first, None, begins, segment_ids >= 0)


def _over_devices(F: jax.Array, top: jax.Array, axes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return m of the tokens of this device, m before them, and m after the tokens of all devices."""
    if not axes:
        return top, jnp.full_like(top[:, :1], -jnp.inf), top[:, -1]
    D, r = lax.axis_size(axes), lax.axis_index(axes)
    carried = _shifted_scan(*lax.all_gather((F[:, -1], top[:, -1]), axes), 0)[1]  # [D, B, HV]
    entering = jnp.where(r == 0, -jnp.inf, carried[jnp.maximum(r - 1, 0)])[:, None]
    m = jnp.maximum(top, F + entering)
    return m, entering, lax.psum(jnp.where(r == D - 1, m[:, -1], 0.0), axes)


def _ends(m: jax.Array, before: jax.Array, cu_seqlens: jax.Array, axes) -> jax.Array:
    """Return m after every sequence of a packed batch; that of an empty one is m before it."""
    T, empty = m.shape[1], cu_seqlens[1:] == cu_seqlens[:-1]
    at = jnp.clip(cu_seqlens[1:] - 1 - stream.first_token(T, axes), 0, T - 1)
    last = jnp.where(empty[:, None], before, m[0, at])
    if not axes:
        return last
    return lax.psum(jnp.where(stream.documents_end(cu_seqlens, T, axes)[:, None], last, 0.0), axes)


def _scan(F: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the maps of all tokens up to every token, along [B, T, HV].

    It goes over blocks, whose tokens lie along a dimension that a TPU does not tile.
    """
    B, T, HV = F.shape
    if T <= _BLOCK:
        return _shifted_scan(F, top, 1)
    padding = [(0, 0), (0, -T % _BLOCK), (0, 0)]
    cut = lambda y: jnp.swapaxes(jnp.pad(y, padding).reshape(B, -1, _BLOCK, HV), 1, 2)
    F, top = _shifted_scan(cut(F), cut(top), 1)  # [B, _BLOCK, blocks, HV]
    P, before = _shifted_scan(F[:, -1], top[:, -1], 1)
    P, before = (jnp.concatenate([jnp.full_like(y[:, :1], x), y[:, :-1]], 1) for y, x in ((P, 0.0), (before, -jnp.inf)))
    top, F = jnp.maximum(top, F + before[:, None]), F + P[:, None]
    return tuple(jnp.swapaxes(y, 1, 2).reshape(B, -1, HV)[:, :T] for y in (F, top))


def _shifted_scan(F: jax.Array, top: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Return the maps of all elements up to every element along an axis, in a logarithm of its length of steps."""
    size, distance = F.shape[axis], 1

    def moved(y: jax.Array, first: float) -> jax.Array:
        kept = lax.slice_in_dim(y, 0, size - distance, axis=axis)
        return jnp.concatenate([jnp.full_like(lax.slice_in_dim(y, 0, distance, axis=axis), first), kept], axis)

    while distance < size:
        top, F = jnp.maximum(top, F + moved(top, -jnp.inf)), F + moved(F, 0.0)
        distance *= 2
    return F, top
