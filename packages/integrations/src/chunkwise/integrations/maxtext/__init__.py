"""The gated delta rule in MaxText's signatures, and the weights of its Qwen3-Next layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from chunkwise.integrations.maxtext.called import CALLS, must_call
from chunkwise.integrations.maxtext.weights import load_qwen3_next, save_qwen3_next
from chunkwise.integrations.replacing import Place, PutBack, replace
from chunkwise.pipeline import chunk_gated_delta_rule, recurrent_gated_delta_rule

__all__ = ["install", "jax_ar_gated_delta_rule", "jax_chunk_gated_delta_rule", "load_qwen3_next", "save_qwen3_next"]


def install(documents: bool = False) -> PutBack:
    """Make MaxText's Qwen3-Next and Qwen3.5 compute the gated delta rule by chunkwise; return a function to undo this.

    MaxText has no setting for this, so two functions of `maxtext.models.qwen3` are replaced. Models that are traced
    afterwards use chunkwise. Newer versions have settings, such as `use_gdn_kernel`, with which the layer runs a kernel
    of MaxText's instead of these functions: the call of the layer raises a ValueError then.

    Args:
      documents: whether the documents of a packed row are kept apart in training. MaxText's layer passes the state, and
        the inputs of the convolution, from one document to the next; so chunkwise's layer takes its place, with the
        same parameters.
    """
    from maxtext.models import qwen3

    call = must_call(qwen3.Qwen3NextGatedDeltaNet.__call__)
    if documents:
        from chunkwise.integrations.maxtext import layer

        call = layer.over_documents
    return replace(
        Place(qwen3, "jax_chunk_gated_delta_rule", jax_chunk_gated_delta_rule),
        Place(qwen3, "jax_ar_gated_delta_rule", jax_ar_gated_delta_rule),
        Place(qwen3.Qwen3NextGatedDeltaNet, "__call__", call),
    )


def jax_chunk_gated_delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array, chunk_size: int = 64,
    initial_state: jax.Array | None = None, use_qk_norm_in_gdn: bool = False,
    cp_axis: str | tuple[str, ...] | None = None, compute_dtype: DTypeLike = jnp.bfloat16, *,
    segment_ids: jax.Array | None = None, implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Return the gated delta rule over whole sequences, with the signature in `maxtext.models.qwen3`.

    Dims: B batch, S tokens, H query and key heads, HV value heads: MaxText repeats queries and keys, so that H = HV,
    but H may be any divisor of HV; K and V key and value dimensions.

    Args:
      query, key, value: [B, S, H, K], [B, S, H, K] and [B, S, HV, V].
      g, beta: log decay and step sizes [B, S, HV].
      chunk_size: tokens of a chunk, 16, 32, 64 or 128; static.
      initial_state: [B, HV, K, V], or None for zeros.
      use_qk_norm_in_gdn: whether queries and keys are made to have unit length.
      cp_axis: the axis or axes, inside a `shard_map`, over which S is split, in the order of tokens.
      compute_dtype: the type to which queries, keys, values and step sizes are rounded first.
      segment_ids: int32 [B, S], MaxText's ids of documents, 0 for padding: no state goes from one document to the next.
        MaxText's function has no such argument.
      implementation: "xla", "staged" or "fused"; None for the best.

    Returns:
      o [B, S, HV, V] in the type of `query`, and the final state in `compute_dtype`, None without an initial one.
    """
    o, state = _run(
        chunk_gated_delta_rule, compute_dtype, query, key, value, g, beta, initial_state=initial_state,
        output_final_state=initial_state is not None, use_qk_l2norm_in_kernel=use_qk_norm_in_gdn,
        chunk_size=chunk_size, context_axis=cp_axis, implementation=implementation,
        segment_ids=None if segment_ids is None else segment_ids.astype(jnp.int32) - 1,
    )  # fmt: skip
    return o, None if state is None else state.astype(compute_dtype)


def jax_ar_gated_delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array, initial_state: jax.Array,
    use_qk_norm_in_gdn: bool = False, compute_dtype: DTypeLike = jnp.bfloat16,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the gated delta rule of one more token in each row, with the signature in `maxtext.models.qwen3`.

    `jax_chunk_gated_delta_rule` has the same arguments; S is 1 here.

    Returns:
      o [B, 1, HV, V] in the type of `query`, and the state after the token [B, HV, K, V], float32.
    """
    return _run(
        recurrent_gated_delta_rule, compute_dtype, query, key, value, g, beta, initial_state=initial_state,
        output_final_state=True, use_qk_l2norm_in_kernel=use_qk_norm_in_gdn,
    )  # fmt: skip


def _run(operator: Callable, dtype: DTypeLike, q, k, v, g, beta, **options: Any) -> tuple[jax.Array, Any]:
    """Return the output of an operator, in the type of queries, and its state."""
    CALLS[operator] += 1
    o, state = operator(*(x.astype(dtype) for x in (q, k, v)), g, beta.astype(dtype), **options)
    return o.astype(q.dtype), state
