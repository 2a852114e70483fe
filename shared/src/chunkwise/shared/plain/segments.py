"""Rows of segments, for implementations that take no segment ids.

A segment begins with a gate that forgets everything, so that nothing before the segment reaches it, and with an erase
key of zeros, because an erase key may read the state before the decay of its token. The tokens of padding are zeros,
with a gate of 0, which leave a state as it is.

A product with 0 does not stop NaN, so a segment that is not finite is taken as padding and its results become NaN, as
in `isolation`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared import compat
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import chunking, derivatives, tiles
from chunkwise.shared.kernels.spans import segment_tables
from chunkwise.shared.plain import isolation, state_map

# From arguments without segment ids to the output [B, T, HV, V] and the final states [B, HV, K, V] or None.
Run = Callable[[arguments.Arguments], tuple[jax.Array, jax.Array | None]]


def run_segments(run: Run, x: arguments.Arguments) -> tuple[jax.Array, jax.Array | None]:
    """Run an operator over the segments of `x.segment_ids`, by an implementation that takes no ids.

    Args:
      run: takes arguments without segment ids; their gates, [B, T, HV] or [B, T, HV, K], are decays.
      x: arguments with segment ids; their gates are decays, too.
    """
    taken, nonfinite, segments = _with_resets(x)
    return _mark(run(taken), x.v, x.initial_state, nonfinite, segments)


def map_segments(find: Callable[[arguments.Arguments], state_map.Found], x: arguments.Arguments) -> state_map.Found:
    """Return the map that the tokens apply to a state, by a function that takes no segment ids: see `run_segments`."""
    taken, nonfinite, segments = _with_resets(x)
    found, precomputed = find(taken)
    wrong = nonfinite[:, -1]
    M = None if found.M is None else _unless(wrong, found.M, jnp.nan)
    return found._replace(M=M, N=_unless(wrong, found.N, jnp.nan)), precomputed


def _with_resets(x: arguments.Arguments) -> tuple[arguments.Arguments, jax.Array, segment_tables.Segments]:
    """Return arguments without segment ids, which tokens are in segments that are not finite, and the segments."""
    ids: Any = x.segment_ids
    segments = segment_tables.find_segments(ids)
    tokens = [tiles.clip_gate(y) if y is x.g else y for y in (x.q, x.k, x.v, x.g, x.beta, x.p) if y is not None]
    nonfinite = nonfinite_segments(tokens, x.initial_state, None, segments)
    taken = segments.valid & ~nonfinite
    g = chunking.select_tokens(taken, arguments.total_gate(x))
    given = {name: getattr(x, name) for name in ("q", "k", "v", "beta", "p")}
    inputs = {name: chunking.select_tokens(taken, y) for name, y in given.items() if y is not None}
    state = x.initial_state
    if state is not None:
        state = jnp.where(_not_finite(state), jnp.zeros((), state.dtype), state)
    if inputs.get("p") is not None:
        inputs["p"] = chunking.select_tokens(~segments.begins, inputs["p"])
    g = chunking.select_tokens(~segments.begins, g, tiles.FORGET)
    return x._replace(**inputs, g=g, g_gamma=None, initial_state=state, segment_ids=None), nonfinite, segments


def _not_finite(states: jax.Array) -> jax.Array:
    """Return which rows of a batch have a state that is not finite, bool [B, 1, 1, 1]."""
    return ~jnp.all(jnp.isfinite(states), axis=(1, 2, 3), keepdims=True)


def nonfinite_segments(
    tokens: Iterable[jax.Array], first: jax.Array | None, last: jax.Array | None, segments: segment_tables.Segments
) -> jax.Array:
    """Return the tokens of segments that hold something not finite, bool [B, T].

    Args:
      tokens: arrays [B, T, ...], floating; padding does not count.
      first, last: states [B, HV, K, V] that belong to the first and to the last segment of every row, or None.
      segments: the segments of the rows.
    """
    owner, valid, _ = segments
    found = isolation.tokens_not_finite(tokens) & valid
    for state, end in ((first, owner[:, :1]), (last, owner[:, -1:])):
        if state is not None:
            found |= _not_finite(state)[:, :, 0, 0] & (owner == end)
    start, final = segment_tables.runs(owner)
    count = segment_tables.scan_rows(lax.cumsum, jnp.add, found.astype(jnp.int32))
    before = jnp.pad(count, ((0, 0), (1, 0)))
    return jnp.take_along_axis(before, final + 1, axis=1) > jnp.take_along_axis(before, start, axis=1)


def _mark(
    results: tuple[jax.Array, Any], v: jax.Array, initial_state, nonfinite: jax.Array, segments: segment_tables.Segments
):
    """Return the results with NaN for nonfinite segments, and zeros for padding.

    In the backward, zeros take the place of the cotangents of every segment in which one is not finite, and the
    gradients of v and of the initial state get NaN there, so that the fault is not hidden.
    """
    o, final, v, initial_state, nonfinite, *arrays = compat.vary_alike(*results, v, initial_state, nonfinite, *segments)
    segments = segment_tables.Segments(*arrays)

    def transpose(cotangents):
        do, *more = cotangents
        dfinal: Any = more[0] if more else None
        bad = nonfinite_segments((do,), None, dfinal, segments)
        do = chunking.select_tokens(~bad, do)
        return (do,) if final is None else (do, _unless(bad[:, -1], dfinal, 0.0))

    kept = derivatives.linear((o,) if final is None else (o, final), transpose)
    # These sums add zeros. Through them, v and the initial state get zero times the cotangents, which may be NaN.
    o = kept[0] + jnp.zeros((), o.dtype) * chunking.select_tokens(segments.valid, v).astype(o.dtype)
    if initial_state is not None:
        first = segments.owner == segments.owner[:, :1]
        row = jnp.zeros((), o.dtype) * initial_state[:, None, :, 0].astype(o.dtype)  # [B, 1, HV, V]
        o = o + jnp.where(first[:, :, None, None], row, jnp.zeros((), o.dtype))
    o = chunking.select_tokens(segments.valid, chunking.select_tokens(~nonfinite, o, jnp.nan))
    if final is None:
        return o, None
    # To mark one token of the last segment is enough.
    token = jnp.arange(v.shape[1], dtype=jnp.int32)[None]
    last = token == jnp.max(jnp.where(segments.valid, token, jnp.int32(-1)), axis=1, keepdims=True)
    one = jnp.sum(chunking.select_tokens(last, v), axis=1)[:, :, None]  # [B, HV, 1, V]
    final = kept[1] + jnp.zeros((), final.dtype) * one.astype(final.dtype)
    return o, _unless(nonfinite[:, -1], final, jnp.nan)


def _unless(rows: jax.Array, states: jax.Array, value: float) -> jax.Array:
    """Return states [B, HV, K, V], with this value in those rows of the batch that bool [B] names."""
    return jnp.where(rows[:, None, None, None], jnp.full((), value, states.dtype), states)
