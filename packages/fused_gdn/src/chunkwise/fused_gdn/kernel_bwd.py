"""Backward: one reverse pass over the chunks; tile mathematics, kernel body, launcher.

With the names of kernel.py, where S and W are computed again, and dS' arriving from the right:

    dv_new = (scale tril(Q K^T * D))^T dO + e^(G_last - G) K dS'      dR = X^T B dv_new      dV = dR
    dN = -tril(dR W^T, -1)                    dA = tril(dO (B W)^T)    of N = K K^T * D and A = scale Q K^T * D
    dS = e^G_last dS' + Q^T (scale e^G dO) - K^T (e^G dR)

dN needs no further product with X: -X^T (B dv_new R^T) X^T = -dR W^T. As in the forward, what oscillates where keys
repeat (W, dv_new, A and the gradients of N and A) keeps 16 bits with bfloat16 tensors; S and dS enter at 8.

In a chunk that holds several sequences, all rows of a sequence that is not finite are zero in all products, and its
gradients there become NaN. W says by NaN which values, or states, were not finite.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn import cost, kernel, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, layout, matmul, nonfinite, packed, tiles
from chunkwise.shared.kernels.operands import Operands


def lane_sums(x: jax.Array, w: int, dtype) -> jax.Array:
    """Return the sums of x [n, C, m w] over every w lanes, as [C, n m].

    A product with zeros and ones: the matrix unit has time, and the unit that adds up lanes has not.
    """
    heads = x.shape[0] * x.shape[2] // w
    flat = packed.parts(packed.lanes([x[i : i + 1] for i in range(x.shape[0])]), dtype)
    lane, head = (lax.broadcasted_iota(jnp.int32, (1, heads * w, heads), axis) for axis in (1, 2))
    ones = tile.indicator(packed.block_of(lane, w) == head).astype(flat[0].dtype)  # [1, heads w, heads]
    sums = matmul.dot(packed.rows(flat), ones)[0]  # [parts C, heads]
    return functools.reduce(jnp.add, [sums[i * x.shape[1] : (i + 1) * x.shape[1]] for i in range(len(flat))])


def row_sums(x: jax.Array, s: tile.Shape) -> jax.Array:
    """Return the sums over the rows of packed x [n, C, p C], as [C, heads]."""
    total = jnp.sum(x, axis=1, keepdims=True)
    head = packed.block_of(packed.lane_index(s.p * s.C)[0], s.C)
    per_head = [jnp.where(head == i, total[n], 0.0) for n in range(x.shape[0]) for i in range(s.p)]  # [1, p C] each
    i, j = tile.packed_index(s)
    return matmul.dot_nt(tile.indicator(i == j), jnp.concatenate(per_head)[None])[0]


def fold(row: jax.Array, width: int) -> jax.Array:
    """Return rows [heads, 1, w] as [heads, 1, width] of the same sum; both are whole registers of lanes."""
    folded = functools.reduce(jnp.add, [row[:, :, i : i + packed.LANES] for i in range(0, row.shape[2], packed.LANES)])
    return packed.lanes([folded, jnp.zeros_like(folded)]) if width > packed.LANES else folded


def strictly(s: tile.Shape) -> jax.Array:
    """Return i > j of shape [1, C, p C]."""
    i, j = tile.packed_index(s)
    return i > j


def multiply_nt(a, b, dtype):
    """Return a b^T of float32 tiles as one pass of operands of `dtype`."""
    return matmul.dot_nt(a.astype(dtype), b.astype(dtype))


def key_gradients(A1, A2, q, k, s: tile.Shape):
    """Return the gradients of (q, k) [key heads, C, K] through the packed scores.

    dq = A2 K and dk = (A1 + A1^T) K + A2^T Q, summed over the value heads of a key head.
    """
    q_packs, k_packs, each = tile.key_packs(q, s), tile.key_packs(k, s), s.p // s.keys
    A = packed.parts(packed.rows([A1, A2]), k.dtype)  # [n, 2 C, p C] each
    direct = matmul.dot(packed.lanes(A), packed.rows([tile.placed_keys(k_packs, s)] * len(A)))  # [n, 2 C, keys K]
    turned = matmul.dot_tn(
        packed.rows(A), packed.rows([packed.lanes(k_packs), packed.lanes(q_packs)] * len(A))
    )  # [n, p C, keys K]
    dq, dk = [0.0] * k.shape[0], [0.0] * k.shape[0]
    for n in range(s.heads // s.p):
        for j in range(s.keys):
            head, at = (n * s.p + j * each) // s.group, slice(j * s.K, (j + 1) * s.K)
            dq[head] += direct[n, s.C :, at]
            dk[head] += direct[n, : s.C, at]
            for i in range(j * each, (j + 1) * each):
                dk[head] += turned[n, i * s.C : (i + 1) * s.C, at]
    return jnp.stack(dq), jnp.stack(dk)


def back_to_values(k, QK, D, X, do, dS, scale, end, beta, s: tile.Shape):
    """Return what reaches the values of a chunk, [heads, C, V] each; this needs neither the state nor the values.

    Args:
      k: [key heads, C, K].
      QK, D: scores and decays, packed [n, C, p C].
      X: packed [n, C, p C].
      do: [heads, C, V].
      dS: float32 [heads, K, V], gradient of the state after the chunk.
      scale: multiplies q.
      end, beta: of `Flow` and `Gates`, over all lanes [heads, C, V].
      s: static.

    Returns:
      What reaches the new values from the state after the chunk, what reaches them in all, the gradient of the values.
    """
    written = end * tile.read_state(k, None, dS.astype(k.dtype), s)[0]
    dv_new = packed.apply_transposed(QK * (D * scale), do, k.dtype, s.p) + written
    return written, dv_new, packed.apply_transposed(X, beta * dv_new, k.dtype, s.p)


def back_to_state(q, k, do, dR, dS, scale, start, s: tile.Shape):
    """Return the gradient of the state before a chunk, [heads, K, V]; dR and the others as in `back_to_values`."""
    entering = packed.rows([(scale * start) * do.astype(jnp.float32), -start * dR])  # [heads, 2 C, V]
    entering = packed.side_lanes(entering.astype(k.dtype), s.group)  # [key heads, 2 C, group V]
    return start[:, -1:] * dS + packed.split_lanes(matmul.dot_tn(packed.rows([q, k]), entering), s.group)


def state_gradient(q, k, gate, flow, X, do, dS, scale, s: tile.Shape):
    """Return the gradient of the state before a chunk alone; the arguments are those of `chunk_gradients`."""
    start, end, beta = (tile.head_columns(x, s, s.V) for x in (flow.start, flow.end, gate.beta))  # [heads, C, V]
    QK, D = tile.scores([q], k, gate, flow.pairs, s)  # [n, C, p C]
    *_, dR = back_to_values(k, QK, D, X, do, dS, scale, end, beta, s)
    return back_to_state(q, k, do, dR, dS, scale, start, s)


def chunk_gradients(q, k, gate, flow, X, S, W, do, dS, scale, s: tile.Shape):
    """Return the gradients of one chunk.

    Args:
      q, k: [key heads, C, K].
      gate, flow: of the chunk.
      X: packed [n, C, p C].
      S: state before the chunk [heads, K, V], operand type.
      W: [heads, C, V] float32.
      do: [heads, C, V].
      dS: float32 [heads, K, V], gradient of the state after the chunk.
      scale: multiplies q.
      s: static.

    Returns:
      dq, dk [key heads, C, K], dv [heads, C, V]; [C, heads] what a row passes to its own and all earlier gates, what it
      passes to all later gates, and dbeta; dS before the chunk.
    """
    dtype, C = k.dtype, s.C
    q_heads, k_heads = (jnp.stack([x[i // s.group] for i in range(s.heads)]) for x in (q, k))  # [heads, C, K]
    # Factors of rows over all lanes, of tiles [heads, C, K] and of tiles [heads, C, V].
    start_k, end_k, beta_k = (tile.head_columns(x, s, s.K) for x in (flow.start, flow.end, gate.beta))
    start, end, beta = (tile.head_columns(x, s, s.V) for x in (flow.start, flow.end, gate.beta))
    KK, QK, D = tile.scores([k, q], k, gate, flow.pairs, s)  # [n, C, p C]
    # What reaches the new values: from the outputs of the chunk, and from the state after it.
    written, dv_new, dR = back_to_values(k, QK, D, X, do, dS, scale, end, beta, s)

    # From there to the scores, and through them to queries and keys.
    outers = packed.outer(packed.rows([dR, do.astype(jnp.float32)]), W, dtype, s.p)  # [n, 2 C, p C]
    dN = jnp.where(strictly(s), -outers[:, :C], 0.0) * D  # [n, C, p C]
    A1, A2 = dN * gate.beta_rows, outers[:, C:] * (D * gate.beta_rows * scale)  # [n, C, p C]
    dq, dk = key_gradients(A1, A2, q, k, s)  # [key heads, C, K]

    # What queries and keys multiply: the state before the chunk, and for keys the one after it.
    through_state = multiply_nt(packed.rows([do.astype(jnp.float32), dR]), S, dtype)  # [heads, 2 C, K]
    dq_start, dk_start = (scale * start_k) * through_state[:, :C], -start_k * through_state[:, C:]  # [heads, C, K]
    dk_end = (end_k * beta_k) * multiply_nt(W, dS, dtype)  # [heads, C, K]

    # What passes through a row's own and all earlier gates, and apart from it what passes all later ones. What passes
    # none, a row's own product, stands in neither: added and taken away again it would drown the rest at strong gates.
    passes = fold(jnp.sum(S.astype(jnp.float32) * dS, axis=1, keepdims=True), s.K)  # [heads, 1, K]
    is_last = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1) == C - 1
    entered = q_heads.astype(jnp.float32) * dq_start + k_heads.astype(jnp.float32) * dk_start  # [heads, C, K]
    entered = entered + jnp.where(is_last, start_k[:, -1:] * passes, 0.0)
    pairs = jnp.where(strictly(s), A1 * KK + A2 * QK, 0.0)  # [n, C, p C]
    later = lane_sums(entered, s.K, dtype) + lane_sums(pairs, C, dtype) - row_sums(pairs, s)
    earlier = lane_sums(beta * written * W, s.V, dtype)
    dbeta = lane_sums(dv_new * W, s.V, dtype) + row_sums(dN * KK, s)
    dS = back_to_state(q, k, do, dR, dS, scale, start, s)
    dq, dk = dq + layout.sum_value_heads(dq_start, s.group), dk + layout.sum_value_heads(dk_start + dk_end, s.group)
    return dq, dk, dR, later, earlier, dbeta, dS


def _bwd_kernel(refs, *, static: kernel.Static, s: tile.Shape):
    turn, first = pl.program_id(2), pl.program_id(0) * jnp.int32(static.steps)
    step = layout.Step(refs.table, first + (jnp.int32(static.steps - 1) - turn))

    @pl.when(turn == 0)
    def _():
        layout.clear(refs.dS)

    @pl.when(step.last == 1)
    def _():
        refs.dS[...] = jnp.zeros_like(refs.dS) if refs.dht is None else refs.dht[...]

    if static.pieces and refs.dq is not None:

        @pl.when((step.closes & step.mixed) == 1)
        def _():
            layout.clear(refs.dq, refs.dk, refs.dv, refs.dg, refs.dbeta)  # rows that belong to no piece stay zero

    take_turn = lambda masked: _turn(refs, step, masked, static, s)
    if static.pieces:
        layout.whole_or_cut([step], static.C, take_turn)
    else:
        nonfinite.masked_or_not(None if refs.owner is None else step.mixed == 1, take_turn)
    if refs.dh0 is not None:

        @pl.when(step.first == 1)
        def _():
            refs.dh0[...] = refs.dS[...]


def _turn(refs, step: layout.Step, masked: bool | None, static: kernel.Static, s: tile.Shape) -> None:
    """Do as `_bwd_kernel`; `masked` says whether the chunk is mixed, None that a chunk never is.

    False says also that all its rows belong to the step.
    """
    gradients = (refs.dq, refs.dk, refs.dv, refs.dg, refs.dbeta)
    # All rows of a chunk that could be mixed and is not are its own.
    own: Any = kernel.own_rows(step, static) if masked is None else None
    masks: Any = None
    spoilt: Any = None
    if masked:
        masks = kernel.load_masks(refs.owner, step, s.C)
        own = masks.code[0] >= 0
        spoilt = quarantine(refs, own, masks, s)
        own &= spoilt[0] == 0.0
    q, k, g, beta = kernel.load_chunk(refs, own, s, static)
    do = layout.load_heads(refs.do, s.V, own=own)  # [heads, C, V]
    gate = tile.gates(tile.gate_sums(g, beta, s, k.dtype != jnp.bfloat16, masks), slice(0, s.heads), s)
    flow = tile.flow_of(gate, s, masks)
    if refs.dq is None:
        refs.dS[...] = state_gradient(q, k, gate, flow, refs.X[...], do, refs.dS[...], static.scale, s)
        if masked:
            spoil_gradients((), refs.dS, spoilt, masks)
        return
    W = layout.load_heads(refs.W, s.V, own=own)  # [heads, C, V]
    dq, dk, dv, later, earlier, dbeta, dS = chunk_gradients(
        q, k, gate, flow, refs.X[...], refs.h[...], W, do, refs.dS[...], static.scale, s
    )
    if static.normalise:
        dq = tiles.l2norm_gradient(layout.load_heads(refs.q, s.K, own=own), dq)
        dk = tiles.l2norm_gradient(layout.load_heads(refs.k, s.K, own=own), dk)

    stored = own if static.pieces else None
    for ref, x in ((refs.dq, dq), (refs.dk, dk), (refs.dv, dv)):
        layout.store_heads(ref, x, stored)
    # A gate gets what the rows from it on pass to all earlier gates, and what those before it pass to later gates.
    i, j = (lax.broadcasted_iota(jnp.int32, (1, s.C, s.C), axis) for axis in (1, 2))
    below, above = (i <= j, i > j) if masks is None else (masks.same[:, :, : s.C] & x for x in (i <= j, i > j))
    collect = packed.lanes([tile.indicator(below), tile.indicator(above)])  # [1, C, 2 C]
    dg = matmul.dot(collect, packed.rows([later[None], earlier[None]]))[0]  # [C, heads]
    # Padding counts to the sequence before it, and its gates to what passes through.
    layout.store_own(refs.dg, slice(None), jnp.where(own, dg, 0.0) if masked else dg, stored)
    layout.store_own(refs.dbeta, slice(None), dbeta, stored)
    refs.dS[...] = dS

    if masked:
        spoil_gradients(gradients, refs.dS, spoilt, masks)


def quarantine(refs, own, masks: layout.SequenceMasks, s: tile.Shape) -> jax.Array:
    """Clear a gradient of the state that is not finite; return the rows of spoilt sequences, float32 [1, C, 1]."""
    # What a product wrote is not finite in whole columns.
    state = nonfinite.not_finite(refs.dS[:, :8] if refs.dht is None else refs.dS[...])  # [1, 1, 1]

    @pl.when(jnp.max(state) > 0.0)
    def _():
        layout.clear(refs.dS)

    values = (layout.load_heads(ref, s.V, own=own) for ref in (refs.do, refs.W) if ref is not None)
    found = jnp.maximum(kernel.tokens_not_finite(refs, own, s, ("q", "k")), nonfinite.rows_not_finite(*values))
    found = jnp.maximum(found, jnp.where(masks.ending, state, 0.0))
    return nonfinite.whole_sequences(found, masks.same[:, :, : s.C])


def spoil_gradients(gradients, dS_ref, spoilt, masks) -> None:
    """Store NaN in the gradients of spoilt rows, and as that of the state if it belongs to a spoilt sequence."""

    @pl.when(jnp.max(spoilt) > 0.0)
    def _():
        for ref in gradients:
            nonfinite.spoil(ref, jnp.where(masks.code >= 0, spoilt, 0.0))

        @pl.when(jnp.max(jnp.where(masks.carried, spoilt, 0.0)) > 0.0)
        def _():
            dS_ref[...] = jnp.full(dS_ref.shape, jnp.nan, jnp.float32)


# The gradients of all tokens.
ALL = ("dq", "dk", "dv", "dg", "dbeta")


def launch(x: Operands, static: kernel.Static, want: tuple[str, ...]):
    """Run the reverse kernel.

    Args:
      x: operands; v and h0 are not read. Without h and W nothing but dh0 can be had.
      static: what is known.
      want: ALL, ALL and "dh0", or "dh0" alone.

    Returns:
      A dict of what is wanted: dq, dk, dv like q, k, v, dg, dbeta float32 like g, and dh0 [N, HV, K, V] float32, the
      gradient of the initial states, undefined for empty sequences.
    """
    x = x._replace(v=None, initial_state=None)
    B, HV, steps, s = static.B, static.HV, static.steps, static.shape(static.config.heads_bwd)
    specs = kernel.specs_of(static, s, lambda turn: jnp.int32(steps - 1) - turn)
    kinds = {
        "dq": (specs["q"], x.q.shape, x.q.dtype),
        "dk": (specs["k"], x.k.shape, x.k.dtype),
        "dv": (specs["v"], x.do.shape, x.do.dtype),
        "dg": (specs["g"], x.g.shape, jnp.float32),
        "dbeta": (specs["g"], x.g.shape, jnp.float32),
        "dh0": (specs["initial_state"], (static.N, HV, s.K, s.V), jnp.float32),
    }
    wanted = [name for name in kinds if name in want]
    out = launcher.pallas_call(
        launcher.named(_bwd_kernel, Operands._fields, [(n, n in wanted) for n in kinds], ["dS"], static=static, s=s),
        *x,
        name=f"chunk_gated_delta_rule_{'bwd' if 'dq' in want else 'bwd_state'}_c{s.C}",
        num_scalar_prefetch=1,
        # Batch and head blocks are independent; time is sequential and runs backwards, the gradient of the state stays
        # in VMEM.
        grid=(B, HV // s.heads, steps),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=kernel.in_specs(x, specs),
        out_specs=[kinds[name][0] for name in wanted],
        out_shape=[compat.out_struct(*kinds[name][1:], x.q, x.k, x.g, x.beta, x.do, x.dht) for name in wanted],
        scratch_shapes=[pltpu.VMEM((s.heads, s.K, s.V), jnp.float32)],
        cost_estimate=cost.cost(**static.sizes(), itemsize=x.k.dtype.itemsize, backward=True),
        vmem_limit_bytes=static.config.vmem_bytes,
        in_bounds=True,
    )
    return dict(zip(wanted, out, strict=True))
