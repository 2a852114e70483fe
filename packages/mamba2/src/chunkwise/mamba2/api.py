"""The contract: signatures and documentation; `operator` has the functions that they call.

The functions have no body: `signature` hands their arguments to the method that stands above each of them. `options`
are keyword arguments of the function over whole sequences, and others that `forms` names.
"""

import math
from typing import Unpack

import jax

from chunkwise.fused_gla import chunk_simple_gla
from chunkwise.mamba2 import operator
from chunkwise.shared.call import forms, signature
from chunkwise.shared.serving.state_pool import Pool


@signature.public_function_by_name(operator.chunk, "chunk", chunk_simple_gla)
def chunk_mamba2(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None = None, *,
    z: jax.Array | None = None, dt_bias: jax.Array | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), initial_state: jax.Array | None = None,
    output_final_state: bool = False, **options: Unpack[forms.Linear],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Mamba-2 over whole sequences, chunk by chunk, differentiable.

        dt  = clip(softplus(dt_t + dt_bias), *dt_limit)
        S_t = e^(A dt) S_{t-1} + dt B_t x_t^T
        o_t = (S_t^T C_t + D x_t) silu(z_t)

    It is `chunk_simple_gla` for q = C, k = B and v = x. Heads of B and C are the groups of mamba_ssm.

    Args:
      x: values [B, T, HV, V]; every tensor is float32, bfloat16 or float16, in any mixture.
      dt: step sizes [B, T, HV], at least 0 once the bias and the softplus are applied; padding is a step of 0, too.
      A: decay rates [HV], at most 0.
      B: keys [B, T, H, K].
      C: queries [B, T, H, K].
      D: the skip [HV] or [HV, V]; None for no skip.
      z: gates of the output [B, T, HV, V]; None for no gate.
      dt_bias: [HV], is added to dt; None for zeros.
      dt_softplus: replace dt by its softplus after the bias; static.
      dt_limit: the least and the most step size, two numbers; static.

    Returns:
      o [B, T, HV, V] in the type of x and final_state in float32, None unless asked for. Every floating-point argument
      has a gradient, of the type of the argument. The kernels can be differentiated once and in reverse mode, "xla" by
      any transform of JAX.

    Raises:
      NotImplementedError: "fused", if a head is too large for fast memory.

    Accuracy: 1e-5 relative to the recurrence in float64 for float32 inputs, 5e-3 for bfloat16 inputs.
    Cost: that of `chunk_simple_gla`. "fused" weighs tokens and adds the skip in its kernels; a gate z is one more pass.
    Source: Dao and Gu, Transformers are SSMs (2024).
    """
    ...


@signature.public_function_by_name(operator.recurrent, "recurrent", chunk_mamba2)
def recurrent_mamba2(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None = None, *,
    z: jax.Array | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Mamba-2 token by token, the decode path: one new token or a few for every sequence, in one launch.

    Accuracy: 1e-6 relative to float64 for float32 inputs; the arithmetic is float32, and dt x has the type of x.
    Cost: 5 B T HV K V flops; every state is read and written once.
    Source: Dao and Gu, Transformers are SSMs (2024).
    """
    ...


@signature.public_function_by_name(operator.ragged, "ragged", chunk_mamba2)
def ragged_mamba2(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, states: Pool, cu_seqlens: jax.Array,
    state_indices: jax.Array, *, D: jax.Array | None = None, z: jax.Array | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """Mamba-2 as one serving step: decodes, speculation and prefills over one pool of states."""
    ...
