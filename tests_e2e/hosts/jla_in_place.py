"""Ours in the place of jax-linear-attention's chunked operators, for its tests."""

from collections.abc import Callable

import jax.numpy as jnp

from chunkwise.pipeline import chunk_gated_delta_rule, chunk_gdn2, chunk_gla, chunk_kda, chunk_simple_gla
from tests_e2e.hosts.suite import compiled


def install(count: Callable[[], None]) -> None:
    """Replace the function that its chunked operators share, and count the calls."""
    from jla.ops import chunked

    def run(
        q, k, v, g, beta, *, delta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm, chunk_size,
        sub_chunk, precision, segment_ids, erase=None, write=None,
    ):  # fmt: skip
        """Return outputs in the type of q, and the state in float32, by the operator that the gates say."""
        if cu_seqlens is not None:
            # It refuses them too.
            raise NotImplementedError("cu_seqlens")
        count()
        per_channel = g is not None and g.ndim == q.ndim
        if g is None:
            g = jnp.zeros(q.shape[:3], jnp.float32)
        if not delta:
            operator, gates = chunk_gla if per_channel else chunk_simple_gla, (g,)
        elif erase is not None:
            operator, gates = chunk_gdn2, (g, erase, write)
        else:
            operator, gates = chunk_kda if per_channel else chunk_gated_delta_rule, (g, beta)
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm} if delta else {}
        options |= {"chunk_size": chunk_size} if chunk_size in (16, 32, 64, 128) else {}
        run = compiled(operator, scale=scale, output_final_state=output_final_state, **options)
        o, state = run(q, k, v, *gates, initial_state=initial_state, segment_ids=segment_ids)
        return o.astype(q.dtype), state

    chunked._chunked = run
