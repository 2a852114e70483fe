"""The gated delta rule over named arrays, with the signatures of levanter's `layers/gated_deltanet.py`."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from chunkwise import pipeline
from chunkwise.integrations.replacing import Place, PutBack, replace

if TYPE_CHECKING:
    from haliax import NamedArray

__all__ = ["chunk_gated_delta_rule", "install", "recurrent_gated_delta_rule"]
_ORDER = ("batch", "position", "heads")


def install() -> PutBack:
    """Make levanter's `GatedDeltaNet` compute the gated delta rule by chunkwise; return a function that undoes this.

    levanter has no setting for this, so two functions of `levanter.layers.gated_deltanet` are replaced. Models that are
    traced afterwards use chunkwise.
    """
    from levanter.layers import gated_deltanet

    return replace(
        Place(gated_deltanet, "chunk_gated_delta_rule", chunk_gated_delta_rule),
        Place(gated_deltanet, "recurrent_gated_delta_rule", recurrent_gated_delta_rule),
    )


def chunk_gated_delta_rule(
    query: "NamedArray", key: "NamedArray", value: "NamedArray", g: "NamedArray", beta: "NamedArray", *,
    chunk_size: int = 64, initial_state: jax.Array | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True, implementation: str | None = None,
) -> tuple["NamedArray", jax.Array | None]:  # fmt: skip
    """Return the gated delta rule over whole sequences.

    Args:
      query, key: with the axes batch, position, heads and k_head_dim, in any order.
      value: with the axes batch, position, heads and v_head_dim. The number of its heads may be a multiple of the heads
        of query and key, where levanter repeats the latter.
      g, beta: log decay and step sizes, with the axes batch, position and heads.
      chunk_size: tokens of a chunk, 16, 32, 64 or 128; static.
      initial_state: [batch, heads, k_head_dim, v_head_dim], or None for zeros.
      output_final_state: whether to return the state; static.
      use_qk_l2norm_in_kernel: whether queries and keys are made to have unit length; static.
      implementation: "xla", "staged" or "fused"; None for the best.

    Returns:
      o, float32, with the axes of `value` in the order above, and the state, float32, None unless asked for. Products
      have operands in the types of the arguments, while levanter casts these to float32 first.
    """
    return _run(
        pipeline.chunk_gated_delta_rule, query, key, value, g, beta, chunk_size=chunk_size, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        implementation=implementation,
    )  # fmt: skip


def recurrent_gated_delta_rule(
    query: "NamedArray", key: "NamedArray", value: "NamedArray", g: "NamedArray", beta: "NamedArray", *,
    initial_state: jax.Array | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = True,
) -> tuple["NamedArray", jax.Array | None]:  # fmt: skip
    """Return the gated delta rule token by token, for decoding."""
    return _run(
        pipeline.recurrent_gated_delta_rule, query, key, value, g, beta, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip


def _run(operator, query, key, value, g, beta, **options):
    import haliax

    q, k = (x.rearrange((*_ORDER, "k_head_dim")).array for x in (query, key))
    v = value.rearrange((*_ORDER, "v_head_dim"))
    g, beta = (x.rearrange(_ORDER).array for x in (g, beta))
    o, state = operator(q, k, v.array, g, beta, **options)
    return haliax.named(o.astype(jnp.float32), v.axes), state
