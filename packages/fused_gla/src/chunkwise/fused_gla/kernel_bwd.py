"""Backward in one launch, time reversed through the index maps: two algorithms for a chunk, kernel body, launcher.

The forward kept the state before every grid step. A step first recomputes the states before its chunks into VMEM, then
walks them in reverse with the gradient of the state. Both are float32 where they are read, and [V, K] like all states
in the kernels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gla import cost, kernel, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import chunking, layout, matmul, schedule, tiles
from chunkwise.shared.kernels.operands import Operands

# Heads that the backward takes in lock-step, and how many such pairs it starts before it finishes the first.
PAIR, AHEAD = 2, 2
# Decays that are the same for every chunk, in scratch.
DECAYS = ("pairs_t", "from_start", "to_end", "through")


def _kept_decays(s: kernel.Static, refs, heads: slice) -> tile.Decays | None:
    """Return the decays of constant gates, of which those of pairs are kept transposed; None for other gates."""
    return tile.Decays(*(getattr(refs, name)[heads] for name in DECAYS), s.scale) if s.constant else None


def _recompute_state(s: kernel.Static, refs, at: kernel.GridStep, i, masked) -> None:
    """Store the state after chunk i, which is the one before chunk i + 1."""
    before = refs.S.at[i]
    place = kernel.Place(s, refs, at, i, masked, (("k", s.K), ("v", s.V)), (before,))
    heads = slice(0, refs.dS.shape[0])
    c = kernel.Chunk(place, heads, _kept_decays(s, refs, heads), queries=False)
    S = before[...]  # [heads, V, K]
    refs.S[i + 1] = tile.next_state(S, c.k, c.v, c.to_end()[:, :, : s.K], c.through(), s.parts)
    if place.masks is not None:
        place.spoil_state(refs.S.at[i + 1], place.last)
        # It may have been replaced by zeros; the gradients must find it as it was.
        place.spoil_state(before, place.before)


def _place(s: kernel.Static, refs, at: kernel.GridStep, i, masked) -> kernel.Place:
    """Return the place of chunk i, whose gradients are to be computed."""
    tiles = ("q", s.K), ("k", s.K), ("v", s.V), ("do", s.V)
    return kernel.Place(s, refs, at, i, masked, tiles, (refs.S.at[i], refs.dS))


def _chunk_in_groups(s: kernel.Static, refs, at: kernel.GridStep, i, masked) -> None:
    """Store the gradients of chunk i, whose gates are per head.

    The matrix unit works in program order: while it computes the products of some heads, the vector unit finishes
    those before them. What value heads of one key head have in common goes from one pair to the next.
    """
    place = _place(s, refs, at, i, masked)
    every = refs.dS.shape[0]
    # Value heads of a key head in the block; a pair holds whole groups or lies inside one.
    group = every // (place.keys(slice(0, every)).stop)
    pair = PAIR if PAIR % group == 0 or group % PAIR == 0 else 1
    by_keys, sums = {}, {}

    def gradients(heads: slice):
        keys, begins, ends = place.keys(heads), heads.start % group == 0, heads.stop % group == 0
        c = kernel.Chunk(place, heads, _kept_decays(s, refs, heads))
        do = place.load(refs.do, s.V, heads).astype(c.dtype)  # [heads, C, V]
        known = None if begins else by_keys[keys.start]
        products = tile.chunk_products(refs.S[i, heads], refs.dS[heads], c.q, c.k, c.v, do, s.parts, known)
        by_keys[keys.start] = products.by_keys
        # These products wait for no other, so the next pairs may begin before this one ends.
        for _ in range(AHEAD):
            yield
        pairs: Any = c.decays.pairs
        pairs_t = pairs if s.constant else jnp.swapaxes(pairs, 1, 2)  # [heads, C, C]
        grads = tile.chunk_bwd(
            products, refs.S[i, heads], refs.dS[heads], c.q, c.k, do, pairs_t,
            c.from_start(), c.to_end(), c.through(), s.parts, None if begins else sums[keys.start], ends,
        )  # fmt: skip
        refs.dS[heads], sums[keys.start] = grads.S, grads.sums
        for ref, x, at in ((refs.dq, grads.q, keys), (refs.dk, grads.k, keys), (refs.dv, grads.v, heads)):
            if x is not None:
                place.store(ref, x, at)
        if refs.dg is None:
            return
        if s.constant:
            refs.dg[heads] += tile.constant_gate_bwd(
                grads.exponents, grads.from_start, grads.to_end, grads.through
            )  # fmt: skip
            return
        # A token and itself have no gate between them.
        exponents = jnp.where(tiles.strictly_lower(s.C), jnp.swapaxes(grads.exponents, 1, 2), 0.0)  # [heads, C, C]
        dg = grads.through + tile.gate_bwd(exponents, grads.from_start, grads.to_end, c.same)  # [heads, 1, C]
        place.store_gates(refs.dg, dg, heads)

    for _ in schedule.stagger(gradients(slice(first, min(first + pair, every))) for first in range(0, every, pair)):
        pass
    _spoil(s, refs, place)


def _chunk_in_step(s: kernel.Static, refs, at: kernel.GridStep, i, masked) -> None:
    """Store the gradients of chunk i, whose gates are per channel, all heads in lock-step."""
    place = _place(s, refs, at, i, masked)
    heads = slice(0, refs.dS.shape[0])
    keys, c = place.keys(heads), kernel.Chunk(place, heads)
    do = place.load(refs.do, s.V).astype(c.dtype)  # [heads, C, V]
    # The decay of the state is a gate.
    outer = tile.state_bwd(
        refs.S[i], refs.dS[...], c.q, c.k, c.v, do, c.from_start(), c.to_end(), c.through(), s.parts
    )  # fmt: skip
    refs.dS[...] = outer.S
    P, dP = tile.scores(c.q, c.k, c.decays, c.same), matmul.dot_nt(do, c.v)  # [heads, C, C]
    inside = tile.scores_bwd(dP, c.q, c.k, c.decays, P, c.same, s.parts)
    place.store(refs.dq, tile.to_key_heads(outer.q, keys.stop) + inside.q, keys)
    place.store(refs.dk, tile.to_key_heads(outer.k, keys.stop) + inside.k, keys)
    place.store(refs.dv, outer.v + matmul.dot_tn(P.astype(do.dtype), do), heads)
    if refs.dg is not None:
        from_start, to_end = (tiles.repeat_heads(y, heads.stop) * dy for y, dy in ((c.q, outer.q), (c.k, outer.k)))
        dg = outer.through + tile.gate_bwd(inside.exponents, from_start, to_end, c.same)  # [heads, C, K]
        place.store_gates(refs.dg, dg, heads)
    _spoil(s, refs, place)


def _spoil(s: kernel.Static, refs, place: kernel.Place) -> None:
    """Store NaN in the gradients of spoilt sequences, and of the state."""
    place.spoil_tokens(refs.dq, refs.dk, refs.dv, None if s.constant else refs.dg)
    if place.masks is not None:
        place.spoil_state(refs.dS, place.before)


def _gla_bwd_kernel(refs, s: kernel.Static):
    """Take the gradient of the state back through the chunks of a grid step; the last step comes first.

    If that of the initial state is wanted, its block holds it until another sequence begins.
    """
    if refs.dh0 is not None:
        refs.dS = refs.dh0
    turn = pl.program_id(2)
    at = kernel.grid_step(s, refs, s.steps - 1 - turn)
    begins = turn == 0
    if at.piece is not None:
        begins |= at.piece.last == 1

    @pl.when(begins)
    def _():
        refs.dS[...] = jnp.zeros_like(refs.dS) if refs.dht is None else refs.dht[...]
        if s.constant:
            decays: Any = kernel.constant_decays(s, refs, refs.dS.shape[0])
            decays = decays._replace(pairs=jnp.swapaxes(decays.pairs, 1, 2))
            for name, decay in zip(DECAYS, decays, strict=False):
                ref = getattr(refs, name)
                ref[...] = jnp.broadcast_to(decay, ref.shape)
            layout.clear(refs.dg)

    if at.piece is not None:  # tokens that no piece owns

        @pl.when((at.piece.closes & at.piece.mixed) == 1)
        def _():
            layout.clear(refs.dq, refs.dk, refs.dv, refs.dg)

    first, end = at.chunks(s)
    refs.S[first] = refs.h[...]

    def run(algorithm, i):
        kernel.run_chunk(s, refs, at, i, functools.partial(algorithm, s, refs, at, i))

    lax.fori_loop(first, end - 1, lambda i, _: run(_recompute_state, i), None)
    gradients = _chunk_in_step if s.per_channel else _chunk_in_groups
    lax.fori_loop(first, end, lambda i, _: run(gradients, first + end - 1 - i), None)


def _gla_bwd_state_kernel(refs, s: kernel.Static):
    """Take the gradient of the state back through the chunks of a grid step; the last step comes first.

    Of a chunk it takes queries for keys and gradients of outputs for values: it adds them like these, but decayed from
    the start of the chunk.
    """
    dS, turn = refs.dh0, pl.program_id(2)
    at, heads = kernel.grid_step(s, refs, s.steps - 1 - turn), slice(0, dS.shape[0])
    begins = turn == 0
    if at.piece is not None:
        begins |= at.piece.last == 1

    @pl.when(begins)
    def _():
        dS[...] = refs.initial_state[...]

    constant = kernel.constant_decays(s, refs, heads.stop) if s.constant else None

    def chunk(i, masked):
        place = kernel.Place(s, refs, at, i, masked, (("k", s.K), ("v", s.V)), (None, dS))
        c = kernel.Chunk(place, heads, constant, queries=False)
        dS[...] = tile.next_state(dS[...], c.k, c.v, c.from_start(), c.through(), s.parts)
        place.spoil_state(dS, place.before if masked else None)

    def turn_of(i):
        kernel.run_chunk(s, refs, at, i, functools.partial(chunk, i))

    first, end = at.chunks(s)
    lax.fori_loop(first, end, lambda i, _: turn_of(first + end - 1 - i), None)


def launch_state(x: Operands, s: kernel.Static) -> jax.Array:
    """Return the gradient of the initial states alone, [N, HV, V, K] float32, as `launch` does."""
    # Queries and the gradients of outputs act on the gradient of the state as keys and values act on the state.
    dtype = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype)
    q = x.q.astype(dtype)
    x = x._replace(q=q, k=q, v=x.do.astype(dtype), initial_state=x.dht, do=None, dht=None)
    blocks = kernel.Blocks(s, s.config.heads, lambda t: s.steps - 1 - t)
    inputs = [y for y in x if y is not None]
    state = compat.out_struct((s.N, s.HV, s.V, s.K), jnp.float32, *inputs)
    results: Any = kernel.run_kernel(
        _gla_bwd_state_kernel, s, blocks, x, queries=False,
        name=f"chunk_gla_bwd_state_c{s.C}" + kernel.varlen(s, x),
        outputs=[("dh0", blocks.states(), state)],
        scratch=[],
        cost_estimate=cost.cost(
            B=s.B, T=s.T, H=s.H, HV=s.HV, K=s.K, V=s.V, C=s.C, itemsize=x.v.dtype.itemsize,
            per_channel=s.per_channel, output=False,
        ),
    )  # fmt: skip
    return results[0]


def launch(x: Operands, s: kernel.Static, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Run the backward, or the part of it that makes the gradient of the initial states alone.

    Args:
      x: operands of the forward with do, dht, and h unless dh0 alone is wanted.
      s: static sizes.
      outputs: names of gradients.

    Returns:
      A dict of the outputs: dq, dk, dv in the layouts and types of q, k, v; dg float32 in the layout of the gates;
      dgamma [HV, 1, 1] float32, of constant gates; dh0 float32, of the initial states.
    """
    if outputs == ("dh0",):
        return {"dh0": launch_state(x, s)}
    inputs, gates = [y for y in x if y is not None], "dg" in outputs or "dgamma" in outputs
    blocks = kernel.Blocks(s, s.config.heads_bwd, lambda t: s.steps - 1 - t)
    out = lambda y: compat.out_struct(y.shape, y.dtype, *inputs)
    dg = blocks.gates(), (s.B, s.T, s.HV * s.K) if s.per_channel else (s.B, chunking.num_chunks(s.T, s.C), s.HV, 1, s.C)
    if s.constant:
        dg = blocks.per_head(8, s.K), (s.B, s.HV, 8, s.K)
    # Kept as whole tiles: a column would be broadcast at every use.
    tails = (s.C, s.C), (s.C, s.K), (s.C, max(s.K, s.V)), (1, s.K)
    decays = {name: (blocks.heads, *tail) for name, tail in zip(DECAYS, tails, strict=True) if s.constant}
    state = blocks.heads, s.V, s.K
    scratch = {
        # At least two: of a single state XLA would fold the index away, and round other code when it interprets.
        "S": (max(s.chunks, 2), *state),
        # An output holds it otherwise.
        **({"dS": state} if "dh0" not in outputs else {}),
    } | decays

    def keys_out(y):
        """Return the type of the gradient of queries or keys: sums to be added up where blocks share a key head."""
        shape = *y.shape[:2], y.shape[2] * blocks.share
        return compat.out_struct(shape, y.dtype if blocks.share == 1 else jnp.float32, *inputs)

    dq, dk, dv, *rest = kernel.run_kernel(
        _gla_bwd_kernel, s, blocks, x,
        name=f"chunk_gla_bwd_c{s.C}" + kernel.varlen(s, x),
        more=[
            ("do", blocks.tokens(s.V), x.do),
            ("dht", blocks.states(), x.dht),
            ("h", blocks.kept(), x.h),
        ],
        outputs=[
            ("dq", blocks.query_sums(), keys_out(x.q)),
            ("dk", blocks.query_sums(), keys_out(x.k)),
            ("dv", blocks.tokens(s.V), out(x.v)),
            ("dg", dg[0], compat.out_struct(dg[1], jnp.float32, *inputs) if gates else None),
            ("dh0", blocks.states(), out(x.initial_state) if "dh0" in outputs else None),
        ],
        scratch=[(name, pltpu.VMEM(shape, jnp.float32)) for name, shape in scratch.items()],
        cost_estimate=cost.cost(
            B=s.B, T=s.T, H=s.H, HV=s.HV, K=s.K, V=s.V, C=s.C, itemsize=x.v.dtype.itemsize, backward=True,
            per_channel=s.per_channel,
        ),
    )  # fmt: skip
    dq, dk = (_added_up(s, y, like, blocks.share) for y, like in ((dq, x.q), (dk, x.k)))
    results = dict(zip(("dq", "dk", "dv", "dg", "dh0"), (dq, dk, dv, *rest), strict=True))
    if "dgamma" in outputs:
        results["dgamma"] = _sum_gates(s, results["dg"])
    return {name: y for name, y in results.items() if name in outputs}


def _sum_gates(s: kernel.Static, dg: jax.Array) -> jax.Array:
    """Return the gradient of the constant gates [HV, 1, 1] from the gradient of all gates.

    Args:
      s: static sizes.
      dg: [B, NT, HV, 1, C], or where all gates are constant [B, HV, 8, K], parts of the sum over tokens.
    """
    if s.constant:
        return jnp.sum(dg, axis=(0, 2, 3))[:, None, None]
    # By tokens, without those past the end, which share the decay of the last chunk.
    tokens = jnp.moveaxis(dg[:, :, :, 0], 3, 2).reshape(s.B, -1, s.HV)[:, : s.T]
    return jnp.sum(tokens, axis=(0, 1))[:, None, None]


def _added_up(s: kernel.Static, y, like: jax.Array, share: int) -> jax.Array:
    """Return the gradient of queries or keys from the sums [B, T, H * share * K] of blocks that share a key head."""
    if share == 1:
        return y
    return jnp.sum(y.reshape(s.B, s.T, s.H, share, s.K), axis=3).reshape(like.shape).astype(like.dtype)
