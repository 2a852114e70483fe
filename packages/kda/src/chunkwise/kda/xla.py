"""Kimi delta attention in plain JAX, chunk by chunk: the fast path off TPU, differentiable, and a second opinion.

As in the kernels a state is transposed, [V, K]. Without states the chunks of a packed batch stay aligned to the stream,
and masks keep its sequences apart; with states every sequence begins a chunk of its own.

Where tokens are split over devices the same scan runs before, without queries, and gives what the tokens do to a state.
It keeps the inverses, and the operator behind it takes these.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.kda import tile
from chunkwise.shared import compat
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import chunking, layout, matmul, tiles
from chunkwise.shared.plain import block_inverse, isolation

# Blocks of so many rows take all their levels as masked products; larger levels multiply only the pairs that exist.
_BASE = 16


class Decayed(NamedTuple):
    """Queries and keys with the decay between their row and a boundary of their block, all [n, b, K].

    Attributes:
      q_start, e_start: of queries and erase keys, from the start of the block to the row, its gate included.
      k_end: from the row to the end.
      through: [n, 1, K], the decay over the whole block.
    """

    q_start: jax.Array
    e_start: jax.Array
    k_end: jax.Array
    through: jax.Array


def interactions(q, e, k, g, base, goes_on) -> tuple[jax.Array, jax.Array, Decayed]:
    """Return scores of queries with keys, of erase keys with keys, and what passes boundaries of chunks [M, C, K].

    Blocks of `_BASE` rows as in the kernels, then neighbouring blocks are joined: the corner is one product.
    `goes_on` is `tile.continuing` [M, C, 1], or None.
    """
    M, C = k.shape[:2]
    b = _BASE

    def blocks(x, size):
        return x.reshape(M * C // size, size, x.shape[-1])

    q, e, k, g = blocks(q, b), blocks(e, b), blocks(k, b), blocks(g * tiles.LOG2_E, b)

    def by_row(x):
        """Return the first, the second rows and so on of all blocks of 8."""
        return [x[:, r :: tile.SUBLANES] for r in range(tile.SUBLANES)]

    goes_on = None if goes_on is None else by_row(blocks(goes_on, b))
    in_blocks = [jnp.stack(x, axis=2).reshape(g.shape) for x in tile.block_decays(by_row(g), base, goes_on)]
    decays, table = tile.chunk_decays(in_blocks, base), jnp.asarray(tile.level_table(b, base))[None]
    scores = jnp.swapaxes(tile.interaction_tile(q, e, k, decays, table, jnp.float32), 1, 2)
    # A row with itself has no decay. In the product of a base block its gate would get a gradient as a row and lose it
    # as a column, up to a rounding far above the gradients of strong gates.
    itself = jnp.sum(q * k, axis=-1, keepdims=True)
    x = Decayed(q * decays.start, e * decays.start, k * decays.end, decays.start[:, -1:])
    scores_q, scores_e = jnp.where(jnp.eye(b, dtype=bool)[None], itself, scores[:, :b]), scores[:, b:]

    def pairs(x):
        return [x.reshape(len(x) // 2, 2, *x.shape[1:])[:, n] for n in range(2)]

    while b < C:
        (_, q_right), (e_left, e_right), (k_left, k_right), (t_left, t_right) = map(pairs, x)
        corner = matmul.dot_nt(jnp.concatenate([q_right, e_right], axis=1), k_left)

        def joined(x, lower_left):
            left, right = pairs(x)
            top = jnp.concatenate([left, jnp.zeros_like(left)], axis=2)
            return jnp.concatenate([top, jnp.concatenate([lower_left, right], axis=2)], axis=1)

        scores_q, scores_e = joined(scores_q, corner[:, :b]), joined(scores_e, corner[:, b:])
        x = Decayed(
            q_start=jnp.concatenate([pairs(x.q_start)[0], q_right * t_left], axis=1),
            e_start=jnp.concatenate([e_left, e_right * t_left], axis=1),
            k_end=jnp.concatenate([k_left * t_right, k_right], axis=1),
            through=t_left * t_right,
        )
        b *= 2
    return scores_q, scores_e, x


def chunk_kda(
    q, e, k, v, g, beta, initial_state, starts, masks, base, keep_states, with_output: bool = True, X=None
) -> tuple[Any, jax.Array, jax.Array | None, jax.Array]:
    """Run chunks in order.

    Args:
      q, e, k, g: [steps, n, C, K] float32, n = batch * heads; q scaled, and e what erases: k in KDA itself.
      v: [steps, n, C, V] float32.
      beta: [steps, n, C] float32.
      initial_state: [n, V, K], or [N, n, V, K] with `starts`, or None for zeros. States may have more channels than v,
        whose values are zeros, if no output is wanted.
      starts: of packed sequences that begin chunks, whether one begins with the chunk, bool [steps], and which, int32
        [steps]; or None.
      masks: `StreamMasks` of chunks that may hold several sequences, or None.
      base: rows of the diagonal blocks that one product covers.
      keep_states: return the state after every chunk.
      with_output: return o.
      X: the inverses of the same tokens, if they are known.

    Returns:
      (o [steps, n, C, V] float32 or None, the state after the last chunk [n, V, K], those after every chunk or None,
      the inverses [steps, n, C, C]).
    """
    steps, n, C, K = k.shape

    def flat(x):
        return x.reshape(steps * n, *x.shape[2:])

    def per_step(x):
        return x.reshape(steps, n, *x.shape[1:])

    goes_on = None
    if masks is not None:
        goes_on = flat(jnp.broadcast_to(tile.continuing(masks.same)[:, None], (steps, n, C, 1)))
    scores, M, decayed = jax.tree.map(per_step, interactions(*map(flat, (q, e, k, g)), base, goes_on))
    if masks is not None:
        scores, M = (jnp.where(masks.same[:, None], x, 0.0) for x in (scores, M))
    beta = beta[..., None]
    A = flat(jnp.where(tiles.strictly_lower(C), beta * M, 0.0))
    X = per_step(block_inverse.block_inverse(A) if X is None else block_inverse.known_inverse(A, flat(X)))
    channels = v.shape[-1] if initial_state is None else initial_state.shape[-2]
    zero = compat.varying_zeros((n, channels, K), q, k, v, g, beta, initial_state)
    start = zero
    if initial_state is not None and starts is None:
        start += initial_state

    def step(S, x):
        v, beta, scores, X, decayed, starts, masks = x
        if starts is not None:
            first, sequence = starts
            S = jnp.where(first, zero if initial_state is None else initial_state[sequence], S)
        if masks is not None:
            masks = masks._replace(carried=masks.carried[None, :, None], ending=masks.ending[None, :, None])
        q_start, e_start, k_end, through = tile.within_sequence(decayed[:2], decayed[2:3], decayed.through, masks)
        readers = [q_start, e_start] if with_output else [e_start]
        *seen_q, seen_e = jnp.split(matmul.dot_nt(jnp.concatenate(readers, axis=1), S), len(readers), axis=1)
        v = jnp.pad(v, [(0, 0), (0, 0), (0, channels - v.shape[2])])
        v_new = matmul.dot(X, beta * (v - seen_e))
        o = seen_q[0] + matmul.dot(scores, v_new) if with_output else None
        S = through * S + matmul.dot_tn(v_new, k_end)
        return S, (o, S if keep_states else None)

    S, (o, states) = lax.scan(step, start, (v, beta, scores, X, decayed, starts, masks))
    return o, S, states, X


def kimi_delta_attention(
    x: arguments.Arguments, options: arguments.Options, inverses: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Return (o [B, T, HV, V] in the type of v, the final states [N, HV, K, V] float32, or None unless asked for).

    Args:
      x: prepared arguments; scale is a float32 scalar array.
      options: as the operator has them.
      inverses: of `states_after`, of the same tokens.
    """
    return _run(x, options, True, inverses)[:2]


def states_after(x: arguments.Arguments, options: arguments.Options) -> tuple[jax.Array, jax.Array]:
    """Return the states after the tokens and the inverses of all chunks [steps, B HV, C, C].

    Initial states, which there must be, may have more channels than v, whose values are zeros.
    """
    _, states, X, _ = _run(x, options._replace(output_final_state=True), False, None)
    return states, X


def chunk_states(x: arguments.Arguments, options: arguments.Options) -> jax.Array:
    """Return the states before all chunks of a packed batch with states, [1, NT, HV, K, V].

    Before the first chunk of a sequence they are meaningless.
    """
    after: Any = _run(x, options._replace(output_final_state=True), False, None)[3]
    return jnp.roll(jnp.swapaxes(after, -1, -2), 1, axis=0)[None]


def _run(
    x: arguments.Arguments, options: arguments.Options, with_output: bool, kept: jax.Array | None
) -> tuple[Any, Any, jax.Array, jax.Array | None]:
    """Return the output, the final states, the inverses, and the states after all chunks [NT, HV, V, K].

    There is an output and there are final states if they are wanted; states after chunks if the batch is packed too.
    """
    B, T, HV, _ = x.v.shape
    C, base = options.chunk_size, tile.base_block(options.min_gate, jnp.float32)
    cu_seqlens: Any = x.cu_seqlens
    state = None if x.initial_state is None else jnp.swapaxes(x.initial_state.astype(jnp.float32), -1, -2)
    stream = cu_seqlens is not None and state is None and not options.output_final_state
    g = x.g if x.g.ndim == 4 else jnp.broadcast_to(x.g[..., None], (*x.g.shape, x.q.shape[3]))
    tokens = [x.q, x.k, x.v, g, x.beta, *([] if x.p is None else [x.p])]
    nonfinite: Any = (
        isolation.nonfinite_tokens([tiles.clip_gate(y) if y is g else y for y in tokens], cu_seqlens)
        if stream
        else None
    )
    if stream:
        tokens = [chunking.select_tokens(~nonfinite, y) for y in tokens]
    # What padding holds must not matter, not even NaN.
    q, k, v, g, beta, *e = (chunking.zero_padding(y.astype(jnp.float32), cu_seqlens) for y in tokens)
    q, k = (tiles.l2norm(q), tiles.l2norm(k)) if options.use_qk_l2norm_in_kernel else (q, k)
    q, k = (jnp.repeat(y, HV // y.shape[2], axis=2) for y in (q * x.scale, k))
    chunks = chunking.Chunking(B, T, C, None if stream else cu_seqlens)
    batch = B if cu_seqlens is None else 1

    def steps(y):
        """Return tokens as [steps, batch * heads, C, ...]."""
        y = chunks.split(y)
        y = jnp.moveaxis(y.reshape(batch, -1, *y.shape[1:]), 0, 1)
        return y.reshape(y.shape[0], batch * HV, *y.shape[3:])

    masks: Any = chunking.stream_masks(T, C, cu_seqlens) if stream else None
    starts = (chunks.first, chunks.sequence) if chunks.packed else None
    if state is not None and not chunks.packed:
        state = state.reshape(B * HV, *state.shape[2:])
    keep = cu_seqlens is not None and options.output_final_state
    q, k, v, g, beta = map(steps, (q, k, v, g, beta))
    e = steps(e[0]) if e else k
    o, last, states, X = chunk_kda(q, e, k, v, g, beta, state, starts, masks, base, keep, with_output, kept)
    if with_output:
        o = jnp.moveaxis(o.reshape(o.shape[0], batch, HV, *o.shape[2:]), 1, 0)
        o = chunks.merge(o.reshape(-1, *o.shape[2:])).astype(x.v.dtype)
    if stream:
        return isolation.keep_apart(o, x.v, nonfinite, cu_seqlens), None, X, None
    if not options.output_final_state:
        return o, None, X, None
    last = last.reshape(B, HV, *last.shape[1:]) if states is None else states[chunks.final_chunk]
    return o, jnp.swapaxes(layout.unless_empty(last, state, cu_seqlens), -1, -2), X, states
