"""One chunk of GDN-2 and its gradient, straight down; every implementation of the package computes the same.

The kernels are in `chunkwise.kda`. Comba has other erase keys p and written values y, which read the state before the
decay of their token: with `erase_before_decay`, p of row i has the decays of row i - 1.
"""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular


def prepare(q, k, p, y, g, scale, erase_before_decay=False):
    """Return the part of a chunk that needs no state: from_start, D, both for p, to_end, A_inv, w_y, u and scores."""
    C = len(k)
    lower = jnp.tri(C, dtype=bool)[:, :, None]  # [C, C, 1], i >= j
    # Sums of the gates after j up to i. Differences of cumulative sums would cancel.
    between = jnp.cumsum(jnp.where(jnp.tri(C, k=-1, dtype=bool)[:, :, None], g[:, None], 0.0), axis=0)
    D = jnp.where(lower, jnp.exp(between), 0.0)  # [C, C, K], e^(G_i - G_j)
    from_start, to_end = jnp.exp(jnp.cumsum(g, axis=0)), D[-1]  # [C, K]

    before = lambda x, first: jnp.concatenate([jnp.full_like(x[:1], first), x[:-1]])  # the rows before
    start_p, D_p = (before(from_start, 1.0), before(D, 0.0)) if erase_before_decay else (from_start, D)

    A = jnp.tril(jnp.einsum("ik,ijk,jk->ij", p, D_p, k), -1)  # [C, C]
    identity = jnp.eye(C, dtype=k.dtype)
    A_inv = solve_triangular(identity + A, identity, lower=True, unit_diagonal=True)  # [C, C], (I + A)^-1
    w_y, u = A_inv @ (start_p * p), A_inv @ y  # [C, K], [C, V]
    scores = scale * jnp.einsum("ik,ijk,jk->ij", q, D, k)  # [C, C]
    return from_start, D, start_p, D_p, to_end, A_inv, w_y, u, scores


def chunk(q, k, v, g, b, w, S, scale, erase_before_decay=False) -> tuple[jax.Array, jax.Array]:
    """Return the output of a chunk and the state after the chunk.

    Args:
      q, k: queries and keys [C, K].
      v: values [C, V].
      g: log decays [C, K] in nats, at most 0, -inf included.
      b, w: erase gates [C, K] and write gates [C, V].
      S: the state before the chunk [K, V].
      scale: multiplies q.
      erase_before_decay: whether erase keys read the state before the decay of their token.

    Returns:
      (o [C, V], S_next [K, V]) in the type of the arguments, float32 or float64.
    """
    from_start, *_, to_end, _, w_y, u, scores = prepare(q, k, b * k, w * v, g, scale, erase_before_decay)
    v_new = u - w_y @ S  # [C, V]
    o = scale * (from_start * q) @ S + scores @ v_new  # [C, V]
    S_next = from_start[-1][:, None] * S + (to_end * k).T @ v_new  # [K, V]
    return o, S_next


def chunk_bwd(q, k, v, g, b, w, S, scale, do, dS_next, erase_before_decay=False) -> tuple[jax.Array, ...]:
    """Return the gradients (dq, dk, dv, dg, db, dw, dS) of `chunk` for cotangents do [C, V] and dS_next [K, V]."""
    p = b * k  # [C, K]
    from_start, D, start_p, D_p, to_end, A_inv, w_y, u, scores = prepare(q, k, p, w * v, g, scale, erase_before_decay)
    v_new = u - w_y @ S  # [C, V]

    # Through o and S_next to v_new and S; the gradient of u is dv_new.
    dv_new = scores.T @ do + (to_end * k) @ dS_next  # [C, V]
    dw_y = -dv_new @ S.T  # [C, K]
    dS = from_start[-1][:, None] * dS_next + scale * (from_start * q).T @ do - w_y.T @ dv_new  # [K, V]

    # For x = (I + A)^-1 r, the gradient of r is A_inv^T dx, and the gradient of A is -(A_inv^T dx) x^T; w_y and u are
    # two such x.
    dX, dy = A_inv.T @ dw_y, A_inv.T @ dv_new  # [C, K], [C, V]
    dA = -jnp.tril(dX @ w_y.T + dy @ u.T, -1)  # [C, C]
    dscores = jnp.tril(do @ v_new.T)  # [C, C]

    dq_state = scale * from_start * (do @ S.T)  # [C, K], because o reads S
    dp_state = start_p * dX  # [C, K], because v_new reads S
    dk_state = to_end * (v_new @ dS_next.T)  # [C, K], through S_next
    dq = dq_state + scale * jnp.einsum("ij,ijk,jk->ik", dscores, D, k)  # [C, K]
    dp = dp_state + jnp.einsum("ij,ijk,jk->ik", dA, D_p, k)  # [C, K]
    dk = dk_state + jnp.einsum("ij,ijk,ik->jk", scale * dscores, D, q) + jnp.einsum("ij,ijk,ik->jk", dA, D_p, p)
    dk, db = dk + b * dp, k * dp  # [C, K]
    dv, dw = w * dy, v * dy  # [C, V]

    # Through the decays to the gates: gate t is in D_ij for j < t <= i and in from_start_i for t <= i. to_end is the
    # last row of D. The decays of p may be those of the row before.
    of_p = lambda x: jnp.concatenate([x[1:], jnp.zeros_like(x[:1])]) if erase_before_decay else x
    dg_between = scale * D * jnp.einsum("ij,ik,jk->ijk", dscores, q, k)  # [C, C, K]
    dg_between = dg_between + of_p(D_p * jnp.einsum("ij,ik,jk->ijk", dA, p, k))
    dg_between = dg_between.at[-1].add(k * dk_state)
    dg_cum = q * dq_state + of_p(p * dp_state)  # [C, K]
    dg_cum = dg_cum.at[-1].add(from_start[-1] * jnp.sum(S * dS_next, axis=1))
    i_from_t, j_before_t = jnp.tri(len(k), dtype=k.dtype), jnp.tri(len(k), k=-1, dtype=k.dtype)  # [C, C]
    dg = i_from_t.T @ dg_cum + jnp.einsum("it,ijk,tj->tk", i_from_t, dg_between, j_before_t)  # [C, K]
    return dq, dk, dv, dg, db, dw, dS
