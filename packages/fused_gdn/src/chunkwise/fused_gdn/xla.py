"""The same operator in plain JAX, chunk by chunk.

One scan over chunks does everything of a chunk while it is in cache: its time is that of the products. The backward
reads the states before the chunks, the inverses and the new values, which the forward keeps, and computes the rest of
a chunk again: two products for each of the forward, none for the inverse.

A packed batch without states keeps its chunks aligned to the token stream and masks the pairs of different
sequences: its cost follows tokens, not sequences. A mask does not stop NaN, so a sequence that is not finite is taken
as zeros and its outputs are NaN (see shared.plain.isolation). With states, chunks restart at every sequence, so
that every sequence has a chunk boundary where its state can be handed in and out.

Where tokens are split over devices the same scan runs before, without queries, and gives what the tokens do to a state.
It keeps the inverses, and the operator behind it takes these.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from chunkwise.fused_gdn import tile
from chunkwise.shared import compat
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import chunking, layout, matmul, tiles
from chunkwise.shared.plain import block_inverse, isolation, recurrence, state_scan

# Products inside a chunk cost C per token, steps of the scan and states that the backward keeps 1 / C: see
# docs/maintain/lessons.md.
_MOST_ROWS = 32

# What the backward reads instead of computing it again, under the name `state_scan.KEPT`.
_checkpoint = functools.partial(
    jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(state_scan.KEPT)
)


class Decays(NamedTuple):
    """The decays of chunks, rows [NT, HV, 1, C].

    Attributes:
      coarse, fine: parts of the cumulative gates, in nats; see `split_gate`.
      from_start: from the start of the chunk to each token, 0 for tokens of later sequences.
      to_end: from each token to the end of the chunk, 0 for tokens of sequences that ended.
      through: [NT, HV, 1, 1], over the whole chunk, 0 if another sequence begins in it.
    """

    coarse: jax.Array
    fine: jax.Array
    from_start: jax.Array
    to_end: jax.Array
    through: jax.Array


def gated_delta_rule(
    x: arguments.Arguments, options: arguments.Options, inverses: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Return (o, final_state) for checked arguments; final_state is None unless asked for.

    `inverses` are those of `states_after`, of the same tokens.
    """
    return _scan(x, options, True, inverses)[:2]


def states_after(x: arguments.Arguments, options: arguments.Options) -> tuple[jax.Array, jax.Array]:
    """Return the states after the tokens and the inverses of all chunks [steps, B HV, C, C]; nothing reads queries.

    Initial states, which there must be, may have more channels than v, whose values are zeros.
    """
    _, states, inverses, _ = _scan(x, options._replace(output_final_state=True), False, None)
    return states, inverses


def chunk_states(x: arguments.Arguments, options: arguments.Options) -> jax.Array:
    """Return the states before all chunks of a packed batch with states, [1, NT, HV, K, V].

    Before the first chunk of a sequence they are meaningless.
    """
    after = _scan(x, options._replace(output_final_state=True), False, None, options.chunk_size)[3]
    return jnp.roll(after, 1, axis=0)[None]


def _scan(
    x: arguments.Arguments,
    options: arguments.Options,
    with_output: bool,
    kept: jax.Array | None,
    most_rows: int = _MOST_ROWS,
) -> tuple[Any, Any, Any, Any]:
    """Return the output, the final states, the inverses and the states after all chunks.

    There is an output if it is wanted, and inverses if it is not; final states if the options ask for them, and those
    after chunks, [NT, HV, K, V], if the batch is packed too.
    """
    v, scale, initial_state = x.v, x.scale, x.initial_state
    cu_seqlens: Any = x.cu_seqlens
    output_final_state = options.output_final_state
    q = recurrence.unit_rows(x.q, options.use_qk_l2norm_in_kernel, cu_seqlens)
    k, beta = recurrence.unit_keys(x.k, x.beta, options.use_qk_l2norm_in_kernel, cu_seqlens)
    (B, T, HV, V), K, C = v.shape, k.shape[-1], min(options.chunk_size or most_rows, most_rows)
    stream = cu_seqlens is not None and initial_state is None and not output_final_state
    chunks = chunking.Chunking(B, T, C, None if stream else cu_seqlens)
    masks: Any = chunking.stream_masks(T, C, cu_seqlens) if stream else None
    gates = tiles.clip_gate(x.g)
    nonfinite: Any = isolation.nonfinite_tokens((q, k, v, gates, beta), cu_seqlens) if stream else None
    h0 = None if initial_state is None else initial_state.astype(jnp.float32)

    # One axis for batch and tokens: an axis of size 1 between others makes XLA copy what a loop reads.
    def by_time(x):
        return jnp.moveaxis(chunks.spread(x).reshape(B, -1, C, *x.shape[2:]), 1, 0).reshape(-1, B * C, *x.shape[2:])

    # Heads come first inside the scan only, where a chunk is in cache.
    def heads(x):
        return jnp.moveaxis(x.reshape(B, C, *x.shape[1:]), 2, 1).reshape(-1, C, *x.shape[2:])

    # Values per token are so few that they are put in order, heads first, for all chunks at once.
    def rows(x):
        return jnp.moveaxis(chunks.per_batch(chunks.split_rows(x)), 1, 0).reshape(-1, B * HV, 1, C)

    @_checkpoint
    def step(S, x):
        tokens, decays, beta, masks, first, sequence, A_inv = x
        if chunks.packed:
            S = jnp.where(first, 0.0 if h0 is None else h0[sequence], S)
        if stream:
            tokens = [_select(masks, x, (C, 1, 1)) for x in tokens]
        q, k, v = jax.tree.map(heads, tokens)
        S, o, A_inv = _chunk(S, q, k, v, decays, beta, scale, None if masks is None else masks.same, A_inv)
        if with_output:
            o = jnp.moveaxis(o.reshape(B, HV, C, V), 1, 2).reshape(B * C, HV, V).astype(v.dtype)
        return S, (o, S if chunks.packed and output_final_state else None, None if with_output else A_inv)

    channels = V if h0 is None else h0.shape[3]
    start = compat.varying_zeros((B * HV, K, channels), q, k, v, gates, beta, initial_state)
    if h0 is not None and not chunks.packed:
        start += h0.reshape(start.shape)
    first, sequence = (chunks.per_batch(x)[0] for x in (chunks.first, chunks.sequence))
    tokens = jax.tree.map(by_time, (q if with_output else None, k, v))
    gates, beta = rows(gates), rows(beta)
    if stream:
        # Padding may hold anything, and products read every row of a chunk.
        masks = masks._replace(valid=masks.valid & ~_by_chunk(nonfinite, C))
        gates, beta = (_select(masks, x, (-1, 1, 1, C)) for x in (gates, beta))
    tokens, gates, beta, masks, first, sequence = jax.tree.map(
        _keep_loop, (tokens, gates, beta, masks, first, sequence)
    )
    xs = (tokens, find_decays(gates, masks), beta, masks, first, sequence, kept)
    S, (o, after, inverses) = lax.scan(step, start, xs)
    if with_output:
        o = o[: chunks.NC // B].reshape(-1, B, C, HV, V)
        o = chunks.gather(jnp.moveaxis(o, 1, 0).reshape(B, -1, HV, V))
    if stream:
        return isolation.keep_apart(o, v, nonfinite, cu_seqlens), None, None, None
    if not output_final_state:
        return o, None, None, None
    if not chunks.packed:
        return o, S.reshape(B, HV, K, channels), inverses, None
    return o, layout.unless_empty(after[chunks.final_chunk], h0, cu_seqlens), inverses, after[: chunks.NC]


def _by_chunk(x: jax.Array, C: int) -> jax.Array:
    """Return x [T] as chunks [NT, C], False past the end."""
    return jnp.pad(x, (0, -x.shape[0] % C)).reshape(-1, C)


def _select(masks: chunking.StreamMasks, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return x, or zeros for tokens that are not valid; the mask gets this shape."""
    return jnp.where(masks.valid.reshape(shape), x, jnp.zeros((), x.dtype))


def _keep_loop(x):
    """Return operands of a scan, of two steps at least.

    A loop of one step is unrolled, and the CPU backend of XLA (jax 0.10 to 0.12) then fuses the products of all stages
    into one operation that computes garbage. A second chunk, of zeros, keeps the loop.
    """
    return x if x.shape[0] > 1 else jnp.concatenate([x, jnp.zeros_like(x)])


def _chunk(S, q, k, v, decays, beta, scale, same, A_inv) -> tuple[jax.Array, Any, jax.Array]:
    """Return the state after a chunk, its output, and its inverse, from the state S [HV, K, V] before it.

    The new values are beta (I + A)^-1 (v - e^G k S), which is u - w S with one product less: here beta multiplies the
    columns of A, so that its own gradient needs no division by it.

    Args:
      S: may have more channels than v, whose values are zeros.
      q, k, v: [h, C, K], [h, C, K], [HV, C, V]. Without q there is no output.
      decays: `Decays` of the chunk.
      beta: rows [HV, 1, C].
      scale: multiplies the output.
      same: bool [C, C], rows of one sequence, if the chunk may hold several; else None.
      A_inv: the inverse, if it is known.
    """
    HV, C, V = v.shape
    coarse, fine, from_start, to_end, through = decays
    below = tiles.strictly_lower(C) if same is None else tiles.strictly_lower(C) & same[None]
    # The diagonal is left out: its 1 does not depend on gates, and in their gradient it would swamp decays of 1e-13.
    decay = tiles.masked_exp((_column(coarse) - coarse) + (_column(fine) - fine), below)
    readers = [k] if q is None else [k, q]
    n, rows = len(readers), jnp.concatenate(readers, axis=1)  # [h, n C, K]: one product serves keys and queries
    # With the inverse given only gradients need the product of the keys.
    products = jnp.split(matmul.dot_nt(rows, k), n, axis=1) if A_inv is None else [matmul.dot_nt(x, k) for x in readers]
    kk, *qk = (tiles.repeat_heads(x, HV) for x in products)  # [HV, C, C]
    rows = tiles.repeat_heads(rows, HV) * _column(jnp.concatenate([from_start] * n, axis=2))  # [HV, n C, K]
    seen_k, *seen_q = jnp.split(matmul.dot(rows, S), n, axis=1)  # [HV, C, V]
    A = decay * kk * beta
    if A_inv is None:
        A_inv = checkpoint_name(block_inverse.block_inverse(A), state_scan.KEPT)
    v = jnp.pad(v, [(0, 0), (0, 0), (0, S.shape[2] - V)])
    v_new = _column(beta) * _solve(A, A_inv, v - seen_k)
    after = through * S + matmul.dot_tn(tiles.repeat_heads(k, HV) * _column(to_end), v_new)
    if q is None:
        return after, None, A_inv
    # A token reads its own value undecayed.
    scores = jnp.where(tiles.row_index(C) == tiles.column_index(C), qk[0], decay * qk[0])
    return after, scale * (seen_q[0] + matmul.dot(scores, v_new)), A_inv


def _column(row):
    return jnp.swapaxes(row, 1, 2)


@jax.custom_jvp
def _solve(A, A_inv, R):
    """Return X = (I + A)^-1 R for strictly lower A [HV, C, C], its inverse, and R [HV, C, V].

    dX = (I + A)^-1 (dR - dA X): nothing is differentiated through the steps of the inverse.
    """
    return matmul.dot(A_inv, R)


def _solve_jvp(primals, tangents):
    (_, A_inv, R), (dA, _, dR) = primals, tangents
    X = checkpoint_name(matmul.dot(A_inv, R), state_scan.KEPT)
    if isinstance(dR, SymbolicZero):
        dR = jnp.zeros(R.shape, R.dtype)
    # A zero here, where only the gradient of a state is wanted, would be multiplied by X, which needs all states.
    if not isinstance(dA, SymbolicZero):
        dR = dR - matmul.dot(dA, X)
    return X, matmul.dot(A_inv, dR)


_solve.defjvp(_solve_jvp, symbolic_zeros=True)


def find_decays(g, masks) -> Decays:
    """Return the decays of chunks from their gates g, rows [NT, HV, 1, C], within the sequences of `masks`."""
    if masks is None:
        coarse, fine = (lax.cumsum(part, axis=3) for part in tile.split_gate(g))
        # Summed from the end: in the difference to the last row a decay of 1 would depend on gates that cancel.
        after = lax.cumsum(g, axis=3, reverse=True)[..., 1:]
        to_end = jnp.exp(jnp.pad(after, [(0, 0), (0, 0), (0, 0), (0, 1)]))
        from_start = jnp.exp(coarse + fine)
        return Decays(coarse, fine, from_start, to_end, from_start[..., -1:])
    # Every sequence for itself, so that what one holds does not change the rounding of another.
    C, same = g.shape[3], masks.same
    coarse, fine = (_sums(part, same & tiles.lower(C)) for part in tile.split_gate(g))
    from_start = jnp.where(masks.carried[:, None, None], jnp.exp(coarse + fine), 0.0)
    to_end = jnp.where(masks.ending[:, None, None], jnp.exp(_sums(g, same & ~tiles.lower(C))), 0.0)
    through = jnp.where(masks.through[:, None, None, None], from_start[..., -1:], 0.0)
    return Decays(coarse, fine, from_start, to_end, through)


def _sums(g, selected):
    """Return the sums of gates g, rows [NT, HV, 1, C], over the columns j selected for every i, bool [NT, C, C]."""
    return matmul.dot_nt(g[:, :, 0], selected.astype(jnp.float32))[:, :, None]
