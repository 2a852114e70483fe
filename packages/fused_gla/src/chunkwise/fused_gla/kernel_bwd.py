"""Backward in one launch, time reversed through the index maps: kernel body, launcher.

The forward kept the state before every grid step. A step first recomputes the states before its chunks into VMEM, then
walks them in reverse with the gradient of the state. Both are float32 where they are read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gla import tiles
from chunkwise.fused_gla.kernel import Chunk, Inputs, Operands, Shape, constant_decays, fetch_state, put_state
from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import dot_nt, dot_tn, strictly_lower

# Heads that the backward takes in lock-step, and how many such groups it starts before it finishes the first.
PAIR, AHEAD = 2, 2


def _gla_bwd_kernel(*refs, s: Shape):
    x, (do_ref, dfinal_ref, kept_ref, dq_ref, dk_ref, dv_ref, dg_ref, dinitial_ref) = Inputs(*refs[:11]), refs[11:19]
    S_ref, dS_ref, start_ref, *decay_refs = refs[19:]
    block, step = pl.program_id(1), s.grid[2] - 1 - pl.program_id(2)

    @pl.when(step == s.grid[2] - 1)
    def _():
        whole = not s.visit and dfinal_ref is not None
        dS_ref[...] = dfinal_ref[...] if whole else jnp.zeros(dS_ref.shape, dS_ref.dtype)
        if s.constant:
            decays: Any = constant_decays(s, x)
            for ref, decay in zip(decay_refs, decays._replace(pairs=jnp.swapaxes(decays.pairs, 1, 2)), strict=False):
                ref[...] = jnp.broadcast_to(decay, ref.shape)
            if dg_ref is not None:
                dg_ref[...] = jnp.zeros(dg_ref.shape, dg_ref.dtype)

    S_ref[0] = kept_ref[...]

    def load_chunk(i, heads=slice(0, s.heads)):
        constant = tiles.Decays(*(r[heads] for r in decay_refs), x.scale[0]) if s.constant else None
        return Chunk(s, x, step, i, constant, heads)

    def states(i, _):
        c = load_chunk(i)
        before, n = S_ref[i], None
        if s.visit:
            # Of the sequences in the chunk only the last one matters for the next; it may start here.
            n = jnp.minimum(c.last, x.bounds.shape[0] - 2)
            start_ref[...] = before
            pl.when(c.starts(n))(lambda: fetch_state(x.initial_state, n, block, start_ref))
            before = start_ref[...]
        S_ref[i + 1] = tiles.next_state(before, c.k, c.v, c.to_end(n)[:, :, : s.K], c.through(n), s.parts)

    lax.fori_loop(0, s.chunks(step) - 1, states, None)

    def start(i, heads):
        c = load_chunk(i, heads)
        do = c.load(do_ref, s.V)
        return c, do, tiles.chunk_products(S_ref[i, heads], dS_ref[heads], c.q, c.k, c.v, do, s.parts)

    def finish(c, do, products):
        i, heads = c.i, c.heads
        # The decays that are the same for every chunk are kept transposed.
        pairs_t = c.decays.pairs if s.constant else jnp.swapaxes(c.decays.pairs, 1, 2)
        grads = tiles.chunk_bwd(
            products, S_ref[i, heads], dS_ref[heads], c.q, c.k, do, pairs_t,
            c.from_start(), c.to_end(), c.through(), s.parts,
        )  # fmt: skip
        dS_ref[heads] = grads.S
        c.store(dq_ref, grads.q)
        c.store(dk_ref, grads.k)
        c.store(dv_ref, grads.v)
        if dg_ref is None:
            return
        if s.constant:
            dg_ref[heads] += tiles.constant_gate_bwd(grads.exponents, grads.from_start, grads.to_end, grads.through)
            return
        exponents = jnp.where(strictly_lower(s.C), jnp.swapaxes(grads.exponents, 1, 2), 0.0)
        dg_ref[i, heads] = grads.through + tiles.gate_bwd(exponents, grads.from_start, grads.to_end, c.same)

    def chunk_per_head(j, _):
        # A pipeline by hand: the matrix unit works in program order, and while it computes the products of some heads
        # the vector unit finishes those before them.
        i, started = s.chunks(step) - 1 - j, []
        for first in range(0, s.heads, PAIR):
            started.append(start(i, slice(first, min(first + PAIR, s.heads))))
            if len(started) > AHEAD:
                finish(*started.pop(0))
        for pair in started:
            finish(*pair)

    def chunk(j, _):
        i = s.chunks(step) - 1 - j
        c = load_chunk(i)
        do = c.load(do_ref, s.V)

        def state_pass(S, n=None):
            """Return the gradients through the state, that of its decay as one of the gates."""
            decays = c.from_start(n), c.to_end(n), c.through(n)
            grads = tiles.state_bwd(S, dS_ref[...], c.q, c.k, c.v, do, *decays, s.parts)
            dS_ref[...] = grads.S
            through = jnp.broadcast_to(grads.through, c.g.shape)
            return grads.q, grads.k, grads.v, through if n is None else c.of(n, through)

        def visit(m, sums):
            first, end = c.sequences()
            n = end - 1 - (m - first)
            start_ref[...] = S_ref[i]
            pl.when(c.starts(n))(lambda: fetch_state(x.initial_state, n, block, start_ref))
            pl.when(c.ends(n))(lambda: fetch_state(dfinal_ref, n, block, dS_ref))
            sums = jax.tree.map(jnp.add, sums, state_pass(start_ref[...], n))
            pl.when(c.starts(n))(lambda: put_state(dS_ref, dinitial_ref, n, block))
            return sums

        if s.visit:
            zeros = tuple(jnp.zeros(y.shape, jnp.float32) for y in (c.q, c.k, c.v, c.g))
            dq, dk, dv, through = lax.fori_loop(*c.sequences(), visit, zeros)
        else:
            dq, dk, dv, through = state_pass(S_ref[i])

        P, dP = tiles.scores(c.q, c.k, c.decays, c.same), dot_nt(do, c.v)
        own = tiles.scores_bwd(dP, c.q, c.k, c.decays, P, c.same, s.parts)
        c.store(dq_ref, dq + own.q)
        c.store(dk_ref, dk + own.k)
        c.store(dv_ref, dv + dot_tn(P.astype(do.dtype), do))
        if dg_ref is None:
            return
        d_from_start, d_to_end = c.q * dq, c.k * dk
        dg = through + tiles.gate_bwd(own.exponents, d_from_start, d_to_end, c.same)
        if s.per_channel:
            c.store(dg_ref, dg)
        else:
            dg_ref[i] = dg

    lax.fori_loop(0, s.chunks(step), chunk if s.per_channel or s.visit else chunk_per_head, None)
    if dinitial_ref is not None and not s.visit:

        @pl.when(step == 0)
        def _():
            dinitial_ref[...] = dS_ref[...]


def launch(s: Shape, x: Operands, do: jax.Array, dfinal: jax.Array | None, kept: jax.Array, gates: bool):
    """Return (dq, dk, dv, dg, dinitial) in the layouts of the operands.

    dg is None unless `gates`; where all gates are constant it is [B, H, 8, K], parts of the gradient of gamma.

    Args:
      s, x: as in the forward.
      do: gradient of o [B, T, H * V], of the type of v.
      dfinal: gradient of the final state [N, H, V, K], or None for zeros.
      kept: states before the grid steps, from the forward.
      gates: whether the gradient of the gates is wanted.
    """
    inputs = [y for y in (*x[:-1], do, dfinal) if y is not None]
    last = s.NT // s.steps - 1
    time = lambda t: last - t
    out = lambda y, dtype: out_struct(y.shape, dtype, *inputs)
    dg = None
    if gates:
        shape = x.k.shape if s.per_channel else (s.B, s.NT, s.H, 1, s.C)
        shape = (s.B, s.H, 8, s.K) if s.constant else shape
        dg = out_struct(shape, jnp.float32, *inputs)
    dg_spec = pl.BlockSpec((None, s.heads, 8, s.K), lambda b, h, t: (b, h, 0, 0)) if s.constant else s.gates(time)
    state, tokens = (s.heads, s.V, s.K), s.B * s.NT * s.C * s.H
    decays = [(s.C, s.C), (s.C, s.K), (s.C, max(s.K, s.V)), (1, s.K)] if s.constant else []
    return s.launch(
        _gla_bwd_kernel, x, do, dfinal, kept, time=time,
        name=f"fused_chunk_gla_bwd_c{s.C}" + ("_varlen" if x.tables else ""),
        in_specs=[s.tokens(s.V, time), None if dfinal is None else s.state(), s.kept(time)],
        out_specs=(
            s.tokens(s.K, time), s.tokens(s.K, time), s.tokens(s.V, time),
            None if dg is None else dg_spec, None if x.initial_state is None else s.state(),
        ),
        out_shape=(
            out(x.q, x.q.dtype), out(x.k, x.k.dtype), out(x.v, x.v.dtype), dg,
            None if x.initial_state is None else out(x.initial_state, jnp.float32),
        ),
        scratch_shapes=[
            # At least two: of a single state XLA would fold the index away, and round other code when it interprets.
            pltpu.VMEM((max(s.steps, 2), *state), jnp.float32),
            pltpu.VMEM(state, jnp.float32),
            pltpu.VMEM(state if s.visit else (1, 8, 128), jnp.float32),
            # Decays that are the same for every chunk, kept as whole tiles: a column would be broadcast at every use.
            *(pltpu.VMEM((s.heads, *tail), jnp.float32) for tail in decays),
        ],
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * (s.C * (3 * s.K + 2 * s.V) + 5 * s.K * s.V),
            transcendentals=tokens * s.C,
            bytes_accessed=sum(y.size * y.dtype.itemsize for y in (*inputs, kept, x.q, x.k, x.v)),
        ),
    )  # fmt: skip
