"""All operators in plain JAX, chunk by chunk: the work around the mathematics of a chunk, which is the same for all.

An operator gives a `Rule`, which makes the `Form` of its chunks. This module does the rest: it cuts the tokens,
isolates sequences that are not finite, passes states in and out, and goes through the chunks in one of two ways.

- On a CPU a scan takes the state from chunk to chunk, and products take most of the time. The scan may do all the work
  of a chunk while the chunk is in cache. The backward then reads the states before the chunks, the inverses and the new
  values, which the forward keeps, and computes the rest of a chunk again.
- A GPU waits for the launch of every operation, and a loop over chunks would be thousands of launches. So the forms of
  a span of chunks are made in large products, `state_scan` finds the states before all of them, and then the outputs
  of all are computed at once. Spans follow one another, so that memory is bounded.

A packed batch without states keeps its chunks aligned to the token stream and masks the pairs of different sequences:
its cost follows tokens, not sequences. A mask does not stop NaN, so a sequence that is not finite is taken as zeros and
its outputs are NaN (see `isolation`). With states, chunks restart at every sequence, so that every sequence has a chunk
boundary where its state can be handed in and out.

Where tokens are split over devices, the chunks run first without queries, to find the map that the tokens apply to a
state. On a CPU the inverses are kept for the second run.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from chunkwise.shared import compat, trees
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import chunking, matmul, tiles
from chunkwise.shared.plain import block_inverse, isolation, state_scan

# The size of a span on a GPU: tokens times heads.
_SPAN = 2**17
# The name of results that the backward does not compute again, beside `state_scan.KEPT`, where a scan does all the work
# of a chunk.
_SOLVED = "solved"


class Tokens(NamedTuple):
    """The tokens of n chunks of C rows, for h key heads and HV value heads.

    Attributes:
      q, k: [n, h, C, K]; q is None where there is no output.
      v: [n, HV, C, V] float32.
      g: float32 gates per channel [n, HV, C, K]; gates per head as rows [n, HV, 1, C], or what `Rule.decays` makes of
        them.
      beta: float32 rows [n, HV, 1, C], or None.
      e: erase keys [n, HV, C, K], or None for k.
      masks: the masks of chunks that may hold several sequences, or None.
      solved: whether the inverses are known, so that only gradients need A.
    """

    q: jax.Array | None
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    e: jax.Array | None
    masks: chunking.StreamMasks | None
    solved: bool

    def of_value_heads(self, y: jax.Array) -> jax.Array:
        """Return [n, H, ...] of key heads as [n, HV, ...]."""
        return tiles.repeat_heads(y, self.v.shape[1], axis=1)

    def flat(self, y: jax.Array) -> jax.Array:
        """Return [n, HV, ...] as [n HV, ...]."""
        return y.reshape(-1, *y.shape[2:])

    def by_head(self, y: jax.Array) -> jax.Array:
        """Return [n HV, ...] as [n, HV, ...], the inverse of `flat`."""
        return y.reshape(*self.v.shape[:2], *y.shape[1:])

    def within_sequence(self, from_start: object, to_end: jax.Array, through: jax.Array) -> tuple[Any, jax.Array, Any]:
        """Return what decays lead to, with zeros where they lead to another sequence.

        Args:
          from_start: arrays [n, heads, C, ...] of rows that read the states before the chunks, in any tree.
          to_end: the same of rows that write the states after them.
          through: the decays over whole chunks, [n, heads, 1, ...].
        """
        if (masks := self.masks) is None:
            return from_start, to_end, through
        of_rows = lambda owned, y: jnp.where(owned[:, None, :, None], y, 0.0)
        from_start = jax.tree.map(lambda y: of_rows(masks.carried, y), from_start)
        return from_start, of_rows(masks.ending, to_end), of_rows(masks.through[:, None], through)


class Form(NamedTuple):
    """How n chunks of h heads with values v change the states S before them, and read them.

        v_new = beta (I + A)^-1 (v - e S)      of a delta rule; v without one
        o = scale (from_start q S + scores v_new)
        S' = through S + k^T to_end v_new

    In a delta rule beta multiplies the columns of A, so that its own gradient needs no division by it. Where there are
    fewer key heads h than value heads HV, several value heads read and write by one key head.

    Attributes:
      through: decays over whole chunks [n, HV, 1, 1] or, per channel, [n, HV, K, 1].
      k: keys [n, h, C, K], decayed to the ends of their chunks without `to_end`.
      q: queries [n, h, C, K], decayed from the starts of their chunks without `from_start`; or None.
      scores: decayed products of queries with keys [n, h, C, C], or None.
      A: strictly lower [n, h, C, C], or None.
      e: the keys that erase, decayed from the starts of the chunks, [n, h, C, K].
      beta: columns [n, h, C, 1].
      from_start, to_end: decays of an operator without a delta rule, columns [n, HV, C, 1]; None if keys and queries
        have them.
    """

    through: jax.Array
    k: jax.Array
    q: jax.Array | None
    scores: jax.Array | None
    A: jax.Array | None = None
    e: jax.Array | None = None
    beta: jax.Array | None = None
    from_start: jax.Array | None = None
    to_end: jax.Array | None = None


class Rule(NamedTuple):
    """The mathematics of the chunks of an operator.

    Attributes:
      form: from tokens, options, and the passes of products of computed operands, as `state_scan.dot` takes them, to
        the form of their chunks.
      decays: from gates per head, as rows of all chunks, and masks to the `g` of `Tokens`; None if the gates stay as
        they are.
      at_once: whether a CPU, too, makes the form of all chunks at once. Otherwise its scan does all the work of a
        chunk.
      most_rows: the most rows of a chunk on a CPU, or None.
      delta: whether it is a delta rule.
    """

    form: Callable[[Tokens, arguments.Options, int | None], Form]
    decays: Callable[[jax.Array, chunking.StreamMasks | None], Any] | None = None
    at_once: bool = True
    most_rows: int | None = None
    delta: bool = True


class _Starts(NamedTuple):
    """For every chunk: whether its sequence begins in it, whether it ends in it, and the sequence's number."""

    first: jax.Array
    last: jax.Array
    sequence: jax.Array

    def store(self, after: jax.Array, finals: jax.Array) -> jax.Array:
        """Return finals [N + 1, ...] with the final states taken from `after`; the last row may hold anything."""
        n, N = after.shape[0], len(finals) - 1
        target = jnp.where(self.last, self.sequence, N + jnp.arange(n, dtype=jnp.int32))
        if n == 1:
            # This updates in place; a scatter would copy all states in every step of a loop.
            return lax.dynamic_update_index_in_dim(finals, after[0], target[0], 0)
        return finals.at[target].set(after, mode="drop", unique_indices=True)


def _initial(starts: _Starts | None, h0: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Return `Chunks.first` and `Chunks.initial` of the scan of states, for initial states h0 of all sequences."""
    if starts is None:
        return None, None
    return starts.first, None if h0 is None else h0[starts.sequence]


def _stream_masks(x: arguments.Arguments, g, beta, C: int) -> tuple[Any, jax.Array]:
    """Return the masks of a packed batch without states, and which tokens have values that are not finite."""
    T = x.v.shape[1]
    nonfinite = isolation.nonfinite_tokens([y for y in (x.q, x.k, x.v, g, beta, x.p) if y is not None], x.cu_seqlens)
    masks = chunking.stream_masks(T, C, x.cu_seqlens)
    # Padding may hold anything, and products read every row of a chunk.
    return masks._replace(valid=masks.valid & ~jnp.pad(nonfinite, (0, -T % C)).reshape(-1, C)), nonfinite


def _filled(tree: object, missing: object) -> Any:
    """Return arrays of chunks with so many chunks of zeros after them, which fill up the last span.

    They leave a state as it is, because the decay of a gate of 0 is 1.
    """
    if isinstance(missing, int) and not missing:
        return tree
    return jax.tree.map(lambda y: jnp.pad(y, [(0, missing)] + [(0, 0)] * (y.ndim - 1)), tree)


def run(
    rule: Rule, x: arguments.Arguments, options: arguments.Options, on_gpu: bool, *, with_output: bool = True,
    keep_states: bool = False, inverses: object = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the output [B, T, HV, V], the final states [N, HV, K, V], and what is kept; None for what is not wanted.

    Args:
      rule: the rule of the operator.
      x: prepared arguments; initial states may have more channels than v, whose missing values are zeros.
      options: options with a chunk size.
      on_gpu: whether to go through the chunks in the way of a GPU.
      with_output: whether to return the output; otherwise a CPU keeps the inverses of all chunks [NT, B HV, C, C].
      keep_states: whether to keep the states before all chunks [NT, B HV, K, V] instead; only without an output. For
        the first chunk of a sequence they are meaningless.
      inverses: the inverses of the same tokens, if they are known; only on a CPU.
    """
    cu_seqlens = x.cu_seqlens
    (B, T, HV, V), K, C = x.v.shape, x.k.shape[-1], options.chunk_size
    stream = cu_seqlens is not None and x.initial_state is None and not options.output_final_state
    bfloat16 = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype) == jnp.bfloat16
    passes = 3 if on_gpu and bfloat16 else None
    g, beta = arguments.total_gate(x), None if x.beta is None else x.beta.astype(jnp.float32)
    chunks = chunking.Chunking(B, T, C, None if stream else cu_seqlens)
    masks, nonfinite = _stream_masks(x, g, beta, C) if stream else (None, None)
    h0 = None if x.initial_state is None else x.initial_state.astype(jnp.float32)
    channels = V if h0 is None else h0.shape[3]
    S = compat.varying_zeros((B * HV, K, channels), *x.arrays().values())
    starts = _Starts(chunks.first, chunks.last, chunks.sequence) if chunks.packed else None
    finals = None
    if chunks.packed and options.output_final_state:
        finals = compat.varying_zeros((chunks.N + 1, HV, K, channels), S)
        finals = finals if h0 is None else finals.at[:-1].set(h0)
    if h0 is not None and not chunks.packed:
        S += h0.reshape(S.shape)

    # Batch and tokens share one axis, because an axis of size 1 between others makes XLA copy what a loop reads.
    def by_time(y):
        return jnp.moveaxis(chunks.spread(y).reshape(B, -1, C, *y.shape[2:]), 1, 0).reshape(-1, B * C, *y.shape[2:])

    # Values per token are so few that all chunks get them heads first at once.
    def rows(y):
        y = jnp.moveaxis(chunks.per_batch(chunks.split_rows(y)), 1, 0).reshape(-1, B * HV, 1, C)
        return y if masks is None else jnp.where(masks.valid[:, None, None], y, 0.0)

    def span(carry, each):
        (S, finals), (tokens, g, beta, masks, starts, A_inv) = carry, each

        # Large arrays get their heads first only inside of the loop, while a chunk is in cache.
        def heads(y):
            y = y.reshape(-1, B, C, *y.shape[2:])
            if masks is not None:
                y = jnp.where(masks.valid[:, None, :, None, None], y, jnp.zeros((), y.dtype))
            return jnp.moveaxis(y, 3, 2).reshape(y.shape[0], -1, C, y.shape[4])

        q, k, v, e, channel_g = jax.tree.map(heads, tokens)
        v = jnp.pad(v.astype(jnp.float32), [(0, 0)] * 3 + [(0, channels - V)])
        tokens = Tokens(q, k, v, g if channel_g is None else channel_g, beta, e, masks, A_inv is not None)
        form = rule.form(tokens, options, passes)
        # Without a delta rule a CPU, too, finds the states first, so that devices that share tokens make them only
        # once.
        together = on_gpu or not rule.delta
        advance = functools.partial(_in_segments, passes) if together else _one_by_one
        o, before, S, A_inv = advance(form, v, S, starts, h0, A_inv, keep_states or finals is not None)
        if finals is not None:
            finals = starts.store(jnp.concatenate([before[1:], S[None]]), finals)
        if with_output:
            o = jnp.moveaxis((x.scale * o).reshape(-1, B, HV, C, V), 2, 3).reshape(-1, B * C, HV, V).astype(x.v.dtype)
            return (S, finals), (o, None)
        return (S, finals), (None, state_scan.select_states(*_initial(starts, h0), before) if keep_states else A_inv)

    n = chunks.NC // B
    count, size = _divide(rule, n, B * HV, C, on_gpu)
    # The names of results that the backward does not compute again; None to keep all that it reads.
    keep = (state_scan.KEPT,) if on_gpu else None if rule.at_once else (state_scan.KEPT, _SOLVED)
    tokens = x.q if with_output else None, x.k, x.v, x.p, g if g.ndim == 4 else None
    per_head = None if g.ndim == 4 else rows(g), None if beta is None else rows(beta)
    tokens, (gates, beta), masks, starts, inverses = _filled(
        (jax.tree.map(by_time, tokens), per_head, masks, starts, inverses), count * size - n
    )
    if gates is not None and rule.decays is not None:
        gates = rule.decays(gates, masks)
    carry, out = _over_spans(count, size, keep, span, (S, finals), (tokens, gates, beta, masks, starts, inverses))
    (S, finals), (o, kept) = carry, trees.at(out, slice(n))
    if with_output:
        o = chunks.gather(jnp.moveaxis(o.reshape(-1, B, C, HV, V), 1, 0).reshape(B, -1, HV, V))
    if nonfinite is not None:
        o = isolation.keep_apart(o, x.v, nonfinite, cu_seqlens)
    if options.output_final_state:
        finals = S.reshape(B, HV, K, channels) if finals is None else finals[:-1]
    return o, finals, kept


def _one_by_one(form: Form, v, S, starts: _Starts | None, h0, A_inv, keep: bool) -> tuple[Any, Any, Any, Any]:
    """Take the state S through chunks; return outputs, the states before them or None, the last S, and inverses."""
    if form.A is not None and A_inv is None:
        A_inv = _inverse(form.A)

    def pass_chunk(S, each):
        x, v, A_inv, starts = each
        here = state_scan.select_states(*_initial(starts, h0), S)
        readers = [y for y in (x.q, x.e) if y is not None]
        seen = jnp.split(matmul.dot(jnp.concatenate(readers, axis=1), here), len(readers), axis=1) if readers else []
        v_new = v if A_inv is None else x.beta * solve(None, x.A, A_inv, v - seen[-1])
        o = None if x.q is None else seen[0] + matmul.dot(x.scores, v_new)
        return x.through * here + matmul.dot_tn(x.k, v_new), (o, S if keep else None)

    xs = form, v, A_inv, starts
    if form.k.shape[0] == 1:
        after, out = pass_chunk(S, trees.at(xs, 0))
        o, before = trees.at(out, None)
    else:
        after, (o, before) = lax.scan(pass_chunk, S, xs)
    return o, before, after, A_inv


def _in_segments(
    passes: int | None, form: Form, v, S, starts: _Starts | None, h0, A_inv, keep: bool
) -> tuple[Any, Any, Any, Any]:
    """Do the same as `_one_by_one` with few launches; return None for the inverses."""
    first, initial = _initial(starts, h0)
    w, u = None, v if form.to_end is None else form.to_end * v
    if form.A is not None:
        A_inv = _inverse(form.A)
        w, u = (form.beta * solve(passes, form.A, A_inv, y) for y in (form.e, v))
    x = state_scan.Chunks(form.through, form.k, u, w, first, initial)
    states, S = state_scan.states_before(x, S, passes)
    o = None
    if form.q is not None and form.scores is not None:
        here = state_scan.select_states(first, initial, states)
        v_new = v if w is None else u - state_scan.dot(w, here, passes)
        seen = state_scan.dot(form.q, here, passes)
        o = (seen if form.from_start is None else form.from_start * seen) + state_scan.dot(form.scores, v_new, passes)
    return o, states, S, None


def _inverse(A: jax.Array) -> jax.Array:
    # `solve` ignores the change of A_inv in first derivatives, which costs nothing; second derivatives need it.
    A_inv = block_inverse.block_inverse(A.reshape(-1, *A.shape[2:])).reshape(A.shape)
    return checkpoint_name(A_inv, state_scan.KEPT)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def solve(passes: int | None, A: jax.Array, A_inv: jax.Array, R: jax.Array) -> jax.Array:
    """Return Y = (I + A)^-1 R for strictly lower A [..., C, C], its inverse A_inv, and R [..., C, D].

    dY = (I + A)^-1 (dR - dA Y): nothing is differentiated through the steps of the inverse.
    """
    return state_scan.dot(A_inv, R, passes)


def _solve_jvp(passes, primals, tangents):
    (_, A_inv, R), (dA, _, dR) = primals, tangents
    Y = checkpoint_name(state_scan.dot(A_inv, R, passes), _SOLVED)
    if isinstance(dR, SymbolicZero):
        dR = jnp.zeros(R.shape, R.dtype)
    # Where only the gradient of a state is asked for, dA is zero: to multiply it by Y would make the program find all
    # states.
    if not isinstance(dA, SymbolicZero):
        dR = dR - state_scan.dot(dA, Y, passes)
    return Y, state_scan.dot(A_inv, dR, passes)


solve.defjvp(_solve_jvp, symbolic_zeros=True)


def _divide(rule: Rule, n: int, h: int, C: int, on_gpu: bool) -> tuple[int, int]:
    """Return the number of spans of n chunks of C tokens with h heads, and how many chunks a span has."""
    if rule.at_once and not on_gpu:
        return 1, n
    if not on_gpu:
        # A loop of one step is unrolled, and the CPU backend of XLA (jax 0.10 to 0.12) then fuses the products of all
        # stages into one operation that computes garbage. A second chunk, of zeros, keeps the loop.
        return jax.core.max_dim(n, 2), 1
    count = -(-n // max(1, _SPAN // (h * C)))
    size = -(-n // count)
    if rule.delta and state_scan.in_segments(size, h):
        size = -(-size // state_scan.SEGMENTS) * state_scan.SEGMENTS
    return -(-n // size), size


def _over_spans(
    count: int, size: int, keep: tuple[str, ...] | None, body: Callable, carry: object, xs: object
) -> tuple[Any, Any]:
    """Scan body(carry, chunks of a span) over `count` spans of xs [n, ...], with the results of `lax.scan`."""

    def one(carry, x):
        carry, out = body(carry, trees.at(x, None))
        return carry, trees.at(out, 0)

    turn = one if size == 1 < count else body
    if keep is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*keep)
        turn = jax.checkpoint(turn, policy=policy, prevent_cse=count == 1)
    if count == 1:
        return turn(carry, xs)
    if size == 1:
        return lax.scan(turn, carry, xs)
    carry, out = lax.scan(turn, carry, jax.tree.map(lambda y: y.reshape(count, size, *y.shape[1:]), xs))
    return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), out)
