"""What the delta rules of serving engines have in common."""

from typing import Any

import jax
import jax.numpy as jnp


def raw_gates(A_log: jax.Array, dt_bias: jax.Array) -> dict[str, Any]:
    """Return the arguments of a delta rule over raw gates and step sizes, which gives queries and keys unit length."""
    return dict(
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log.astype(jnp.float32),
        dt_bias=dt_bias.astype(jnp.float32), use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def split_heads(x: jax.Array, *sizes: tuple[int, int]) -> list[jax.Array]:
    """Return channels [T, ...] cut into arrays [1, T, heads, size], by pairs of heads and size."""
    ends = [sum(heads * size for heads, size in sizes[:i]) for i in range(1, len(sizes))]
    parts = jnp.split(x[None], ends, axis=2)
    return [part.reshape(1, -1, heads, size) for part, (heads, size) in zip(parts, sizes, strict=True)]
