"""A chunk whose gates are per head and differ from token to token, forward and backward; arrays in, arrays out.

Tiles of values and outputs are *packs* [m, C, p V]: p heads that share a key head lie side by side in the lanes, as in
the flat array, and are never taken apart. Where p is 1, a pack is a head. The states of n heads [n, V, K] are m = n / p
packs [m, p V, K] without a move. Tiles of queries and keys are [keys, C, K].

    [o_a o_b] = [P_a P_b] [v_a 0; 0 v_b]

The decay of a token multiplies values, outputs and their gradients, and never keys or queries: so the products of all
heads of a key head are one product. Exponents are to base 2. They are sums of gates over a span of tokens, which are
products of bfloat16 parts of the gates with matrices of zeros and ones, one for many heads.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gla import tile
from chunkwise.shared.kernels import matmul, packed, tiles

# The exponent of a decay that is exactly 0.
NEVER = -1e4


class GateSums(NamedTuple):
    """The gates of a chunk, of all h heads of a block.

    Attributes:
      g: gates to base 2, [h, 1, C], zero in rows that are not valid.
      log_weight: logs of the weights of tokens to base 2, [h, 1, C], or None for weights of 1.
      sums: exponents [k, h, C]: of the decays from the start of the chunk to a token, and from a token with its weight
        to the end of the chunk, or of only one of both.
      through: the decay over the whole chunk, [h, 1, 1].
    """

    g: jax.Array
    log_weight: Any
    sums: jax.Array
    through: jax.Array

    def of(self, heads: slice) -> "GateSums":
        """Return the gates of some heads."""
        weight = None if self.log_weight is None else self.log_weight[heads]
        return GateSums(self.g[heads], weight, self.sums[:, heads], self.through[heads])


def heads_at_once(most: int, heads: int, group: int, p: int) -> int:
    """Return how many heads of a block to take at once: whole packs, of whole groups or of a part of a group."""
    whole = (n for n in range(1, min(most, heads) + 1) if heads % n == 0 and n % p == 0)
    return max((n for n in whole if n % group == 0 or group % n == 0), default=p)


def spans_of(C: int, start: bool = True, end: bool = True) -> list[jax.Array]:
    """Return the tokens t up to token i, and those after it, bool [1, t, i] each."""
    return [~tiles.strictly_lower(C)] * start + [tiles.strictly_lower(C)] * end


def sum_spans(rows: jax.Array, spans: list[jax.Array]) -> list[jax.Array]:
    """Return for every span, bool [1, t, i], the sums of rows [h, C] over the tokens t of i, float32 [h, C]."""
    h, C = rows.shape
    parts = jnp.concatenate(matmul.bf16_parts(rows[None]), axis=1)  # [1, 3 h, C]
    product = matmul.dot(parts, packed.concat_lanes([x.astype(jnp.bfloat16) for x in spans]))[0]  # [3 h, k C]
    total = product[:h] + product[h : 2 * h] + product[2 * h :]
    return [total[:, i : i + C] for i in range(0, total.shape[1], C)]


def over_lanes(sums: jax.Array, p: int, V: int, count: int) -> jax.Array:
    """Return values per token [k, n, C] in the lanes of their heads, [k n / p, C, p V], from `count` bfloat16 parts."""
    k, n, C = sums.shape
    rows = jnp.concatenate(matmul.bf16_parts(sums.reshape(1, k * n, C), count), axis=1)  # [1, count k n, C]
    # A head that is alone has one register of lanes at least.
    shape = 1, rows.shape[1], k * n // p * packed.LANES
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
    apart = row - packed.block_of(lane, packed.LANES // p)
    mine = functools.reduce(jnp.logical_or, [apart == jnp.int32(i * k * n) for i in range(count)])
    each = matmul.dot_tn(rows, mine.astype(jnp.bfloat16))  # [1, C, k n / p 128]
    each = jnp.concatenate([each[:, :, i : i + packed.LANES] for i in range(0, each.shape[2], packed.LANES)])
    return packed.concat_lanes([each] * -(-p * V // packed.LANES))[:, :, : p * V]


def pair_exponents(gates: GateSums, count: int) -> jax.Array:
    """Return the exponents of the decays from token j to i >= j, with the weight of j, [n, i, j].

    The exponents of other pairs are finite. The sums keep `count` bfloat16 parts of the gates.
    """
    h, _, C = gates.g.shape
    # The sum of the gates m with j < m <= i: the left operand selects by one condition, the right one by the other. The
    # heads are in the lanes of the product, because one of 128 lanes takes the matrix unit as long as one of 256.
    left = packed.concat_lanes([tiles.lower(C).astype(jnp.bfloat16)] * count)  # [1, i, count m]
    right = packed.concat_lanes(_where(~tiles.lower(C), gates.g, count))  # [n, j, count m]
    found = matmul.dot_nt(left, right.reshape(1, h * C, -1))  # [1, i, n j]
    found = packed.split_lanes(found, h)
    return found if gates.log_weight is None else found + gates.log_weight


def pair_exponents_transposed(gates: GateSums, count: int) -> jax.Array:
    """Return `pair_exponents` as [n, j, i]."""
    h, _, C = gates.g.shape
    left = _where(~tiles.lower(C), gates.g, count)  # [n, j, m] each
    if gates.log_weight is not None:
        itself = tiles.row_index(C) == tiles.column_index(C)
        left = [x + w for x, w in zip(left, _where(itself, gates.log_weight, count), strict=True)]
    right = packed.concat_rows([(~tiles.strictly_lower(C)).astype(jnp.bfloat16)] * count)  # [1, count m, i]
    return matmul.dot(packed.concat_lanes(left).reshape(1, h * C, -1), right).reshape(h, C, C)


def _where(mask: jax.Array, rows: jax.Array, count: int) -> list[jax.Array]:
    """Return bfloat16 parts of rows [n, 1, C] where a mask [1, C, C] is set, and zeros elsewhere."""
    h, _, C = rows.shape
    zero = jnp.zeros((), jnp.bfloat16)
    return [jnp.where(mask, jnp.broadcast_to(x, (h, C, C)), zero) for x in matmul.bf16_parts(rows, count)]


def scores(left: jax.Array, right: jax.Array, scale, transposed: bool, same: jax.Array | None) -> jax.Array:
    """Return scale <q_i, k_j> for i >= j of one sequence, else 0, for q and k, or transposed for k and q."""
    C = left.shape[1]
    pairs = tile.within(~tiles.strictly_lower(C) if transposed else tiles.lower(C), same)
    return jnp.where(pairs, scale * matmul.dot_nt(left, right), 0.0)


def placed(x: jax.Array, p: int) -> jax.Array:
    """Return packs [m, C, p V] as [m, p C, p V]: p copies below one another, copy i with the lanes of head i alone."""
    if p == 1:
        return x
    head, zero = packed.block_of(packed.lane_index(x.shape[2]), x.shape[2] // p), jnp.zeros_like(x)
    return packed.concat_rows([jnp.where(head == jnp.int32(i), x, zero) for i in range(p)])


def read(x: jax.Array, S: tuple[jax.Array, ...], lanes: int) -> jax.Array:
    """Return x S^T for tiles x [keys, C, K] and parts of the states of n heads [n, V, K], as packs of some lanes."""
    n, V, K = S[0].shape
    m = n * V // lanes
    if lanes % packed.LANES:
        return _added(matmul.dot_nt(tiles.repeat_heads(x, m), part.reshape(m, lanes, K)) for part in S)
    return _added(tile.one_by_one(matmul.dot_nt(x, part.reshape(x.shape[0], -1, K)), m) for part in S)


def read_back(x: tuple[jax.Array, ...], S: tuple[jax.Array, ...], keys: int) -> jax.Array:
    """Return the sum of x S over the heads of a key head, [keys, C, K], for parts of packs and of states."""
    K, pairs = S[0].shape[2], list(zip(*packed.part_pairs(x, S), strict=True))
    if x[0].shape[2] % packed.LANES:
        each = _added(matmul.dot(left, right.reshape(len(left), -1, K)) for left, right in pairs)
        return tile.to_key_heads(each, keys)
    return _added(matmul.dot(tile.side_by_side(left, keys), right.reshape(keys, -1, K)) for left, right in pairs)


def turned(x: jax.Array, V: int) -> jax.Array:
    """Return packs [m, C, p V] as heads with tokens in the lanes, [n, V, C]."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, V, x.shape[1])


def write_turned(x: tuple[jax.Array, ...], k: jax.Array) -> jax.Array:
    """Return x^T k of every head, [n, V, K], for parts of turned heads [n, V, C] and tiles k [keys, C, K]."""
    n, V, C = x[0].shape
    return _added(matmul.dot(part.reshape(len(k), -1, C), k) for part in x).reshape(n, V, -1)


def write(x: tuple[jax.Array, ...], k: tuple[jax.Array, ...], V: int) -> jax.Array:
    """Return x^T k of every head, [n, V, K], for parts of packs x [m, C, p V] and of tiles k [keys, C, K]."""
    pairs = zip(*packed.part_pairs(x, k), strict=True)
    added = _added(matmul.dot_tn(left, tiles.repeat_heads(right, len(left))) for left, right in pairs)
    return added.reshape(-1, V, k[0].shape[2])


def chunk_products(q, k, v, do, S, dS, gates: GateSums, p: int, parts: int, count: int) -> tuple[Any, ...]:
    """Return products for `chunk_bwd` that wait for no other product.

    Args:
      q, k: tiles [keys, C, K].
      v, do: packs; do is the gradient of the output.
      S, dS: [n, V, K], the state before the chunk, and the gradient of the state after it.
      gates: the gates of these n heads.
      p: heads of a pack.
      parts: how many bfloat16 parts computed tiles have in products with bfloat16 tensors.
      count: how many bfloat16 parts of gates exponents keep.

    Returns:
      The exponents of pairs, transposed [n, C, C], and of `GateSums.sums` in lanes [2 m, C, p V]; the product of k and
      dS, packs; that of v and do, the gradient of the scores, transposed [n, C, C]; those of do and S and of v and dS,
      [n, C, K], if no heads share a key head, otherwise that of q and S, packs, and None.
    """
    lanes, (n, V, K) = v.shape[2], S.shape
    S, dS = (tile.operands(x, k.dtype, parts) for x in (S, dS))
    alone = len(k) == n
    return (
        pair_exponents_transposed(gates, count),
        over_lanes(gates.sums, p, max(V, K) if alone else V, count),
        read(k, dS, lanes),
        packed.split_lanes(matmul.dot_nt(v, placed(do, p)), p),
        read_back((do,), S, n) if alone else read(q, S, lanes),
        read_back((v,), dS, n) if alone else None,
    )


class PackGradients(NamedTuple):
    """What `chunk_bwd` returns, float32.

    Attributes:
      sums: over the heads of a key head: of the gradients of the scores, transposed [keys, C, C], and of those of q and
        k through the states [keys, C, K].
      dv: the gradient of the values, packs.
      d_state, dn: those of the state before the chunk [n, V, K], and of the sums of keys [n, 1, K] if there are any.
      of_pairs, of_start, of_end, of_through: those of exponents in nats: of the decays of pairs j < i, transposed
        [n, C, C]; of the decays from the start and to the end, packs, or tiles [n, C, K], to be added up over the lanes
        of a head; and of the chunk's [n, 1, 1].
      columns: what the sums of keys add to `of_start`, `of_end` and the gradients of weights, [n, C, 1] each; or ().
    """

    sums: tuple[jax.Array, jax.Array, jax.Array]
    dv: jax.Array
    d_state: jax.Array
    dn: Any
    of_pairs: jax.Array
    of_start: jax.Array
    of_end: jax.Array
    of_through: jax.Array
    columns: tuple[jax.Array, ...] = ()


def chunk_bwd(
    q, k, v, do, S, dS, shared, gates: GateSums, scale, p: int, parts: int, products, divided=None
) -> PackGradients:
    """Return the gradients of a chunk but for the part of q and k through the scores, which `through_scores` has.

    Args:
      q, k, v, do, S, dS, gates, p, parts: as in `chunk_products`.
      shared: `scores` of k and q, transposed [keys, C, C].
      scale: the scale of the outputs.
      products: the result of `chunk_products`.
      divided: changes the scores, the decays to outputs and the gradient of the scores for outputs that are divided:
        see `normaliser.Divided`.
    """
    of_pairs, exponents, by_k, dP, by_do, by_v = products
    n, m, keys, V, K, dtype = len(S), len(v), len(k), *S.shape[1:], k.dtype
    pairs, decays, shared = jnp.exp2(of_pairs), jnp.exp2(exponents), tiles.repeat_heads(shared, n)
    start, end = scale * decays[:m], decays[m:]
    if divided is not None:
        divided, (pairs, start, dP) = divided.scores(pairs, start, dP, q, shared, by_do, do if by_v is None else q)
    P, dS_before = pairs * shared, gates.through * dS
    operands = functools.partial(tile.operands, dtype=dtype, parts=parts)
    if by_v is None:
        # The heads of a key head share products over the lanes of all of them, if decays are those of values.
        do_start, v_end = do.astype(jnp.float32) * start, v.astype(jnp.float32) * end
        of_start, of_end = do_start * by_do, v_end * by_k
        do_start = operands(do_start)
        dq, dk = read_back(do_start, operands(S), keys), read_back(operands(v_end), operands(dS), keys)
        read = write(do_start, (q,), V)
    else:
        q_start = q.astype(jnp.float32) * start[:, :, :K]
        dq, dk = start[:, :, :K] * by_do, end[:, :, :K] * by_v
        of_start, of_end = q_start * by_do, k.astype(jnp.float32) * dk
        read = write((do,), operands(q_start), V)
    gradients = PackGradients(
        (tile.to_key_heads(pairs * dP, keys), dq, dk),
        dv=end[:, :, : v.shape[2]] * by_k + matmul.dot(packed.side_lanes(P.astype(dtype), p), placed(do, p)),
        d_state=dS_before + read,
        dn=None,
        of_pairs=jnp.where(~tiles.lower(P.shape[1]), P * dP, 0.0),
        of_start=of_start,
        of_end=of_end,
        of_through=jnp.sum(jnp.sum(S * dS_before, axis=1, keepdims=True), axis=2, keepdims=True),
    )
    return gradients if divided is None else divided.sums(gradients, P, start, end, q, k, gates.through)


def through_scores(sums, q, k, scale, same: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of q and k, [keys, C, K], from `PackGradients.sums` over all heads of the key heads."""
    d_scores, dq, dk = sums
    pairs = tile.within(~tiles.strictly_lower(q.shape[1]), same)
    low = jnp.where(pairs, scale * d_scores, 0.0).astype(q.dtype)  # [keys, j, i]
    return dq + matmul.dot_tn(low, k), dk + matmul.dot(low, q)


def before_last(valid: jax.Array | None, ending: jax.Array | None, C: int) -> jax.Array:
    """Return the tokens with a decay to the end of the chunk that has a gate: not the last one, bool [1, C, 1]."""
    row = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1)
    if valid is None and ending is None:
        return row < C - 1
    there = jnp.ones((1, C, 1), jnp.bool_) if valid is None else valid[None]
    there = there if ending is None else there & ending
    number = jnp.where(there, row.astype(jnp.float32), -1.0)
    return row.astype(jnp.float32) < jnp.max(number, axis=1, keepdims=True)


class GateTerms:
    """The gradients of the gates of a chunk, and of the logs of weights, collected from its heads.

    A gate is in the decays of the pairs j < t <= i, in those from the start to i >= t, and in those to the end from
    i < t. So its gradient adds up terms of tokens from t on: of a token's pairs as i less those as j, of its decay from
    the start less that to the end; and the terms of all decays to the end. There the last token has none, whose decay
    of 1 would take the digits of the others.
    """

    def __init__(self, C: int, heads: int, before_last: jax.Array):
        """Begin with no head of a block of so many."""
        self.C, self.heads, self.before_last = C, heads, before_last
        self.columns = self.weights = jnp.zeros((1, C, packed.pad_lanes(heads)), jnp.float32)
        self.rows: list = [None] * heads
        self.totals: list = [None] * heads

    def _put(self, columns: jax.Array, head: int, x: jax.Array) -> jax.Array:
        """Return columns [1, C, all heads] with the column [1, C, 1] of a head."""
        return jnp.where(packed.lane_index(columns.shape[2]) == jnp.int32(head), x, columns)

    def add_gates(self, first: int, x: PackGradients, p: int) -> None:
        """Add the terms of the gates of the heads from `first` on."""
        of_end = jnp.where(self.before_last, x.of_end, 0.0)
        of_states = x.of_start - of_end
        more = None
        if x.columns:
            to_end = jnp.where(self.before_last, x.columns[1], 0.0)
            more = x.columns[0] - to_end, jnp.sum(to_end, axis=1, keepdims=True)
        for i in range(len(x.of_pairs)):
            column = _lane_sum(_of_head(of_states, i, p), x.of_pairs[i : i + 1])
            total = jnp.sum(_of_head(jnp.sum(of_end, axis=1, keepdims=True), i, p), axis=2, keepdims=True)
            if more is not None:
                column, total = column + more[0][i : i + 1], total + more[1][i : i + 1]
            self.columns = self._put(self.columns, first + i, column)
            self.rows[first + i] = jnp.sum(x.of_pairs[i], axis=0, keepdims=True)  # [1, C]
            self.totals[first + i] = total[0], x.of_through[i]  # [1, 1] each

    def add_weights(self, first: int, v: jax.Array, x: PackGradients, p: int) -> None:
        """Add the gradients of the logs of weights, which multiply values, of the heads from `first` on."""
        product = v.astype(jnp.float32) * x.dv
        for i in range(len(x.of_pairs)):
            column = jnp.sum(_of_head(product, i, p), axis=2, keepdims=True)
            column = column + x.columns[2][i : i + 1] if x.columns else column
            self.weights = self._put(self.weights, first + i, column)

    def of_gates(self, same: jax.Array | None, ending: jax.Array | None) -> jax.Array:
        """Return the gradients of all gates, [heads, 1, C]."""
        tokens = self._as_rows(self.columns) + jnp.concatenate(self.rows, axis=0)  # [heads, C]
        (dg,) = sum_spans(tokens, [tile.within(tiles.lower(self.C), same)])
        to_end, through = (jnp.concatenate(list(x), axis=0) for x in zip(*self.totals, strict=True))  # [heads, 1]
        if ending is not None:
            to_end = jnp.where(tiles.to_row(ending.astype(jnp.float32))[0] > 0.0, to_end, 0.0)
        return (dg + to_end + through)[:, None]

    def of_weights(self) -> jax.Array:
        """Return the gradients of the logs of all weights, [heads, 1, C]."""
        return self._as_rows(self.weights)[:, None]

    def _as_rows(self, columns: jax.Array) -> jax.Array:
        return jnp.swapaxes(columns, 1, 2)[0, : self.heads]


def _of_head(x: jax.Array, i: int, p: int) -> jax.Array:
    """Return the pack [1, r, p V] of head i, with zeros in the lanes of other heads."""
    pack = x[i // p : i // p + 1]
    if p == 1:
        return pack
    return jnp.where(packed.block_of(packed.lane_index(x.shape[2]), x.shape[2] // p) == jnp.int32(i % p), pack, 0.0)


def _lane_sum(x: jax.Array, less: jax.Array) -> jax.Array:
    """Return the sum over lanes of x less that of another tile: one sum where both are as wide."""
    total = functools.partial(jnp.sum, axis=2, keepdims=True)
    return total(x - less) if x.shape == less.shape else total(x) - total(less)


def _added(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)
