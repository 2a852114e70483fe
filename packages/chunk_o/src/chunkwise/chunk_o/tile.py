"""o = scale (e^G q S + P v), P_ij = <q_i, e^(G_i - G_j) k_j>, i >= j, and its gradient; arrays in, arrays out.

With dP = scale do v^T: dv = P^T (scale do), dh = (e^G q)^T (scale do), and q, k and G get their gradients from dP.
"""

import jax.numpy as jnp

from chunkwise.shared.kernels import gating, matmul, tiles


def output_tile(q, k, v, h, g, scale):
    """Return the output of one chunk.

    Args:
      q, k: [h, C, K], queries and keys of the key heads.
      v: [HV, C, V].
      h: [HV, K, V], the state before the chunk.
      g: cumulative gates in nats, rows [HV, 1, C] or per channel [HV, C, K].
      scale: multiplies the output.

    Returns:
      ([HV, C, V] float32,)
    """
    HV, from_start = v.shape[0], gating.decay_from_start(g)  # [HV, C, 1 or K]
    scores = gating.decayed_scores(q, k, g)  # [HV, C, C], for i > j
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)  # [h, C, K]
    # A token reads its value without a decay, so the diagonal of P needs no exponential.
    diagonal = tiles.repeat_heads(jnp.sum(q * k, axis=2, keepdims=True), HV)  # [HV, C, 1]
    carried = matmul.dot(tiles.repeat_heads(q, HV) * from_start, h)  # [HV, C, V]
    return (scale * (carried + matmul.dot(scores, v) + diagonal * v.astype(jnp.float32)),)


def output_bwd_tile(q, k, v, h, g, scale, do):
    """Return the gradients by name, q and k [HV, C, K], from the operands of the forward and do [HV, C, V].

    The scale gets no gradient, because it is a known number here: `api` multiplies by a traced scale after the kernel.
    """
    HV = v.shape[0]
    scores = gating.decayed_scores(q, k, g)  # [HV, C, C]
    q, k = (tiles.repeat_heads(x, HV).astype(jnp.float32) for x in (q, k))  # [HV, C, K]
    from_start = gating.decay_from_start(g)  # [HV, C, 1 or K]
    do = scale * do.astype(jnp.float32)  # [HV, C, V]
    dq, dk, dg = gating.decayed_scores_bwd(q, k, g, matmul.dot_nt(do, v))
    # The diagonal of P and its gradient: there is no decay from a token to itself.
    diagonal = jnp.sum(q * k, axis=2, keepdims=True)  # [HV, C, 1]
    ddiagonal = jnp.sum(do * v.astype(jnp.float32), axis=2, keepdims=True)  # [HV, C, 1]
    carried = from_start * matmul.dot_nt(do, h)  # [HV, C, K]
    dv = matmul.dot_tn(scores, do) + diagonal * do  # [HV, C, V]
    dh = matmul.dot_tn(from_start * q, do)  # [HV, K, V]
    dq, dk, dg = dq + carried + ddiagonal * k, dk + ddiagonal * q, dg + gating.gate_gradient(q * carried, g)
    return {"q": dq, "k": dk, "v": dv, "h": dh, "g": dg}
