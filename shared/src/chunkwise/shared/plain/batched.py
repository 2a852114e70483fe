"""A delta rule in plain JAX for a GPU: all chunks of a group at once, but for one short scan over states.

A GPU waits for the launch of every operation, so a loop that does all of a chunk is thousands of them. Here the package
of an operator gives the `Form` of many chunks at once, in large products, and `state_scan` the states before all of
them; the outputs are batched behind it. Groups of chunks follow one another, so that memory is bounded.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from chunkwise.shared import compat
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import chunking, layout, matmul, tiles
from chunkwise.shared.plain import block_inverse, isolation, recurrence, state_scan

# Tokens times heads of a group.
_GROUP = 2**17


class Form(NamedTuple):
    """The chunk form of n chunks of h heads: v_new = u - w S are the new values for the states S before the chunks.

    Attributes:
      chunks: what the chunks do to states.
      u: [n, h, C, V].
      q_start: queries decayed from the starts of their chunks [n, h, C, K].
      scores: of queries with keys [n, h, C, C].
    """

    chunks: state_scan.Chunks
    u: jax.Array
    q_start: jax.Array
    scores: jax.Array


# From options, q, k [n, B H, C, K], v [n, B HV, C, V], g [n, B HV, C] or [n, B HV, C, K], beta [n, B HV, C], the masks
# of n chunks or None, the products of computed operands, and erase keys [n, B HV, C, K] if there are any.
MakeForm = Callable[..., Form]


def run(make_form: MakeForm, x: arguments.Arguments, options: arguments.Options) -> tuple[jax.Array, Any]:
    """Return the output and the final states, None unless asked for, of prepared arguments."""
    return _run(make_form, x, options, True)[:2]


def states_after(make_form: MakeForm, x: arguments.Arguments, options: arguments.Options) -> jax.Array:
    """Return the final states. Initial states may have more channels than v, whose values are zeros."""
    return _run(make_form, x, options._replace(output_final_state=True), False)[1]


def chunk_states(make_form: MakeForm, x: arguments.Arguments, options: arguments.Options) -> jax.Array:
    """Return the states before all chunks of a packed batch with states, [1, NT, HV, K, V]."""
    return _run(make_form, x, options._replace(output_final_state=True), False, True)[2][None]


def _run(
    make_form: MakeForm,
    x: arguments.Arguments,
    options: arguments.Options,
    with_output: bool,
    keep_states: bool = False,
) -> tuple[Any, Any, Any]:
    """Return the output, unless it is not wanted, the final states, unless they are not, and those before chunks.

    The last are the states before all chunks, [NT, B HV, K, V], if they are kept; there is no output beside them.
    """
    cu_seqlens: Any = x.cu_seqlens
    (B, T, HV, V), K, C = x.v.shape, x.k.shape[-1], options.chunk_size
    bfloat16 = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype) == jnp.bfloat16
    products = state_scan.Products(3 if bfloat16 else None)
    q = recurrence.unit_rows(x.q, options.use_qk_l2norm_in_kernel, cu_seqlens)
    k, beta = recurrence.unit_keys(x.k, x.beta, options.use_qk_l2norm_in_kernel, cu_seqlens)
    tokens = [q, k, x.v, tiles.clip_gate(x.g), beta, *([] if x.p is None else [x.p])]
    stream = cu_seqlens is not None and x.initial_state is None and not options.output_final_state
    nonfinite: Any = isolation.nonfinite_tokens(tokens, cu_seqlens) if stream else None
    if stream:
        # A mask does not stop NaN.
        tokens = [chunking.select_tokens(~nonfinite, y) for y in tokens]
    # What padding holds must not matter.
    q, k, v, g, beta, *p = (chunking.zero_padding(y, cu_seqlens) for y in tokens)
    h0 = None if x.initial_state is None else x.initial_state.astype(jnp.float32)
    channels = V if h0 is None else h0.shape[3]
    v = jnp.pad(v, [(0, 0)] * 3 + [(0, channels - V)])

    chunks = chunking.Chunking(B, T, C, None if stream else cu_seqlens)
    masks = chunking.stream_masks(T, C, cu_seqlens) if stream else None
    start = compat.varying_zeros((B * HV, K, channels), *tokens, h0)
    if h0 is not None and not chunks.packed:
        start += h0.reshape(start.shape)
    finals = None
    if chunks.packed and options.output_final_state:
        finals = compat.varying_zeros((chunks.N, HV, K, channels), *tokens, h0)
    size, by_maps = divide(chunks.NC // B, B * HV, C)

    def by_time(y):
        return jnp.moveaxis(chunks.spread(y).reshape(B, -1, C, *y.shape[2:]), 1, 0)  # [NT, B, C, heads, ...]

    def heads(y):
        return jnp.moveaxis(y, 3, 2).reshape(y.shape[0], -1, C, *y.shape[4:])  # [n, B heads, C, ...]

    def group(carry, each):
        S, finals = carry
        tokens, masks, number, starts = each
        tokens = tuple(map(heads, tokens))
        form = make_form(options, *tokens[:5], masks, products, *tokens[5:])
        restarts = None
        if starts is not None:
            first, sequence = starts
            restarts = state_scan.Restarts(first, None if h0 is None else h0[sequence])
        states, S = state_scan.states_before(form.chunks, form.u, S, restarts, products, by_maps)
        if finals is not None:
            place = chunks.final_chunk - number[0]
            after = jnp.concatenate([states[1:], S[None]])[jnp.clip(place, 0, size - 1)]
            ends = (place >= 0) & (place < size)
            finals = jnp.where(ends[:, None, None, None], after, finals)
        here = state_scan.select_states(restarts, states)
        if not with_output:
            return (S, finals), here if keep_states else None
        v_new = form.u - products.dot(form.chunks.w, here)
        o = x.scale * (products.dot(form.q_start, here) + products.dot(form.scores, v_new))
        return (S, finals), jnp.moveaxis(o.reshape(-1, B, HV, C, channels), 2, 3).astype(x.v.dtype)

    starts = (chunks.first, chunks.sequence) if chunks.packed else None
    number = jnp.arange(chunks.NC // B, dtype=jnp.int32)
    xs = (tuple(map(by_time, (q, k, v, g, beta, *p))), masks, number, starts)
    (S, finals), o = over_groups(size, group, (start, finals), xs)
    if with_output:
        o = chunks.gather(jnp.moveaxis(o, 0, 1).reshape(B, -1, HV, V))
    if stream:
        return isolation.keep_apart(o, x.v, nonfinite, cu_seqlens), None, None
    if not options.output_final_state:
        return o, None, None
    finals = S.reshape(B, HV, K, channels) if finals is None else layout.unless_empty(finals, h0, cu_seqlens)
    return (o, finals, None) if with_output else (None, finals, o)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def solve(products: state_scan.Products, A: jax.Array, rights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return (I + A)^-1 R for every R [n, h, C, D], of strictly lower A [n, h, C, C].

    Nothing is differentiated through the steps of the inverse.
    """
    return _solve(products, A, rights)[1]


def _solve(products, A, rights):
    X = block_inverse.block_inverse(A.reshape(-1, *A.shape[2:])).reshape(A.shape)
    X = checkpoint_name(X, state_scan.KEPT)
    return X, tuple(products.dot(X, R) for R in rights)


@solve.defjvp
def _solve_jvp(products, primals, tangents):
    (A, rights), (dA, drights) = primals, tangents
    X, found = _solve(products, A, rights)
    dA = jnp.where(tiles.strictly_lower(A.shape[-1]), dA, 0.0)
    return found, tuple(products.dot(X, dR - products.dot(dA, Y)) for dR, Y in zip(drights, found, strict=True))


def divide(n: int, h: int, C: int) -> tuple[int, bool]:
    """Return how many of n chunks of C tokens with h heads a group has, and whether its states go by maps."""
    count = -(-n // max(1, _GROUP // (h * C)))
    chunks = -(-n // count)
    by_maps = h <= state_scan.FEW_HEADS and chunks >= 2 * state_scan.SEGMENTS
    if by_maps:
        chunks = -(-chunks // state_scan.SEGMENTS) * state_scan.SEGMENTS
    return chunks, by_maps


def over_groups(chunks: int, body: Callable, carry: Any, xs: Any) -> tuple[Any, Any]:
    """Return what `lax.scan` of body(carry, chunks of a group) over groups of so many chunks of xs [n, ...] returns.

    Zeros fill the last group. The backward computes a group again from the states and inverses that it kept.
    """
    n = jax.tree.leaves(xs)[0].shape[0]
    count = -(-n // chunks)
    missing = count * chunks - n
    xs = jax.tree.map(lambda y: jnp.pad(y, [(0, missing)] + [(0, 0)] * (y.ndim - 1)) if missing else y, xs)
    policy = jax.checkpoint_policies.save_only_these_names(state_scan.KEPT)
    if count == 1:
        carry, out = jax.checkpoint(body, policy=policy)(carry, xs)
    else:
        xs = jax.tree.map(lambda y: y.reshape(count, chunks, *y.shape[1:]), xs)
        carry, out = jax.lax.scan(jax.checkpoint(body, policy=policy, prevent_cse=False), carry, xs)
        out = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), out)
    return carry, jax.tree.map(lambda y: y[:n], out)
