"""Context parallelism: the tokens of a row are split over the devices of a mesh axis, consecutive ones on each.

The tokens of a device take a state S to M S + N. N is the state that they make from zeros, and M is a matrix [K, K] per
value head for a delta rule, and a decay otherwise. So a device first makes its map (M, N), a scan over the devices
gives it the state before its tokens, and from this state the operator runs as on one device. This is exact, and the
size of a map, which is all that a device sends, does not depend on how many tokens it has.

In the backward the cotangent of the state goes back the same way: the cotangent of the state before a device is M^T
times the cotangent of the state after it, plus dN, where dN is the gradient of the device's results for the state
before it.

Two devices need no M: the first one knows its state, and makes the state after its tokens in place of N.

Only one state goes from device to device, however many documents there are. A document that begins on a device needs no
state from the device before, and does not let a state pass.
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

# Names that a policy of `jax.checkpoint` can save, so that a recomputed forward runs neither the maps nor the scan.
MAP_NAME, STATE_NAME = "chunkwise_context_map", "chunkwise_context_state"


class Part(NamedTuple):
    """How the tokens of a device lie in the sequences. For every row, one state comes in and one state goes out.

    Attributes:
      enters: bool [B], whether the state that comes in reaches the first sequence of a row; None if it always does.
      passes: bool [B], whether the state that comes in also reaches the end of the row; None if it always does.
      valid: bool [B, T], False for padding; None if all tokens are valid.
      first, last: int32 [1], the documents of the first and of the last token, for a packed batch with a state for
        every document; None otherwise.
      ends: bool [N], for such a batch, whether the device has the final state of a document, which exactly one device
        has; None otherwise.
    """

    enters: jax.Array | None = None
    passes: jax.Array | None = None
    valid: jax.Array | None = None
    first: jax.Array | None = None
    last: jax.Array | None = None
    ends: jax.Array | None = None


def _segments(
    x: arguments.Arguments, ids: jax.Array, before: jax.Array, any_before: jax.Array
) -> tuple[arguments.Arguments, Part]:
    """Return the arguments and the `Part` of rows of segments.

    Args:
      x: arguments without cu_seqlens.
      ids: int32 [B, T], the ids of the tokens of this device.
      before: int32 [B], the id of the token before them; -1 for none.
      any_before: bool [B], whether a token before them is not padding.
    """
    valid = ids >= 0
    continues = (ids == before[:, None]) & valid
    # Padding leaves a state as it is, so the initial state reaches the first segment of the row, on whatever device.
    empty = ~jnp.any(valid, axis=1)
    enters = continues[:, 0] | ~any_before | empty
    previous = jnp.concatenate([before[:, None], ids[:, :-1]], axis=1)
    begins = valid & (ids != previous)
    starts = jnp.sum(begins.astype(jnp.int32), axis=1)
    # If no segment is before this device, the first segment that begins here starts from the state that comes in.
    passes = starts <= jnp.where(any_before, 0, 1)
    return x._replace(cu_seqlens=arguments.ABSENT, segment_ids=ids), Part(enters, passes, valid)


def _neighbouring_ids(ids: jax.Array, axis) -> tuple[jax.Array, jax.Array]:
    """Return `before` and `any_before` of `_segments`, which tell of the tokens before this device."""
    D, r = lax.axis_size(axis), lax.axis_index(axis)
    last, any_valid = lax.all_gather((ids[:, -1], jnp.any(ids >= 0, axis=1)), axis)  # [D, B]
    earlier = jnp.arange(D, dtype=jnp.int32)[:, None] < r
    before = jnp.where(r > 0, last[jnp.maximum(r - 1, 0)], jnp.int32(-1))
    return before, jnp.any(any_valid & earlier, axis=0)


def _documents(x: arguments.Arguments, axis) -> tuple[arguments.Arguments, Part]:
    """Return the arguments and the `Part` of a packed batch with a state for every document."""
    cu = x.cu_seqlens
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
    """Return the initial states for the operator on this device, if the state S [B, HV, K, V] comes in.

    `states` are the initial states of documents [N, HV, K, V]; S takes the place of one of them.
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


def _map_start(part: Part, S: jax.Array | None, states: jax.Array | None, axis) -> jax.Array | None:
    """Return the initial states of the map of this device, None for zeros.

    Documents that begin here start from their states. If nobody needs M, the first device starts from the state S.
    """
    if part.first is not None:
        assert states is not None
        return _entry(part, jnp.zeros_like(states[:1]), states)
    if S is None or affine_scan.needs_M(axis):
        return None
    return _entry(part, jnp.where(lax.axis_index(axis) == 0, S, 0.0), None)


def _exit(part: Part, states: jax.Array) -> jax.Array:
    """Return the state [B, HV, K, V] that goes out, one of the final states of the operator on this device."""
    return states if part.first is None else states[part.last]


def _passing(part: Part) -> jax.Array | None:
    """Return `passes` of a part as bool [B, 1, 1, 1], or None."""
    return None if part.passes is None else part.passes[:, None, None, None]


def _decay(x: arguments.Arguments, part: Part) -> jax.Array:
    """Return the decay over all tokens of a device, [B, HV, K, 1] or [B, HV, 1, 1]."""
    g = arguments.total_gate(x)
    G = jnp.sum(chunking.select_tokens(part.valid, g), axis=1)
    return jnp.exp(G)[..., None] if g.ndim == 4 else jnp.exp(G)[..., None, None]


def _local(x: arguments.Arguments, axis) -> tuple[arguments.Arguments, Part]:
    """Return the arguments and the `Part` of this device; this may need communication with its neighbours."""
    if x.segment_ids is not None:
        return _segments(x, x.segment_ids, *_neighbouring_ids(x.segment_ids, axis))
    if x.cu_seqlens is None:
        return x, Part()
    if x.initial_state is not None:
        return _documents(x, axis)
    # If documents have no states, their numbers can serve as ids of segments.
    ids = stream.document_ids(x.cu_seqlens, x.q.shape[1], axis, before=1)
    return _segments(x, ids[:, 1:], ids[:, 0], (lax.axis_index(axis) > 0)[None])


def run_context(
    implementation: Implementation, x: arguments.Arguments, options: arguments.Options, axis: tuple[str, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Run an operator over tokens that are split over the devices of a mesh axis, inside of a `shard_map`.

    Args:
      implementation: an implementation of the operator.
      x: arguments: of arrays with tokens the part of this device; all other arrays are the same on all devices, also
        states, and cu_seqlens, which counts all tokens.
      options: the options.
      axis: the axes of the mesh.

    Returns:
      The output, and the final states, None unless asked for. A device that does not have a final state returns zeros
      for it, so the caller must add the states up over the devices.
    """
    with_states, options = options.output_final_state, options._replace(output_final_state=True)
    if x.cu_seqlens is not None and x.initial_state is None and with_states:
        shape = x.cu_seqlens.shape[0] - 1, x.v.shape[2], x.q.shape[3], x.channels
        x = x._replace(initial_state=jnp.zeros(shape, jnp.float32))
    x, part = _local(x, axis)
    plan, plan_of_states = (implementations.plan(implementation, x, options, states) for states in (False, True))
    arrays, part = compat.vary_over(compat.varying_axes(*x.arrays().values()).union(axis), (x.arrays(), part))
    start = arrays.pop("initial_state") if x.initial_state is not None and part.first is None else None
    if start is not None:
        start = compat.vary_over(compat.varying_axes(*arrays.values()), start.astype(jnp.float32))
    floats = {name: y for name, y in arrays.items() if jnp.issubdtype(y.dtype, jnp.floating)}
    fixed = {name: y for name, y in arrays.items() if name not in floats}

    def entering(floats, S, fixed, part) -> arguments.Arguments:
        """Return the arguments with S as the state that comes in."""
        y = x.with_arrays(floats | fixed)
        return y._replace(initial_state=_entry(part, S, y.initial_state))

    def state_before(floats, S, fixed, part):
        """Return M of this device, the state before it, and the `precomputed` of its map."""
        y = x.with_arrays(floats | fixed)
        with_M, start = affine_scan.needs_M(axis), _map_start(part, S, y.initial_state, axis)
        found, precomputed = implementations.map_states(plan_of_states, y._replace(initial_state=start), with_M)
        M = None
        if with_M:
            M = checkpoint_name(_decay(y, part) if found.M is None else _exit(part, found.M), MAP_NAME)
        local = affine_scan.AffineMap(M, _exit(part, found.N), _passing(part))
        return M, checkpoint_name(affine_scan.exclusive_scan(local, S, axis), STATE_NAME), precomputed

    def forward(floats, start, fixed, part):
        M, S, precomputed = state_before(floats, start, fixed, part)
        run = lambda floats, S: implementations.run(plan, entering(floats, S, fixed, part), precomputed)
        results, pull = jax.vjp(run, floats, S)
        return results, (M, S, precomputed, pull, floats, fixed, part)

    def backward(residuals, cotangents):
        M, S, precomputed, pull, floats, fixed, part = residuals
        do, dstates = cotangents
        if implementation.at_once or implementation.state_map is None:
            dN = pull((do, dstates))[1]
        else:
            y = entering(floats, S, fixed, part)
            dentry = implementations.state_gradient(plan_of_states, y, precomputed, do, dstates)
            states = floats.get("initial_state")
            dN = jax.vjp(lambda S: _entry(part, S, states), S)[1](dentry)[0]
        back = affine_scan.AffineMap(affine_scan.transposed(M), dN, _passing(part))
        dS = affine_scan.exclusive_scan(back, None, axis, reverse=True)
        dafter = dS if part.first is None else jnp.zeros_like(dstates).at[part.last].add(dS)
        dfloats, dS = pull((do, dstates + dafter))
        # The initial state is the same on all devices, and only the first one reads it.
        dstart = None if start is None else jnp.where(lax.axis_index(axis) == 0, dS, 0.0)
        return dfloats, dstart, None, None

    @jax.custom_vjp
    def call(floats, start, fixed, part):
        # This does not call `forward`, because without gradients the operator makes no residuals.
        _, S, precomputed = state_before(floats, start, fixed, part)
        return implementations.run(plan, entering(floats, S, fixed, part), precomputed)

    call.defvjp(forward, backward)
    results: Any = call(floats, start, fixed, part)
    o, states = results
    if not with_states:
        return o, None
    last = lax.axis_index(axis) == lax.axis_size(axis) - 1
    ends = last if part.first is None else part.ends[:, None, None, None]
    return o, jnp.where(ends, states, 0.0)
