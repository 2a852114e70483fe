"""One chunk of one head of Kimi delta attention, and its gradient, in the names of docs/kda.md.

kernel.py and kernel_bwd.py compute the same on a schedule, for many heads at once and without the array D.
Tests of the pipeline hold them to this file. Matrix products have the precision of the context: on a TPU, call both
functions under `jax.default_matmul_precision("highest")`.

Dims: C tokens of the chunk, K and V key and value dimensions. In the einsums i and j are tokens, k is a channel.
"""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular


def prepare(q, k, v, g, beta, scale) -> tuple[jax.Array, ...]:
    """Return the part of a chunk that needs no state: e^g_cum, D, e^(g_cum_last - g_cum), A_inv, w, u and the scores P.

    D_ij = e^(g_cum_i - g_cum_j) for i >= j, else 0. Its exponent is the sum of the gates after j up to i. This is never
    positive, and a strong gate takes no digits from weak gates that follow it.
    """
    C = k.shape[0]
    i, j = jnp.arange(C)[:, None], jnp.arange(C)
    lower, strictly_lower = (i >= j)[..., None], (i > j)[..., None]  # [C, C, 1]
    g_between = jnp.cumsum(jnp.where(strictly_lower, g[:, None], 0.0), axis=0)  # [C, C, K], g_cum_i - g_cum_j or 0
    D = jnp.where(lower, jnp.exp(g_between), 0.0)  # [C, C, K]
    from_start, to_end = jnp.exp(jnp.cumsum(g, axis=0)), D[-1]  # [C, K]

    k_beta, v_beta = beta[:, None] * k, beta[:, None] * v  # [C, K], [C, V]
    A = jnp.tril(jnp.einsum("ik,ijk,jk->ij", k_beta, D, k), -1)  # [C, C]
    identity = jnp.eye(C, dtype=k.dtype)
    A_inv = solve_triangular(identity + A, identity, lower=True, unit_diagonal=True)  # [C, C], (I + A)^-1
    w = A_inv @ (from_start * k_beta)  # [C, K]
    u = A_inv @ v_beta  # [C, V]
    scores = scale * jnp.einsum("ik,ijk,jk->ij", q, D, k)  # [C, C]
    return from_start, D, to_end, A_inv, w, u, scores


def chunk(q, k, v, g, beta, S, scale) -> tuple[jax.Array, jax.Array]:
    """Return the output of a chunk and the state after the chunk.

    Args:
      q, k: queries and keys [C, K].
      v: values [C, V].
      g: log decays [C, K] in nats, at most 0, -inf included.
      beta: step sizes [C].
      S: the state before the chunk [K, V].
      scale: multiplies q.

    Returns:
      (o [C, V], S_next [K, V]) in the type of the arguments, float32 or float64.
    """
    from_start, _, to_end, _, w, u, scores = prepare(q, k, v, g, beta, scale)
    v_new = u - w @ S  # [C, V]
    o = scale * (from_start * q) @ S + scores @ v_new  # [C, V]
    S_next = from_start[-1][:, None] * S + (to_end * k).T @ v_new  # [K, V]
    return o, S_next


def chunk_bwd(q, k, v, g, beta, S, scale, do, dS_next) -> tuple[jax.Array, ...]:
    """Return the gradients (dq, dk, dv, dg, dbeta, dS) of `chunk` for cotangents do [C, V] and dS_next [K, V]."""
    from_start, D, to_end, A_inv, w, u, scores = prepare(q, k, v, g, beta, scale)
    k_beta = beta[:, None] * k  # [C, K]
    v_new = u - w @ S  # [C, V]

    # Through o and S_next to v_new and S; the gradient of u is dv_new.
    dv_new = scores.T @ do + (to_end * k) @ dS_next  # [C, V]
    dw = -dv_new @ S.T  # [C, K]
    dS = from_start[-1][:, None] * dS_next + scale * (from_start * q).T @ do - w.T @ dv_new  # [K, V]

    # For x = (I + A)^-1 r, the gradient of r is A_inv^T dx, and the gradient of A is -(A_inv^T dx) x^T; w and u are two
    # such x.
    dw_rhs = A_inv.T @ dw  # [C, K], the gradient of e^g_cum k_beta
    dv_beta = A_inv.T @ dv_new  # [C, V]
    dA = -jnp.tril(dw_rhs @ w.T + dv_beta @ u.T, -1)  # [C, C]

    # Through S, the scores and A to queries and keys.
    dscores = jnp.tril(do @ v_new.T)  # [C, C]
    dq_state = scale * from_start * (do @ S.T)  # [C, K], because o reads S
    dk_beta_state = from_start * dw_rhs  # [C, K], because v_new reads S
    dk_state = to_end * (v_new @ dS_next.T)  # [C, K], through S_next
    dk_scores = scale * jnp.einsum("ij,ijk,ik->jk", dscores, D, q)  # [C, K]
    dk_A = jnp.einsum("ij,ijk,ik->jk", dA, D, k_beta)  # [C, K]
    dk_beta = dk_beta_state + jnp.einsum("ij,ijk,jk->ik", dA, D, k)  # [C, K]
    dq = dq_state + scale * jnp.einsum("ij,ijk,jk->ik", dscores, D, k)  # [C, K]
    dk = beta[:, None] * dk_beta + dk_scores + dk_A + dk_state  # [C, K]
    dv = beta[:, None] * dv_beta  # [C, V]
    dbeta = jnp.sum(k * dk_beta, axis=1) + jnp.sum(v * dv_beta, axis=1)  # [C]

    # Through the decays to the gates: gate t is in D_ij for j < t <= i and in from_start_i for t <= i. Every term
    # has its decay as a factor, so that strong gates lose no digits. to_end is the last row of D.
    dD = scale * jnp.einsum("ij,ik,jk->ijk", dscores, q, k) + jnp.einsum("ij,ik,jk->ijk", dA, k_beta, k)  # [C, C, K]
    dg_between = (D * dD).at[-1].add(k * dk_state)  # [C, C, K]
    dg_cum = q * dq_state + k_beta * dk_beta_state  # [C, K]
    dg_cum = dg_cum.at[-1].add(from_start[-1] * jnp.sum(S * dS_next, axis=1))
    i_from_t, j_before_t = jnp.tri(len(k), dtype=k.dtype), jnp.tri(len(k), k=-1, dtype=k.dtype)  # [C, C]
    dg = i_from_t.T @ dg_cum + jnp.einsum("it,ijk,tj->tk", i_from_t, dg_between, j_before_t)  # [C, K]
    return dq, dk, dv, dg, dbeta, dS
