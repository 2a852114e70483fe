"""A serving step of any operator: the sequences that a scheduler packed into a stream, over one pool of states.

`step_table` says which sequences decode and which are prefills. Decodes go token by token, by the kernel of `decode`.
Prefills go chunk by chunk. Decodes and prefills change the pool in place.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared import tuning
from chunkwise.shared.call import arguments, checks, faults
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.implementation import implementations
from chunkwise.shared.implementation.implementations import Implementation, Plan
from chunkwise.shared.kernels import interleaved, launcher, tiles
from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.serving import few_tokens, ring, state_pool, step_table
from chunkwise.shared.serving.decode import choose, launch, records
from chunkwise.shared.serving.decode.records import DecodeStatic
from chunkwise.shared.serving.state_pool import StatePool

# The names of the arguments [B, T, ...].
_TOKENS = ("q", "k", "v", "g", "beta", "p", "echo", "b", "w", "log_weight")


def check_step(x: Arguments, options: Options) -> tuple[Arguments, Options]:
    """Check the pool and the slots of a serving step, and return its arguments and options with all defaults."""
    slots: arguments.Slots = x.slots
    checks.check(x.cu_seqlens is not None, "`cu_seqlens` must be an int32 array [N + 1]; got None.")
    (H, K), (HV, V), pool = x.q.shape[2:], x.v.shape[2:], x.initial_state
    known = state_pool.as_pool(pool)
    if known is pool:
        state_pool.check_pool(pool, H, HV, K, V, x.g is not None and x.g.ndim == 4)
    else:
        scaled = getattr(pool, "dtype", None) != jnp.int8
        checks.check(
            scaled, "`states` must be a StatePool of `make_pool` if states are int8; got an array without scales."
        )
        checks.check_array("states", pool, "slots HV K V", (None, HV, K, V))
    if options.block_size is not None and options.chunk_size is None:
        options = options._replace(chunk_size=tuning.BLOCK_CHUNK_SIZE)
    checks.check_step_types(slots, x.num_states, options.block_size, options.chunk_size)
    checks.check_decode_tokens(options.decode_tokens, slots.state_indices, known.replay)
    if known.replay:
        options = options._replace(decode_tokens=int(options.decode_tokens or 1))
    sizes = pool.shape[0], x.v.shape[1], options.block_size, options.decode_tokens
    faults.check_known_values(
        (x.cu_seqlens, *slots), functools.partial(step_table.find_faults, x.cu_seqlens, slots, *sizes)
    )
    return x._replace(slots=step_table.with_counts(slots)), options._replace(output_final_state=True)


def run_step(plan: Plan, x: Arguments, *, name: str, strict: bool) -> tuple[jax.Array, Any]:
    """Run a serving step.

    Args:
      plan: how prefills are computed; if the name of the implementation is "xla", decodes go in plain JAX, too.
      x: arguments that `check_step` returned, as the options of `plan`.
      name: the name of the kernel for decodes.
      strict: whether decodes that do not fit into a kernel are an error; otherwise they go in plain JAX.

    Returns:
      The outputs, of the tokens with queries alone where x has `Interleaved` ones, and the pool.
    """
    x = x if plan.implementation.interleaves else interleaved.whole(x)
    options, slots = plan.options, x.slots
    pool = state_pool.as_pool(x.initial_state)
    # The pool is returned in the form that the caller gave: an array or a StatePool.
    returned = (lambda after: after) if pool is x.initial_state else (lambda after: after.states)
    step = step_table.find_step(x.cu_seqlens, slots, pool.shape[0], x.v.shape[1], options.decode_tokens)
    x = x._replace(cu_seqlens=step.boundaries, initial_state=None, slots=None)
    accepted = slots.num_accepted_tokens
    if slots.num_decodes is None:
        o, pool = _prefill(plan, x, pool, step.prefills, accepted)
        return o, returned(pool)
    # XLA moves no reshape into a condition or out of it. So arrays that pass through conditions have all heads in one
    # row, as projections make them and kernels take them.
    named = _of_tokens(x)
    rows = jax.tree.map(_in_rows, named)
    # An output takes n tokens. T is the most outputs that decodes can have.
    n, outputs = interleaved.kinds(x.q), interleaved.first(x.q).shape[1]
    T = min(outputs, slots.state_indices.shape[0] * _most_tokens(step.decodes, options) // n)

    def tokens(most: int) -> Arguments:
        first = lambda row, y: row[:, : most * y.shape[1] // outputs].reshape(1, -1, *y.shape[2:])
        return x._replace(**jax.tree.map(first, rows, named))

    def run_decodes(pool):
        few = tokens(T)._replace(cu_seqlens=jnp.stack([jnp.int32(0), step.tokens]))
        run_alone = functools.partial(_decode, name, plan.implementation.name, strict, pool, step, slots)
        o, pool = implementations.run(Plan(Implementation("xla", run_alone), options), few)
        return _in_rows(interleaved.select_queries(few.q, o)), pool

    def prefill_beside(leading, pool):
        o, pool = _prefill(plan, tokens(outputs), pool, step.prefills, accepted)
        o = _in_rows(interleaved.select_queries(x.q, o))
        decoded = lax.broadcasted_iota(jnp.int32, (1, T, 1), 1) < (step.tokens if n == 1 else step.tokens // n)
        return o.at[:, :T].set(jnp.where(decoded, leading, o[:, :T])), pool

    # A serving step without decodes, or without prefills, spends no time on them.
    nothing = lambda T: jnp.zeros((1, T, rows["v"].shape[2]), x.v.dtype)
    leading, pool = lax.cond(step.tokens > 0, run_decodes, lambda pool: (nothing(T), pool), pool)
    only = lambda leading, pool: (nothing(outputs).at[:, :T].set(leading), pool)
    o, pool = lax.cond(step.boundaries[-1] > step.tokens, prefill_beside, only, leading, pool)
    return o.reshape(1, outputs, *x.v.shape[2:]), returned(pool)


def _most_tokens(routes: pools.Routes, options: Options) -> int:
    """Return W, the most tokens of a decode."""
    return options.decode_tokens or routes.target.shape[1]


def _of_tokens(x: Arguments) -> dict[str, jax.Array]:
    """Return the arguments [B, T, ...] by name."""
    return {name: y for name, y in x._asdict().items() if name in _TOKENS and y is not None}


def _in_rows(x: jax.Array) -> jax.Array:
    """Return [B, T, heads, ...] as [B, T, row]."""
    return x.reshape(*x.shape[:2], -1)


def _prefill(
    plan: Plan, x: Arguments, pool: StatePool, routes: pools.Routes, accepted: jax.Array | None
) -> tuple[jax.Array, StatePool]:
    """Return the outputs of the prefills, zeros elsewhere, and the pool after them."""
    if x.echo is not None:
        return _prefill_in_two(plan, x, pool, routes, accepted)
    implementation, dtype = plan.implementation, x.v.dtype
    x, options = implementations.prepare(plan, x)
    if implementation.pooled is not None:
        if pool.is_array:
            o, states = implementation.pooled(x._replace(initial_state=pool.states), options, routes)
            return o, pool._replace(states=states)
        # `small` is a pool of only the states of this serving step: the state of sequence n in slot n, then states
        # after blocks.
        small, into, slot = _gather(pool, routes, accepted, options.block_size)
        o, small = implementation.pooled(x._replace(initial_state=small), options, into)
        return o, state_pool.store(pool, slot, small)
    # The tokens before the first prefill form one more sequence.
    boundaries = jnp.concatenate([jnp.zeros(1, jnp.int32), routes.start[:1], routes.end])
    states = state_pool.read(pool, routes.source, accepted)
    states = jnp.concatenate([jnp.zeros_like(states[:1]), states])
    owned = lax.broadcasted_iota(jnp.int32, (1, x.v.shape[1]), 1) >= routes.start[0]
    tokens = {
        name: jnp.where(owned.reshape(*owned.shape, *(1,) * (y.ndim - 2)), y, jnp.zeros((), y.dtype))
        for name, y in _of_tokens(x).items()
    }
    x, with_skip = arguments.fold_weights(x._replace(initial_state=states, cu_seqlens=boundaries, **tokens))
    o, after = implementation.run(x, options, None)
    assert after is not None
    if routes.blocks is not None:
        assert implementation.chunk_states is not None
        kept = implementation.chunk_states(x, options)[0]
        pool = _write_blocks(pool, kept, after[1:], routes, options)
    return with_skip(o.astype(dtype)), state_pool.store(pool, routes.target[:, 0], after[1:])


def _prefill_in_two(plan: Plan, x: Arguments, pool: StatePool, routes: pools.Routes, accepted: jax.Array | None):
    """Do the same as `_prefill` where a token is two for an implementation over whole sequences."""
    two, options = jnp.int32(2), plan.options
    x = arguments.as_two_tokens(x)._replace(cu_seqlens=x.cu_seqlens * two)
    q, x = x.q, x if plan.implementation.interleaves else interleaved.whole(x)
    options = options if options.block_size is None else options._replace(block_size=options.block_size * 2)
    routes = routes._replace(start=routes.start * two, end=routes.end * two)
    o, pool = _prefill(implementations.plan(plan.implementation, x, options), x, pool, routes, accepted)
    return interleaved.select_queries(q, o), pool


def _gather(
    pool: StatePool, routes: pools.Routes, accepted: jax.Array | None, block_size: int | None
) -> tuple[jax.Array, pools.Routes, jax.Array]:
    """Return a float32 pool of the sequences' states, their routes in it, and a slot of `pool` for each state."""
    N, index = routes.source.shape[0], jnp.arange(routes.source.shape[0], dtype=jnp.int32)
    states, none = state_pool.read(pool, routes.source, accepted), jnp.int32(-1)
    into = routes._replace(
        source=jnp.where(routes.source >= 0, index, none),
        target=jnp.where(routes.target >= 0, index[:, None], none),
    )
    slot = routes.target[:, 0]
    if routes.blocks is not None:
        assert block_size is not None
        M = routes.blocks.shape[1]
        states = jnp.concatenate([states, jnp.zeros((N * M, *states.shape[1:]), jnp.float32)])
        place = N + index[:, None] * jnp.int32(M) + jnp.arange(M, dtype=jnp.int32)[None]
        full = step_table.full_blocks(routes, block_size)[1]
        into = into._replace(blocks=jnp.where(full >= 0, place, none))
        slot = jnp.concatenate([slot, full.reshape(-1)])
    return states, into, slot


def _write_blocks(pool: StatePool, kept, after, routes: pools.Routes, options: Options) -> StatePool:
    """Write the states after blocks of tokens to the pool.

    The state after a block is the state before the next chunk of its sequence, in `kept` [NT, ...], or, after the last
    chunk, the state after the sequence, in `after` [N, ...].
    """
    C = options.chunk_size
    assert options.block_size is not None
    stop, slot = step_table.full_blocks(routes, options.block_size)
    length = (routes.end - routes.start)[:, None]
    chunks = -(-length[:, 0] // C)
    # The tokens before the first prefill have chunks, too.
    first = jnp.cumsum(chunks, dtype=jnp.int32) - chunks - (-routes.start[0] // C)
    inside = jnp.minimum(first[:, None] + stop // C, kept.shape[0] - 1)  # [N, M]
    sequence = jnp.arange(length.shape[0], dtype=jnp.int32)[:, None]
    states = jnp.where((stop < length)[:, :, None, None, None], kept[inside], after[sequence + 0 * stop])
    return state_pool.store(pool, slot.reshape(-1), states.reshape(-1, *states.shape[2:]))


def _decode(
    name: str, implementation: str, strict: bool, pool: StatePool, step: step_table.ServingStep, slots: Slots,
    x: Arguments, options: Options, precomputed: None = None,
) -> tuple[jax.Array, StatePool]:  # fmt: skip
    """Return the outputs of the decodes, whose tokens are the first tokens of x, and the pool."""
    routes, accepted = step.decodes, slots.num_accepted_tokens
    scale, W = x.scale, _most_tokens(routes, options)
    x, with_skip = arguments.fold_weights(x)
    x = arguments.one_gate(x)._replace(scale=None, cu_seqlens=arguments.ABSENT)
    static = records.static_of_rule(name, W, True, x, options)
    if choose.by_kernel(implementation, x, pool, slots, static, strict=strict):
        made, _, pool = launch.launch(records.of_rule(static, x), (), pool, step.boundaries, slots)
        made = made.reshape(x.v.shape)
    else:
        made, pool = _plain_tokens(static, x, pool, routes, accepted)
    return with_skip(launcher.scaled(made, scale)), pool


def _plain_tokens(
    static: DecodeStatic, x: Arguments, pool: StatePool, routes: pools.Routes, accepted: jax.Array | None = None
) -> tuple[jax.Array, StatePool]:
    """Return o and the pool as the kernels do, in plain JAX: token t of all sequences at once."""
    W, target = static.W, routes.target
    token = routes.start[:, None] + jnp.arange(W, dtype=jnp.int32)[None]  # [N, W]
    token = jnp.where(token < routes.end[:, None], token, jnp.int32(x.v.shape[1]))
    q, k, v, g, beta, p, echo = jax.tree.map(
        lambda y: y[0].at[token].get(mode="fill", fill_value=0),
        (x.q, x.k, x.v, arguments.total_gate(x), x.beta, x.p, x.echo),
    )  # [N, W, ...]
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if static.normalise:
        q, k = tiles.l2norm(q), tiles.l2norm(k)
    before = state_pool.read(pool, routes.source, accepted)
    o, states, writes = few_tokens.scan_tokens(
        q, k, v, g, beta, static.scale, before, None, False, p, True, static.erase_before_decay, echo
    )  # fmt: skip
    if pool.replay:
        kept = state_pool.kept_tokens(pool, routes.source, accepted)
        folded = ring.folds(pool, routes.source, target[:, 0], kept, W)
        pool = state_pool.store(pool, jnp.where(folded, target[:, 0], jnp.int32(-1)), before)
        pool = ring.append(pool, routes, kept, folded, k, writes, g)
    else:
        pool = state_pool.store(pool, target.reshape(-1), states.reshape(-1, *states.shape[2:]))
    return jnp.zeros_like(x.v).at[0, token].set(o, mode="drop"), pool
