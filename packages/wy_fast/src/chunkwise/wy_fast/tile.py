"""w = Q (e^G k) and u = Q v, where Q_ij = A_inv_ij beta_j, and their gradient; arrays in, arrays out.

dQ = dw (e^G k)^T + du v^T, d(e^G k) = Q^T dw, dv = Q^T du, dA_inv_ij = dQ_ij beta_j, and dbeta_j is the sum of dQ_ij
A_inv_ij over i.
"""

import jax.numpy as jnp

from chunkwise.shared.kernels import gating, matmul, tiles


def decayed_keys(k, from_start):
    """Return e^G k [HV, C, K] float32 from the keys of the key heads [h, C, K] and e^G [HV, C, 1 or K]."""
    return tiles.repeat_heads(k, from_start.shape[0]).astype(jnp.float32) * from_start


def wy_tile(k, v, A_inv, beta, g):
    """Return the effective keys and values of one chunk.

    Args:
      k: [h, C, K], keys of the key heads.
      v: [HV, C, V].
      A_inv: [HV, C, C].
      beta: [HV, 1, C]; it multiplies the columns of A_inv.
      g: cumulative gates in nats, rows [HV, 1, C] or per channel [HV, C, K].

    Returns:
      w [HV, C, K] and u [HV, C, V], float32.
    """
    scaled = A_inv * beta  # [HV, C, C]
    return matmul.dot(scaled, decayed_keys(k, gating.decay_from_start(g))), matmul.dot(scaled, v)


def wy_bwd_tile(k, v, A_inv, beta, g, dw, du):
    """Return the gradients by name, k [HV, C, K], from the operands of the forward, dw [HV, C, K] and du [HV, C, V]."""
    from_start = gating.decay_from_start(g)  # [HV, C, 1 or K]
    decayed = decayed_keys(k, from_start)  # [HV, C, K]
    scaled = A_inv * beta  # [HV, C, C]
    dscaled = matmul.dot_nt(dw, decayed) + matmul.dot_nt(du, v)  # [HV, C, C]
    ddecayed = matmul.dot_tn(scaled, dw)  # [HV, C, K]
    dbeta = jnp.sum(A_inv * dscaled, axis=1, keepdims=True)  # [HV, 1, C]
    dg = gating.gate_gradient(decayed * ddecayed, g)
    dv = matmul.dot_tn(scaled, du)  # [HV, C, V]
    return {"k": from_start * ddecayed, "v": dv, "A_inv": beta * dscaled, "beta": dbeta, "g": dg}
