"""The operators of SGLang-JAX in its signatures, over its pools of states."""

from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.integrations.serving import raw_gates, split_heads
from chunkwise.pipeline import ragged_gated_delta_rule, ragged_kda, ragged_simple_gla


def prefill_gated_delta_rule(
    mixed_qkv: jax.Array, b: jax.Array, a: jax.Array, recurrent_state: jax.Array, A_log: jax.Array, dt_bias: jax.Array,
    cu_seqlens: jax.Array | None, state_indices: jax.Array, has_initial_state: jax.Array | None, *, n_kq: int, n_v: int,
    d_k: int, d_v: int, chunk_size: int = 64, track_indices: jax.Array | None = None,
    track_mask: jax.Array | None = None, implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the pool and the output of the gated delta rule over prompts, as `chunked_gated_delta_rule_jax` does.

    Dims: T tokens of all requests, B requests.

    Args:
      mixed_qkv: queries, keys and values after the convolution [T, 2 n_kq d_k + n_v d_v].
      b, a: raw step sizes and raw decays [T, n_v].
      recurrent_state: the pool [slots, n_v, d_k, d_v], whose type the new pool has, too; donate it. Slot 0 belongs to
        no request: a request with this slot starts from zeros and writes nothing.
      A_log, dt_bias: [n_v].
      cu_seqlens: boundaries of the requests, int32 [B + 1]; None for one token each.
      state_indices: the slot of a request, int32 [B].
      has_initial_state: bool [B], False if a request starts from zeros; None for True.
      n_kq, n_v, d_k, d_v, chunk_size: sizes on this device, static.
      track_indices, track_mask: a second slot that gets the state of a request, [B]; only where neither the mask nor
        the slot is 0.
      implementation: "xla", "staged" or "fused"; None for the best.

    Returns:
      The pool, and out [T, n_v, d_v] in the type of mixed_qkv.
    """
    q, k, v = split_heads("mixed_qkv", mixed_qkv, (n_kq, d_k), (n_kq, d_k), (n_v, d_v))
    o, pool = ragged_gated_delta_rule(
        q, k, v, a[None], b[None], recurrent_state, **_step(cu_seqlens, state_indices, has_initial_state),
        **raw_gates(A_log, dt_bias), chunk_size=chunk_size, implementation=implementation,
    )  # fmt: skip
    return _track(pool, state_indices, track_indices, track_mask), o[0]


def decode_gated_delta_rule(
    mixed_qkv: jax.Array, b: jax.Array, a: jax.Array, recurrent_state: jax.Array, A_log: jax.Array, dt_bias: jax.Array,
    state_indices: jax.Array, *, n_kq: int, n_v: int, d_k: int, d_v: int, has_initial_state: jax.Array | None = None,
    track_indices: jax.Array | None = None, track_mask: jax.Array | None = None, implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the same for one token of each request, B = T, as `decode_gated_delta_rule_ref` does."""
    return prefill_gated_delta_rule(
        mixed_qkv, b, a, recurrent_state, A_log, dt_bias, None, state_indices, has_initial_state, n_kq=n_kq, n_v=n_v,
        d_k=d_k, d_v=d_v, track_indices=track_indices, track_mask=track_mask, implementation=implementation,
    )  # fmt: skip


def kda(
    q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array, recurrent_state: jax.Array, A_log: jax.Array,
    dt_bias: jax.Array, cu_seqlens: jax.Array | None, state_indices: jax.Array,
    has_initial_state: jax.Array | None = None, *, scale: float | None = None, lower_bound: float | None = None,
    track_indices: jax.Array | None = None, track_mask: jax.Array | None = None, implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the pool and the output of Kimi delta attention, for which `KDAAttnBackend` gathers and scatters states.

    Args:
      q, k, v: [T, H, K], [T, H, K], [T, HV, V] after the convolution; queries and keys are scaled to unit length here.
      a, b: raw decays [T, HV, K], and step sizes [T, HV], of which SGLang-JAX's model has taken the sigmoid.
      dt_bias: [HV, K] or [HV K].
      recurrent_state, and the others: as in `prefill_gated_delta_rule`; cu_seqlens is None for a decode.
    """
    o, pool = ragged_kda(
        *(x[None] for x in (q, k, v, a, b)), recurrent_state, **_step(cu_seqlens, state_indices, has_initial_state),
        **raw_gates(A_log.reshape(-1), dt_bias.reshape(a.shape[1:]), raw_beta=False), scale=scale,
        lower_bound=lower_bound, implementation=implementation,
    )  # fmt: skip
    return _track(pool, state_indices, track_indices, track_mask), o[0]


def lightning(
    q: jax.Array, k: jax.Array, v: jax.Array, slope: jax.Array, recurrent_state: jax.Array,
    cu_seqlens: jax.Array | None, state_indices: jax.Array, has_initial_state: jax.Array | None = None, *,
    scale: float | None = None, track_indices: jax.Array | None = None, track_mask: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the pool and the output of lightning attention; `slope` [HV], below 0, has the log decay of every head."""
    o, pool = ragged_simple_gla(
        q[None], k[None], v[None], None, recurrent_state, **_step(cu_seqlens, state_indices, has_initial_state),
        g_gamma=slope, scale=scale, implementation=implementation,
    )  # fmt: skip
    return _track(pool, state_indices, track_indices, track_mask), o[0]


def _step(cu_seqlens, state_indices, has_initial_state) -> dict[str, Any]:
    """Return a step of SGLang-JAX as arguments of chunkwise."""
    N = state_indices.shape[0]
    return dict(
        cu_seqlens=jnp.arange(N + 1, dtype=jnp.int32) if cu_seqlens is None else cu_seqlens,
        state_indices=jnp.where(state_indices == 0, -1, state_indices),
        has_initial_state=has_initial_state,
        num_decodes=N if cu_seqlens is None else 0,
    )


def _track(pool: jax.Array, state_indices: jax.Array, track_indices, track_mask) -> jax.Array:
    """Return the pool with the states of requests copied to their second slots."""
    if track_indices is None:
        return pool
    kept = (track_indices == 0) | (state_indices == 0)
    kept = kept if track_mask is None else kept | (track_mask == 0)
    return pool.at[jnp.where(kept, pool.shape[0], track_indices)].set(pool[state_indices], mode="drop")
