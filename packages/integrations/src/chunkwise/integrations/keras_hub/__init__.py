"""The gated delta rule in keras-hub's Qwen3.5 and Qwen3.5-MoE, with the signatures of its layer, on the JAX backend."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise import pipeline
from chunkwise.integrations.replacing import Place, PutBack, replace
from chunkwise.shared.call import checks

__all__ = ["chunk_gated_delta_rule", "install", "recurrent_gated_delta_rule"]


def install() -> PutBack:
    """Make keras-hub's Qwen3.5 compute the gated delta rule by chunkwise; return a function that undoes this.

    keras-hub has no setting for this, so two functions of the module `qwen3_5_gated_delta_net` are replaced, whose
    layer Qwen3.5-MoE has too, and a method of both models, so that a prompt is read once before an answer. Models that
    are traced afterwards use chunkwise.

    Raises:
      ValueError: Keras does not run on JAX.
    """
    import keras
    from keras_hub.src.models.qwen3_5 import qwen3_5_gated_delta_net as layer

    from chunkwise.integrations.keras_hub import prompts

    backend = keras.backend.backend()
    checks.check(backend == "jax", f'The backend of Keras must be "jax", by KERAS_BACKEND=jax; got "{backend}".')
    return replace(
        Place(layer, "_chunk_gated_delta_rule", chunk_gated_delta_rule),
        Place(layer, "_recurrent_gated_delta_rule", recurrent_gated_delta_rule),
        *prompts.PLACES,
    )


def chunk_gated_delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array, chunk_size: int = 64,
    initial_state: jax.Array | None = None, output_final_state: bool = False, padding_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Return the gated delta rule over whole sequences.

    Args:
      query, key: [B, T, HV, K], made to have unit length.
      value: [B, T, HV, V].
      g, beta: log decay and step sizes [B, T, HV].
      chunk_size: tokens of a chunk, 16, 32, 64 or 128; static.
      initial_state: [B, HV, K, V], or None for zeros.
      output_final_state: whether to return the state; static.
      padding_mask: [B, T], 0 at padding, which gives zeros and leaves the state as it is. keras-hub does not read it.

    Returns:
      o [B, T, HV, V] in the type of `query`, and the state, float32, None unless asked for.
    """
    return _run(
        pipeline.chunk_gated_delta_rule, query, key, value, g, beta, chunk_size=chunk_size,
        initial_state=initial_state, output_final_state=output_final_state, **_segments(padding_mask),
    )  # fmt: skip


def recurrent_gated_delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array,
    initial_state: jax.Array | None = None, output_final_state: bool = False, padding_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Return the gated delta rule token by token, for decoding; the arguments are those over whole sequences."""
    arrays = query, key, value, g, beta
    options: dict[str, Any] = dict(initial_state=initial_state, output_final_state=output_final_state)
    if padding_mask is not None:
        # Token by token there is no padding.
        return chunk_gated_delta_rule(*arrays, padding_mask=padding_mask, **options)
    return _run(pipeline.recurrent_gated_delta_rule, *arrays, **options)


def _segments(padding_mask: jax.Array | None) -> dict[str, jax.Array]:
    """Return the argument that says which tokens are padding."""
    if padding_mask is None:
        return {}
    return {"segment_ids": jnp.where(jnp.asarray(padding_mask) != 0, 0, -1).astype(jnp.int32)}


def _run(operator: Callable, query, *arrays, **options):
    o, state = operator(query, *arrays, use_qk_l2norm_in_kernel=True, **options)
    return o.astype(query.dtype), state
