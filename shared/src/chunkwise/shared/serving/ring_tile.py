"""Tile mathematics of a decode over a pool with a ring: a few tokens of one sequence; arrays in, arrays out.

`state_pool` has the equations, and `ring_kernel` says when. The matrix unit, which has time to spare, reads the state
and the ring as they were before the step. The rows of a product are the keys and queries of eight heads with the state
of one, or of all heads with the ring, and the products of two different heads are dropped. What the few tokens of the
step read of one another are sums on the vector unit.

HV = H R: value head n belongs to key head n // R, and lies in row [n % R, n // R] of arrays [R, H, ...]. A list over r
has an array [H, ...] for each. A decode has W tokens, and the slot of a sequence is a `StatePool` without the dimension
of slots: L tokens in its ring, `count` of which exist, and scales [R, H, K].

A gate per head is a number of a head and multiplies results; a gate per channel multiplies keys and queries. So gates
are columns [H, 1] or tiles [H, K].
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.serving import state_pool
from chunkwise.shared.serving.state_pool import StatePool

# Heads whose keys and queries are rows of one product: as many as a register has rows.
_ROWS = 8

Rows = list[jax.Array]


def masks(W: int, L: int, H: int, delta: bool) -> tuple[jax.Array, jax.Array]:
    """Return the columns [L H] of heads and of tokens, ones and zeros in float32.

    Returns:
      [W H or 2 W H, L H], 1 where a query, or the key of a delta rule, meets the tokens of the same head in a ring.
      [L, L H], 1 where a column is of that token.
    """
    iotas = lambda *shape: (lax.broadcasted_iota(jnp.int32, shape, i) for i in range(2))
    row, column = iotas((1 + delta) * W * H, L * H)
    same_head = (lax.rem(row, jnp.int32(H)) == lax.rem(column, jnp.int32(H))).astype(jnp.float32)
    row, column = iotas(L, L * H)
    return same_head, (lax.div(column, jnp.int32(H)) == row).astype(jnp.float32)


def decode(
    q: Rows,
    k: Rows,
    v: list[Rows],
    g: Rows,
    beta: Rows | None,
    p: Rows | None,
    slot: StatePool,
    same_head: jax.Array,
    of_token: jax.Array,
    scale: float,
) -> tuple[list[Rows], list[Rows]]:
    """Run the tokens of a sequence.

    Args:
      q, k: [H, K] float32 of every token.
      v: [H, V] float32 of every token, for every r.
      g: float32 of every token: [1, HV] in the order [R, H], or [R, H, K] per channel.
      beta: as the gates per head, or None without the delta rule.
      p: erase keys, [R, H, K] of every token, or None for keys.
      slot: the sequence starts from its state and its ring.
      same_head, of_token: the `masks`.
      scale: multiplies the outputs.

    Returns:
      The outputs, and what the tokens write, float32 [H, V] of every token, for every r.
    """
    W, R, per_channel = len(q), len(v[0]), g[0].ndim == 3
    gates = _decays(slot, g)
    beta, gates = (_columns(beta, len(k[0])), gates) if per_channel else _columns((beta, gates), len(k[0]))
    # The erase keys of a delta rule and the queries of all tokens read at once what was there before the step.
    erase = [[x] * R for x in k] if p is None else p
    reads = [[*(x[r] for x in erase if beta is not None), *q] for r in range(R)]
    if per_channel:
        before = _read_by_channel(reads, slot, same_head, *gates[:3])
    else:
        before = _read_by_head(reads, slot, same_head, of_token, *gates[:3], alike=p is None)
    between = gates[3]

    def read_step(x, r, t):
        """Return what x of token t reads of the tokens of the step before it."""
        found = jnp.zeros_like(v[t][r])
        for u in range(t):
            found = found + jnp.sum(x * k[u] * between[t][u][r], axis=-1, keepdims=True) * written[u][r]
        return found

    o: list[Rows] = [[] for _ in range(W)]
    written: list[Rows] = [[] for _ in range(W)]
    for t in range(W):
        of_itself = jnp.sum(q[t] * k[t], axis=-1, keepdims=True)  # [H, 1]
        for r in range(R):
            d = v[t][r]
            if beta is not None:
                d = beta[t][r] * (d - before[r][t] - read_step(erase[t][r], r, t))
            o[t].append(scale * (before[r][t - W] + read_step(q[t], r, t) + of_itself * d))
            written[t].append(d)
    return o, written


def _decays(slot: StatePool, g: Rows) -> tuple[Any, jax.Array, Rows, list[Rows]]:
    """Return what is left of the tokens of a ring at its end, of the state, and of both after the tokens of a step.

    Returns:
      [L, HV], or [R, H, K] of every token of the ring; [1, HV] or [R, H, K] of the state; the same shape of both up to
      every token of the step; and for every token t of the step, of all tokens before it up to token t.
    """
    upto = [jnp.exp(x) for x in itertools.accumulate(g, jnp.add)]
    between = [[jnp.exp(functools.reduce(jnp.add, g[u + 1 : t + 1])) for u in range(t)] for t in range(len(g))]
    L = slot.gates.shape[0]
    if slot.gates.ndim == 4:
        after, total = [], jnp.zeros(slot.gates.shape[1:], jnp.float32)
        for gate in reversed(_existing(slot.gates, slot.count)):
            after.insert(0, jnp.exp(total))
            total = total + gate
        return after, jnp.exp(total), upto, between
    later = lambda x, n: jnp.concatenate([x[n:], jnp.zeros_like(x[:n])], axis=0)
    since = jnp.where(lax.broadcasted_iota(jnp.int32, (L, 1), 0) < slot.count, slot.gates, 0.0)
    n = 1
    while n < L:
        since, n = since + later(since, n), 2 * n
    return jnp.exp(later(since, 1)), jnp.exp(since[:1]), upto, between


def _columns(tree: Any, H: int) -> Any:
    """Return a tree whose rows [n, HV] are columns, [H, n] for every r, all of them by one transposition."""
    rows, structure = jax.tree.flatten(tree)
    if not rows:
        return tree
    HV, ends = rows[0].shape[1], list(itertools.accumulate(x.shape[0] for x in rows))
    padding = jnp.zeros((-ends[-1] % _ROWS, HV), jnp.float32)
    transposed = jnp.concatenate([*rows, padding], axis=0).T
    spans = zip([0, *ends], ends, strict=False)
    return structure.unflatten([[transposed[i : i + H, a:b] for i in range(0, HV, H)] for a, b in spans])


def _read_by_channel(reads: list[Rows], slot: StatePool, same_head, after, start, upto) -> list[Rows]:
    """Return what keys and queries [H, K] read of a state and its ring, [H, V] each, for every r.

    Args:
      reads: erase keys and queries of all tokens, for every r.
      slot: the state and the ring.
      same_head: one of the `masks`.
      after, start, upto: of `_decays`, by channel.
    """
    W, parts = len(upto), _parts(slot.keys.dtype)
    reads = [[x * upto[j % W][r] for j, x in enumerate(y)] for r, y in enumerate(reads)]
    of_state = _read_state([[x * start[r] for x in y] for r, y in enumerate(reads)], slot)
    keys, weights = _existing(slot.keys, slot.count), []
    for r, y in enumerate(reads):
        # What is left of a key is not exact.
        left = _below([key.astype(jnp.float32) * x[r] for key, x in zip(keys, after, strict=True)])
        weights.append(_product(matmul.bf16_parts(_below(y), parts), matmul.bf16_parts(left, parts), matmul.dot_nt))
    of_ring = _read_writes(weights, slot, same_head)
    return [[x + y for x, y in zip(*pair, strict=True)] for pair in zip(of_state, of_ring, strict=True)]


def _read_by_head(
    reads: list[Rows], slot: StatePool, same_head, of_token, after, start, upto, alike: bool
) -> list[Rows]:
    """Return the result of `_read_by_channel` for decays by head; with `alike` all r have the same keys and queries."""
    W, R, H, parts = len(upto), len(reads), slot.keys.shape[1], _parts(slot.keys.dtype)
    # The matrix unit takes products in this order: those with the state fill the time until the gates are columns.
    of_state = _read_state(reads, slot)
    keys = _exact_parts(_below(_existing(slot.keys, slot.count)), slot.keys.dtype)
    weights = [_product(matmul.bf16_parts(_below(y), parts), keys, matmul.dot_nt) for y in reads[: 1 if alike else R]]
    left = jnp.concatenate(after, axis=0)[None]  # [1, HV, L]
    left = _product(matmul.bf16_parts(left, parts), (of_token.astype(jnp.bfloat16)[None],))  # [HV, L H]
    by_read = [jnp.concatenate([left[r * H : (r + 1) * H]] * len(reads[r]), axis=0) for r in range(R)]
    of_ring = _read_writes([weights[r % len(weights)] * x for r, x in enumerate(by_read)], slot, same_head)
    return [
        [upto[j % W][r] * (start[r] * x + y) for j, (x, y) in enumerate(zip(of_state[r], of_ring[r], strict=True))]
        for r in range(R)
    ]


def _read_writes(weights: Rows, slot: StatePool, same_head) -> list[Rows]:
    """Return the sums of what the tokens of a ring wrote, [H, V] of every key and query, for every r.

    All heads have met all keys of the ring in one product, whose columns [L H] are the rows of this one. The weights of
    other heads become zero.

    Args:
      weights: [keys and queries, L H], for every r.
      slot: the ring.
      same_head: one of the `masks`.
    """
    found, H, dtype = [], slot.keys.shape[1], slot.writes.dtype
    for r, x in enumerate(weights):
        writes = _below(_existing(slot.writes[:, r], slot.count))
        left = matmul.bf16_parts(jnp.where(same_head > 0, x, 0.0)[None], _parts(dtype))
        y = _product(left, _exact_parts(writes, dtype))
        found.append([y[i : i + H] for i in range(0, y.shape[0], H)])
    return found


def _read_state(reads: list[Rows], slot: StatePool) -> list[Rows]:
    """Return what keys and queries [H, K] read of the states of their heads, [H, V] each, for every r."""
    (H, _), V, R, n = reads[0][0].shape, slot.states.shape[2], len(reads), len(reads[0])
    rows = _ROWS if H % _ROWS == 0 else H
    # Two states beside one another fill a matrix unit of 256 columns.
    wide = 2 if rows % 2 == 0 and V % 128 == 0 else 1
    heads = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    found: list[Any] = []
    for group in range(0, H, rows):
        operands = []
        for r in range(R):
            some = [x[group : group + rows] for x in reads[r]]
            if slot.scales is not None:
                some = [x * slot.scales[r][group : group + rows] for x in some]
            operands.append(matmul.bf16_parts(_below(some), _parts(slot.states.dtype)))
        total = [[jnp.zeros((rows, V), jnp.float32)] * n for _ in range(R)]
        for head, r in itertools.product(range(0, rows, wide), range(R)):
            beside = [slot.states[(group + head + i) * R + r] for i in range(wide)]
            y = _product(operands[r], _exact_parts(jnp.concatenate(beside, axis=1)[None], slot.states.dtype))
            for i, j in itertools.product(range(wide), range(n)):
                part = y[j * rows : (j + 1) * rows, i * V : (i + 1) * V]
                total[r][j] = jnp.where(heads == head + i, part, total[r][j])
        found.append(total)
    return [[jnp.concatenate([x[r][j] for x in found], axis=0) for j in range(n)] for r in range(R)]


def fold_tokens(slot: StatePool) -> tuple[jax.Array, jax.Array, Rows]:
    """Return what the tokens of a ring add to its states, and what is left of the states, for every r.

    Returns:
      Keys times what is left of them, float32 [R, L, H, K]; what they wrote [R, L, H, V]; and [H, K], or [H, 1] where
      all channels decay alike.
    """
    (L, H), per_channel = slot.keys.shape[:2], slot.gates.ndim == 4
    after, start, *_ = _decays(slot, [])
    if not per_channel:
        after, start = _columns((after, start), H)
    mask = lax.broadcasted_iota(jnp.int32, (L, 1, 1), 0) < slot.count
    keys = jnp.where(mask, slot.keys.astype(jnp.float32), 0.0)
    R = slot.writes.shape[1]
    each = lambda r: jnp.stack([x[r] for x in after] if per_channel else [after[r][:, i : i + 1] for i in range(L)])
    left = jnp.stack([keys * each(r) for r in range(R)])
    writes = jnp.stack([jnp.where(mask, slot.writes[:, r].astype(jnp.float32), 0.0) for r in range(R)])
    return left, writes, [start[r] for r in range(R)]


def fold_head(
    state: jax.Array, keys: jax.Array, writes: jax.Array, decay: jax.Array, ring_dtype
) -> tuple[jax.Array, jax.Array | None]:
    """Return a state [K, V] with its ring as the pool keeps it, and its scales [1, K], None if it is not of 8 bits.

    Args:
      state: of a head, in the type of the pool.
      keys, writes, decay: of `fold_tokens`: [L, K], [L, V], and [1, K] or [1, 1], times the scales of the state.
      ring_dtype: the type of the writes in the ring.
    """
    column = decay if decay.shape[1] == 1 else tiles.to_column(decay[None])[0]
    # The parts of keys and of writes that are multiplied lie below one another, in one product.
    left, right = matmul.bf16_parts(keys[None], _parts(ring_dtype)), _exact_parts(writes[None], ring_dtype)
    pairs = [(i, j) for j in range(len(right)) for i in range(len(left) - j)]
    left, right = (packed.concat_rows(x) for x in ([left[i] for i, _ in pairs], [right[j] for _, j in pairs]))
    S = column * state.astype(jnp.float32) + matmul.dot_tn(left, right, jnp.bfloat16)[0]
    if state.dtype != jnp.int8:
        return S.astype(state.dtype), None
    S, scales = state_pool.quantize(S)
    return S.astype(state.dtype), tiles.to_row(scales[None])[0]


def _existing(x: jax.Array, count) -> Rows:
    """Return what a ring holds for every token, zeros for one that does not exist: it may hold anything then."""
    return [lax.select(jnp.int32(i) < count, x[i], jnp.zeros_like(x[i])) for i in range(x.shape[0])]


def _below(rows: Rows) -> jax.Array:
    """Return matrices below one another, [1, rows, columns]."""
    return jnp.concatenate(rows, axis=0)[None]


def _parts(dtype) -> int:
    """Return how many bfloat16 parts a factor has that meets a type: three for float32, which is exact to its bits."""
    return 3 if dtype == jnp.float32 else 2


def _exact_parts(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return x, whose numbers are of this type, in bfloat16 parts whose sum it is: one for int8 and bfloat16."""
    return matmul.bf16_parts(x) if dtype == jnp.float32 else (x.astype(jnp.bfloat16),)


def _product(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...], dot=matmul.dot) -> jax.Array:
    """Return the product of matrices [1, m, k] and [1, k, n] in parts, [m, n], without what is past the first bits.

    The parts of the left factor that meet one of the right lie below one another. `dot` may take a transposed factor.
    """
    products, m = [], left[0].shape[1]
    for j, part in enumerate(right):
        some = left[: len(left) - j]
        y = dot(packed.concat_rows(some), part, jnp.bfloat16)[0]
        products += [y[i * m : (i + 1) * m] for i in range(len(some))]
    return functools.reduce(jnp.add, products[::-1])
