"""The contract: documentation, argument checks and the choice of implementation."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.chunk_h import config as tiles
from chunkwise.chunk_h import kernel, kernel_bwd, xla
from chunkwise.shared import compat
from chunkwise.shared.call import checks, configs, docstrings, unknown_arguments
from chunkwise.shared.kernels import chunking, derivatives


@unknown_arguments.explained
@docstrings.completed(docstrings.STAGE)
def chunk_gated_delta_rule_fwd_h(
    k: jax.Array,
    w: jax.Array,
    u: jax.Array,
    g_cum: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int | None = None,
    *,
    implementation: str | None = None,
    config: tiles.Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the states before every chunk of the gated delta rule, and the values that the chunks add.

        v_new = u - w S
        S'    = e^G_last S + (k e^(G_last - G))^T v_new

    S becomes S' from chunk to chunk, in value head n with key head n // (HV // H).

    Dims: B batch, T tokens, H key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    C chunk size, NT chunks a batch row, N sequences.

    Args:
      k: keys [B, T, H, K], float32, bfloat16 or float16.
      w: effective keys [B, T, HV, K], float32 from `chunkwise.wy_fast.recompute_w_u`; narrower types are widened.
      u: effective values [B, T, HV, V], of the same types. Products are float32 at full precision.

    Returns:
      h [B, NT, HV, K, V] float32, the state before every chunk; NT is ceil(T / C), or T // C + N for a packed batch,
      whose unused chunks are zero.
      v_new [B, T, HV, V] float32, the values without decay.
      final_state [N, HV, K, V] float32, or None. Every array has a gradient under both implementations. The carried
      state is float32 whatever the inputs are.

    Accuracy: 5e-7 relative to the recurrence in float64.
    Cost: 4 B T HV K V flops.
    Source: Yang et al., Gated Delta Networks (2024), section 3.3.
    """
    B, T, HV, _ = checks.check_array("u", u, "B T HV V")
    K = checks.check_array("k", k, "B T H K", (B, T, None, None))[3]
    checks.check_array("w", w, "B T HV K", (B, T, HV, K))
    checks.check_gates("g_cum", g_cum, (B, T, HV), K)
    return _states(
        k, w, u, g_cum, None, initial_state, cu_seqlens, output_final_state, chunk_size, implementation, config
    )  # fmt: skip


@unknown_arguments.explained
@docstrings.completed(docstrings.STAGE)
def chunk_fwd_h(
    k: jax.Array,
    v: jax.Array,
    g_cum: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    gk_cum: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int | None = None,
    *,
    implementation: str | None = None,
    config: tiles.Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the states before every chunk of gated linear attention.

        S' = e^G_last S + (k e^(G_last - G))^T v

    S becomes S' from chunk to chunk, in value head n with key head n // (HV // H), with a gate per head (g_cum,
    g_gamma, or the sum of both) or per channel of the key (gk_cum).

    Dims: as in `chunk_gated_delta_rule_fwd_h`.

    Args:
      k: keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, HV, V], of the same types.
      g_cum: chunk-local inclusive cumulative log decay [B, T, HV] in nats, float32 from
        `chunkwise.cumsum.chunk_local_cumsum` (narrower types are widened); None for no decay.
      gk_cum: like g_cum, but per channel of the key [B, T, HV, K]; g_cum and g_gamma must then be None.

    Returns:
      h [B, NT, HV, K, V] float32, the state before every chunk, zero for unused chunks. Every array has a gradient
      under both implementations.
      final_state [N, HV, K, V] float32, or None.

    Raises:
      ValueError: an argument has the wrong rank, shape or type, a static argument is traced, or both kinds of gates are
        given.
      NotImplementedError: `implementation` is one that only whole operators have.

    Accuracy: 3e-7 relative to the recurrence in float64.
    Cost: 2 B T HV K V flops.
    Source: Yang et al., Gated Linear Attention Transformers (2023), section 4.
    """
    B, T, HV, _ = checks.check_array("v", v, "B T HV V")
    K = checks.check_array("k", k, "B T H K", (B, T, None, None))[3]
    if g_cum is not None:
        checks.check_array("g_cum", g_cum, "B T HV", (B, T, HV))
    if g_gamma is not None:
        checks.check_array("g_gamma", g_gamma, "HV", (HV,))
    if gk_cum is not None:
        checks.check_array("gk_cum", gk_cum, "B T HV K", (B, T, HV, K))
        checks.check(g_cum is None and g_gamma is None, "`gk_cum` must come without `g_cum` and `g_gamma`; got both.")
        g_cum = gk_cum
    h, _, final_state = _states(
        k, None, v, g_cum, g_gamma, initial_state, cu_seqlens, output_final_state, chunk_size, implementation, config
    )  # fmt: skip
    return h, final_state


def _states(k, w, u, g_cum, g_gamma, initial_state, cu_seqlens, output_final_state, chunk_size, implementation, config):
    """Check the arguments that both functions share, and run; w is None without the delta rule."""
    B, T, H, K = k.shape
    HV, V = u.shape[2:]
    checks.check_heads(H, HV, "v" if w is None else "u")
    checks.check_flags(output_final_state=output_final_state)
    C = checks.choose_chunk_size(chunk_size)
    cu_seqlens = checks.check_cu_seqlens(cu_seqlens, B, T)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    checks.check_initial_state(initial_state, (N, HV, K, V))
    implementation = configs.choose_stage(implementation, config, tiles)
    config = config or tiles.default_for(H, HV, C, K, V, g_cum is not None and g_cum.ndim == 4)
    configs.check_blocks(config, H, HV)
    return _run(
        k, w, u, g_cum, g_gamma, initial_state, cu_seqlens, C, bool(output_final_state), implementation, config
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("C", "output_final_state", "implementation", "config"))
def _run(
    k, w, u, g_cum, g_gamma, initial_state, cu_seqlens, C: int, output_final_state: bool, implementation: str,
    config: tiles.Config,
):  # fmt: skip
    chunks = chunking.Chunking(*k.shape[:2], C, cu_seqlens)
    g = chunks.split_gates(g_cum, u.shape[2])  # rows [NC, HV, 1, C] or channels [NC, HV, C, K]
    if g_gamma is not None:
        g = g + chunks.gamma_rows(g_gamma)
    initial_state = None if initial_state is None else initial_state.astype(jnp.float32)
    w = None if w is None else chunks.split(w)  # [NC, HV, C, K]
    operands = kernel.ChunkHOperands(*compat.vary_alike(chunks.split(k), w, chunks.split(u), g, initial_state))
    table = kernel.make_table(chunks.first, chunks.length, chunks.sequence)
    # The row of the last token of a sequence, C for a chunk in which no sequence ends.
    end = jnp.where(chunks.last, chunks.length - 1, C).astype(jnp.int32)
    if implementation == "pallas":
        name = "chunk_fwd_h" if w is None else "chunk_gated_delta_rule_fwd_h"
        operands = derivatives.of_kernel(name, operands)
        h, v_new, final_state = kernel_bwd.states(operands, table, end, chunks.N, config)
    else:
        decays = xla.end_decays(jnp.swapaxes(g, -1, -2) if g.shape[2] == 1 else g, end)
        h, v_new, after = xla.states(operands.k, w, operands.u, *decays, initial_state, table, chunks.B)
        final_state = after[chunks.final_chunk]
    v_new = None if w is None else chunks.merge(v_new)
    if not output_final_state:
        return chunks.per_batch(h), v_new, None
    # A sequence without tokens has no chunk: its final state is its initial state.
    start = 0.0 if initial_state is None else initial_state
    final_state = jnp.where(chunks.empty[:, None, None, None], start, final_state)
    return chunks.per_batch(h), v_new, final_state
