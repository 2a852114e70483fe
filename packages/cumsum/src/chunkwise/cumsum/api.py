"""The contract: documentation, argument checks and the choice of implementation."""

import jax

from chunkwise.cumsum import config as tiles
from chunkwise.cumsum import vjp
from chunkwise.shared import compat
from chunkwise.shared.call import checks, configs, docstrings, unknown_arguments


@unknown_arguments.explained
@docstrings.completed(docstrings.STAGE)
def chunk_local_cumsum(
    g: jax.Array,
    chunk_size: int | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
    *,
    implementation: str | None = None,
    config: tiles.Config | None = None,
) -> jax.Array:
    """Return the inclusive cumulative sum of gates inside every chunk.

        G[i] = g[0] + ... + g[i]              reverse: G[i] = g[i] + ... + g[m]

    Token i belongs to a chunk whose first token is 0 and whose last is m.

    Dims: B batch, T tokens, H heads, K channels, C chunk size, N packed sequences.

    Args:
      g: log decays [B, T, H] or [B, T, H, K] in nats, finite, float32, bfloat16 or float16. Gates that mean "forget
        everything", such as -1e9 or -inf, should pass through `chunkwise.shared.kernels.tiles.clip_gate` first: in a
        sum with them, the other gates lose all digits.
      reverse: sum from the end of the chunk; static.

    Returns:
      G [B, T, H] float32, in the shape of g. g has a gradient under both implementations: the cumulative sum in the
      other direction.

    Accuracy: 1e-7 relative to the sum in float64. G is rounded to float32, and differences G[i] - G[j] have the error
    of that rounding: 1.5e-5 nats once |G| exceeds 256.
    Cost: 2 B T H K C flops, with K = 1 for gates per head; the kernel multiplies by a triangle of ones. Reading and
    writing the gates, 4 bytes each way, takes longer.
    Source: Yang et al., Gated Linear Attention Transformers (2023), section 4.
    """
    rank = getattr(g, "ndim", 3)
    checks.check(
        rank in (3, 4), f"`g` must have shape [B, T, H] or [B, T, H, K]; got {tuple(getattr(g, 'shape', ()))}."
    )
    shape = checks.check_array("g", g, "B T H" if rank == 3 else "B T H K")
    checks.check_flags(reverse=reverse)
    chunk_size = checks.choose_chunk_size(chunk_size)
    cu_seqlens = checks.check_cu_seqlens(cu_seqlens, *shape[:2])
    implementation = configs.choose_stage(implementation, config, tiles)
    return vjp.cumsum(*compat.vary_alike(g, cu_seqlens), chunk_size, bool(reverse), implementation, config)
