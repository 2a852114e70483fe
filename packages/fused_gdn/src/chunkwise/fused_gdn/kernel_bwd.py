"""The backward, one reverse pass over the chunks: loads and stores, kernel body, launcher.

The mathematics is in tile_bwd.py. In a chunk that holds several sequences, all rows of a sequence that is not finite
are zero in all products, and its gradients there become NaN. The forward stored NaN in v_new_over_beta where values, or
states, were not finite.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gdn import config, loads, tile, tile_bwd
from chunkwise.fused_gdn.operands import GdnRefs
from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.kernels.spans import chunk_loop, layout, nonfinite, schedule, stage_chunks
from chunkwise.shared.kernels.spans.operands import FusedStatic, Operands


def _bwd_kernel(refs: GdnRefs, *, static: FusedStatic, s: tile.Heads) -> None:
    """Take the gradient of the state back through a chunk; the last chunk comes first."""
    chunk_loop.run_backward(
        refs,
        functools.partial(_grid_step, static=static, s=s),
        static,
        not_finite=functools.partial(not_finite, refs, s),
        # After a product, whole columns of a gradient are not finite, so its first rows show it.
        part=slice(0, 8) if refs.dht is None else slice(None),
        results=(refs.dq, refs.dk, refs.dv, refs.dg, refs.dbeta),
    )


def not_finite(refs: GdnRefs, s: tile.Heads, at: slice = slice(None)) -> jax.Array:
    """Return which rows of the chunk, which has the rows `at` of the blocks, are not finite, float32 [1, C, 1]."""
    values = (layout.load_heads(ref, s.V, at=at) for ref in (refs.do, refs.v_new_over_beta) if ref is not None)
    tokens = loads.tokens_not_finite(refs, s, refs.q, refs.k, at=at)
    return jnp.maximum(tokens, nonfinite.rows_not_finite(*values))


def _grid_step(refs: GdnRefs, chunk: stage_chunks.StageChunk, static: FusedStatic, s: tile.Heads) -> None:
    """Run a grid step."""
    valid, masks = chunk.valid, chunk.masks
    q, k, g, beta, of_rounding = loads.load_chunk(refs, valid, s, static)
    do = layout.load_heads(refs.do, s.V, valid=valid)  # [heads, C, V]
    gate = tile.pack_gates(tile.gate_sums(g, beta, s, k.dtype != jnp.bfloat16, masks), s)
    boundary = tile.boundary_decays(gate, s, masks)
    if refs.dq is None:
        refs.dstate[...] = tile_bwd.state_gradient(
            q, k, gate, boundary, refs.A_inv[...], do, refs.dstate[...], static.scale, s
        )
    else:
        v_new_over_beta = layout.load_heads(refs.v_new_over_beta, s.V, valid=valid)  # [heads, C, V]
        *gradients, dS = schedule.finish(
            tile_bwd.chunk_gradients(
                q, k, gate, boundary, refs.A_inv[...], refs.h[...], v_new_over_beta, do, refs.dstate[...],
                static.scale, s,
            )
        )  # fmt: skip
        refs.dstate[...] = dS
        if of_rounding is not None:
            gradients[-1] = gradients[-1] * of_rounding
        store(refs, gradients, chunk, static, s)


def store(refs: GdnRefs, gradients, chunk: stage_chunks.StageChunk, static: FusedStatic, s: tile.Heads) -> None:
    """Store the gradients of the tokens of a chunk that `tile_bwd.token_gradients` returns."""
    dq, dk, dv, later, earlier, crossing, dbeta = gradients
    valid, masks, at = chunk.valid, chunk.masks, chunk.rows(s.C)
    if static.normalise:
        dq = tiles.l2norm_gradient(layout.load_heads(refs.q, s.K, valid=valid, at=at), dq)
        dk = tiles.l2norm_gradient(layout.load_heads(refs.k, s.K, valid=valid, at=at), dk)
    stored = valid if static.varlen else None
    for ref, x in ((refs.dq, dq), (refs.dk, dk), (refs.dv, dv)):
        layout.store_heads(ref, x, stored, at=at)
    if refs.dg is not None:
        # The gradient of a gate is the sum of the terms that its row and later rows give to all gates up to theirs, of
        # the terms that earlier rows give to all gates after theirs, and of the terms of pairs of rows around it.
        i, j = (lax.broadcasted_iota(jnp.int32, (1, s.C, s.C), axis) for axis in (1, 2))
        below, above = (i <= j, i > j) if masks is None else (masks.same[:, :, : s.C] & x for x in (i <= j, i > j))
        collect = packed.concat_lanes([tile.indicator(below), tile.indicator(above)])  # [1, C, 2 C]
        dg = matmul.dot(collect, packed.concat_rows([later[None], earlier[None]]))[0] + crossing  # [C, heads]
        # Padding counts as a part of the sequence before it, so its gates get a gradient from the state that passes
        # through.
        layout.store_rows(refs.dg, slice(None), dg if masks is None else jnp.where(valid, dg, 0.0), stored, at)
    layout.store_rows(refs.dbeta, slice(None), dbeta, stored, at)


def plan(x: Operands, static: FusedStatic, outputs: tuple[str, ...], body: Callable = _bwd_kernel) -> dict[str, Any]:
    """Return the launch of the reverse kernel, the arguments of `launcher.launch`.

    Args:
      x: operands; v and the initial states are not read. Without h and v_new_over_beta, dh0 must be the only output.
      static: the static description.
      outputs: dq, dk, dv and dbeta with or without dg and dh0; or dh0 alone.
      body: the body of the kernel, called with the Refs, the static description and the heads of a grid step.

    Returns:
      The arguments. The launch gives a dict of these outputs: dq, dk and dv, laid out and typed as q, k and v; dg and
      dbeta, float32, laid out as g; and dh0 [N, HV, K, V] float32, the gradient of the initial states, undefined for
      empty sequences.
    """
    HV, s, of_tokens = static.HV, loads.heads_of(static, static.config.heads_bwd), "dq" in outputs
    cut = chunk_loop.blocks_backwards(static)
    key, value, gate = cut.tokens(s.heads // s.group * s.K), cut.tokens(s.heads * s.V), cut.values(s.heads)
    state = cut.state(s.heads, s.K, s.V)
    estimate = config.cost if of_tokens else config.states_cost
    return dict(
        body=functools.partial(body, static=static, s=s),
        refs=GdnRefs,
        name=f"chunk_gated_delta_rule_{'bwd' if of_tokens else 'bwd_state'}_c{s.C}",
        grid=(static.B, HV // s.heads, static.spans),
        tables={"table": x.table},
        inputs={
            "q": (x.q, key),
            "k": (x.k, key),
            "g": (x.g, gate),
            "beta": (x.beta, gate),
            "owner": (x.owner, cut.owner(s.p * s.C)),
            "A_inv": (x.A_inv, cut.per_chunk(s.heads // s.p, s.C, s.p * s.C)),
            "h": (x.h, cut.per_chunk(s.heads, s.K, s.V)),
            "v_new_over_beta": (x.v_new_over_beta, value),
            "do": (x.do, value),
            "dht": (x.dht, state),
        },
        outputs={
            "dq": (key, x.q.shape, x.q.dtype),
            "dk": (key, x.k.shape, x.k.dtype),
            "dv": (value, x.do.shape, x.do.dtype),
            "dg": (gate, x.beta.shape, jnp.float32),
            "dbeta": (gate, x.beta.shape, jnp.float32),
            "dh0": (state, (static.N, HV, s.K, s.V), jnp.float32),
        },
        requested=outputs,
        like=x.gradients(),
        scratch={} if "dh0" in outputs else {"dstate": (s.heads, s.K, s.V)},
        cost_estimate=estimate(**static.sizes(), itemsize=x.k.dtype.itemsize, backward=True),
    )
