"""Tile mathematics of a decode over a pool with a ring: a few tokens of one sequence; arrays in, arrays out.

`state_pool` has the equations. The matrix unit, which has time to spare, reads the state and the ring as they were
before the step. One product takes keys and queries of eight heads and the state of one head, or keys and queries of all
heads and the ring; results of two different heads are dropped. Reads between the few tokens of the step are sums on the
vector unit.

HV = H R: value head n belongs to key head n // R, and lies at [n % R, n // R] in arrays [R, H, ...]. A list over r has
an array [H, ...] for each r < R. A decode has W tokens. The slot of a sequence is a `StatePool` without the dimension
of slots: its ring has room for L tokens, of which the first `count` exist, and its scales are [R, H, K].

Decays per head are columns [H, 1], which multiply results. Decays per channel are tiles [H, K], which multiply keys and
queries.
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

# How many heads have their keys and queries in one product: as many as a register has rows.
_ROWS = 8

Rows = list[jax.Array]


def masks(W: int, L: int, H: int, delta: bool) -> tuple[jax.Array, jax.Array]:
    """Return masks of columns [L H] by head and by token, ones and zeros in float32.

    Returns:
      A mask [W H or 2 W H, L H], 1 if the query, or the key of a delta rule, in the row has the head of the column; and
      a mask [L, L H], 1 if the column belongs to the token of the row.
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
    erase_before_decay: bool = False,
) -> tuple[list[Rows], list[Rows]]:
    """Run the tokens of a sequence.

    Args:
      q, k: for every token, [H, K] float32.
      v: for every token and every r, [H, V] float32.
      g: for every token, float32 [1, HV] in the order [R, H], or per channel [R, H, K].
      beta: laid out as gates per head; None without the delta rule.
      p: for every token, erase keys [R, H, K]; None for k.
      slot: the slot whose state and ring the sequence starts from.
      same_head, of_token: the `masks`.
      scale: the number by which the outputs are multiplied.
      erase_before_decay: whether erase keys read the state before the decay of their token.

    Returns:
      The outputs, and the values that the tokens write, float32 [H, V] for every token and every r.
    """
    W, R, per_channel = len(q), len(v[0]), g[0].ndim == 3
    gates = _decays(slot, g)
    beta, gates = (_columns(beta, len(k[0])), gates) if per_channel else _columns((beta, gates), len(k[0]))
    # The erase keys of a delta rule and the queries of all tokens read together from the slot as it was before the
    # step.
    erase = [[x] * R for x in k] if p is None else p
    reads = [[*(x[r] for x in erase if beta is not None), *q] for r in range(R)]
    after, start, upto, between = gates
    upto_erased, between_erased = upto, between
    if erase_before_decay:
        # An erase key reads the state that the token before leaves.
        one = jax.tree.map(jnp.ones_like, upto[0])
        upto_erased, between_erased = [one, *upto[:-1]], [[], *([*x, one] for x in between[:-1])]
    upto = [*(upto_erased if beta is not None else []), *upto]
    if per_channel:
        before = _read_by_channel(reads, slot, same_head, after, start, upto)
    else:
        before = _read_by_head(reads, slot, same_head, of_token, after, start, upto, alike=p is None)

    def read_step(x, decays, r, t):
        """Return the value that x, a key or query of token t, reads from earlier tokens of the step."""
        found = jnp.zeros_like(v[t][r])
        for u in range(t):
            found = found + jnp.sum(x * k[u] * decays[t][u][r], axis=-1, keepdims=True) * written[u][r]
        return found

    o: list[Rows] = [[] for _ in range(W)]
    written: list[Rows] = [[] for _ in range(W)]
    for t in range(W):
        of_itself = jnp.sum(q[t] * k[t], axis=-1, keepdims=True)  # [H, 1]
        for r in range(R):
            d = v[t][r]
            if beta is not None:
                d = beta[t][r] * (d - before[r][t] - read_step(erase[t][r], between_erased, r, t))
            o[t].append(scale * (before[r][t - W] + read_step(q[t], between, r, t) + of_itself * d))
            written[t].append(d)
    return o, written


def _decays(slot: StatePool, g: Rows) -> tuple[Any, jax.Array, Rows, list[Rows]]:
    """Return the decays of a ring's tokens and of the state up to the end of the ring, and the decays in a step.

    Returns:
      The decays from every token of the ring to its end, [L, HV], or a list of [R, H, K]; from the state to the end of
      the ring, [1, HV] or [R, H, K]; from there to every token of the step, a list of the same shape; and for every
      token t of the step, from each earlier token of the step to t.
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
    """Return a tree with its rows [n, HV] turned into columns, [H, n] for every r, all by one transposition."""
    rows, structure = jax.tree.flatten(tree)
    if not rows:
        return tree
    HV, ends = rows[0].shape[1], list(itertools.accumulate(x.shape[0] for x in rows))
    padding = jnp.zeros((-ends[-1] % _ROWS, HV), jnp.float32)
    transposed = jnp.concatenate([*rows, padding], axis=0).T
    spans = zip([0, *ends], ends, strict=False)
    return structure.unflatten([[transposed[i : i + H, a:b] for i in range(0, HV, H)] for a, b in spans])


def _read_by_channel(reads: list[Rows], slot: StatePool, same_head, after, start, upto) -> list[Rows]:
    """Return the values that keys and queries [H, K] read from a state and its ring, [H, V] each, for every r.

    Args:
      reads: erase keys and queries of all tokens, for every r.
      slot: the state and the ring.
      same_head: one of the `masks`.
      after, start: the first results of `_decays`, for gates per channel.
      upto: for every read, the decay from the end of the ring to where the step reads.
    """
    parts = _parts(slot.keys.dtype)
    reads = [[x * decay[r] for x, decay in zip(y, upto, strict=True)] for r, y in enumerate(reads)]
    of_state = _read_state([[x * start[r] for x in y] for r, y in enumerate(reads)], slot)
    keys, weights = _existing(slot.keys, slot.count), []
    for r, y in enumerate(reads):
        # A decayed key is not exact in the type of the ring.
        left = _below([key.astype(jnp.float32) * x[r] for key, x in zip(keys, after, strict=True)])
        weights.append(product(matmul.bf16_parts(_below(y), parts), matmul.bf16_parts(left, parts), matmul.dot_nt))
    of_ring = _read_writes(weights, slot, same_head)
    return [[x + y for x, y in zip(*pair, strict=True)] for pair in zip(of_state, of_ring, strict=True)]


def _read_by_head(
    reads: list[Rows], slot: StatePool, same_head, of_token, after, start, upto, alike: bool
) -> list[Rows]:
    """Return the same as `_read_by_channel`, for gates per head; `alike`: keys and queries are the same for every r."""
    R, H, parts = len(reads), slot.keys.shape[1], _parts(slot.keys.dtype)
    # The matrix unit takes products in this order: products with the state fill the time until the gates are columns.
    of_state = _read_state(reads, slot)
    keys = exact_parts(_below(_existing(slot.keys, slot.count)), slot.keys.dtype)
    weights = [product(matmul.bf16_parts(_below(y), parts), keys, matmul.dot_nt) for y in reads[: 1 if alike else R]]
    left = jnp.concatenate(after, axis=0)[None]  # [1, HV, L]
    left = product(matmul.bf16_parts(left, parts), (of_token.astype(jnp.bfloat16)[None],))  # [HV, L H]
    by_read = [jnp.concatenate([left[r * H : (r + 1) * H]] * len(reads[r]), axis=0) for r in range(R)]
    of_ring = _read_writes([weights[r % len(weights)] * x for r, x in enumerate(by_read)], slot, same_head)
    return [
        [decay[r] * (start[r] * x + y) for decay, x, y in zip(upto, of_state[r], of_ring[r], strict=True)]
        for r in range(R)
    ]


def _read_writes(weights: Rows, slot: StatePool, same_head) -> list[Rows]:
    """Return weighted sums of the writes of a ring, [H, V] for every key and query, for every r.

    The weights come from one product of all heads with all keys of the ring; its columns [L H] are the rows of the
    writes here. Weights between different heads become zero.

    Args:
      weights: [keys and queries, L H], for every r.
      slot: the slot of the ring.
      same_head: one of the `masks`.
    """
    found, H, dtype = [], slot.keys.shape[1], slot.writes.dtype
    for r, x in enumerate(weights):
        writes = _below(_existing(slot.writes[:, r], slot.count))
        left = matmul.bf16_parts(jnp.where(same_head > 0, x, 0.0)[None], _parts(dtype))
        y = product(left, exact_parts(writes, dtype))
        found.append([y[i : i + H] for i in range(0, y.shape[0], H)])
    return found


def _read_state(reads: list[Rows], slot: StatePool) -> list[Rows]:
    """Return the values that keys and queries [H, K] read from the states of their heads, [H, V] each, for every r."""
    (H, _), V, R, n = reads[0][0].shape, slot.states.shape[2], len(reads), len(reads[0])
    rows = _ROWS if H % _ROWS == 0 else H
    # Two states side by side fill a matrix unit of 256 columns.
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
            y = product(operands[r], exact_parts(jnp.concatenate(beside, axis=1)[None], slot.states.dtype))
            for i, j in itertools.product(range(wide), range(n)):
                part = y[j * rows : (j + 1) * rows, i * V : (i + 1) * V]
                total[r][j] = jnp.where(heads == head + i, part, total[r][j])
        found.append(total)
    return [[jnp.concatenate([x[r][j] for x in found], axis=0) for j in range(n)] for r in range(R)]


def fold_tokens(slot: StatePool) -> tuple[jax.Array, jax.Array, Rows]:
    """Return the decayed keys and the writes of a ring, and the decays of its states.

    Returns:
      Keys times their decays up to the end of the ring, float32 [R, L, H, K]; the writes [R, L, H, V]; and for every r
      the decay of the states, [H, K], or [H, 1] for gates per head.
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
    """Return the state [K, V] after its ring, in the type of the pool, and its scales [1, K], None unless it is int8.

    Args:
      state: the state of a head, in the type of the pool.
      keys, writes, decay: the results of `fold_tokens` for the head, [L, K], [L, V], and [1, K] or [1, 1]; the decay is
        already multiplied by the scales of the state.
      ring_dtype: the type of the writes in the ring.
    """
    column = decay if decay.shape[1] == 1 else tiles.to_column(decay[None])[0]
    # All parts of keys and writes that are multiplied are stacked, for one product.
    left, right = matmul.bf16_parts(keys[None], _parts(ring_dtype)), exact_parts(writes[None], ring_dtype)
    pairs = [(i, j) for j in range(len(right)) for i in range(len(left) - j)]
    left, right = (packed.concat_rows(x) for x in ([left[i] for i, _ in pairs], [right[j] for _, j in pairs]))
    return stored(column * state.astype(jnp.float32) + matmul.dot_tn(left, right, jnp.bfloat16)[0], state.dtype)


def stored(state: jax.Array, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Return a float32 state [K, V] in the type of a pool, and its scales [1, K], None unless it is int8."""
    if dtype != jnp.int8:
        return state.astype(dtype), None
    state, scales = state_pool.quantize(state)
    return state.astype(dtype), tiles.to_row(scales[None])[0]


def _existing(x: jax.Array, count) -> Rows:
    """Return a ring's entry for every token; zeros for tokens that do not exist, whose entries may hold anything."""
    return [lax.select(jnp.int32(i) < count, x[i], jnp.zeros_like(x[i])) for i in range(x.shape[0])]


def _below(rows: Rows) -> jax.Array:
    """Return matrices stacked to one matrix, [1, rows, columns]."""
    return jnp.concatenate(rows, axis=0)[None]


def _parts(dtype) -> int:
    """Return how many bfloat16 parts a factor beside one of this type has: three for float32, which lose no bits."""
    return 3 if dtype == jnp.float32 else 2


def exact_parts(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return x, which holds numbers of this type, as bfloat16 parts with the sum x: one part for int8 and bfloat16."""
    return matmul.bf16_parts(x) if dtype == jnp.float32 else (x.astype(jnp.bfloat16),)


def product(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...], dot=matmul.dot) -> jax.Array:
    """Return the product [m, n] of matrices [1, m, k] and [1, k, n] in parts, without products of two small parts.

    The parts of the left factor that are multiplied by one part of the right factor are stacked. `dot` may take a
    transposed factor.
    """
    products, m = [], left[0].shape[1]
    for j, part in enumerate(right):
        some = left[: len(left) - j]
        y = dot(packed.concat_rows(some), part, jnp.bfloat16)[0]
        products += [y[i * m : (i + 1) * m] for i in range(len(some))]
    return functools.reduce(jnp.add, products[::-1])
