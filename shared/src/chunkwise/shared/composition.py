"""Operators that are another operator, which takes n tokens of its own for every token of the user.

Boundaries, ids, blocks and slots count tokens of the user; here they become those of the operator that runs. All checks
of what the user counts come first, in the user's tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.shared.call import arguments, checks, gates
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.kernels import interleaved
from chunkwise.shared.plain import stream
from chunkwise.shared.serving import run, state_pool, step_table


def check_counts(x: Arguments, options: Options, form: str) -> tuple[Arguments, Options]:
    """Check what counts tokens of the user, and all that operators check alike.

    Args:
      x: arguments whose shapes are checked, all of them with the tokens of the user, as arrays or as their shapes.
      options: the options of the call.
      form: "chunk", "recurrent" or "ragged", the name of a method of an `Operator`.

    Returns:
      The arguments and options with defaults, and in a step the boundaries of the sequences that exist.
    """
    x = arguments.check_shared(x, options)
    if form != "ragged":
        return x, options
    x, options = run.check_step(x, options)
    return x._replace(cu_seqlens=step_table.boundaries_of(x.cu_seqlens, x.slots, x.q.shape[1])), options


def valid_tokens(x: Arguments, options: Options) -> jax.Array | None:
    """Return which tokens of the user on a device are not padding; None if there can be no padding."""
    axes = checks.check_context_axis(options.context_axis)
    return stream.valid_tokens(x.cu_seqlens, x.segment_ids, x.q.shape[1], axes)


def decays(x: Arguments, options: Options) -> tuple[Arguments, Options]:
    """Return arguments whose gates g [B, T, ...] are decays, in the place of raw gates of a law."""
    law = options.activation.law
    if law is None:
        return x, options
    g = gates.decays(x.g, x.A_log, x.dt_bias, law, valid_tokens(x, options))
    activation = options.activation._replace(use_gate_in_kernel=False, lower_bound=None)
    return x._replace(g=g, A_log=None, dt_bias=None), options._replace(activation=activation)


def over_tokens(
    operator: object, form: str, x: Arguments, options: Options, implementation: str | None, n: int
) -> tuple[jax.Array, Any]:
    """Run a form of an `Operator` and return its output at the tokens with queries, and its states or pool.

    The tokens of x are those of the operator, n for each of the user; its boundaries, ids and slots, and the options,
    count the user's.
    """
    q = x.q
    if form == "recurrent":
        x = interleaved.whole(x)
    if x.cu_seqlens is not None:
        # A boundary past the end, which a compiled program cannot refuse, must not overflow.
        x = x._replace(cu_seqlens=jnp.clip(x.cu_seqlens, 0, checks.MOST_COUNTED // n) * jnp.int32(n))
    if x.segment_ids is not None:
        x = x._replace(segment_ids=interleaved.Interleaved(*(x.segment_ids,) * n).whole())
    if options.block_size is not None:
        options = options._replace(block_size=options.block_size * n)
    pool = x.initial_state if form == "ragged" and state_pool.as_pool(x.initial_state).replay else None
    if pool is not None:
        x, options = _over_ring(x, options, n)
    elif x.slots is not None and x.slots.num_decodes is not None:
        x, options = _slots_of_decodes(x, options, n)
    o, states = getattr(operator, form)(x, options, implementation)
    if pool is not None:
        written = jnp.where(jnp.diff(x.cu_seqlens) > 0, x.slots.state_indices, jnp.int32(-1))
        states = state_pool.with_tokens_of(states, pool, written, n)
    return interleaved.select_queries(q, o), states


def _over_ring(x: Arguments, options: Options, n: int) -> tuple[Arguments, Options]:
    """Return arguments of a step over a ring, whose decodes and accepted tokens have n times as many tokens."""
    pool: state_pool.StatePool = x.initial_state
    most = options.decode_tokens or 1
    checks.check(
        most * n <= pool.replay,
        f"`decode_tokens` must be at most {pool.replay // n}, because every token takes {n} of the {pool.replay} "
        f"tokens of the ring; got {most}.",
    )
    slots: arguments.Slots = x.slots
    if slots.num_accepted_tokens is not None:
        # A number that is too large must not overflow.
        accepted = jnp.clip(slots.num_accepted_tokens, 0, pool.replay) * jnp.int32(n)
        slots = slots._replace(num_accepted_tokens=accepted)
    x = x._replace(slots=slots, initial_state=state_pool.with_plain_drafts(pool))
    return x, options._replace(decode_tokens=most * n)


def _slots_of_decodes(x: Arguments, options: Options, n: int) -> tuple[Arguments, Options]:
    """Return slots of a step whose decodes have n times as many tokens: only the state after the last of n is kept."""
    slots: arguments.Slots = x.slots
    indices = slots.state_indices
    indices = indices[:, None] if indices.ndim == 1 else indices
    decodes = jnp.arange(indices.shape[0], dtype=jnp.int32) < slots.num_decodes
    # The state after a prefill goes to the first slot of its row.
    at = jnp.where(decodes, jnp.int32(n - 1), jnp.int32(0))
    kept = at[:, None] == jnp.arange(indices.shape[1] * n, dtype=jnp.int32)[None] % jnp.int32(n)
    wide = jnp.where(kept, jnp.repeat(indices, n, axis=1), jnp.int32(-1))
    more = dict(read_indices=step_table.first_slots(slots), num_accepted_tokens=None)
    return x._replace(slots=slots._replace(state_indices=wide, **more)), options
