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
