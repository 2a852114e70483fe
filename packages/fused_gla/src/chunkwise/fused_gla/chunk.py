"""One chunk of one head of gated linear attention, and its gradient, in the names of docs/gla.md.

kernel.py and kernel_bwd.py compute the same on a schedule, for many heads at once and without the array D.
Tests of the pipeline hold them to this file. Matrix products have the precision of the context: on a TPU, call both
functions under `jax.default_matmul_precision("highest")`.

Dims: C tokens of the chunk, K and V key and value dimensions. In the einsums i and j are tokens, k is a channel.
"""

import jax
import jax.numpy as jnp


def prepare(q, k, g, scale) -> tuple[jax.Array, ...]:
    """Return the part of a chunk that needs no state: e^g_cum, D, e^(g_cum_last - g_cum) and the scores P.

    D_ij = e^(g_cum_i - g_cum_j) for i >= j, else 0. Its exponent is the sum of the gates after j up to i. This is never
    positive, and a strong gate takes no digits from weak gates that follow it.
    """
    C = k.shape[0]
    g = jnp.broadcast_to(g if g.ndim == 2 else g[:, None], k.shape)  # [C, K]
    i, j = jnp.arange(C)[:, None], jnp.arange(C)
    lower, strictly_lower = (i >= j)[..., None], (i > j)[..., None]  # [C, C, 1]
    g_between = jnp.cumsum(jnp.where(strictly_lower, g[:, None], 0.0), axis=0)  # [C, C, K], g_cum_i - g_cum_j or 0
    D = jnp.where(lower, jnp.exp(g_between), 0.0)  # [C, C, K]
    from_start, to_end = jnp.exp(jnp.cumsum(g, axis=0)), D[-1]  # [C, K]
    scores = scale * jnp.einsum("ik,ijk,jk->ij", q, D, k)  # [C, C]
    return from_start, D, to_end, scores


def chunk(q, k, v, g, S, scale) -> tuple[jax.Array, jax.Array]:
    """Return the output of a chunk and the state after the chunk.

    Args:
      q, k: queries and keys [C, K].
      v: values [C, V].
      g: log decays in nats, at most 0, -inf included: [C] per head, or [C, K] per channel.
      S: the state before the chunk [K, V].
      scale: multiplies q.

    Returns:
      (o [C, V], S_next [K, V]) in the type of the arguments, float32 or float64.
    """
    from_start, _, to_end, scores = prepare(q, k, g, scale)
    o = scale * (from_start * q) @ S + scores @ v  # [C, V]
    S_next = from_start[-1][:, None] * S + (to_end * k).T @ v  # [K, V]
    return o, S_next


def chunk_bwd(q, k, v, g, S, scale, do, dS_next) -> tuple[jax.Array, ...]:
    """Return the gradients (dq, dk, dv, dg, dS) of `chunk` for cotangents do [C, V] and dS_next [K, V]."""
    from_start, D, to_end, scores = prepare(q, k, g, scale)

    # Through o and S_next to v and S.
    dv = scores.T @ do + (to_end * k) @ dS_next  # [C, V]
    dS = from_start[-1][:, None] * dS_next + scale * (from_start * q).T @ do  # [K, V]

    # Through S and the scores to queries and keys.
    dscores = jnp.tril(do @ v.T)  # [C, C]
    dq_state = scale * from_start * (do @ S.T)  # [C, K], because o reads S
    dk_state = to_end * (v @ dS_next.T)  # [C, K], through S_next
    dq = dq_state + scale * jnp.einsum("ij,ijk,jk->ik", dscores, D, k)  # [C, K]
    dk = dk_state + scale * jnp.einsum("ij,ijk,ik->jk", dscores, D, q)  # [C, K]

    # Through the decays to the gates: gate t is in D_ij for j < t <= i and in from_start_i for t <= i. Every term
    # has its decay as a factor, so that strong gates lose no digits. to_end is the last row of D.
    dD = scale * jnp.einsum("ij,ik,jk->ijk", dscores, q, k)  # [C, C, K]
    dg_between = (D * dD).at[-1].add(k * dk_state)  # [C, C, K]
    dg_cum = (q * dq_state).at[-1].add(from_start[-1] * jnp.sum(S * dS_next, axis=1))  # [C, K]
    i_from_t, j_before_t = jnp.tri(len(k), dtype=k.dtype), jnp.tri(len(k), k=-1, dtype=k.dtype)  # [C, C]
    dg = i_from_t.T @ dg_cum + jnp.einsum("it,ijk,tj->tk", i_from_t, dg_between, j_before_t)  # [C, K]
    return dq, dk, dv, dg if g.ndim == 2 else jnp.sum(dg, axis=1), dS
