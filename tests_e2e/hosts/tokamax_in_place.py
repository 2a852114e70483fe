"""Ours in the place of tokamax's chunked Kimi delta attention, for its tests; its recurrence stays their reference.

tokamax's code checks the arguments of a call. Its arrays have heads first, and every segment of a row has a state.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from chunkwise.pipeline import chunk_kda

# The most numbers in the states of all tokens, which the reference keeps for its gradient.
MOST = 3e8


def install(count: Callable[[], None]) -> None:
    """Replace both chunked implementations, and count the calls."""
    from tokamax._src.ops.kda import api, base, pallas_mosaic_tpu, pallas_mosaic_tpu_kernel_test

    # Its annotations say how tokamax writes arguments down.
    @functools.wraps(base.KimiDeltaAttention._fwd)
    def run(
        self, query, key, value, gate, beta, *, a_log, delta_time_bias, scale, initial_state, output_final_state,
        use_qk_l2norm, use_gate_in_kernel, segment_ids, lower_bound, context_parallel_metadata, max_num_segments,
        return_residuals, config,
    ):  # fmt: skip
        count()
        laws = dict(A_log=a_log, dt_bias=delta_time_bias, lower_bound=lower_bound) if use_gate_in_kernel else {}
        options = dict(scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm, use_gate_in_kernel=use_gate_in_kernel)
        axis = None if context_parallel_metadata is None else context_parallel_metadata.axis_name
        x = [jnp.moveaxis(y, 0, 2) for y in (query, key, value, gate, beta)]
        run = lambda x, **more: chunk_kda(*x, **laws, **options, **more)
        if segment_ids is None:
            first = None if initial_state is None else initial_state[:, 0]
            o, final = run(x, initial_state=first, output_final_state=output_final_state)
            states = None if final is None else final[:, None]
        elif initial_state is None and not output_final_state:
            (o, _), states = run(x, segment_ids=segment_ids - 1, context_axis=axis), None
        else:
            o, states = _packed(run, x, segment_ids, initial_state, max_num_segments)
        return (jnp.moveaxis(o, 2, 0), states if output_final_state else None), None

    ours = type("Ours", (base.KimiDeltaAttention,), {"_fwd": run, "supports_batched_args_capture": False})
    api.IMPLEMENTATIONS |= {name: ours() for name in ("mosaic_tpu", "xla_chunked")}
    # How to differentiate is what the options of theirs say.
    pallas_mosaic_tpu.PallasMosaicTpuKimiDeltaAttention = lambda config: ours()
    pallas_mosaic_tpu_kernel_test._require_tpu = _skip_if_large


def _packed(run: Callable, x: list[jax.Array], ids: jax.Array, first: jax.Array | None, N: int) -> tuple:
    """Return outputs and the states of all segments, with the rows of a batch one behind the other."""
    B, T = ids.shape
    # The padding behind the segments of a row is a segment too.
    counts = jnp.sum(ids[:, None] == jnp.arange(1, N + 1)[:, None], axis=2)
    counts = jnp.concatenate([counts, T - jnp.sum(counts, axis=1, keepdims=True)], axis=1)
    boundaries = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts.reshape(-1)).astype(jnp.int32)])
    if first is not None:
        first = jnp.concatenate([first, jnp.zeros_like(first[:, :1])], axis=1)
        first = first.reshape(-1, *first.shape[2:])
    x = [y.reshape(1, -1, *y.shape[2:]) for y in x]
    o, states = run(x, initial_state=first, cu_seqlens=boundaries, output_final_state=True)
    o = jnp.where((ids > 0)[..., None, None], o.reshape(B, T, *o.shape[2:]), 0)
    return o, states.reshape(B, N + 1, *states.shape[1:])[:, :N]


def _skip_if_large(case) -> None:
    """Skip what a machine without a TPU has no memory or devices for, in the place of their question for a TPU."""
    numbers = math.prod((case.heads, case.batch, case.seq_len, case.key_dim, case.value_dim))
    if numbers > MOST:
        pytest.skip(f"The recurrence makes {numbers:,} numbers of states.")
    if jax.device_count() < case.cp_size:
        pytest.skip(f"The case takes {case.cp_size} devices.")
