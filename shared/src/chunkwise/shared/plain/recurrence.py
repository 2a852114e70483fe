"""The token recurrence of all operators, one token at a time; every kernel computes the same.

S~  = exp(g_t) S_{t-1}                                 g_t per head, or per channel of the key
S_t = S~ + k_t v_t^T                                   GLA and simple GLA (no beta)
S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T               gated delta rule and KDA (beta)
S_t = S~ + beta_t k_t (v_t - S~^T p_t)^T               GDN-2 (beta and p)
S_t = S~ + beta_t k_t (v_t - S_{t-1}^T p_t)^T          Comba (beta, p and `erase_before_decay`)
S_t = S~ + k_t v_t^T + e_t (S_{t-1}^T p_t)^T           RWKV-7 (p, an `echo` e and `erase_before_decay`)
o_t = scale * S_t^T q_t
"""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared import compat
from chunkwise.shared.kernels import chunking, tiles


def unit_rows(x: jax.Array, wanted: bool, cu_seqlens: jax.Array | None) -> jax.Array:
    """Return x [B, T, ...] with unit rows, computed in float32, in the type of x; x itself if `wanted` is False."""
    # Padding may hold anything: the gradient of its norm must not be 0 times NaN.
    return tiles.l2norm(chunking.zero_padding(x, cu_seqlens).astype(jnp.float32)).astype(x.dtype) if wanted else x


def unit_keys(k: jax.Array, beta: jax.Array, wanted: bool, cu_seqlens: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return keys as `unit_rows`, and float32 step sizes [B, T, HV] that make up for their rounding."""
    beta = beta.astype(jnp.float32)
    if not wanted:
        return k, beta
    k, factor = tiles.unit_keys(chunking.zero_padding(k, cu_seqlens).astype(jnp.float32), k.dtype)
    return k, beta if factor is None else beta * tiles.repeat_heads(factor[..., 0], beta.shape[2], axis=2)


def advance(S, q, k, v, g, beta, p, echo, scale, erase_before_decay=False):
    """Advance states by one token.

    Args:
      S: states [..., K, V].
      q, k: [..., K].
      v: [..., V].
      g: log decay [...] or [..., K] in nats.
      beta: step sizes [...], or None for an operator without the delta rule.
      p: erase keys [..., K], or None to erase by k.
      echo: keys [..., K] that write what erase keys read, or None.
      scale: multiplies the output.
      erase_before_decay: whether erase keys read S before the decay.

    Returns:
      The new S, the output o [..., V], and the value that the token wrote [..., V].
    """
    # Products are written as sums, because a matrix unit may round float32 operands; one token is bound by memory
    # anyway.
    gate = g[..., None] if g.ndim == k.ndim else g[..., None, None]
    before, S = S, jnp.exp(gate) * S
    if beta is not None or echo is not None:
        erased = (before if erase_before_decay else S) * (k if p is None else p)[..., None]
        erased = jnp.sum(erased, axis=-2)
        v = v if beta is None else beta[..., None] * (v - erased)
        S = S if echo is None else S + echo[..., None] * erased[..., None, :]
    S = S + k[..., None] * v[..., None, :]
    return S, scale * jnp.sum(S * q[..., None], axis=-2), v


def recurrence(
    q, k, v, g, beta, scale, initial_state, dtype, p=None, every=False, erase_before_decay=False, echo=None
):  # fmt: skip
    """Run a batch of equally long sequences token by token in `dtype`.

    Args:
      q, k: [B, T, HV, K].
      v: [B, T, HV, V].
      g: [B, T, HV] or [B, T, HV, K].
      beta: [B, T, HV] or None.
      scale: multiplies the output; a number, or a scalar of any type.
      initial_state: [B, HV, K, V] or None.
      dtype: float32, or float64 under `jax.enable_x64`.
      p: [B, T, HV, K] or None.
      every: whether to return the states after every token; for few tokens.
      erase_before_decay: as in `advance`.
      echo: [B, T, HV, K] or None.

    Returns:
      (o [B, T, HV, V], final_state [B, HV, K, V]), both in `dtype`; with `every`, (o, the states after every token
      [B, T, HV, K, V], the values that the tokens wrote [B, T, HV, V]).
    """
    B, _, HV, K = k.shape
    scale = jnp.asarray(scale, dtype)
    tokens = q, k, v, g, beta, p, echo
    state = _start((B, HV, K, v.shape[-1]), tokens, initial_state, dtype)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x.astype(dtype), 1, 0), tokens)
    if not every:
        state, o = lax.scan(lambda S, x: advance(S, *x, scale, erase_before_decay)[:2], state, tokens)
        return jnp.moveaxis(o, 0, 1), state

    def pass_token(S, x):
        S, o, written = advance(S, *x, scale, erase_before_decay)
        return S, (o, S, written)

    # Few tokens need no loop.
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), lax.scan(pass_token, state, tokens, unroll=True)[1])


def _start(shape, tokens, initial_state, dtype):
    """Return the states to start from; under `shard_map` they must vary over the axes of all operands at once."""
    zeros = compat.varying_zeros(shape, *tokens, initial_state).astype(dtype)
    return zeros if initial_state is None else zeros + initial_state.astype(dtype)


def packed_recurrence(
    q, k, v, g, beta, scale, initial_state, cu_seqlens, dtype, p=None, erase_before_decay=False, echo=None
):  # fmt: skip
    """Run a packed batch token by token; the arguments of `recurrence` with B = 1 and one state per sequence.

    Tokens from cu_seqlens[-1] on belong to no sequence: their output is zero.
    """
    T, HV, K = k.shape[1:]
    N = cu_seqlens.shape[0] - 1
    scale = jnp.asarray(scale, dtype)
    tokens = q, k, v, g, beta, p, echo
    states = _start((N, HV, K, v.shape[-1]), tokens, initial_state, dtype)
    owner = jnp.searchsorted(cu_seqlens[1:], jnp.arange(T, dtype=jnp.int32), side="right")

    def pass_token(states, x):
        n, token = x
        S, o, _ = advance(states[jnp.minimum(n, N - 1)], *token, scale, erase_before_decay)
        return states.at[n].set(S, mode="drop"), jnp.where(n < N, o, 0)

    tokens = jax.tree.map(lambda x: x[0].astype(dtype), tokens)
    states, o = lax.scan(pass_token, states, (owner, tokens))
    return o[None], states
