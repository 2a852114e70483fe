"""A serving step over the pools of tpu-inference: the convolution, the gates and the operator in one function."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from chunkwise.integrations.serving import convolve, raw_gates, split_heads, step_of
from chunkwise.layers.mixer.mixing import Step, fused_step
from chunkwise.pipeline import ragged_gated_delta_rule, ragged_kda, ragged_simple_gla
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.kernels import gate_activation
from chunkwise.shared.serving.decode.records import Decodes, static_of
from chunkwise.shared.serving.state_pool import StatePool

__all__ = ["fused_conv1d_gdn", "fused_conv1d_kda", "fused_conv1d_mamba2"]
# The pools of the convolution and of the operator, and the output.
Updated = tuple[tuple[jax.Array, Any], jax.Array]


def fused_conv1d_gdn(
    qkv: jax.Array, b: jax.Array, a: jax.Array, conv_state: jax.Array, recurrent_state: jax.Array,
    conv_weight: jax.Array, conv_bias: jax.Array | None, a_log: jax.Array, dt_bias: jax.Array,
    query_start_loc: jax.Array, state_indices: jax.Array, distribution: jax.Array, seq_lens: jax.Array,
    read_state_indices: jax.Array, read_offsets: jax.Array | None = None, *, n_kq: int, n_v: int, d_k: int, d_v: int,
    kernel_size: int, num_spec_tokens: int = 0, zero_initialize_out: bool = True,
    compute_precision: DTypeLike = jnp.float32, decode_tile_size: int = 4, mixed_tile_size: int = 64,
    implementation: str | None = None,
) -> Updated:  # fmt: skip
    """Return a serving step of convolution, gates and gated delta rule, as tpu-inference's `kernels.gdn.v3` does.

    Dims: T tokens of all requests, N the most requests, W width of the convolution; `dim` is 2 n_kq d_k + n_v d_v.

    Args:
      qkv: queries, keys and values of all heads [T, dim], before the convolution.
      b, a: raw step sizes and raw decays [T, n_v].
      conv_state, recurrent_state: the pools [slots, W - 1, dim] and [slots, n_v, d_k, d_v], whose types the new pools
        have, too. Donate them to the jitted step.
      conv_weight, conv_bias: [dim, 1, W], and [dim] or None.
      a_log, dt_bias: [n_v].
      query_start_loc: boundaries of the requests, int32 [N + 1].
      state_indices: the slot that a request writes, int32 [N]; with speculation the first of num_spec_tokens + 1 slots.
      distribution: int32 [3]; the first entry counts the decodes, and the last one all requests.
      seq_lens: tokens of a request so far and in this step, [N]. A request without earlier tokens starts from zeros.
      read_state_indices: the slot that a request starts from, [N].
      read_offsets: for a decode this is added to its read_state_indices, [N]: the number of accepted tokens of the step
        before, less one.
      n_kq, n_v, d_k, d_v, kernel_size: sizes on this device.
      num_spec_tokens: the most guessed tokens of a decode; static.
      zero_initialize_out, compute_precision, decode_tile_size, mixed_tile_size: have no effect: outputs of padding are
        zeros, states are computed in float32, and tile sizes come from the shapes.
      implementation: "xla", "staged" or "fused"; None for the best.

    Returns:
      ((conv_state, recurrent_state), out [T, n_v d_v] in the type of qkv). A slot past the end is neither read nor
      written.
    """
    step = step_of(
        query_start_loc, state_indices, distribution, seq_lens, read_state_indices, read_offsets, num_spec_tokens
    )
    return _delta_rule(
        ragged_gated_delta_rule, qkv, b, a, (conv_state, recurrent_state), (conv_weight, conv_bias, kernel_size),
        ((n_kq, d_k), (n_kq, d_k), (n_v, d_v)), step, implementation, **raw_gates(a_log, dt_bias),
    )  # fmt: skip


def fused_conv1d_kda(
    qkv: jax.Array, b: jax.Array, a: jax.Array, conv_state: jax.Array, recurrent_state: jax.Array,
    conv_weight: jax.Array, conv_bias: jax.Array | None, a_log: jax.Array, dt_bias: jax.Array,
    query_start_loc: jax.Array, state_indices: jax.Array, distribution: jax.Array, seq_lens: jax.Array,
    read_state_indices: jax.Array, read_offsets: jax.Array | None = None, *, n_kq: int, n_v: int, d_k: int, d_v: int,
    kernel_size: int, num_spec_tokens: int = 0, lower_bound: float | None = None, beta_is_activated: bool = False,
    implementation: str | None = None,
) -> Updated:  # fmt: skip
    """Return the same step for Kimi delta attention, whose decays a [T, n_v d_k] and dt_bias [n_v d_k] have channels.

    Args:
      lower_bound: the bound that log decays stay above, in nats, below 0, for the law with a sigmoid; None for the law
        with a softplus.
      beta_is_activated: whether b is the sigmoid of raw step sizes already, as in vLLM's Kimi-Linear; static.
      qkv, b, and the others: as in `fused_conv1d_gdn`.
    """
    step = step_of(
        query_start_loc, state_indices, distribution, seq_lens, read_state_indices, read_offsets, num_spec_tokens
    )
    a, dt_bias = a.reshape(-1, n_v, d_k), dt_bias.reshape(n_v, d_k)
    return _delta_rule(
        ragged_kda, qkv, b, a, (conv_state, recurrent_state), (conv_weight, conv_bias, kernel_size),
        ((n_kq, d_k), (n_kq, d_k), (n_v, d_v)), step, implementation, lower_bound=lower_bound,
        **raw_gates(a_log, dt_bias, not beta_is_activated),
    )  # fmt: skip


def fused_conv1d_mamba2(
    xbc: jax.Array, dt: jax.Array, conv_state: jax.Array, ssm_state: jax.Array, conv_weight: jax.Array,
    conv_bias: jax.Array | None, a_log: jax.Array, dt_bias: jax.Array, skip: jax.Array, query_start_loc: jax.Array,
    state_indices: jax.Array, distribution: jax.Array, seq_lens: jax.Array, read_state_indices: jax.Array,
    read_offsets: jax.Array | None = None, *, n_kq: int, n_v: int, d_k: int, d_v: int, kernel_size: int,
    num_spec_tokens: int = 0, dt_limit: tuple[float, float] = (0.0, float("inf")), implementation: str | None = None,
) -> Updated:  # fmt: skip
    """Return the same step for the mixer of Mamba-2, with n_kq groups, n_v heads, d_k channels of a state.

    Args:
      xbc: x, B and C of all heads [T, n_v d_v + 2 n_kq d_k], in the order of a checkpoint; so are the channels of
        conv_state, conv_weight and conv_bias.
      dt: raw time steps [T, n_v].
      ssm_state: the pool [slots, n_v, d_k, d_v].
      skip: [n_v], which the paper calls D.
      dt_limit: the least and the largest time step.
      conv_state, and the others: as in `fused_conv1d_gdn`.
    """
    step = step_of(
        query_start_loc, state_indices, distribution, seq_lens, read_state_indices, read_offsets, num_spec_tokens
    )
    y, conv_state = convolve(xbc, conv_state, conv_weight, conv_bias, kernel_size, step, implementation)
    x, k, q = split_heads("xbc", y, (n_v, d_v), (n_kq, d_k), (n_kq, d_k))
    dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + dt_bias.astype(jnp.float32)), *dt_limit)[None]
    v = (dt[..., None] * x.astype(jnp.float32)).astype(x.dtype)
    g = gate_activation.decay_of_steps(dt, a_log.astype(jnp.float32))
    o, ssm_state = ragged_simple_gla(q, k, v, g, states=ssm_state, **step, scale=1.0, implementation=implementation)
    o = o.astype(jnp.float32) + skip.astype(jnp.float32)[:, None] * x.astype(jnp.float32)
    return (conv_state, ssm_state), o.reshape(-1, n_v * d_v).astype(xbc.dtype)


def _delta_rule(
    operator, qkv, b, a, pools, conv, sizes, step, implementation, *, A_log, dt_bias, use_qk_l2norm_in_kernel, **gates
) -> Updated:
    def by_operators() -> Step:
        y, conv_state = convolve(qkv, pools[0], *conv, step, implementation)
        q, k, v = split_heads("qkv", y, *sizes)
        o, state = operator(
            q, k, v, a[None], b[None], pools[1], **step, A_log=A_log, dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **gates, implementation=implementation,
        )  # fmt: skip
        return o.reshape(len(qkv), -1).astype(qkv.dtype), (conv_state,), StatePool(state)

    weight, bias, _ = conv
    (H, K), _, (HV, V) = sizes
    mixer = Decodes(
        static_of(H, HV, K, V, GateActivation(**gates)), (qkv,), a.reshape(len(a), -1), b, None, (weight[:, 0],),
        () if bias is None else (bias,), A_log, dt_bias,
    )  # fmt: skip
    slots = Slots(**{name: step[name] for name in Slots._fields})
    o, (conv_state,), pool = fused_step(
        mixer, (pools[0],), StatePool(pools[1]), step["cu_seqlens"], slots, implementation, by_operators
    )
    return (conv_state, pool.states), o
