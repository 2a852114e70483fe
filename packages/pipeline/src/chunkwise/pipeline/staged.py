"""The operators as chains of stage kernels, which are easier to read than fused kernels, and check them.

Each chain is one more implementation of its operator, "staged": `register_all` adds it to the records of the packages.
"""

from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.dplr import operator as dplr
from chunkwise.fused_gdn import operator as gdn
from chunkwise.fused_gla import operator as gla_operators
from chunkwise.kda import operator as kda
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation.implementations import Implementation, in_plain_jax, with_chunk_size
from chunkwise.shared.kernels import chunking, tiles
from chunkwise.shared.operator import Operator, register
from chunkwise.shared.plain import recurrence, state_map
from chunkwise.solve_tril import solve_tril
from chunkwise.two_keys import operator as two_keys
from chunkwise.wy_fast import recompute_w_u

_PALLAS = "pallas"


@in_plain_jax
def delta_rule(x: Arguments, options: Options, A_inv: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Gated delta rule for gates per head g [B, T, HV], Kimi delta attention for gates per channel [B, T, HV, K].

    Erase keys p may take the place of k where the state is erased. `A_inv` has the inverses that `map_delta_rule` made
    of the same tokens.
    """
    g_cum, (h, v_new, final_state) = _delta_states(x, options, A_inv)
    q, k = (recurrence.unit_rows(y, options.use_qk_l2norm_in_kernel, x.cu_seqlens) for y in (x.q, x.k))
    o = chunk_fwd_o(
        q, k, v_new, h, g_cum, None, x.scale, x.cu_seqlens, options.chunk_size, implementation=_PALLAS
    )  # fmt: skip
    return o.astype(x.v.dtype), final_state


def _solve(x: Arguments, options: Options, A_inv: jax.Array | None) -> tuple[Any, ...]:
    """Return k, g_cum, A_inv, w and u from the stages before the stage of the states; A_inv may be known."""
    assert x.beta is not None
    cu, C, how = x.cu_seqlens, options.chunk_size, {"implementation": _PALLAS}
    k, beta = recurrence.unit_keys(x.k, x.beta, options.use_qk_l2norm_in_kernel, cu)
    g_cum = None if x.g is None else chunk_local_cumsum(tiles.clip_gate(x.g), C, cu_seqlens=cu, **how)
    # If the inverses are known, only gradients need A.
    if options.erase_before_decay:
        A, of_rows = _before_decay(k, x.p, beta, g_cum, cu, C)
    else:
        A, of_rows = chunk_scaled_dot_kkt(k, beta, g_cum, cu, C, p=x.p, **how), g_cum
    A_inv = solve_tril(A, cu, A_inv=A_inv, **how)
    return k, g_cum, A_inv, *recompute_w_u(k if x.p is None else x.p, x.v, beta, A_inv, of_rows, cu, **how)


def _before_decay(k, p, beta, g_cum, cu_seqlens, C: int) -> tuple[jax.Array, jax.Array | None]:
    """Return A, and the cumulative gates of its rows, where erase keys read the state before the decay of their token.

    The cumulative gates of a row are those of the row before, so A_ij = beta_i <p_i, e^(G_(i-1) - G_j) * k_j>. With the
    keys and the cumulative gates of the tokens before, this is the matrix of the stage kkt, whose columns lie one to
    the right. Its diagonal is missing: the pairs of neighbours, which have no decay.
    """
    token = jnp.arange(k.shape[1], dtype=jnp.int32)
    start = 0 if cu_seqlens is None else cu_seqlens[chunking.token_owners(k.shape[1], cu_seqlens)]
    place = (token - start)[None] % C  # in the chunk

    def before(y):
        moved = jnp.pad(y[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (y.ndim - 2))
        return chunking.select_tokens(place > 0, moved)

    p = tiles.repeat_heads(k, beta.shape[2], axis=2) if p is None else p
    k, g_cum = before(k), None if g_cum is None else before(g_cum)
    A = chunk_scaled_dot_kkt(k, beta, g_cum, cu_seqlens, C, p=p, implementation=_PALLAS)
    A = jnp.pad(A[..., 1:], [(0, 0)] * 3 + [(0, 1)])
    k = tiles.repeat_heads(k, p.shape[2], axis=2)
    of_neighbours = beta * jnp.sum(p.astype(jnp.float32) * k.astype(jnp.float32), axis=3)
    neighbours = jnp.arange(C, dtype=jnp.int32)[None, None] == place[..., None] - 1  # [1, T, C]
    return jnp.where(neighbours[:, :, None], of_neighbours[..., None], A), g_cum


def _delta_states(x: Arguments, options: Options, A_inv: jax.Array | None = None) -> tuple[jax.Array, tuple]:
    """Return the cumulative gates, and the results of chunk_h: states before chunks, new values, final states."""
    k, g_cum, _, w, u = _solve(x, options, A_inv)
    return g_cum, chunk_gated_delta_rule_fwd_h(
        k, w, u, g_cum, x.initial_state, options.output_final_state, x.cu_seqlens, options.chunk_size,
        implementation=_PALLAS,
    )  # fmt: skip


def map_delta_rule(x: Arguments, options: Options, with_M: bool) -> state_map.Found:
    """Return the map that the tokens apply to a state, by a run with the identity beside the states; keep inverses."""
    k, g_cum, A_inv, w, u = _solve(x, options, None)

    def states_after(y: Arguments) -> tuple[Any, jax.Array]:
        missing = y.initial_state.shape[3] - u.shape[3]
        _, _, states = chunk_gated_delta_rule_fwd_h(
            k, w, jnp.pad(u, [(0, 0)] * 3 + [(0, missing)]), g_cum, y.initial_state, True, y.cu_seqlens,
            options.chunk_size, implementation=_PALLAS,
        )  # fmt: skip
        return states, A_inv

    return state_map.augment_with_identity(states_after, x, with_M=with_M)


@in_plain_jax
def gla(x: Arguments, options: Options, precomputed: None = None) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention for gates per head [B, T, HV], constant per head [HV], or per channel [B, T, HV, K]."""
    g_cum, g_gamma, (h, final_state) = _gla_states(x, options)
    o = chunk_fwd_o(
        x.q, x.k, x.v, h, g_cum, g_gamma, x.scale, x.cu_seqlens, options.chunk_size, implementation=_PALLAS
    )  # fmt: skip
    return o.astype(x.v.dtype), final_state


def _gla_states(x: Arguments, options: Options) -> tuple[Any, Any, tuple]:
    """Return the cumulative and the constant gates, the states before chunks, and the final states."""
    cu, C, how = x.cu_seqlens, options.chunk_size, {"implementation": _PALLAS}
    g_gamma = None if x.g_gamma is None else tiles.clip_gate(x.g_gamma)
    g_cum = None if x.g is None else chunk_local_cumsum(tiles.clip_gate(x.g), C, cu_seqlens=cu, **how)
    # The states take gates per channel as another argument.
    per_head, per_channel = (None, g_cum) if x.g is not None and x.g.ndim == 4 else (g_cum, None)
    states = chunk_fwd_h(
        x.k, x.v, per_head, g_gamma, per_channel, x.initial_state, options.output_final_state, cu, C, **how
    )  # fmt: skip
    return g_cum, g_gamma, states


def register_all() -> None:
    """Add the chains to the operators."""
    for operator in (gdn.OPERATOR, kda.OPERATOR, two_keys.GDN2, two_keys.COMBA, dplr.OPERATOR):
        add_delta_rule(operator)
    for operator in (gla_operators.GLA, gla_operators.SIMPLE_GLA):
        _register(operator, Implementation("staged", gla), _gla_states)


def add_delta_rule(operator: Operator) -> None:
    """Add the chain to an operator with a delta rule."""
    options = frozenset({"use_qk_l2norm_in_kernel", "min_gate", "erase_before_decay"})
    find = in_plain_jax(map_delta_rule, 2)
    _register(operator, Implementation("staged", delta_rule, find, at_once=True, options=options), _delta_states)


def _register(operator: Operator, chain: Implementation, states) -> None:
    """Add a chain to an operator; `states` runs its stages up to the states."""
    sizes = lambda x, options, states: with_chunk_size("staged", x, options)
    register(operator, chain._replace(sizes=sizes, chunk_states=lambda x, options: states(x, options)[-1][0]))
