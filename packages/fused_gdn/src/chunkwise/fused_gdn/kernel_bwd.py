"""Backward: one reverse pass over the chunks; tile mathematics, kernel body, launcher.

With the names of kernel.py, where S and W are computed again, and dS' arriving from the right:

    dv_new = (scale tril(Q K^T * D))^T dO + e^(G_last - G) K dS'      dR = X^T B dv_new      dV = dR
    dN = -tril(dR W^T, -1)                    dA = tril(dO (B W)^T)    of N = K K^T * D and A = scale Q K^T * D
    dS = e^G_last dS' + Q^T (scale e^G dO) - K^T (e^G dR)

dN needs no further product with X: -X^T (B dv_new R^T) X^T = -dR W^T. As in the forward, what oscillates where keys
repeat (W, dv_new, A and the gradients of N and A) keeps 16 bits with bfloat16 tensors; S and dS enter at 8.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn.config import Config
from chunkwise.fused_gdn.kernel import (
    CLOSES,
    FIRST,
    LAST,
    Options,
    blocks,
    clear,
    load_chunk,
    load_owner,
    load_tokens,
    own_rows,
    store_own,
    store_tiles,
)
from chunkwise.fused_gdn.tile import (
    Shape,
    flow_of,
    gate_sums,
    gates,
    head_columns,
    key_packs,
    placed_keys,
    read_state,
    scores,
)
from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import (
    LANES,
    apply_transposed,
    dot,
    dot_nt,
    dot_tn,
    l2norm_gradient,
    lanes,
    named,
    outer,
    pallas_call,
    parts,
    rows,
    side_lanes,
    split_lanes,
)


def lane_sums(x: jax.Array, w: int, dtype) -> jax.Array:
    """Return the sums of x [n, C, m w] over every w lanes, as [C, n m].

    A product with zeros and ones: the matrix unit has time, and the unit that adds up lanes has not.
    """
    heads = x.shape[0] * x.shape[2] // w
    flat = parts(lanes([x[i : i + 1] for i in range(x.shape[0])]), dtype)
    lane = lax.broadcasted_iota(jnp.int32, (1, heads * w, heads), 1)
    head = lax.broadcasted_iota(jnp.int32, (1, heads * w, heads), 2)
    own = jnp.where(lax.shift_right_logical(lane, w.bit_length() - 1) == head, 1.0, 0.0)
    sums = dot(rows(flat), own.astype(flat[0].dtype))[0]
    return functools.reduce(jnp.add, [sums[i * x.shape[1] : (i + 1) * x.shape[1]] for i in range(len(flat))])


def row_sums(x: jax.Array, s: Shape) -> jax.Array:
    """Return the sums over the rows of packed x [n, C, p C], as [C, heads]."""
    total = jnp.sum(x, axis=1, keepdims=True)
    lane = lax.broadcasted_iota(jnp.int32, (1, s.p * s.C), 1)
    owner = lax.shift_right_logical(lane, s.C.bit_length() - 1)
    per_head = [jnp.where(owner == i, total[n], 0.0) for n in range(x.shape[0]) for i in range(s.p)]
    row = lax.broadcasted_iota(jnp.int32, (1, s.C, s.p * s.C), 1)
    diagonal = jnp.where(row == (lane & (s.C - 1))[None], 1.0, 0.0)
    return dot_nt(diagonal, jnp.concatenate(per_head)[None])[0]


def fold(row: jax.Array, width: int) -> jax.Array:
    """Return rows [heads, 1, w] as [heads, 1, width] of the same sum; both are whole registers of lanes."""
    folded = functools.reduce(jnp.add, [row[:, :, i : i + LANES] for i in range(0, row.shape[2], LANES)])
    return lanes([folded, jnp.zeros_like(folded)]) if width > LANES else folded


def strictly(s: Shape) -> jax.Array:
    """Return i > j of shape [1, C, p C]."""
    i = lax.broadcasted_iota(jnp.int32, (1, s.C, s.p * s.C), 1)
    return i > (lax.broadcasted_iota(jnp.int32, (1, s.C, s.p * s.C), 2) & (s.C - 1))


def per_key(x: jax.Array, s: Shape) -> jax.Array:
    """Sum tiles [heads, m, w] over the value heads of every key head, [key heads, m, w]."""
    return jnp.stack([sum(x[i + j] for j in range(s.group)) for i in range(0, s.heads, s.group)])


def multiply_nt(a, b, dtype):
    """Return a b^T of float32 tiles as one pass of operands of `dtype`."""
    return dot_nt(a.astype(dtype), b.astype(dtype))


def key_gradients(A1, A2, q, k, s: Shape):
    """Return the gradients of (q, k) [key heads, C, K] through the packed scores.

    dq = A2 K and dk = (A1 + A1^T) K + A2^T Q, summed over the value heads of a key head.
    """
    own_q, own_k, each = key_packs(q, s), key_packs(k, s), s.p // s.keys
    A = parts(rows([A1, A2]), k.dtype)
    direct = dot(lanes(A), rows([placed_keys(own_k, s)] * len(A)))
    turned = dot_tn(rows(A), rows([lanes(own_k), lanes(own_q)] * len(A)))
    dq, dk = [0.0] * k.shape[0], [0.0] * k.shape[0]
    for n in range(s.heads // s.p):
        for j in range(s.keys):
            head, at = (n * s.p + j * each) // s.group, slice(j * s.K, (j + 1) * s.K)
            dq[head] += direct[n, s.C :, at]
            dk[head] += direct[n, : s.C, at]
            for i in range(j * each, (j + 1) * each):
                dk[head] += turned[n, i * s.C : (i + 1) * s.C, at]
    return jnp.stack(dq), jnp.stack(dk)


def chunk_gradients(q, k, gate, flow, X, S, W, do, dS, scale, s: Shape):
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
    q_own, k_own = (jnp.stack([x[i // s.group] for i in range(s.heads)]) for x in (q, k))
    start_k, end_k, beta_k = (head_columns(x, s, s.K) for x in (flow.start, flow.end, gate.beta))
    start, end, beta = (head_columns(x, s, s.V) for x in (flow.start, flow.end, gate.beta))
    KK, QK, D = scores(q, k, gate, flow.mask, s)

    written = end * read_state(k, None, dS.astype(dtype), s)[0]
    dv_new = apply_transposed(QK * (D * scale), do, dtype, s.p) + written
    dR = apply_transposed(X, beta * dv_new, dtype, s.p)

    outers = outer(rows([dR, do.astype(jnp.float32)]), W, dtype, s.p)
    dN = jnp.where(strictly(s), -outers[:, :C], 0.0) * D
    A1, A2 = dN * gate.beta_rows, outers[:, C:] * (D * gate.beta_rows * scale)
    dq, dk = key_gradients(A1, A2, q, k, s)

    through_state = multiply_nt(rows([do.astype(jnp.float32), dR]), S, dtype)
    dq_start, dk_start = (scale * start_k) * through_state[:, :C], -start_k * through_state[:, C:]
    dk_end = (end_k * beta_k) * multiply_nt(W, dS, dtype)

    # What passes through a row's own and all earlier gates, and apart from it what passes all later ones. What passes
    # none, a row's own product, stands in neither: added and taken away again it would drown the rest at strong gates.
    kept = fold(jnp.sum(S.astype(jnp.float32) * dS, axis=1, keepdims=True), s.K)
    is_last = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1) == C - 1
    entered = q_own.astype(jnp.float32) * dq_start + k_own.astype(jnp.float32) * dk_start
    entered = entered + jnp.where(is_last, start_k[:, -1:] * kept, 0.0)
    pairs = jnp.where(strictly(s), A1 * KK + A2 * QK, 0.0)
    later = lane_sums(entered, s.K, dtype) + lane_sums(pairs, C, dtype) - row_sums(pairs, s)
    earlier = lane_sums(beta * written * W, s.V, dtype)
    dbeta = lane_sums(dv_new * W, s.V, dtype) + row_sums(dN * KK, s)

    entering = rows([(scale * start) * do.astype(jnp.float32), -start * dR])
    entering = side_lanes(entering.astype(dtype), s.group)
    dS = start[:, -1:] * dS + split_lanes(dot_tn(rows([q, k]), entering), s.group)
    return dq + per_key(dq_start, s), dk + per_key(dk_start + dk_end, s), dR, later, earlier, dbeta, dS


def _bwd_kernel(refs, *, s, opt, NT):
    c = NT - 1 - pl.program_id(2)
    chunk = pl.program_id(0) * NT + c
    dS_ref = refs.dS

    @pl.when(pl.program_id(2) == 0)
    def _():
        dS_ref[...] = jnp.zeros_like(dS_ref)

    @pl.when(refs.table[LAST, chunk] == 1)
    def _():
        dS_ref[...] = jnp.zeros_like(dS_ref) if refs.dht is None else refs.dht[...]

    if opt.pieces:  # rows that no piece owns stay zero

        @pl.when(refs.table[CLOSES, chunk] == 1)
        def _():
            clear([refs.dq, refs.dk, refs.dv, refs.dg, refs.dbeta])

    own = own_rows(refs, chunk, c, s, opt)
    q, k, g, beta = load_chunk(refs, own, s, opt)
    do, W = load_tokens(refs.do, own, s.V), load_tokens(refs.W, own, s.V)
    gate = gates(gate_sums(g, beta, s, exact=k.dtype != jnp.bfloat16), slice(0, s.heads), s)
    flow = flow_of(gate, s, load_owner(refs, chunk))
    dq, dk, dv, later, earlier, dbeta, dS = chunk_gradients(
        q, k, gate, flow, refs.X[...], refs.h[...], W, do, dS_ref[...], opt.scale, s
    )
    if opt.normalise:
        dq = l2norm_gradient(load_tokens(refs.q, own, s.K), dq)
        dk = l2norm_gradient(load_tokens(refs.k, own, s.K), dk)
    kept = own if opt.pieces else None
    for ref, tiles in ((refs.dq, dq), (refs.dk, dk), (refs.dv, dv)):
        store_tiles(ref, tiles, kept)
    i, j = (lax.broadcasted_iota(jnp.int32, (1, s.C, s.C), axis) for axis in (1, 2))
    collect = lanes([jnp.where(i <= j, 1.0, 0.0), jnp.where(i > j, 1.0, 0.0)])
    store_own(refs.dg, slice(None), dot(collect, rows([later[None], earlier[None]]))[0], kept)
    store_own(refs.dbeta, slice(None), dbeta, kept)
    dS_ref[...] = dS
    if refs.dh0 is not None:

        @pl.when(refs.table[FIRST, chunk] == 1)
        def _():
            refs.dh0[...] = dS_ref[...]


def launch(operands, N: int, want_state: bool, config: Config, opt: Options, s: Shape):
    """Run the reverse kernel on the flat views.

    Args:
      operands: q, k, g and beta as in the forward; h, W and X, what its kernel computes for the backward; do, like v;
        dht, the gradient of the final states [N, HV, K, V] float32 or None; table and owner as in the forward.
      N: as in the forward.
      want_state: whether the gradient of the initial state is needed.
      config, opt, s: static.

    Returns:
      A dict of dq, dk, dv like q, k, v, dg, dbeta float32 like g, and dh0 [N, HV, K, V] float32 if wanted.
    """
    q, k, g, beta, h, W, X, do, dht, table, owner = operands
    B = q.shape[0]
    HV, NT = do.shape[2] // s.V, table.shape[1] // B
    cut = blocks(s, NT, lambda c: NT - 1 - c, opt.pieces)
    kinds = {
        "dq": (cut.q, q.shape, q.dtype),
        "dk": (cut.q, k.shape, k.dtype),
        "dv": (cut.v, do.shape, do.dtype),
        "dg": (cut.gate, g.shape, jnp.float32),
        "dbeta": (cut.gate, g.shape, jnp.float32),
        "dh0": (cut.state, (N, HV, s.K, s.V), jnp.float32),
    }
    wanted = [n for n in kinds if n != "dh0" or want_state]
    names = ("table", "q", "k", "g", "beta", "h", "W", "X", "do", "dht", "owner")
    out = pallas_call(
        named(_bwd_kernel, names, [(n, n in wanted) for n in kinds], ["dS"], s=s, opt=opt, NT=NT),
        table, q, k, g, beta, h, W, X, do, dht, owner,
        name=f"fused_chunk_gated_delta_rule_bwd_c{s.C}",
        num_scalar_prefetch=1,
        # Batch and head blocks are independent; time is sequential and runs backwards, the gradient of the state stays
        # in VMEM.
        grid=(B, HV // s.heads, NT),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=[cut.q, cut.q, cut.gate, cut.gate, cut.h, cut.v, cut.X, cut.v, None if dht is None else cut.state,
                  None if owner is None else cut.owner],
        out_specs=[kinds[n][0] for n in wanted],
        out_shape=[out_struct(*kinds[n][1:], q, k, g, beta, do, dht) for n in wanted],
        scratch_shapes=[pltpu.VMEM((s.heads, s.K, s.V), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=2 * B * NT * HV * s.C * (6 * s.C * s.K + 3 * s.C * s.V + 5 * s.K * s.V),
            transcendentals=B * NT * HV * s.C * s.C,
            bytes_accessed=2 * (q.nbytes + k.nbytes + do.nbytes) + W.nbytes + h.nbytes + X.nbytes,
        ),
        vmem_limit_bytes=config.vmem_bytes,
    )  # fmt: skip
    return dict(zip(wanted, out, strict=True))
