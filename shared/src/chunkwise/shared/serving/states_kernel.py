"""The kernel that decodes: a few tokens of many sequences in one launch, their states updated in place.

A grid step takes the states of some heads of one sequence: it reads them once, runs the sequence's tokens, and writes
them to the slot that they go to. If states after several tokens of a sequence are written, a step takes one token, and
the states stay in fast memory between the steps of a sequence. A token takes the time of its memory traffic, so its
products are sums on the vector unit, in float32. States are [K, V] here, the user's layout.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared import compat, tuning
from chunkwise.shared.call.arguments import Arguments
from chunkwise.shared.kernels import launcher, packed, pools, tiles
from chunkwise.shared.serving.decode.records import DecodeStatic

# VMEM for the states (two buffers for reads, two for writes, and the states of the computation), and for the tokens.
_STATE_BYTES = 4 * tuning.VMEM_LIMIT_BYTES // 15
_TOKEN_BYTES = 8 * tuning.VMEM_LIMIT_BYTES // 15


class StatesRefs(NamedTuple):
    """The Refs of the kernel: scalar tables, then tokens of all sequences one after the other, then states.

    `heads` is the number of value heads of a grid step, and `keys` the number of its key heads.

    Attributes:
      start, count: int32 [N], the first token of a sequence and its number of tokens.
      source: int32 [N], the slot whose block the steps of a sequence hold, to read it.
      continues: int32 [N], 1 if the sequence starts from the state in that slot, 0 if it starts from zeros.
      target: int32 [N * W], the slot whose block a step holds, to write it.
      written: int32 [N * W], 1 if the step writes that slot.
      q, k: [tokens, keys, K]; v, o: [tokens, heads, V].
      g: [tokens, heads] or [tokens, heads, K] float32.
      beta: [tokens, heads] float32, or None without the delta rule.
      p: [tokens, heads, K] float32, erase keys, which the kernel does not normalise; None for k.
      pool, pool_out: [heads, K, V], the slot that is read, and the slot that is written.
      state: float32 [heads, K, V], the states between the tokens of a sequence.
    """

    start: jax.Ref
    count: jax.Ref
    source: jax.Ref
    continues: jax.Ref
    target: jax.Ref
    written: jax.Ref
    q: jax.Ref
    k: jax.Ref
    v: jax.Ref
    g: jax.Ref
    pool: jax.Ref
    o: jax.Ref
    pool_out: jax.Ref
    state: jax.Ref
    beta: jax.Ref
    p: jax.Ref


def _states_kernel(refs: StatesRefs, static: DecodeStatic):
    n, t = pl.program_id(1), pl.program_id(2)
    step = n * jnp.int32(static.W) + t
    group = refs.v.shape[1] // refs.q.shape[1]
    # The only token of a sequence reads states from the block of the pool; other tokens read them from `state`, where
    # the token before left them.
    direct = static.single and static.W == 1

    @pl.when(step == 0)
    def _():
        # The output of a token is zero if no sequence has the token.
        refs.o[...] = jnp.zeros_like(refs.o)

        @pl.when(refs.source[0] == refs.target[0])
        def _():
            pools.copy_through(refs.pool, refs.pool_out)

    def state_in(head):
        # A freed slot may hold anything, so zeros are selected, because 0 times NaN is NaN.
        return jnp.where(refs.continues[n] == 1, refs.pool[head].astype(jnp.float32), 0.0)  # [K, V]

    def token(i, carry):
        at = refs.start[n] + i
        # One row per head, [heads, 1, D].
        q, k, v = (_as_rows(ref[at].astype(jnp.float32)) for ref in (refs.q, refs.k, refs.v))
        if static.normalise:
            q, k = tiles.l2norm(q), tiles.l2norm(k)
        # Gates are [heads, 1, 1], or per channel [heads, 1, K].
        g = _as_scalars(refs.g[pl.ds(at, 1)]) if len(refs.g.shape) == 2 else _as_rows(refs.g[at])
        decay = jnp.exp(g)
        beta = None if refs.beta is None else _as_scalars(refs.beta[pl.ds(at, 1)])
        p = None if refs.p is None else _as_rows(refs.p[at])
        # The loop takes one head at a time, so that only one state is in registers: all states together would be
        # spilled.
        o = []
        for key in range(q.shape[0]):
            q_column, k_column = (tiles.to_column(x[key : key + 1])[0] for x in (q, k))  # [K, 1]
            for head in range(key * group, (key + 1) * group):
                rate = decay[head : head + 1]  # [1, 1, 1] or [1, 1, K]
                S = state_in(head) if direct else refs.state[head]
                before, S = S, (rate if rate.shape[2] == 1 else tiles.to_column(rate))[0] * S  # [K, V]
                new = v[head]  # [1, V]
                if beta is not None:
                    p_column = k_column if p is None else tiles.to_column(p[head : head + 1])[0]
                    erased = before if static.erase_before_decay else S
                    new = beta[head] * (new - jnp.sum(erased * p_column, axis=0, keepdims=True))
                refs.state[head] = S = S + k_column * new
                o.append(static.scale * jnp.sum(S * q_column, axis=0, keepdims=True))
        refs.o[at] = jnp.concatenate(o).astype(refs.o.dtype)
        return carry

    if not direct:

        @pl.when(t == 0)
        def _():
            for head in range(refs.state.shape[0]):
                refs.state[head] = state_in(head)

    if static.single:
        pl.when(t < refs.count[n])(lambda: token(t, None))
    else:
        lax.fori_loop(jnp.int32(0), refs.count[n], token, None)

    @pl.when(refs.written[step] == 1)
    def _():
        for head in range(refs.state.shape[0]):
            refs.pool_out[head] = refs.state[head].astype(refs.pool_out.dtype)


def _as_rows(x: jax.Array) -> jax.Array:
    """Return [heads, D] as [heads, 1, D]."""
    return jnp.stack([x[i : i + 1] for i in range(x.shape[0])])


def _as_scalars(row: jax.Array) -> jax.Array:
    """Return a row [1, heads] as [heads, 1, 1]."""
    return jnp.stack([row[:, i : i + 1] for i in range(row.shape[1])])


def _token_bytes(heads: int, D: int, dtype=jnp.float32) -> int:
    """Return the bytes of VMEM of a token's heads [heads, D], in whole registers; D is 0 for one number per head."""
    # The kernel sees float16 as float32.
    itemsize = 4 if dtype == jnp.float16 else jnp.dtype(dtype).itemsize
    return itemsize * (packed.round_up(heads, 32 // itemsize) * packed.pad_lanes(D) if D else packed.LANES)


def key_heads_a_step(x: Arguments) -> int | None:
    """Return how many key heads a grid step takes, with states and tokens in VMEM; None if one does not fit."""
    (B, T, H, K), (HV, V) = x.q.shape, x.v.shape[2:]
    group, gate = HV // H, K if x.g is not None and x.g.ndim == 4 else 0
    # If there are erase keys, all arrays of tokens are float32.
    kind = lambda y: jnp.float32 if x.erases else y.dtype
    # Two buffers for reads, two for writes, and the states of the computation.
    state = 5 * 4 * group * packed.round_up(K, 8) * packed.pad_lanes(V)

    def tokens(key_heads):
        heads = key_heads * group
        keys = sum(_token_bytes(key_heads, K, kind(y)) for y in (x.q, x.k)) + x.erases * _token_bytes(heads, K)
        # The outputs have two buffers.
        values = 3 * _token_bytes(heads, V, kind(x.v)) + _token_bytes(heads, gate)
        return B * T * (keys + values + (_token_bytes(heads, 0) if x.erases or x.beta is not None else 0))

    fit = [n for n in range(1, H + 1) if H % n == 0 and tokens(n) <= _TOKEN_BYTES]
    if not fit or tokens(fit[0]) + fit[0] * state > tuning.VMEM_LIMIT_BYTES:
        return None
    # There is a block of heads for every core of the device.
    return max([n for n in fit if n * state <= _STATE_BYTES and H // n >= compat.cores()], default=fit[0])


def recurrent_cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, N: int | None = None, itemsize: int = 2,
    state_itemsize: int = 4, per_channel: bool = False, delta: bool = True,
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of an operator token by token: 5 or 7 flops per token and state entry, states moved twice.

    A state is decayed, a product of a key and a value is added to it, and it is read; the delta rule reads it once
    more.

    Args:
      B, T, H, HV, K, V: sizes of the arguments.
      N: number of sequences; None for B.
      itemsize, state_itemsize: bytes of an entry of q, k, v and o, and of the states. Gates are float32.
      per_channel: whether gates are per channel of the key.
      delta: whether the operator is a delta rule, with step sizes.
    """
    gates = B * T * HV * (K if per_channel else 1)
    moved = itemsize * B * T * (2 * H * K + 2 * HV * V) + 4 * (gates + B * T * HV * delta)
    return pl.CostEstimate(
        flops=(7 if delta else 5) * B * T * HV * K * V,
        transcendentals=gates,
        bytes_accessed=moved + 2 * state_itemsize * (B if N is None else N) * HV * K * V,
    )


def launch(static: DecodeStatic, x: Arguments, pool: jax.Array, routes: pools.Routes) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel on the user's arrays; return o and the pool, in which only the named slots change.

    Args:
      static: the static description of the launch.
      x: arguments of the operator, without its states; g is the sum of all its gates, float32.
      pool: [slots, HV, K, V] float32 or bfloat16; updated in place if its buffer is donated.
      routes: the routes of the sequences. With `static.single` a sequence has at most W tokens.

    Returns:
      o in the shape and type of v, and the updated pool.
    """
    (B, T, H, K), (HV, V), N, W = x.q.shape, x.v.shape[2:], routes.source.shape[0], static.W
    group, key_heads = HV // H, key_heads_a_step(x)
    assert key_heads is not None
    heads, blocks = key_heads * group, H // key_heads
    source, target = pools.resident_slots(routes.source, routes.target.reshape(-1))
    tables = dict(
        start=routes.start, count=routes.end - routes.start, source=source,
        continues=(routes.source >= 0).astype(jnp.int32), target=target,
        written=(routes.target.reshape(-1) >= 0).astype(jnp.int32),
    )  # fmt: skip

    def cut(y, width):
        """Return [B, T, heads, ...] as blocks of heads [blocks, B T, width, ...]."""
        return jnp.moveaxis(y.reshape(B * T, blocks, width, *y.shape[3:]), 1, 0)

    def whole(x, buffers):
        index = lambda h, n, t, *_: (h, *[0] * (x.ndim - 1))
        return pl.BlockSpec((None, *x.shape[1:]), index, pipeline_mode=pl.Buffered(buffers))

    def slot_of(h, n, t, start, count, source, *_):
        return source[n], h, 0, 0

    def target_of(h, n, t, start, count, source, continues, target, *_):
        return target[n * jnp.int32(W) + t], h, 0, 0

    state, state_out = (pl.BlockSpec((None, heads, K, V), index) for index in (slot_of, target_of))
    beta = None if x.beta is None else x.beta.astype(jnp.float32)
    tensors: dict[str, Any] = {"q": cut(x.q, key_heads), "k": cut(x.k, key_heads)}
    tensors |= {n: None if y is None else cut(y, heads) for n, y in dict(v=x.v, g=x.g, beta=beta, p=x.p).items()}
    v, g = tensors["v"], tensors["g"]
    out = launcher.launch(
        functools.partial(_states_kernel, static=static),
        StatesRefs,
        name=static.name,
        # Blocks of heads are independent; sequences share the block of outputs, so they come one after the other.
        grid=(blocks, N, W),
        dimension_semantics=("parallel", "arbitrary", "arbitrary"),
        tables=tables,
        inputs={name: (y, None if y is None else whole(y, 1)) for name, y in tensors.items()} | {"pool": (pool, state)},
        outputs={"o": (whole(v, 2), v.shape, v.dtype), "pool": (state_out, pool.shape, pool.dtype)},
        scratch={"state": (heads, K, V)},
        in_place={"pool": "pool"},
        cost_estimate=recurrent_cost(
            B=B, T=T, H=H, HV=HV, K=K, V=V, N=N, itemsize=v.dtype.itemsize,
            state_itemsize=pool.dtype.itemsize, per_channel=g.ndim == 4, delta=beta is not None,
        ),
    )  # fmt: skip
    return jnp.moveaxis(out["o"], 0, 1).reshape(x.v.shape), out["pool"]
