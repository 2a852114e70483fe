"""The operators as chains of stage kernels: the readable form, and the cross-check of the fused kernels."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.kernels import tiles
from chunkwise.shared.operators import arguments, chunked, context, recurrence, serving
from chunkwise.solve_tril import solve_tril
from chunkwise.wy_fast import recompute_w_u

_PALLAS = "pallas"


@functools.partial(jax.jit, static_argnums=1)
def delta_rule(
    x: arguments.Arguments, options: arguments.Options, A_inv: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Gated delta rule for gates per head g [B, T, HV], Kimi delta attention for gates per channel [B, T, HV, K].

    `A_inv` are the inverses that `_delta_summary` keeps, of the same tokens.
    """
    g_cum, (h, v_new, final_state) = _delta_states(x, options, _PALLAS, A_inv)
    q, k = (recurrence.unit_rows(y, options.normalise, x.cu_seqlens) for y in (x.q, x.k))
    o = chunk_fwd_o(
        q, k, v_new, h, g_cum, None, _scale(x), x.cu_seqlens, options.chunk_size, implementation=_PALLAS
    )  # fmt: skip
    return o.astype(x.v.dtype), final_state


class Solved(NamedTuple):
    """What the stages before the pass of the state give.

    Attributes:
      k: keys, scaled if this is wanted.
      g_cum, A_inv, w, u: what the stages call so.
    """

    k: jax.Array
    g_cum: jax.Array
    A_inv: jax.Array
    w: jax.Array
    u: jax.Array


def _solve(x: arguments.Arguments, options: arguments.Options, implementation: str, A_inv: jax.Array | None) -> Solved:
    """Run the stages before the pass of the state, with the inverses if they are known."""
    assert x.g is not None
    assert x.beta is not None
    cu, C, how = x.cu_seqlens, options.chunk_size, {"implementation": implementation}
    k = recurrence.unit_rows(x.k, options.normalise, cu)
    g_cum = chunk_local_cumsum(tiles.clip_gate(x.g), C, cu_seqlens=cu, **how)
    # Where the inverses are known only the gradient asks for A.
    A = chunk_scaled_dot_kkt(k, x.beta, g_cum, cu, C, **how)
    A_inv = solve_tril(A, cu, A_inv=A_inv, **how)
    return Solved(k, g_cum, A_inv, *recompute_w_u(k, x.v, x.beta, A_inv, g_cum, cu, **how))


def _delta_states(
    x: arguments.Arguments, options: arguments.Options, implementation: str, A_inv: jax.Array | None = None
) -> tuple[jax.Array, tuple]:
    """Return the cumulative gates, and what the state pass returns: states before chunks, new values, final states."""
    k, g_cum, _, w, u = _solve(x, options, implementation, A_inv)
    return g_cum, chunk_gated_delta_rule_fwd_h(
        k, w, u, g_cum, x.initial_state, options.output_final_state, x.cu_seqlens, options.chunk_size,
        implementation=implementation,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=1)
def _delta_summary(x: arguments.Arguments, options: arguments.Options) -> context.Summary:
    """Return what the tokens do to a state: one pass of the state beside the identity. The inverses are kept."""
    k, g_cum, A_inv, w, u = _solve(x, options, _PALLAS, None)

    def states_after(y: arguments.Arguments) -> tuple[Any, jax.Array]:
        missing = y.initial_state.shape[3] - u.shape[3]
        _, _, states = chunk_gated_delta_rule_fwd_h(
            k, w, jnp.pad(u, [(0, 0)] * 3 + [(0, missing)]), g_cum, y.initial_state, True, y.cu_seqlens,
            options.chunk_size, implementation=_PALLAS,
        )  # fmt: skip
        return states, A_inv

    return context.beside_identity(states_after, x, widest=None)


# What the chain of a delta rule does where tokens are split over devices.
DELTA_RULE_OVER_TOKENS = chunked.Launches(delta_rule, _delta_summary, at_once=True)


@functools.partial(jax.jit, static_argnums=1)
def gla(x: arguments.Arguments, options: arguments.Options) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention for gates per head [B, T, HV], constant per head [HV], or per channel [B, T, HV, K]."""
    g_cum, g_gamma, (h, final_state) = _gla_states(x, options, _PALLAS)
    o = chunk_fwd_o(
        x.q, x.k, x.v, h, g_cum, g_gamma, _scale(x), x.cu_seqlens, options.chunk_size, implementation=_PALLAS
    )  # fmt: skip
    return o.astype(x.v.dtype), final_state


def _gla_states(x: arguments.Arguments, options: arguments.Options, implementation: str) -> tuple[Any, Any, tuple]:
    """Return the cumulative and the constant gates, the states before chunks, and the final states."""
    cu, C, how = x.cu_seqlens, options.chunk_size, {"implementation": implementation}
    g_gamma = None if x.g_gamma is None else tiles.clip_gate(x.g_gamma)
    g_cum = None if x.g is None else chunk_local_cumsum(tiles.clip_gate(x.g), C, cu_seqlens=cu, **how)
    # The states take gates per channel as another argument.
    per_head, per_channel = (None, g_cum) if x.g is not None and x.g.ndim == 4 else (g_cum, None)
    states = chunk_fwd_h(
        x.k, x.v, per_head, g_gamma, per_channel, x.initial_state, options.output_final_state, cu, C, **how
    )  # fmt: skip
    return g_cum, g_gamma, states


def _chunk_states(states: Callable) -> dict[str, serving.ChunkStates]:
    """Return how an operator finds the states before all chunks, by the names of its implementations."""

    def find(x: arguments.Arguments, options: arguments.Options, implementation: str) -> jax.Array:
        return states(x, options, implementation)[-1][0]

    stages = {"xla": "xla", "staged": _PALLAS}
    return {name: functools.partial(find, implementation=stage) for name, stage in stages.items()}


DELTA_RULE_STATES, GLA_STATES = _chunk_states(_delta_states), _chunk_states(_gla_states)


def _scale(x: arguments.Arguments) -> Any:
    """Return the scale as float32: under jit it is traced, and in 64-bit mode a number would be float64."""
    return jnp.asarray(x.scale, jnp.float32)
