"""Forward in one launch: loading and storing, kernel body, launcher; tile mathematics is in tile.py.

With K, Q, V the rows of a chunk, S the state before it, B = diag(beta), G the cumulative gate and
D_ij = exp(G_i - G_j),

    X  = (I + tril(K K^T * D, -1) B)^-1           P = scale tril(Q K^T * D) B     no state in them
    R  = V - e^G K S                              what the keys do not recall yet
    W  = X R                                      the same token by token, B W is v_new
    o  = scale e^G Q S + P W                      S' = e^G_last S + K^T e^(G_last - G) B W

P of a chunk, and X as far as it takes no products, are made in the step before the one that takes the state through it.
Where the launch of kernel_map.py has run over the same tokens, u = X V and w = -X e^G K are given, and W = u + w S.

With bfloat16 tensors S enters its products as bfloat16: what rounding misses of S stays in S. X, P, R and W must not be
rounded so: where keys repeat they oscillate, and the sums over them cancel. They keep 16 bits, as two bfloat16 parts.

The matrices of p heads lie side by side in the lanes ("packed", see shared.kernels.packed): n = heads / p packs. States
are [K, V], as the user has them.

A chunk of a stream, or of rows of segments, may hold several sequences or padding. Only the turns that meet such a
chunk compute with masks. Rows that are not finite are then zero in all products, see shared.kernels.nonfinite, and all
results of their sequence in that chunk, in all heads of the grid step, become NaN.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn import config, cost, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import inverse, launcher, layout, nonfinite, packed, pools, schedule, tiles
from chunkwise.shared.kernels.operands import Operands

# Heads that take the state through a chunk together: the products of one stage of theirs hide the latency of another.
STAGE = 8
# What a turn that need not make its inverses does one after the other: "p" takes the chunk before through its next
# products, "m" prepares half a stage of the next. Found by search for four stages, for launches that are given X, and
# for those that are given u and w: see docs/performance.md.
GIVEN_ORDERS = {"X": "ppmpmmppp", "u": "pmmmppppp"}


class Static(NamedTuple):
    """What is known when a kernel is built.

    Attributes:
      B, T, H, HV, K, V: sizes of the flat arrays: T at least C, K and V padded to whole lanes.
      C: tokens of a chunk.
      N: states in and out.
      steps: of a row of the batch.
      scale: number that multiplies q.
      normalise: apply the l2 norm to q and k.
      pieces: a step is a piece of a chunk instead of a chunk.
      config: tile sizes.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    C: int
    N: int
    steps: int
    scale: float
    normalise: bool
    pieces: bool
    config: config.Config

    def shape(self, heads: int) -> tile.Shape:
        """Return the shape of a step of so many value heads."""
        group = self.HV // self.H
        # What the forward keeps for the backward is packed alike in both.
        p = min(config.lane_packing(n, group, self.C) for n in (self.config.heads, self.config.heads_bwd))
        return tile.Shape(self.C, self.K, self.V, heads, group, p)

    def sizes(self) -> dict[str, Any]:
        """Return the sizes that costs depend on."""
        return {name: getattr(self, name) for name in ("B", "T", "H", "HV", "K", "V", "C")}


def own_rows(step: layout.Step, static: Static) -> Any:
    """Return which rows of a chunk belong to a step, bool [C, 1]; None for all. Others may hold anything."""
    return step.rows(static.C) if static.pieces or static.T % static.C else None


def load_chunk(refs, own, s: tile.Shape, static: Static) -> Any:
    """Load q, k tiles [key heads, C, K] and g, beta [C, heads] float32 of a chunk of a row of the batch."""
    q, k = (None if ref is None else layout.load_heads(ref, s.K, own=own) for ref in (refs.q, refs.k))
    g, beta = tiles.clip_gate(refs.g[...]), refs.beta[...].astype(jnp.float32)
    if own is not None:
        g, beta = (jnp.where(own, x, 0.0) for x in (g, beta))
    if static.normalise:
        q, k = (None if x is None else tiles.l2norm(x.astype(jnp.float32)).astype(x.dtype) for x in (q, k))
    return q, k, g, beta


def load_masks(owner_ref, step: layout.Step, C: int) -> layout.SequenceMasks:
    """Return how the sequences lie in the chunk of a step."""
    return layout.sequence_masks(owner_ref[...], C, step.before, step.final)


def tokens_not_finite(refs, own, s: tile.Shape, names: tuple[str, ...]) -> jax.Array:
    """Return which own rows of g, beta, and q or k by their names, are not finite, float32 [1, C, 1]."""
    heads = (layout.load_heads(getattr(refs, name), s.K, own=own) for name in names)
    values = (jnp.where(own, x.astype(jnp.float32), 0.0)[None] for x in (tiles.clip_gate(refs.g[...]), refs.beta[...]))
    return nonfinite.rows_not_finite(*heads, *values)


def _inverts(refs) -> bool:
    """Return whether a launch makes the inverses itself."""
    return refs.X is None and refs.u is None


def _fwd_kernel(refs, *, static: Static, s: tile.Shape):
    """Take the state through the step before and prepare the next one.

    Neither waits for the other: the products with the state fill the matrix unit while rows are eliminated in the
    inverse, which does not use it.
    """
    turn, first = pl.program_id(2), pl.program_id(0) * jnp.int32(static.steps)
    prepared = layout.Step(refs.table, first + jnp.minimum(turn, jnp.int32(static.steps - 1)))
    passed = layout.Step(refs.table, first + jnp.maximum(turn - 1, jnp.int32(0)))

    # Turn 0 runs on uninitialised scratch. A sequence's first step resets the state; pieces before it have no rows, so
    # that nothing of theirs is stored.
    @pl.when(passed.first == 1)
    def _():
        if refs.pool is not None:
            pools.fetch_states(refs.pool, refs.state, passed.continues)
        else:
            refs.state[...] = jnp.zeros_like(refs.state) if refs.initial_state is None else refs.initial_state[...]

    if static.pieces:

        @pl.when((passed.opens & passed.mixed) == 1)
        def _():
            layout.clear(refs.o, refs.W)  # rows that belong to no piece stay zero

    mixed = None if refs.owner is None else (prepared.mixed + passed.mixed) > 0
    take_turn, pieces = (lambda masked: _turn(refs, prepared, passed, masked, static, s)), (prepared, passed)
    if refs.pool is not None:

        @pl.when((turn == 0) & (passed.sequence == passed.target))
        def _():
            pools.keep_block(refs.pool, refs.pool_out)

        # Before the first step that has rows and after the last there is nothing to do: that costs next to nothing.
        pl.when((prepared.busy | passed.busy) == 1)(
            lambda: layout.whole_or_cut(pieces, s.C, take_turn, also_empty=True)
        )

        @pl.when((turn > 0) & (passed.last == 1))
        def _():
            pools.put_states(refs.state, refs.pool_out)

        return
    if static.pieces:
        # A step without rows behind another may then pass what is left in scratch. Nobody reads the state of a sequence
        # without tokens, and behind the last token all of them have gone out.
        layout.whole_or_cut(pieces, s.C, take_turn)
    else:
        nonfinite.masked_or_not(mixed, take_turn)
    if refs.ht is not None:

        @pl.when((turn > 0) & (passed.last == 1))
        def _():
            refs.ht[...] = refs.state[...]


def _turn(refs, prepared: layout.Step, passed: layout.Step, masked: bool | None, static: Static, s: tile.Shape) -> None:
    """Do as `_fwd_kernel`; `masked` says whether one of the two chunks is mixed, None that a chunk never is.

    False says also that all rows of the two chunks belong to the two steps.
    """
    masks: Any = None
    spoilt: Any = None
    found: Any = None
    # All rows of a chunk that could be mixed and is not are its own.
    own: Any = own_rows(prepared, static) if masked is None else None
    own_passed: Any = own_rows(passed, static) if masked is None else None
    if masked:
        masks = load_masks(refs.owner, prepared, s.C)
        # What is not finite becomes zero before any product reads it, by the selection that padding needs anyway.
        own, own_passed = masks.code[0] >= 0, refs.valid[0] > 0.0
        spoilt = nonfinite.only_if(passed.mixed == 1, lambda: quarantine_passed(refs, own_passed, passed, s), s.C)
        own_passed &= spoilt[0] == 0.0
        # Nothing but its own row reads a query.
        found = nonfinite.only_if(prepared.mixed == 1, lambda: tokens_not_finite(refs, own, s, ("k",)), s.C)
        own &= found[0] == 0.0
    q, k, g, beta = load_chunk(refs, own, s, static)
    bf16 = k.dtype == jnp.bfloat16
    X, steps = None, iter(())
    if refs.X is not None:
        X = refs.X[...]
    if _inverts(refs):
        steps = inverse.ladder(refs.strip[...], refs.M[...], 2 if bf16 else 3)

    sums = tile.gate_sums(g, beta, s, not bf16, masks)
    stages, made, seen = tile.Part(s).cut(STAGE), [], {}
    stored = own_passed if static.pieces else None

    def make(part: tile.Part) -> None:
        made.append((part, prepare(refs, q, k, sums, part, masks, static)))

    def prepare_and_see(stage: tile.Part) -> Iterator[None]:
        for part in stage.cut(STAGE // 2):
            make(part)
        yield
        seen[stage.first] = see_state(refs, stage, s)

    def see_and_pass(stage: tile.Part) -> Iterator[None]:
        if stage.first not in seen:
            seen[stage.first] = see_state(refs, stage, s)
            yield
        yield from pass_chunk(refs, own_passed, stored, X, stage, seen.pop(stage.first), static, s)

    # The matrix unit takes products in the order in which they stand here, and where one waits, all wait. Between those
    # of the inverse, of which each waits for the one before, some heads are prepared and others meet the state. With
    # the inverse at hand, a stage does all it has to do at once, and fewer tiles wait in memory.
    passing = schedule.stagger(see_and_pass(stage) for stage in stages)
    if _inverts(refs):
        turns = schedule.stagger(prepare_and_see(stage) for stage in stages)
        for _ in stages:
            X = next(steps, X)
            next(turns)
        *_, X = X, *steps
        for _ in turns:
            pass
    else:
        making = (make(part) for stage in stages for part in stage.cut(STAGE // 2))
        schedule.take_turns(GIVEN_ORDERS["X" if refs.u is None else "u"], p=passing, m=making)
        for _ in making:
            pass
    for _ in passing:
        pass

    if refs.X_out is not None:
        refs.X_out[...] = X
    if masked:

        @pl.when(passed.mixed == 1)
        def _():
            spoil_passed(refs, spoilt, passed, s)

        refs.found[...], refs.owner_passed[...] = found, refs.owner[...]
    if refs.owner is not None:
        refs.valid[...] = jnp.ones((1, s.C, 1), jnp.float32) if masks is None else tile.indicator(masks.code >= 0)
    # The next turn takes these from scratch; stored last, because this one still reads those of the step before.
    refs.k_passed[...] = k
    if refs.o is not None:
        refs.q_passed[...] = q
    for part, values in made:
        for name, x in values.items():
            getattr(refs, name)[part.packs] = x


def quarantine_passed(refs, own, passed: layout.Step, s: tile.Shape) -> jax.Array:
    """Clear a state that is not finite; return the rows of sequences that are not finite, float32 [1, C, 1].

    The rows of k, g and beta were looked at when the chunk was prepared. Padding counts to the sequence before it.
    """
    masks = load_masks(refs.owner_passed, passed, s.C)
    # What a product wrote is not finite in whole columns.
    state = nonfinite.not_finite(refs.state[:, :8] if refs.initial_state is None else refs.state[...])  # [1, 1, 1]

    @pl.when(jnp.max(state) > 0.0)
    def _():
        layout.clear(refs.state)

    found = jnp.maximum(refs.found[...], nonfinite.rows_not_finite(load_values(refs, slice(None), own, s)))
    found = jnp.maximum(found, jnp.where(masks.carried, state, 0.0))
    return nonfinite.whole_sequences(found, masks.same[:, :, : s.C])


def load_values(refs, heads: slice, own, s: tile.Shape) -> jax.Array:
    """Load v, or u where that is given, of some heads [heads, C, V]; rows that are not own are zero, None for all."""
    if refs.u is None:
        return layout.load_heads(refs.v, s.V, heads, own)
    u = refs.u[heads]
    return u if own is None else jnp.where(own[None], u, 0.0)


def spoil_passed(refs, spoilt, passed: layout.Step, s: tile.Shape) -> None:
    """Store NaN in the results of spoilt rows, and as the state if it is that of a spoilt sequence."""

    @pl.when(jnp.max(spoilt) > 0.0)
    def _():
        masks = load_masks(refs.owner_passed, passed, s.C)
        for ref in (refs.o, refs.W):
            if ref is not None:
                nonfinite.spoil(ref, jnp.where(masks.code >= 0, spoilt, 0.0))

        @pl.when(jnp.max(jnp.where(masks.ending, spoilt, 0.0)) > 0.0)
        def _():
            refs.state[...] = jnp.full(refs.state.shape, jnp.nan, jnp.float32)


def prepare(refs, q, k, sums: tile.Sums, part: tile.Part, masks, static: Static) -> dict[str, jax.Array]:
    """Return what the next turn needs of some heads of a chunk, by the names of the scratch."""
    s = part.shape
    g = tile.gates(sums, part.heads, s)
    flow = tile.flow_of(g, s, masks)
    made = {"start": flow.start, "end": flow.end * g.beta}  # [n, C, p C]
    with_keys, with_queries = _inverts(refs), refs.o is not None
    left = [k[part.keys]] * with_keys + [q[part.keys]] * with_queries
    if not left:
        return made
    *products, D = tile.scores(left, k[part.keys], g, flow.pairs, s)  # [n, C, p C]
    weight = D * g.beta_rows
    if with_keys:
        M = products[0] * weight
        made |= {"M": M, "strip": inverse.begin_inverse(M)}
    if with_queries:
        made["scores"] = packed.lanes(packed.parts(products[-1] * (weight * static.scale), k.dtype))
    return made


class Seen(NamedTuple):
    """What the rows of a chunk see of the state before it.

    Attributes:
      start: `Flow.start`, head by head [heads, C, V].
      KS, QS: keys and queries times the state, [heads, C, V] float32; w takes the place of the keys where it is given.
    """

    start: jax.Array
    KS: jax.Array
    QS: jax.Array | None


def see_state(refs, part: tile.Part, s: tile.Shape) -> Seen:
    """Multiply keys and queries of the chunk in scratch by the state."""
    S, k, q = refs.state[part.heads], refs.k_passed[part.keys], None  # [heads, K, V], [key heads, C, K]
    if refs.h is not None:
        refs.h[part.heads] = S.astype(refs.h.dtype)
    if refs.o is not None:
        q = refs.q_passed[part.keys]
    start, S = tile.head_columns(refs.start[part.packs], s, s.V), S.astype(k.dtype)
    if refs.u is not None:
        return Seen(start, *tile.read_given(refs.w[part.heads], q, S, part.shape))
    return Seen(start, *tile.read_state(k, q, S, part.shape))


def pass_chunk(refs, own, stored, X, part: tile.Part, seen: Seen, static: Static, s: tile.Shape) -> Iterator[None]:
    """Compute W of the chunk in scratch, and one product later write its output and take the state through it.

    Args:
      refs: of the kernel.
      own: its rows, bool [C, 1], or None for all.
      stored: the rows to store, likewise.
      X: packed inverses [n, C, p C] of all heads, None where u and w are given.
      part: the heads to take.
      seen: what they see of the state.
      static, s: of the kernel.
    """
    dtype = refs.k.dtype
    values = load_values(refs, part.heads, own, s).astype(jnp.float32)  # [heads, C, V]
    if refs.u is not None:
        W = values + seen.KS
    else:
        R = values - seen.start * seen.KS
        W = packed.multiply_packed(packed.lanes(packed.parts(X[part.packs], dtype)), R, s.p, dtype)
    if refs.W is not None:
        layout.store_heads(refs.W, W, stored, part.first)
    yield
    k, end = (
        refs.k_passed[part.keys],
        tile.head_columns(refs.end[part.packs], s, s.V),
    )  # [key heads, C, K], [heads, C, V]
    if seen.QS is not None:
        inside = packed.multiply_packed(refs.scores[part.packs], W, s.p, dtype)  # [heads, C, V]
        layout.store_heads(refs.o, (static.scale * seen.start) * seen.QS + inside, stored, part.first)
    S = refs.state[part.heads]
    refs.state[part.heads] = seen.start[:, -1:] * S + tile.write_state(k, end * W, part.shape)


def specs_of(static: Static, s: tile.Shape, at) -> dict[str, pl.BlockSpec]:
    """Return the BlockSpecs of the operands, by name, for the step `at(turn)` in every turn."""
    cut = layout.Blocks(static.C, static.steps, at, static.pieces)
    key, value = cut.tokens(s.heads // s.group * s.K), cut.tokens(s.heads * s.V)
    gate, state = cut.values(s.heads), cut.state(s.heads, s.K, s.V)
    return dict(
        q=key, k=key, v=value, g=gate, beta=gate, initial_state=state, owner=cut.owner(s.p * s.C),
        X=cut.per_step(s.heads // s.p, s.C, s.p * s.C), u=cut.per_step(s.heads, s.C, s.V),
        w=cut.per_step(s.heads, s.C, s.K), h=cut.per_step(s.heads, s.K, s.V), W=value, do=value, dht=state,
    )  # fmt: skip


def in_specs(x: Operands, specs: dict[str, pl.BlockSpec]) -> list[pl.BlockSpec | None]:
    """Return the specs of the operands behind the table, None for those that are None."""
    return [specs[name] if value is not None else None for name, value in x._asdict().items() if name != "table"]


def launch(x: Operands, static: Static, want: tuple[str, ...]) -> dict[str, Any]:
    """Run the forward kernel.

    Args:
      x: operands. With X, or u and w, of an earlier launch, the inverse is not computed again.
      static: what is known.
      want: which outputs of "o", "ht", "h", "W", "X", "pool_out".

    Returns:
      A dict of the outputs wanted: o like v, ht the final states [N, HV, K, V] float32, of which those of empty
      sequences are undefined, and h, W, X, pool_out as in `Operands`. The pool is updated in place.
    """
    B, HV, steps, s = static.B, static.HV, static.steps, static.shape(static.config.heads)
    like_v = (B, static.T, HV * s.V)
    if x.u is not None:
        x = x._replace(v=None, X=None)
    prepared = specs_of(static, s, lambda turn: jnp.minimum(turn, jnp.int32(steps - 1)))
    passed = specs_of(static, s, lambda turn: jnp.maximum(turn - 1, jnp.int32(0)))
    kinds = {
        "o": (passed["v"], like_v, x.k.dtype),
        "ht": (passed["initial_state"], (static.N, HV, s.K, s.V), jnp.float32),
        "h": (passed["h"], (B, steps, HV, s.K, s.V), x.k.dtype),
        "W": (passed["W"], like_v, jnp.float32),
        "X": (passed["X"], (B, steps, HV // s.p, s.C, s.p * s.C), jnp.float32),
    }
    if x.pool is not None:
        cut = layout.Blocks(s.C, steps, lambda turn: jnp.maximum(turn - 1, jnp.int32(0)), static.pieces)
        passed["pool"] = cut.state(s.heads, *x.pool.shape[2:])
        kinds["pool_out"] = (cut.target(s.heads, *x.pool.shape[2:]), x.pool.shape, x.pool.dtype)
    wanted = [name for name in kinds if name in want]
    n, keys = s.heads // s.p, s.heads // s.group
    packed_shape, wide = (
        (n, s.C, s.p * s.C),
        (n, s.C, s.p * s.C * len(packed.parts(jnp.zeros((), jnp.float32), x.k.dtype))),
    )
    # The state, and what a turn makes of its chunk for the next turn to use.
    scratch = {
        "state": pltpu.VMEM((s.heads, s.K, s.V), jnp.float32),
        "start": pltpu.VMEM(packed_shape, jnp.float32),
        "end": pltpu.VMEM(packed_shape, jnp.float32),
        "k_passed": pltpu.VMEM((keys, s.C, s.K), x.k.dtype),
    }
    if x.owner is not None:
        scratch |= {
            "found": pltpu.VMEM((1, s.C, 1), jnp.float32),
            "valid": pltpu.VMEM((1, s.C, 1), jnp.float32),
            "owner_passed": pltpu.VMEM((1, s.p * s.C), jnp.int32),
        }
    if "o" in want:
        scratch |= {"q_passed": pltpu.VMEM((keys, s.C, s.K), x.k.dtype), "scores": pltpu.VMEM(wide, x.k.dtype)}
    if _inverts(x):
        strip = pltpu.VMEM((n, inverse.strip_rows(s.C), s.p * s.C), jnp.float32)
        scratch |= {"M": pltpu.VMEM(packed_shape, jnp.float32), "strip": strip}
    # An operand and an output of one name are two Refs: the names of the outputs X, h and W differ in the kernel.
    present = [({"X": "X_out"}.get(name, name), name in want) for name in kinds]
    operands = [name for name in Operands._fields if name not in ("h", "W", "do", "dht")]
    kind = "fwd" if "o" in want else "states"
    estimate = cost.cost if "o" in want else cost.states_cost
    specs = prepared | {name: passed[name] for name in ("v", "initial_state", "pool", "X", "u", "w") if name in passed}
    inputs = [name for name in operands if getattr(x, name) is not None]
    aliases = {inputs.index("pool"): wanted.index("pool_out")} if "pool_out" in wanted else {}
    out = launcher.pallas_call(
        launcher.named(_fwd_kernel, operands, present, list(scratch), static=static, s=s),
        *(getattr(x, name) for name in operands),
        name=f"chunk_gated_delta_rule_{kind}_c{s.C}",
        num_scalar_prefetch=1,
        # Batch and head blocks are independent; time is sequential, the state stays in VMEM. One more turn, because
        # the state passes a chunk in the turn after the one that prepares it.
        grid=(B, HV // s.heads, steps + 1),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=in_specs(x, specs)[: len(operands) - 1],
        out_specs=[kinds[name][0] for name in wanted],
        out_shape=[compat.out_struct(*kinds[name][1:], *x) for name in wanted],
        scratch_shapes=list(scratch.values()),
        input_output_aliases=aliases,
        cost_estimate=estimate(**static.sizes(), itemsize=x.k.dtype.itemsize),
        vmem_limit_bytes=static.config.vmem_bytes,
        in_bounds=x.pool is None,  # nothing else comes from the caller's numbers
    )  # fmt: skip
    return dict(zip(wanted, out, strict=True))
