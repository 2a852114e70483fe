"""Context parallelism: the tokens of a row are split over the devices of a mesh axis, consecutive ones on each.

The tokens of a device take a state S to M S + N. N is the state after them from zero, and M what they do to a state:
[K, K] per value head for a delta rule, a decay otherwise. So a device first makes its map, a scan over the devices
gives the state before its tokens, and from there the operator runs as on one device. This is exact, and what a device
sends, its map, does not depend on how many tokens it has.

In the backward the cotangent of the state goes back the same way: with dN what the results of a device ask of the state
before it, the cotangent before a device is M^T times that after it, plus dN.

Only one state goes from device to device, however many documents there are. A document that begins inside a device, or
with its first token, needs nothing from before it, and the state does not pass there.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from chunkwise.shared import compat
from chunkwise.shared.call import arguments
from chunkwise.shared.implementation import implementations
from chunkwise.shared.implementation.implementations import Implementation
from chunkwise.shared.kernels import chunking
from chunkwise.shared.plain import affine_scan, stream

# What a policy of `jax.checkpoint` can save, so that a recomputed forward needs neither the maps nor the scan again.
MAP_NAME, STATE_NAME = "chunkwise_context_map", "chunkwise_context_state"


class Part(NamedTuple):
    """How the tokens of a device lie in the sequences. One state comes in for every row and one goes out.

    Attributes:
      enters: bool [B], whether the state that comes in reaches the first sequence of a row; None if it always does.
      passes: bool [B], whether it goes through to the end of the row; None if it always does.
      valid: bool [B, T], False for padding; None if all tokens are valid.
      first, last: int32 [1], of a packed batch with a state for every document the documents of the first and of the
        last token; None otherwise.
      ends: bool [N], whether the device gives the final state of a document, which exactly one does; else None.
    """

    enters: jax.Array | None
    passes: jax.Array | None
    valid: jax.Array | None = None
    first: Any = None
    last: Any = None
    ends: Any = None


def _rows(x: arguments.Arguments) -> tuple[arguments.Arguments, Part]:
    """Return the arguments of rows that are one sequence each, and their part."""
    return x, Part(None, None)


def _segments(
    x: arguments.Arguments, ids: jax.Array, before: jax.Array, any_before: jax.Array
) -> tuple[arguments.Arguments, Part]:
    """Return the arguments of rows of segments, and their part.

    Args:
      x: arguments without cu_seqlens.
      ids: int32 [B, T] of the tokens of this device.
      before: int32 [B], the id of the token before them; -1 for none.
      any_before: bool [B], whether a token before them is not padding.
    """
    valid = ids >= 0
    continues = (ids == before[:, None]) & valid
    # Padding leaves a state as it is, so it also reaches the first segment of the whole row, wherever that begins.
    empty = ~jnp.any(valid, axis=1)
    enters = continues[:, 0] | ~any_before | empty
    previous = jnp.concatenate([before[:, None], ids[:, :-1]], axis=1)
    begins = valid & (ids != previous)
    starts = jnp.sum(begins.astype(jnp.int32), axis=1)
    # Without a segment before, the first one that begins here continues from the state that comes in.
    passes = starts <= jnp.where(any_before, 0, 1)
    return x._replace(cu_seqlens=None, segment_ids=ids), Part(enters, passes, valid)


def _neighbouring_ids(ids: jax.Array, axis) -> tuple[jax.Array, jax.Array]:
    """Return what `_segments` wants to know of the tokens before this device."""
    D, r = lax.axis_size(axis), lax.axis_index(axis)
    last, any_valid = lax.all_gather((ids[:, -1], jnp.any(ids >= 0, axis=1)), axis)  # [D, B]
    earlier = jnp.arange(D, dtype=jnp.int32)[:, None] < r
    before = jnp.where(r > 0, last[jnp.maximum(r - 1, 0)], jnp.int32(-1))
    return before, jnp.any(any_valid & earlier, axis=0)


def _documents(x: arguments.Arguments, axis) -> tuple[arguments.Arguments, Part]:
    """Return the arguments of the part of a packed batch that this device has, and where its documents lie."""
    cu: Any = x.cu_seqlens
    T, N = x.q.shape[1], cu.shape[0] - 1
    start = stream.first_token(T, axis)
    token = start + jnp.arange(T, dtype=jnp.int32)
    first, last = (stream.document_of(t, cu) for t in (token[:1], token[-1:]))
    near = jnp.minimum(first, N - 1)
    enters = (first < N) & (cu[near] < start)
    part = Part(
        enters, enters & (first == last), (token < cu[-1])[None], near, jnp.minimum(last, N - 1),
        stream.documents_end(cu, T, axis),
    )  # fmt: skip
    return x._replace(cu_seqlens=stream.local_boundaries(cu, T, axis)), part


def _entry(part: Part, S: jax.Array, states: jax.Array | None) -> jax.Array:
    """Return the initial states of an operator from the state S [B, HV, K, V] that comes in.

    `states` are the initial states of documents [N, HV, K, V], of which S takes the place of one.
    """
    if part.enters is None:
        return S
    enters = part.enters[:, None, None, None]
    if part.first is None:
        return jnp.where(enters, S, 0.0)
    assert states is not None
    states = jnp.pad(states.astype(jnp.float32), [(0, 0)] * 3 + [(0, S.shape[-1] - states.shape[-1])])
    first = part.first
    return states.at[first].set(jnp.where(enters, S, states[first]))


def _exit(part: Part, states: jax.Array) -> jax.Array:
    """Return the state [B, HV, K, V] that goes out from the final states of an operator."""
    return states if part.first is None else states[part.last]


def _passing(part: Part) -> jax.Array | None:
    """Return bool [B, 1, 1, 1], whether a state goes through to the end of its row; None if it always does."""
    return None if part.passes is None else part.passes[:, None, None, None]


def _decay(x: arguments.Arguments, part: Part) -> jax.Array:
    """Return what the tokens of a device multiply a state by, [B, HV, K, 1] or [B, HV, 1, 1], from the gates alone."""
    g = arguments.total_gate(x)
    G = jnp.sum(g if part.valid is None else chunking.select_tokens(part.valid, g), axis=1)
    return jnp.exp(G)[..., None] if g.ndim == 4 else jnp.exp(G)[..., None, None]


def _local(x: arguments.Arguments, axis) -> tuple[arguments.Arguments, Part]:
    """Return the arguments of one device and how its tokens lie in the sequences; it may look at its neighbours."""
    if x.segment_ids is not None:
        return _segments(x, x.segment_ids, *_neighbouring_ids(x.segment_ids, axis))
    if x.cu_seqlens is None:
        return _rows(x)
    if x.initial_state is not None:
        return _documents(x, axis)
    # Without a state for every document its number says as much as its boundaries.
    ids = stream.document_ids(x.cu_seqlens, x.q.shape[1], axis, before=1)
    return _segments(x, ids[:, 1:], ids[:, 0], (lax.axis_index(axis) > 0)[None])


def run_context(
    implementation: Implementation, x: arguments.Arguments, options: arguments.Options, axis: tuple[str, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Run an operator over tokens that are split over the devices of a mesh axis, inside of a `shard_map`.

    Args:
      implementation: of the operator.
      x: its arguments: of the arrays with tokens the part of this device, of the others, states and cu_seqlens of all
        tokens too, what all devices have.
      options: its options.
      axis: the axes of the mesh.

    Returns:
      The output, and the states, None unless asked for: zeros on the devices that do not have a final state, so that
      their sum over the devices is wanted.
    """
    with_states, options = options.output_final_state, options._replace(output_final_state=True)
    if x.cu_seqlens is not None and x.initial_state is None and with_states:
        (HV, V), N = x.v.shape[2:], x.cu_seqlens.shape[0] - 1
        x = x._replace(initial_state=jnp.zeros((N, HV, x.q.shape[3], V), jnp.float32))
    x, part = _local(x, axis)
    arrays, part = compat.vary_over(compat.varying_axes(*x.arrays().values()).union(axis), (x.arrays(), part))
    start = arrays.pop("initial_state") if x.initial_state is not None and part.first is None else None
    if start is not None:
        start = compat.vary_over(compat.varying_axes(*arrays.values()), start.astype(jnp.float32))
    floats = {name: y for name, y in arrays.items() if jnp.issubdtype(y.dtype, jnp.floating)}
    fixed = {name: y for name, y in arrays.items() if name not in floats}

    def entering(floats, S, fixed, part) -> arguments.Arguments:
        """Return the arguments with the state S that comes in."""
        y = x.with_arrays(floats | fixed)
        return y._replace(initial_state=_entry(part, S, y.initial_state))

    def state_before(floats, S, fixed, part):
        """Return M of this device, the state before it, and what its map precomputed."""
        y = x.with_arrays(floats | fixed)
        # Every document has a state, and the first one starts from zeros here.
        start = None if part.first is None else _entry(part, jnp.zeros_like(y.initial_state[:1]), y.initial_state)
        state_map = implementations.map_states(implementation, y._replace(initial_state=start), options)
        M = checkpoint_name(_decay(y, part) if state_map.M is None else _exit(part, state_map.M), MAP_NAME)
        local = affine_scan.AffineMap(M, _exit(part, state_map.states), _passing(part))
        return M, checkpoint_name(affine_scan.exclusive_scan(local, S, axis), STATE_NAME), state_map.precomputed

    def forward(floats, start, fixed, part):
        M, S, precomputed = state_before(floats, start, fixed, part)
        run = lambda floats, S: implementations.run(
            implementation, entering(floats, S, fixed, part), options, precomputed
        )
        results, pull = jax.vjp(run, floats, S)
        return results, (M, S, precomputed, pull, floats, fixed, part)

    def backward(residuals, cotangents):
        M, S, precomputed, pull, floats, fixed, part = residuals
        do, dstates = cotangents
        if implementation.at_once or implementation.state_map is None:
            dN = pull((do, dstates))[1]
        else:
            y = entering(floats, S, fixed, part)
            dentry = implementations.state_gradient(implementation, y, options, precomputed, do, dstates)
            states = floats.get("initial_state")
            dN = jax.vjp(lambda S: _entry(part, S, states), S)[1](dentry)[0]
        dS = affine_scan.exclusive_scan(
            affine_scan.AffineMap(affine_scan.transposed(M), dN, _passing(part)), None, axis, reverse=True
        )
        dafter = dS if part.first is None else jnp.zeros_like(dstates).at[part.last].add(dS)
        dfloats, dS = pull((do, dstates + dafter))
        # The state before the first tokens belongs to the first device alone.
        dstart = None if start is None else jnp.where(lax.axis_index(axis) == 0, dS, 0.0)
        return dfloats, dstart, None, None

    @jax.custom_vjp
    def call(floats, start, fixed, part):
        # Not `forward`: without gradients the operator keeps nothing.
        _, S, precomputed = state_before(floats, start, fixed, part)
        return implementations.run(implementation, entering(floats, S, fixed, part), options, precomputed)

    call.defvjp(forward, backward)
    results: Any = call(floats, start, fixed, part)
    o, states = results
    if not with_states:
        return o, None
    last = lax.axis_index(axis) == lax.axis_size(axis) - 1
    ends = last if part.first is None else part.ends[:, None, None, None]
    return o, jnp.where(ends, states, 0.0)
