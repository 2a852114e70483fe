"""The operators and the one table of them: an operator more is a function and a line here, and a package.

A function here is what its package's is, with "staged", the chain of stage kernels, as one more implementation. The
package holds documentation, checks and the choice of implementation.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.experimental import pallas as pl

from chunkwise.fused_gdn import api as gdn
from chunkwise.fused_gdn import recurrent_gated_delta_rule
from chunkwise.fused_gdn.cost import cost as gdn_cost
from chunkwise.fused_gla import api as gla
from chunkwise.fused_gla import recurrent_gla, recurrent_simple_gla
from chunkwise.fused_gla.cost import cost as gla_cost
from chunkwise.kda import api as kda
from chunkwise.kda import recurrent_kda
from chunkwise.kda.cost import cost as kda_cost
from chunkwise.pipeline import docstrings, staged
from chunkwise.shared.operators import arguments, checks, gates


@docstrings.documented_by(gdn.fused_chunk_gated_delta_rule)
def chunk_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated delta rule over whole sequences, chunk by chunk."""
    laws = gates.Laws(use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = arguments.Arguments(q, k, v, g, beta, None, scale, initial_state, cu_seqlens, A_log, dt_bias, segment_ids)
    options = arguments.Options(
        output_final_state,
        use_qk_l2norm_in_kernel,
        chunk_size,
        laws=laws,
        devices=arguments.Devices(sharding, context_axis),
    )
    over_tokens = {"staged": staged.DELTA_RULE_OVER_TOKENS}
    return gdn.chunk(x, options, implementation, {"staged": staged.delta_rule}, over_tokens=over_tokens)


@docstrings.documented_by(kda.fused_chunk_kda)
def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi delta attention over whole sequences, chunk by chunk.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused" with K or V above 256.
    """
    laws = gates.Laws(use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = arguments.Arguments(q, k, v, g, beta, None, scale, initial_state, cu_seqlens, A_log, dt_bias, segment_ids)
    devices = arguments.Devices(sharding, context_axis)
    options = arguments.Options(
        output_final_state, use_qk_l2norm_in_kernel, chunk_size, gate_lower_bound, laws, devices
    )
    over_tokens = {"staged": staged.DELTA_RULE_OVER_TOKENS}
    return kda.chunk(x, options, implementation, {"staged": staged.delta_rule}, over_tokens=over_tokens)


@docstrings.documented_by(gla.fused_chunk_gla)
def chunk_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention with a gate per channel, over whole sequences, chunk by chunk.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    Args:
      g: log decay per channel of the key [B, T, HV, K] in nats, at most 0, of any strength: -inf forgets everything
        before. Of any of these types.

    Cost: 2 B T HV (C K + C V + 2 K V) flops, and one read of q, k, v and write of o; the backward reads q, k, v, do and
      one state every few chunks, and writes dq, dk, dv. With states in or out a packed batch also pays for the state
      of every sequence.
    Source: Yang et al., Gated Linear Attention Transformers (2023), sections 3 and 4.
    """
    checks.check_array("g", g, "B T HV K")
    x = arguments.Arguments(q, k, v, g, None, None, scale, initial_state, cu_seqlens, segment_ids=segment_ids)
    options = arguments.Options(
        output_final_state, chunk_size=chunk_size, devices=arguments.Devices(sharding, context_axis)
    )
    return gla.chunk(x, options, implementation, {"staged": staged.gla})


@docstrings.documented_by(gla.fused_chunk_gla)
def chunk_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention with a gate per head, over whole sequences, chunk by chunk.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S_t = e^(g_t + g_gamma) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    Retention and lightning attention are this with constant gates g_gamma.

    Args:
      g: log decay per head [B, T, HV] in nats, at most 0, of any strength: -inf forgets everything before. Of any of
        these types; None for none.

    Source: Dao and Gu, Transformers are SSMs (2024); Sun et al., Retentive Network (2023), for constant gates.
    """
    if g is not None:
        checks.check_array("g", g, "B T HV")
    x = arguments.Arguments(q, k, v, g, None, g_gamma, scale, initial_state, cu_seqlens, segment_ids=segment_ids)
    options = arguments.Options(
        output_final_state, chunk_size=chunk_size, devices=arguments.Devices(sharding, context_axis)
    )
    return gla.chunk(x, options, implementation, {"staged": staged.gla})


@dataclass(frozen=True)
class Operator:
    """An operator, as those see it that treat all operators alike: checks, benchmarks, tests.

    Attributes:
      function: what a user calls.
      delta: whether it is a delta rule, which takes beta.
      gates: "head" for g [B, T, HV]; "channel" for g [B, T, HV, K]; "constant" for a gate per head and g_gamma [HV].
      implementations: what it comes in; the last is the TPU's choice for sizes that fit.
      cost: its package's `cost`, a function of the sizes; None for the forms that go token by token.
    """

    function: Callable
    delta: bool
    gates: str
    implementations: tuple[str, ...]
    cost: Callable[..., pl.CostEstimate] | None = None

    @property
    def name(self) -> str:
        """Its name in `chunkwise.pipeline`."""
        return self.function.__name__

    @property
    def chunked(self) -> bool:
        """Whether it goes chunk by chunk, and not token by token."""
        return self.name.startswith("chunk_")

    @property
    def per_channel(self) -> bool:
        """Whether it has a gate for every channel of the key."""
        return self.gates == "channel"


_RECURRENT = ("xla", "fused")
_CHUNK = ("xla", "staged", "fused")

OPERATORS = {
    operator.name: operator
    for operator in (
        Operator(recurrent_simple_gla, False, "constant", _RECURRENT),
        Operator(recurrent_gla, False, "channel", _RECURRENT),
        Operator(recurrent_gated_delta_rule, True, "head", _RECURRENT),
        Operator(recurrent_kda, True, "channel", _RECURRENT),
        Operator(chunk_simple_gla, False, "constant", _CHUNK, gla_cost),
        Operator(chunk_gla, False, "channel", _CHUNK, functools.partial(gla_cost, per_channel=True)),
        Operator(chunk_gated_delta_rule, True, "head", _CHUNK, gdn_cost),
        Operator(chunk_kda, True, "channel", _CHUNK, kda_cost),
    )
}

CHUNKED = tuple(operator for operator in OPERATORS.values() if operator.chunked)
RECURRENT = tuple(operator for operator in OPERATORS.values() if not operator.chunked)
