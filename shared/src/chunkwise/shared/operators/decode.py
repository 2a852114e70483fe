"""Decode of the delta rules: a few tokens of many sequences in one launch, their states updated in place.

A grid step takes the states of some heads of one sequence: it reads them once, runs the sequence's tokens, and writes
them back over themselves. A token is bound by memory, so its products are sums on the vector unit, in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared.compat import out_struct, vary_alike, varying_zeros
from chunkwise.shared.kernels.chunks import zero_padding
from chunkwise.shared.kernels.launch import pallas_call, scaled, split_scale
from chunkwise.shared.kernels.packed import LANES, pad_lanes, round_up
from chunkwise.shared.kernels.tiles import l2norm, repeat_heads, to_column
from chunkwise.shared.operators.checks import check, check_initial_state
from chunkwise.shared.operators.recurrence import packed_recurrence, recurrence

# VMEM for the states (two buffers each of those read and written), for the tokens, and for all of it.
STATE_BYTES = 16 * 2**20
TOKEN_BYTES = 32 * 2**20
VMEM_BYTES = 60 * 2**20


def check_slots(initial_state, state_indices, has_initial_state, N: int, HV: int, K: int, V: int) -> None:
    """Check the states of N sequences, and which slot of a pool each of them has."""
    if state_indices is None:
        check_initial_state(initial_state, (N, HV, K, V))
    else:
        check(initial_state is not None, "`state_indices` must come with the pool as `initial_state`; got None.")
        check_initial_state(initial_state, (None, HV, K, V))
    for name, x, dtype in (("state_indices", state_indices, jnp.int32), ("has_initial_state", has_initial_state, bool)):
        check(
            x is None or (x.shape == (N,) and x.dtype == dtype),
            f"`{name}` must be {jnp.dtype(dtype).name} of shape {(N,)}; got "
            f"{x if x is None else f'{x.dtype} {tuple(x.shape)}'}.",
        )


def token_by_token(q, k, v, g, beta, scale, initial_state, cu_seqlens, normalise: bool):
    """Return (o, states) of the recurrence in float32, o in the type of v; beta is None without the delta rule."""
    # Padding may hold anything, and its gradient is zero.
    q, k, v, g, beta = jax.tree.map(lambda x: zero_padding(x, cu_seqlens), (q, k, v, g, beta))
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if normalise:
        q, k = l2norm(q), l2norm(k)
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    if cu_seqlens is None:
        o, states = recurrence(q, k, v, g, beta, scale, initial_state, jnp.float32)
    else:
        o, states = packed_recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens, jnp.float32)
    return o.astype(v.dtype), states


def decode(
    q, k, v, g, beta, scale, initial_state, cu_seqlens, state_indices, has_initial_state, *, normalise: bool, name: str,
    implementation: str,
):  # fmt: skip
    """Run a delta rule over a few tokens per sequence.

    Args:
      q, k, v, g, beta, scale, initial_state, cu_seqlens: of the operators; g per head [B, T, HV] or per channel
        [B, T, HV, K]. With state_indices, initial_state is a pool [slots, HV, K, V].
      state_indices: int32 [N], the slot of every sequence; distinct. None for sequence n in slot n.
      has_initial_state: bool [N], False where a sequence starts from zero whatever its slot holds; None for True.
      normalise: whether to apply the l2 norm to q and k; static.
      name: of the kernel; static.
      implementation: "pallas" or "xla"; static.

    Returns:
      o [B, T, HV, V] and the states, or the pool, after the tokens, float32.

    Raises:
      NotImplementedError: "pallas", and the tokens and states do not fit into VMEM; see `decode_fits`.
    """
    inside, after = split_scale(scale)
    o, states = _run(
        q, k, v, g, beta, initial_state, cu_seqlens, state_indices, has_initial_state, inside, normalise, name,
        implementation,
    )  # fmt: skip
    return scaled(o, after), states


@functools.partial(jax.jit, static_argnums=(9, 10, 11, 12))
def _run(q, k, v, g, beta, pool, cu_seqlens, slots, kept, scale, normalise, name, implementation):
    if pool is None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        pool = varying_zeros((N, v.shape[2], q.shape[3], v.shape[3]), q, k, v, g, beta)
    arrays = q, k, v, g, beta, pool.astype(jnp.float32), cu_seqlens, slots, kept
    if implementation == "xla":
        return _xla(scale, normalise, *arrays)
    return _pallas(name, scale, normalise, *vary_alike(*arrays))


def _xla(scale, normalise, q, k, v, g, beta, pool, cu_seqlens, slots, kept):
    states = pool if slots is None else pool[slots]
    if kept is not None:
        states = jnp.where(kept[:, None, None, None], states, 0.0)
    o, states = token_by_token(q, k, v, g, beta, scale, states, cu_seqlens, normalise)
    return o, states if slots is None else pool.at[slots].set(states)


def _forward(name, scale, normalise, q, k, v, g, beta, pool, cu_seqlens, slots, kept):
    B, T = q.shape[:2]
    starts = jnp.arange(B + 1, dtype=jnp.int32) * T if cu_seqlens is None else cu_seqlens
    N = starts.shape[0] - 1
    slots = jnp.arange(N, dtype=jnp.int32) if slots is None else slots
    kept = jnp.ones((N,), jnp.int32) if kept is None else kept.astype(jnp.int32)
    tokens = [x.reshape(B * T, *x.shape[2:]) for x in (q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32))]
    o, pool = launch(*tokens, pool, slots, starts[:-1], jnp.diff(starts), kept, scale, normalise, name)
    return o.reshape(v.shape), pool


def _backward(name, scale, normalise, inputs, cotangents):
    *arrays, cu_seqlens, slots, kept = inputs
    pull = jax.vjp(lambda *x: _xla(scale, normalise, *x, cu_seqlens, slots, kept), *arrays)[1]
    return *pull(cotangents), None, None, None


# The gradient is that of the plain form: a few tokens are not worth a kernel.
_pallas = jax.custom_vjp(_forward, nondiff_argnums=(0, 1, 2))
_pallas.defvjp(lambda name, scale, normalise, *x: (_forward(name, scale, normalise, *x), x), _backward)


def _decode_kernel(
    slot_ref, start_ref, count_ref, kept_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, pool_ref, o_ref, after_ref,
    *, scale, normalise,
):  # fmt: skip
    n = pl.program_id(1)
    heads = v_ref.shape[1]
    start = start_ref[n]

    # Tokens of no sequence are zero.
    @pl.when(n == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    def token(i, S):
        t = start + i
        q, k, v = (as_rows(ref[t].astype(jnp.float32)) for ref in (q_ref, k_ref, v_ref))
        if normalise:
            q, k = l2norm(q), l2norm(k)
        q, k = (repeat_heads(to_column(x), heads) for x in (q, k))
        g = as_scalars(g_ref[pl.ds(t, 1)]) if len(g_ref.shape) == 2 else to_column(as_rows(g_ref[t]))
        S = jnp.exp(g) * S
        S = S + k * (as_scalars(beta_ref[pl.ds(t, 1)]) * (v - jnp.sum(S * k, axis=1, keepdims=True)))
        o = scale * jnp.sum(S * q, axis=1, keepdims=True)
        o_ref[t] = jnp.concatenate(list(o)).astype(o_ref.dtype)
        return S

    S = jnp.where(kept_ref[n] == 1, pool_ref[...], 0.0)
    after_ref[...] = lax.fori_loop(0, count_ref[n], token, S)


def as_rows(x: jax.Array) -> jax.Array:
    """Return [heads, D] as [heads, 1, D]."""
    return jnp.stack([x[i : i + 1] for i in range(x.shape[0])])


def as_scalars(row: jax.Array) -> jax.Array:
    """Return a row [1, heads] as [heads, 1, 1]."""
    return jnp.stack([row[:, i : i + 1] for i in range(row.shape[1])])


def _token_bytes(x, heads: int) -> int:
    """Return the VMEM of `heads` heads of tokens x [T, all heads, ...], in whole registers."""
    rows = 32 // x.dtype.itemsize
    tile = round_up(heads, rows) * pad_lanes(x.shape[2]) if len(x.shape) == 3 else LANES
    return x.dtype.itemsize * x.shape[0] * tile


def _key_heads_a_step(q, k, v, g, beta) -> int | None:
    """Return for how many key heads of tokens [T, heads, ...] the states and all tokens fit into VMEM, None if none."""
    H, group = q.shape[1], v.shape[1] // q.shape[1]
    # Read and written, two buffers each.
    state = 4 * 4 * group * round_up(q.shape[2], 8) * pad_lanes(v.shape[2])

    def tokens(own):
        # The outputs have two buffers.
        return sum(_token_bytes(x, own) for x in (q, k)) + sum(_token_bytes(x, own * group) for x in (v, v, v, g, beta))

    fit = [n for n in range(1, H + 1) if H % n == 0 and tokens(n) <= TOKEN_BYTES]
    if not fit or tokens(fit[0]) + fit[0] * state > VMEM_BYTES:
        return None
    return max([n for n in fit if n * state <= STATE_BYTES], default=fit[0])


def decode_fits(q, k, v, g, beta) -> bool:
    """Return whether the kernel takes so many tokens q [B, T, H, K] and so large states: else "xla" must."""
    flat = lambda x, dtype: jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), dtype)
    tokens = *(flat(x, x.dtype) for x in (q, k, v)), *(flat(x, jnp.float32) for x in (g, beta))
    return _key_heads_a_step(*tokens) is not None


def launch(q, k, v, g, beta, pool, slot, start, count, kept, scale: float, normalise: bool, name: str):
    """Run the kernel.

    Args:
      q, k: tokens [T, H, K] of all sequences, one after the other.
      v: [T, HV, V].
      g: [T, HV] or [T, HV, K] float32.
      beta: [T, HV] float32.
      pool: states [slots, HV, K, V] float32; updated in place where its buffer is donated.
      slot: int32 [N], the slot of every sequence; distinct.
      start, count: int32 [N], its first token and how many.
      kept: int32 [N], 1 where it continues the state in its slot, 0 where it starts from zero.
      scale, normalise, name: static.

    Returns:
      o [T, HV, V] in the type of v and the pool after.

    Raises:
      NotImplementedError: the tokens and states do not fit into VMEM.
    """
    T, H, K = q.shape
    HV, V = v.shape[1:]
    group = HV // H
    own = _key_heads_a_step(q, k, v, g, beta)
    if own is None:
        raise NotImplementedError(
            f'"pallas" takes a few tokens per sequence; {T} tokens and states [{K}, {V}] of {group} value heads for a '
            f'key head do not fit into VMEM: use the chunked operator or implementation="xla".'
        )
    heads, blocks = own * group, H // own

    def cut(x, width):
        return jnp.moveaxis(x.reshape(T, blocks, width, *x.shape[2:]), 1, 0)

    tokens = cut(q, own), cut(k, own), cut(v, heads), cut(g, heads), cut(beta, heads)

    def whole(x, buffers):
        index = lambda h, n, *_: (h, *[0] * (x.ndim - 1))
        return pl.BlockSpec((None, *x.shape[1:]), index, pipeline_mode=pl.Buffered(buffers))

    state = pl.BlockSpec((None, heads, K, V), lambda h, n, slot, *_: (slot[n], h, 0, 0))
    o, pool = pallas_call(
        functools.partial(_decode_kernel, scale=scale, normalise=normalise),
        slot, start, count, kept, *tokens, pool,
        name=name,
        num_scalar_prefetch=4,
        # Blocks of heads are independent; sequences share the block of outputs, so they come one after the other.
        grid=(blocks, slot.shape[0]),
        dimension_semantics=("parallel", "arbitrary"),
        in_specs=[*(whole(x, 1) for x in tokens), state],
        out_specs=[whole(tokens[2], 2), state],
        out_shape=[out_struct(tokens[2].shape, v.dtype, q, k, v, g, beta, pool),
                   out_struct(pool.shape, jnp.float32, q, k, v, g, beta, pool)],
        # Counted with the scalar tables.
        input_output_aliases={9: 1},
        cost_estimate=pl.CostEstimate(
            flops=7 * T * HV * K * V,
            transcendentals=g.size,
            bytes_accessed=8 * slot.shape[0] * HV * K * V + q.nbytes + k.nbytes + 2 * v.nbytes + g.nbytes,
        ),
        vmem_limit_bytes=VMEM_BYTES,
    )  # fmt: skip
    return jnp.moveaxis(o, 0, 1).reshape(v.shape), pool
