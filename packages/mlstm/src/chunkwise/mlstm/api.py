"""The contract: signatures and documentation; `operator` has the functions that they call."""

from typing import Unpack

import jax

from chunkwise.fused_gla import chunk_simple_gla
from chunkwise.mlstm import operator
from chunkwise.mlstm.operator import MlstmState
from chunkwise.shared.call import forms, signature


@signature.public_function_by_name(operator.chunk, "chunk", chunk_simple_gla)
def chunk_mlstm(
    q: jax.Array, k: jax.Array, v: jax.Array, i: jax.Array, f: jax.Array, scale: float | None = None,
    initial_state: MlstmState | None = None, output_final_state: bool = False, *, eps: float = 1e-6,
    context_axis: str | tuple[str, ...] | None = None, **options: Unpack[forms.Whole],
) -> tuple[jax.Array, MlstmState | None]:  # fmt: skip
    """The mLSTM of xLSTM over whole sequences, chunk by chunk, differentiable.

        m_t = max(log f_t + m_{t-1}, i_t)
        C_t = e^(log f_t + m_{t-1} - m_t) C_{t-1} + e^(i_t - m_t) k_t v_t^T
        n_t = e^(log f_t + m_{t-1} - m_t) n_{t-1} + e^(i_t - m_t) k_t
        o_t = scale C_t^T q_t / (max(|scale n_t^T q_t|, e^-m_t) + eps)

    The final_state is an `MlstmState`, whose C has the shape above.

    Args:
      i: raw input gates [B, T, HV], logs of weights, of any of these types and any strength; -inf writes nothing.
      f: raw forget gates [B, T, HV], of any of these types and any strength, where log f stands for log_sigmoid(f);
        -inf forgets everything before.
      scale: multiplies the queries; defaults to K ** -0.5. A number, which is static, or a scalar array.
      initial_state: the `MlstmState` before every sequence, of any of these types; None for no tokens before.
      eps: is added to the divisor; a number, static.

    Returns:
      o [B, T, HV, V] in the type of v, and the `MlstmState` after every sequence in float32, None unless asked for.
      Every floating-point argument has a gradient, of the type of the argument; the final m has none. The kernels can
      be differentiated once and in reverse mode, "xla" by any transform of JAX.

    Raises:
      NotImplementedError: "fused", if a head is too large for fast memory.

    Accuracy: 1e-5 relative to the recurrence in float64 for float32 inputs, 5e-3 for bfloat16 inputs, 3e-2 for their
    gradients where one token outweighs others. Where |scale n^T q| = e^-m the gradient jumps, and a product in bfloat16
    may take that of the other side.
    Cost: that of `chunk_simple_gla`, and the scan of the stabilisers; without "fused" also that of one value channel.
    Source: Beck et al., xLSTM (2024).
    """
    ...


@signature.public_function_by_name(operator.recurrent, "recurrent", chunk_mlstm)
def recurrent_mlstm(
    q: jax.Array, k: jax.Array, v: jax.Array, i: jax.Array, f: jax.Array, scale: float | None = None,
    initial_state: MlstmState | None = None, output_final_state: bool = False, *, eps: float = 1e-6,
    context_axis: str | tuple[str, ...] | None = None, **options: Unpack[forms.FewTokens],
) -> tuple[jax.Array, MlstmState | None]:  # fmt: skip
    """The mLSTM token by token, for decoding: one new token or a few for every sequence.

    Args:
      initial_state: the `MlstmState` before every sequence, of any of these types; None for no tokens before.

    Returns:
      o [B, T, HV, V] in the type of v, and the `MlstmState` after every sequence in float32, None unless asked for.
      Every floating-point argument has a gradient; "xla" takes any transform of JAX.

    Accuracy: 1e-5 relative to float64 for float32 inputs; the arithmetic is float32.
    Cost: 5 B T HV K (V + 1) flops; every state is read and written once.
    """
    ...
