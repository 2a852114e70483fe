"""One serving step of every operator: whatever a scheduler packed into a stream, over one pool of states.

The first sequences decode: they have a token or a few, and go token by token, through the kernel of `decode`. The
others are prefills, and go chunk by chunk. Both start from slots of the pool and end in slots of it, in place. Which
sequence does what is traced, so that one program serves all steps.
"""

import functools
import itertools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from chunkwise.shared.kernels import chunking, launcher, pools, tiles
from chunkwise.shared.operators import arguments, checks, decode, implementations, recurrence, replay, state_pool
from chunkwise.shared.operators.arguments import Arguments, Options, Slots
from chunkwise.shared.operators.implementations import Implementation
from chunkwise.shared.operators.state_pool import StatePool

# The chunk size where states after blocks of tokens are wanted, of which a block holds whole ones.
BLOCK_CHUNK = 64
# The arguments [B, T, ...].
_TOKENS = ("q", "k", "v", "g", "beta", "p", "b", "w")


class ServingStep(NamedTuple):
    """What a serving step does.

    Attributes:
      decodes: routes of the sequences that go token by token; others have no tokens in it.
      prefills: likewise of those that go chunk by chunk.
      boundaries: int32 [N + 1], those of all sequences that exist.
      tokens: scalar int32, how many tokens the decodes have.
    """

    decodes: pools.Routes
    prefills: pools.Routes
    boundaries: jax.Array
    tokens: jax.Array


def find_step(
    cu_seqlens: jax.Array, slots: Slots, num_slots: int | None, num_tokens: int, decode_tokens: int | None = None
) -> ServingStep:
    """Return what a step does; sequences that do not exist have no tokens.

    No program can refuse what its arrays hold, and a kernel that read past the end of one would halt its core. So
    tokens lie within the stream and slots within the pool, whatever the arrays hold: a boundary that falls becomes the
    one before it, one that is past the end becomes T, a decode has W tokens at most, and a slot past the end is none,
    as is the slot of a number of accepted tokens that no column has.

    Args:
      cu_seqlens, slots: the step.
      num_slots: slots of the pool; None leaves slots as they are, for a check of them.
      num_tokens: T, tokens of the stream.
      decode_tokens: W over a pool with a ring, where a decode has one slot whatever its tokens; None without one.
    """
    N = cu_seqlens.shape[0] - 1
    none, index = jnp.int32(-1), jnp.arange(N, dtype=jnp.int32)
    known = (lambda y: y) if num_slots is None else functools.partial(pools.existing, count=num_slots)
    indices: Any = slots.state_indices
    indices = known(indices[:, None] if indices.ndim == 1 else indices)
    columns = indices.shape[1]
    W = decode_tokens or columns
    sequences = N if slots.num_sequences is None else slots.num_sequences
    exists = index < sequences
    decodes = exists & (index < (0 if slots.num_decodes is None else slots.num_decodes))
    # Boundaries after the last sequence may be anything: they become the last one.
    named = jnp.arange(N + 1, dtype=jnp.int32) <= sequences
    boundaries = chunking.rising(jnp.where(named, cu_seqlens, jnp.int32(0)), num_tokens)
    start, end = boundaries[:-1], boundaries[1:]
    tokens = jnp.max(jnp.where(decodes, end, jnp.int32(0)))
    source = slots.read_indices
    if source is not None:
        source = known(source)
    else:
        first = slots.num_accepted_tokens is None or decode_tokens is not None
        column = jnp.zeros(N, jnp.int32) if first else slots.num_accepted_tokens - 1
        chosen = column[:, None] == jnp.arange(columns, dtype=jnp.int32)[None]
        source = jnp.max(jnp.where(chosen, indices, none), axis=1)
    if slots.has_initial_state is not None:
        source = jnp.where(slots.has_initial_state, source, none)

    def routes(start, end, target, blocks=None):
        return pools.Routes(start, end, jnp.where(start < end, source, none), target, blocks)

    # The kernel for decodes gets as many tokens as they can have.
    room = min(num_tokens, N * W)
    first = jnp.minimum(start, room)
    stop = jnp.where(decodes, jnp.minimum(end, jnp.minimum(first + W, room)), first)
    reached = jnp.arange(columns, dtype=jnp.int32)[None] < (stop - first)[:, None]
    decoding = routes(first, stop, jnp.where(reached, indices, none))
    start, end = jnp.maximum(start, tokens), jnp.maximum(end, tokens)
    target = jnp.where(start < end, indices[:, 0], none)[:, None]
    blocks = None if slots.block_state_indices is None else known(slots.block_state_indices)
    return ServingStep(decoding, routes(start, end, target, blocks), boundaries, tokens)


def full_blocks(routes: pools.Routes, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Return the tokens up to the end of every block, int32 [1, M], and its slot [N, M], none if it is not full."""
    blocks: Any = routes.blocks
    # The numbers of tokens that an int32 cannot hold are past the end of every sequence.
    stop = np.minimum(np.arange(1, blocks.shape[1] + 1) * block_size, np.iinfo(np.int32).max)
    stop = jnp.asarray(stop[None], jnp.int32)
    return stop, jnp.where(stop <= (routes.end - routes.start)[:, None], blocks, jnp.int32(-1))


def find_faults(
    cu_seqlens: jax.Array,
    slots: Slots,
    num_slots: int,
    num_tokens: int,
    block_size: int | None,
    decode_tokens: int | None = None,
) -> list[checks.Fault]:
    """Return what may be wrong with the values of a step."""
    step, N = find_step(cu_seqlens, slots, None, num_tokens, decode_tokens), cu_seqlens.shape[0] - 1
    indices: Any = slots.state_indices
    W = decode_tokens or (1 if indices.ndim == 1 else indices.shape[1])
    given = (slots.num_decodes, 0), (slots.num_sequences, N)
    counts = (0, *(otherwise if x is None else x for x, otherwise in given), N)
    _, decodes, sequences, _ = counts
    exists = jnp.arange(N, dtype=jnp.int32) < sequences
    start, end = cu_seqlens[:-1], cu_seqlens[1:]
    accepted = jnp.ones(N, jnp.int32) if slots.num_accepted_tokens is None else slots.num_accepted_tokens
    # Every slot that is written, and the sequence that writes it.
    of = jnp.arange(N, dtype=jnp.int32)[:, None]
    written = [(step.decodes.target, of), (step.prefills.target, of)]
    if slots.block_state_indices is not None:
        assert block_size is not None
        written.append((full_blocks(step.prefills, block_size)[1], of))
    target, writer = (
        jnp.concatenate([y.reshape(-1) for y in each])
        for each in zip(*((x, jnp.broadcast_to(n, x.shape)) for x, n in written), strict=True)
    )
    source = jnp.maximum(step.decodes.source, step.prefills.source)
    kept, pairs = target >= 0, target[:, None] == target[None]
    twice = jnp.sum(pairs & kept[None], axis=1, dtype=jnp.int32) > 1
    crossed = (source[:, None] == target[None]) & kept[None] & (of != writer[None])
    return [
        checks.Fault(
            jnp.any(jnp.stack([jnp.asarray(a > b) for a, b in itertools.pairwise(counts)])),
            f"`num_decodes` must be at most `num_sequences`, and both from 0 to {N}.",
        ),
        checks.Fault(
            (cu_seqlens[0] != 0) | jnp.any(exists & ((start > end) | (end > num_tokens))),
            f"`cu_seqlens` must rise from 0 to at most T = {num_tokens}.",
        ),
        checks.Fault(
            jnp.any((of[:, 0] < decodes) & (end - start > W)),
            f"`num_decodes` must count sequences of at most {W} tokens.",
        ),
        checks.Fault(
            jnp.any(exists & ((accepted < 1) | (accepted > W))),
            f"`num_accepted_tokens` must be from 1 to {W}.",
        ),
        checks.Fault(
            jnp.any(source >= num_slots) | jnp.any(target >= num_slots),
            f"`state_indices` and the other indices must be below the number of slots {num_slots}.",
        ),
        checks.Fault(
            jnp.any(kept & twice), "`state_indices` must name a slot that is written only once; got one twice."
        ),
        checks.Fault(
            jnp.any(crossed),
            "`state_indices` must not name a slot that another sequence starts from; got one that is read and written.",
        ),
    ]


def check_step_values(
    cu_seqlens: jax.Array,
    slots: Slots,
    num_slots: int,
    num_tokens: int,
    block_size: int | None,
    decode_tokens: int | None = None,
) -> None:
    """Check the values of a step: at once if they are known, else by `checkify.check`, which the caller makes pure."""
    find = lambda: find_faults(cu_seqlens, with_counts(slots), num_slots, num_tokens, block_size, decode_tokens)
    checks.check_values((cu_seqlens, *slots), find)


def check_known_step(
    cu_seqlens: jax.Array,
    slots: Slots,
    num_slots: int,
    num_tokens: int,
    block_size: int | None,
    decode_tokens: int | None = None,
) -> None:
    """Check the values of a step if all are known: outside of jit, or as constants inside."""
    if checks.are_known((cu_seqlens, *slots)):
        check_step_values(cu_seqlens, slots, num_slots, num_tokens, block_size, decode_tokens)


def check_step(x: Arguments, options: Options) -> tuple[Arguments, Options]:
    """Check the pool and the slots of a serving step, and return its arguments and options in full."""
    slots: Any = x.slots
    checks.check(x.cu_seqlens is not None, "`cu_seqlens` must be an int32 array [N + 1]; got None.")
    (H, K), (HV, V), pool = x.q.shape[2:], x.v.shape[2:], x.initial_state
    if isinstance(pool, StatePool):
        state_pool.check_pool(pool, H, HV, K, V, x.g is not None and x.g.ndim == 4)
    else:
        checks.check_array("states", pool, "slots HV K V", (None, HV, K, V))
    if options.block_size is not None and options.chunk_size is None:
        options = options._replace(chunk_size=BLOCK_CHUNK)
    checks.check_step_types(slots, x.num_states, options.block_size, options.chunk_size)
    ring = state_pool.ring_tokens(pool)
    checks.check_decode_tokens(options.decode_tokens, slots.state_indices, ring)
    if ring:
        options = options._replace(decode_tokens=int(options.decode_tokens or 1))
    check_known_step(x.cu_seqlens, slots, pool.shape[0], x.v.shape[1], options.block_size, options.decode_tokens)
    return x._replace(slots=with_counts(slots)), options._replace(output_final_state=True)


def run_step(
    name: str, implementation: Implementation, x: Arguments, options: Options, strict: bool
) -> tuple[jax.Array, Any]:
    """Run a serving step.

    Args:
      name: of the kernel that decodes.
      implementation: of the prefills; its name says how decodes go, too.
      x, options: arguments that `check_step` returned.
      strict: whether more decodes than the kernel can have are an error, and do not go in plain JAX.
    """
    slots: Any = x.slots
    pool: Any = x.initial_state
    if isinstance(pool, StatePool) and pool.scales is None and not pool.replay:
        # Nothing but an array of states.
        x = x._replace(initial_state=pool.states)
        o, after = run_step(name, implementation, x, options, strict)
        return o, pool._replace(states=after)
    step = find_step(x.cu_seqlens, slots, pool.shape[0], x.v.shape[1], options.decode_tokens)
    x = x._replace(cu_seqlens=step.boundaries, initial_state=None, slots=None)
    if implementation.pooled is not None:
        decode.check_pool_type(pool)
    accepted = slots.num_accepted_tokens
    if slots.num_decodes is None:
        return _prefill(x, pool, step.prefills, options, implementation, accepted)
    # XLA moves no reshape into a condition or out of it: so what passes has its heads in one row, as the kernels
    # take it and as projections leave it.
    rows = {name: _in_rows(y) for name, y in _of_tokens(x).items()}
    shapes = {name: y.shape[2:] for name, y in _of_tokens(x).items()}
    # As many as decodes can have.
    T = min(x.v.shape[1], slots.state_indices.shape[0] * _most_tokens(step.decodes, options))

    def tokens(most: int | None = None) -> Arguments:
        return x._replace(**{name: y[:, :most].reshape(1, -1, *shapes[name]) for name, y in rows.items()})

    def run_decodes(pool):
        few = tokens(T)
        # There is no kernel of decodes for 8 bits without a ring: plain JAX is.
        plain = isinstance(pool, StatePool) and not pool.replay
        fits = not plain and (strict or step_fits(few, pool))
        o, pool = _decode(few, pool, step, options, implementation.name == "xla" or not fits, name, accepted)
        return _in_rows(o), pool

    def prefill_beside(leading, pool):
        o, pool = _prefill(tokens(), pool, step.prefills, options, implementation, accepted)
        o = _in_rows(o)
        decoded = lax.broadcasted_iota(jnp.int32, (1, T, 1), 1) < step.tokens
        return o.at[:, :T].set(jnp.where(decoded, leading, o[:, :T])), pool

    # A step that has no decode, or no prefill, spends nothing on them.
    nothing = lambda T: jnp.zeros((1, T, rows["v"].shape[2]), x.v.dtype)
    leading, pool = lax.cond(step.tokens > 0, run_decodes, lambda pool: (nothing(T), pool), pool)
    only = lambda leading, pool: (nothing(x.v.shape[1]).at[:, :T].set(leading), pool)
    o, pool = lax.cond(step.boundaries[-1] > step.tokens, prefill_beside, only, leading, pool)
    return o.reshape(x.v.shape), pool


def step_fits(x: Arguments, pool: Any) -> bool:
    """Return whether a kernel takes the decodes of a step, all of whose tokens are x."""
    if decode.state_dtype(pool) == jnp.float16:
        return False
    return replay.fits(x, pool) if state_pool.ring_tokens(pool) else decode.key_heads_a_step(x) is not None


def _most_tokens(routes: pools.Routes, options: Options) -> int:
    """Return W, the most tokens of a decode."""
    return options.decode_tokens or routes.target.shape[1]


def with_counts(slots: Slots) -> Slots:
    """Return slots whose numbers of sequences are arrays; None for no decodes, as a number, and for all sequences."""
    decodes, sequences = slots.num_decodes, slots.num_sequences
    none = decodes is None or (isinstance(decodes, numbers.Integral) and decodes == 0)
    return slots._replace(
        num_decodes=None if none else jnp.asarray(decodes, jnp.int32),
        num_sequences=None if sequences is None else jnp.asarray(sequences, jnp.int32),
    )


def _of_tokens(x: Arguments) -> dict[str, jax.Array]:
    """Return the arguments [B, T, ...] by name."""
    return {name: y for name, y in x._asdict().items() if name in _TOKENS and y is not None}


def _in_rows(x: jax.Array) -> jax.Array:
    """Return [B, T, heads, ...] as [B, T, row]."""
    return x.reshape(*x.shape[:2], -1)


def _prefill(
    x: Arguments,
    pool: Any,
    routes: pools.Routes,
    options: Options,
    implementation: Implementation,
    accepted: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Return the outputs of the prefills, zeros elsewhere, and the pool after them."""
    dtype = x.v.dtype
    x, options = implementations.prepare(implementation, x, options)
    if implementation.pooled is not None:
        if not isinstance(pool, StatePool):
            return implementation.pooled(x._replace(initial_state=pool), options, routes)
        # A small pool of the states of this step alone, the n-th sequence's in slot n, and then those after blocks.
        small, into, slot = _gather(pool, routes, accepted, options.block_size)
        o, small = implementation.pooled(x._replace(initial_state=small), options, into)
        return o, state_pool.store(pool, slot, small)
    # The tokens before the first prefill are a sequence of their own.
    boundaries = jnp.concatenate([jnp.zeros(1, jnp.int32), routes.start[:1], routes.end])
    states = _read(pool, routes.source, accepted)
    states = jnp.concatenate([jnp.zeros_like(states[:1]), states])
    owned = lax.broadcasted_iota(jnp.int32, (1, x.v.shape[1]), 1) >= routes.start[0]
    tokens = {
        name: jnp.where(owned.reshape(*owned.shape, *(1,) * (y.ndim - 2)), y, jnp.zeros((), y.dtype))
        for name, y in _of_tokens(x).items()
    }
    x = x._replace(initial_state=states, cu_seqlens=boundaries, **tokens)
    o, after = implementation.run(x, options, None)
    assert after is not None
    if routes.blocks is not None:
        assert implementation.chunk_states is not None
        kept = implementation.chunk_states(x, options)[0]
        pool = _write_blocks(pool, kept, after[1:], routes, options)
    return o.astype(dtype), _write(pool, routes.target[:, 0], after[1:])


def _gather(
    pool: StatePool, routes: pools.Routes, accepted: jax.Array | None, block_size: int | None
) -> tuple[jax.Array, pools.Routes, jax.Array]:
    """Return a float32 pool of the states of some sequences, their routes in it, and the slots that its slots go to."""
    N, index = routes.source.shape[0], jnp.arange(routes.source.shape[0], dtype=jnp.int32)
    states, none = _read(pool, routes.source, accepted), jnp.int32(-1)
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
        full = full_blocks(routes, block_size)[1]
        into = into._replace(blocks=jnp.where(full >= 0, place, none))
        slot = jnp.concatenate([slot, full.reshape(-1)])
    return states, into, slot


def _read(pool: Any, source: jax.Array, accepted: jax.Array | None) -> jax.Array:
    """Return the states that sequences start from, float32 [N, ...]; zeros for no slot."""
    if not isinstance(pool, StatePool):
        return decode.read_slots(pool, Slots(source)).astype(jnp.float32)
    kept = state_pool.kept_tokens(pool, source, accepted) if pool.replay else None
    return state_pool.load(pool, source, kept)


def _write(pool: Any, target: jax.Array, states: jax.Array) -> Any:
    """Return the pool with states in their slots, but for no slot."""
    if isinstance(pool, StatePool):
        return state_pool.store(pool, target, states)
    return decode.write_slots(pool, Slots(target), states)


def _write_blocks(pool, kept, after, routes: pools.Routes, options: Options) -> Any:
    """Write the states after blocks of tokens, of those before all chunks [NT, ...] and those after sequences [N, ...].

    The state after a block is that before the next chunk of its sequence, or that after the sequence.
    """
    C = options.chunk_size
    assert options.block_size is not None
    stop, slot = full_blocks(routes, options.block_size)
    length = (routes.end - routes.start)[:, None]
    chunks = -(-length[:, 0] // C)
    # The tokens before the first prefill have chunks too.
    first = jnp.cumsum(chunks, dtype=jnp.int32) - chunks - (-routes.start[0] // C)
    inside = jnp.minimum(first[:, None] + stop // C, kept.shape[0] - 1)  # [N, M]
    sequence = jnp.arange(length.shape[0], dtype=jnp.int32)[:, None]
    states = jnp.where((stop < length)[:, :, None, None, None], kept[inside], after[sequence + 0 * stop])
    return _write(pool, slot.reshape(-1), states.reshape(-1, *states.shape[2:]))


def _decode(
    x: Arguments,
    pool: Any,
    step: ServingStep,
    options: Options,
    plain: bool,
    name: str,
    accepted: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Return the outputs of the decodes, whose tokens are the first ones and all that x has, and the pool."""
    (B, T, H, K), (HV, V), routes, dtype = x.q.shape, x.v.shape[2:], step.decodes, x.v.dtype
    x, options = arguments.choose_scale(x._replace(cu_seqlens=jnp.stack([jnp.int32(0), step.tokens])), options)
    x, options = arguments.with_final_gates(x, options)
    scale, x = x.scale, x._replace(g=arguments.total_gate(x), g_gamma=None, scale=None, cu_seqlens=None)
    N, W = routes.source.shape[0], _most_tokens(routes, options)
    static = decode.DecodeStatic(B, T, H, HV, K, V, N, W, True, options.scale, options.use_qk_l2norm_in_kernel, name)
    if plain:
        made, pool = _plain_tokens(static, x, pool, routes, accepted)
    elif state_pool.ring_tokens(pool):
        made, pool = replay.launch(static, x, pool, routes, accepted)
    else:
        made, pool = decode.launch_tokens(static, x, pool, routes)
    return launcher.scaled(made, scale).astype(dtype), pool


def _plain_tokens(
    static: decode.DecodeStatic,
    x: Arguments,
    pool: Any,
    routes: pools.Routes,
    accepted: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Do as `launch_tokens` in plain JAX: token t of all sequences at once."""
    s = static
    token = routes.start[:, None] + jnp.arange(s.W, dtype=jnp.int32)[None]  # [N, W]
    token = jnp.where(token < routes.end[:, None], token, jnp.int32(s.T))
    q, k, v, g, beta, p = jax.tree.map(
        lambda y: y[0].at[token].get(mode="fill", fill_value=0).astype(jnp.float32), (x.q, x.k, x.v, x.g, x.beta, x.p)
    )  # [N, W, ...]
    if s.normalise:
        q, k = tiles.l2norm(q), tiles.l2norm(k)
    keys = k
    q, k = (jnp.repeat(y, s.HV // s.H, axis=2) for y in (q, k))
    states, o, writes = _read(pool, routes.source, accepted), [], []
    before, ringed = states, state_pool.ring_tokens(pool) > 0
    for t in range(s.W):
        *one, erase = jax.tree.map(lambda y, t=t: y[:, t], (q, k, v, g, beta, p))
        states, made, written = recurrence.advance(states, *one, jnp.float32(s.scale), erase)
        o.append(made)
        writes.append(written)
        if not ringed:
            pool = _write(pool, routes.target[:, t], states)
    if ringed:
        target = routes.target[:, 0]
        kept = state_pool.kept_tokens(pool, routes.source, accepted)
        folded = state_pool.folds(pool, routes.source, target, kept, s.W)
        pool = state_pool.store(pool, jnp.where(folded, target, jnp.int32(-1)), before)
        pool = state_pool.append(pool, routes, kept, folded, keys, jnp.stack(writes, axis=1), g)
    made = jnp.stack(o, axis=1).astype(x.v.dtype)  # [N, W, HV, V]
    return jnp.zeros_like(x.v).at[0, token].set(made, mode="drop"), pool
