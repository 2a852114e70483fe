"""What the tokens do to a state, in one launch without queries and outputs: kernel body and launcher.

With the names of kernel.py, X applied to values and keys needs no state:

    u = X V        w = -X e^G K        S' = e^G_last S + K^T e^(G_last - G) B (u + w S)

So a chunk takes three turns: one prepares it, the next makes its X, u and w, and the last takes the state through it,
with two products that wait for one another instead of three. V and K are exact operands where the tensors are bfloat16,
which makes the products with X shorter. X and u + w S keep 16 bits, because sums over them cancel; w enters its product
rounded like the state that it meets there.

A state may have K more channels, which have no values: from the identity they become M, the matrix that takes a state
through all tokens. With M, u and w are results, too: the operator that runs behind takes them in place of X and V.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn import cost, kernel, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import inverse, launcher, layout, matmul, nonfinite, packed, schedule, tiles
from chunkwise.shared.kernels.operands import Operands

# What a turn does one after the other: "x" takes the inverse one product further, "p" the state of the chunk two turns
# ago, "m" prepares half a stage of the next chunk, "a" multiplies a stage by the inverse. Found by search for four
# stages: see docs/performance.md.
ORDER = "xpxpmapmxmpmmpxmxmamaa"


def _map_kernel(refs, *, static: kernel.Static, s: tile.Shape):
    """Take the state through the chunk of two turns ago, multiply that of the turn before by X and prepare the next."""
    turn, first = pl.program_id(2), pl.program_id(0) * jnp.int32(static.steps)
    prepared, inverted, passed = (layout.Step(refs.table, first + _at(turn, n, static.steps)) for n in range(3))

    # The first turns run on uninitialised scratch; the first step of a sequence resets the state.
    @pl.when(passed.first == 1)
    def _():
        start = jnp.zeros((s.heads, s.K, s.V), jnp.float32) if refs.initial_state is None else refs.initial_state[...]
        refs.state[:, :, : s.V] = start
        if refs.M_out is not None:
            refs.state[:, :, s.V :] = jnp.broadcast_to(identity(s.K), (s.heads, s.K, s.K))

    mixed = None if refs.owner is None else (prepared.mixed + inverted.mixed + passed.mixed) > 0
    nonfinite.masked_or_not(mixed, lambda masked: _turn(refs, prepared, inverted, passed, masked, static, s))

    @pl.when((turn > 1) & (passed.last == 1))
    def _():
        refs.ht[...] = refs.state[:, :, : s.V]
        if refs.M_out is not None:
            refs.M_out[...] = refs.state[:, :, s.V :]


def identity(K: int) -> jax.Array:
    """Return the identity [1, K, K] float32."""
    i, j = (lax.broadcasted_iota(jnp.int32, (1, K, K), axis) for axis in (1, 2))
    return tile.indicator(i == j)


def _at(turn, behind: int, steps: int) -> jax.Array:
    """Return the step that a turn works on so many turns after the one that prepares it."""
    return jnp.clip(turn - jnp.int32(behind), jnp.int32(0), jnp.int32(steps - 1))


def _turn(
    refs,
    prepared: layout.Step,
    inverted: layout.Step,
    passed: layout.Step,
    masked: bool | None,
    static: kernel.Static,
    s: tile.Shape,
) -> None:
    """Do as `_map_kernel`; `masked` says whether one of the chunks is mixed, None that a chunk never is."""
    masks: Any = None
    spoilt: Any = None
    found: Any = None
    found_v: Any = None
    # All rows of a chunk that could be mixed and is not are its own.
    own: Any = kernel.own_rows(prepared, static) if masked is None else None
    own_v: Any = kernel.own_rows(inverted, static) if masked is None else None
    if masked:
        masks = kernel.load_masks(refs.owner, prepared, s.C)
        # What is not finite becomes zero before any product reads it, by the selection that padding needs anyway.
        own, own_v = masks.code[0] >= 0, refs.valid[0] > 0.0
        found = nonfinite.only_if(prepared.mixed == 1, lambda: kernel.tokens_not_finite(refs, own, s, ("k",)), s.C)
        found_v = nonfinite.only_if(inverted.mixed == 1, lambda: values_not_finite(refs, own_v, s), s.C)
        spoilt = nonfinite.only_if(passed.mixed == 1, lambda: quarantine_state(refs, passed, s), s.C)
        own, own_v = own & (found[0] == 0.0), own_v & (found_v[0] == 0.0)
    _, k, g, beta = kernel.load_chunk(refs, own, s, static)
    exact = k.dtype != jnp.bfloat16
    sums = tile.gate_sums(g, beta, s, exact, masks)

    stages, made, inverses = tile.Part(s).cut(kernel.STAGE), [], []
    inverting = (inverses.append(X) for X in inverse.ladder(refs.strip[...], refs.M[...], 3 if exact else 2))
    passing = schedule.stagger(pass_chunk(refs, stage) for stage in stages)
    halves = [part for stage in stages for part in stage.cut(kernel.STAGE // 2)]
    preparing = (made.append((part, prepare(k, sums, part, masks))) for part in halves)

    def applying() -> Iterator[None]:
        for _ in inverting:
            pass
        for stage in stages:
            apply_inverse(refs, inverses[-1], own_v, stage)
            yield

    # The matrix unit takes products in the order in which they stand here, and where one waits, all wait. Between those
    # of the inverse, of which each waits for the one before, some heads are prepared and others pass the state on.
    apply = applying()
    schedule.take_turns(ORDER, x=inverting, p=passing, m=preparing, a=apply)
    for rest in (passing, apply, preparing):
        for _ in rest:
            pass
    refs.X_out[...] = inverses[-1]

    if masked:
        if refs.u_out is not None:
            # The operator that is given u does not see v.
            pl.when(jnp.max(found_v) > 0.0)(lambda: nonfinite.spoil(refs.u_out, found_v))

        @pl.when(jnp.max(spoilt) > 0.0)
        def _():
            ending = kernel.load_masks(refs.owner_passed, passed, s.C).ending

            @pl.when(jnp.max(jnp.where(ending, spoilt, 0.0)) > 0.0)
            def _():
                refs.state[...] = jnp.full(refs.state.shape, jnp.nan, jnp.float32)

        refs.found[...], refs.found_v[...] = found, found_v
        refs.owner_passed[...], refs.owner_inverted[...] = refs.owner_inverted[...], refs.owner[...]
    if masked is not None:
        refs.valid[...] = jnp.ones((1, s.C, 1), jnp.float32) if masks is None else tile.indicator(masks.code >= 0)
    # The next turns take these from scratch; stored last, because this one still reads those of the steps before.
    refs.k_passed[...], refs.last_passed[...] = refs.k_inverted[...], refs.last[...]
    refs.k_inverted[...] = k
    for part, values in made:
        for name, x in values.items():
            getattr(refs, name)[part.packs] = x


def values_not_finite(refs, own, s: tile.Shape) -> jax.Array:
    """Return which rows of the chunk whose inverse is made are not finite, float32 [1, C, 1]."""
    return jnp.maximum(refs.found[...], nonfinite.rows_not_finite(layout.load_heads(refs.v, s.V, own=own)))


def quarantine_state(refs, passed: layout.Step, s: tile.Shape) -> jax.Array:
    """Clear a state that is not finite; return the rows of sequences that are not finite, float32 [1, C, 1]."""
    masks = kernel.load_masks(refs.owner_passed, passed, s.C)
    state = nonfinite.not_finite(refs.state[...])  # [1, 1, 1]

    @pl.when(jnp.max(state) > 0.0)
    def _():
        layout.clear(refs.state)

    found = jnp.maximum(refs.found_v[...], jnp.where(masks.carried, state, 0.0))
    return nonfinite.whole_sequences(found, masks.same[:, :, : s.C])


def prepare(k, sums: tile.Sums, part: tile.Part, masks) -> dict[str, jax.Array]:
    """Return what the next turn needs of some heads of a chunk, by the names of the scratch."""
    s = part.shape
    g = tile.gates(sums, part.heads, s)
    flow = tile.flow_of(g, s, masks)
    KK, D = tile.scores([k[part.keys]], k[part.keys], g, flow.pairs, s)  # [n, C, p C]
    M = KK * (D * g.beta_rows)
    start = jnp.exp2(sum(g.G_rows))  # [n, 1, p C]
    if masks is not None:
        start = jnp.where(packed.lanes([tiles.to_row(tile.indicator(masks.carried))] * s.p) > 0.0, start, 0.0)
    made = {"M": M, "strip": inverse.begin_inverse(M), "end": flow.end * g.beta}
    return made | {"start": start, "last": flow.start[:, -1:]}


def apply_inverse(refs, X, own, part: tile.Part) -> None:
    """Compute u [heads, C, V] and w [heads, C, K] and store both, for the state multiplied by what reaches the end."""
    s, dtype, X = part.shape, refs.k.dtype, X[part.packs]  # [n, C, p C]
    v = layout.load_heads(refs.v, s.V, part.heads, own)  # [heads, C, V]
    k = refs.k_inverted[part.keys]
    k = jnp.stack([k[i // s.group] for i in range(s.heads)])  # [heads, C, K]
    u = packed.multiply_packed(packed.lanes(packed.parts(X, dtype)), v, s.p, dtype)
    w = packed.multiply_packed(packed.lanes(packed.parts(X * -refs.start[part.packs], dtype)), k, s.p, dtype)
    if refs.u_out is not None:
        refs.u_out[part.heads], refs.w_out[part.heads] = u, w.astype(dtype)
    end = refs.end[part.packs]
    refs.u[part.heads] = tile.head_columns(end, s, s.V) * u
    refs.w[part.heads] = (tile.head_columns(end, s, s.K) * w).astype(dtype)


def pass_chunk(refs, part: tile.Part) -> Iterator[None]:
    """Take the state through the chunk of two turns ago, in two products that wait for one another."""
    s, S = part.shape, refs.state[part.heads]  # [heads, K, channels]
    W = matmul.dot(refs.w[part.heads], S.astype(refs.w.dtype))  # [heads, C, channels]
    yield
    valued = W[:, :, : s.V] + refs.u[part.heads]
    W = valued if W.shape[2] == s.V else packed.lanes([valued, W[:, :, s.V :]])
    last = tile.head_columns(refs.last_passed[part.packs], s, S.shape[2])  # [heads, 1, channels]
    refs.state[part.heads] = last * S + tile.write_state(refs.k_passed[part.keys], W, s)


def launch(x: Operands, static: kernel.Static, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Run the kernel.

    Args:
      x: operands; q is not read.
      static: what is known.
      outputs: names.

    Returns:
      A dict: ht the final states [N, HV, K, V] and M [N, HV, K, K], float32, of which those of empty sequences are
      undefined, and X, u and w as in `Operands`.
    """
    x, with_map = x._replace(q=None), "M" in outputs
    B, HV, steps, s = static.B, static.HV, static.steps, static.shape(static.config.heads)
    prepared, inverted, passed = (kernel.specs_of(static, s, lambda turn, n=n: _at(turn, n, steps)) for n in range(3))
    channels = s.V + s.K * with_map
    n, keys, width = s.heads // s.p, s.heads // s.group, s.p * s.C
    packed_shape, row, operand = (n, s.C, width), (n, 1, width), x.k.dtype
    # The state, and what a turn makes of its chunks for the next turns to use.
    scratch = {
        "state": pltpu.VMEM((s.heads, s.K, channels), jnp.float32),
        "M": pltpu.VMEM(packed_shape, jnp.float32),
        "strip": pltpu.VMEM((n, inverse.strip_rows(s.C), width), jnp.float32),
        "end": pltpu.VMEM(packed_shape, jnp.float32),
        "start": pltpu.VMEM(row, jnp.float32),
        "last": pltpu.VMEM(row, jnp.float32),
        "last_passed": pltpu.VMEM(row, jnp.float32),
        "k_inverted": pltpu.VMEM((keys, s.C, s.K), operand),
        "k_passed": pltpu.VMEM((keys, s.C, s.K), operand),
        "u": pltpu.VMEM((s.heads, s.C, s.V), jnp.float32),
        "w": pltpu.VMEM((s.heads, s.C, s.K), operand),
    }
    if x.owner is not None:
        rows_of, owners = pltpu.VMEM((1, s.C, 1), jnp.float32), pltpu.VMEM((1, width), jnp.int32)
        scratch |= {"found": rows_of, "found_v": rows_of, "valid": rows_of}
        scratch |= {"owner_inverted": owners, "owner_passed": owners}
    operands = [name for name in Operands._fields if name not in ("X", "scores", "u", "w", "h", "W", "do", "dht")]
    # Under these names the outputs are no operands and no scratch.
    square = kernel.specs_of(static, s._replace(V=s.K), lambda turn: _at(turn, 2, steps))["initial_state"]
    kinds = {
        "ht": (passed["initial_state"], (static.N, HV, s.K, s.V), jnp.float32),
        "X_out": (inverted["X"], (B, steps, HV // s.p, s.C, width), jnp.float32),
        "M_out": (square, (static.N, HV, s.K, s.K), jnp.float32),
        "u_out": (inverted["u"], (B, steps, HV, s.C, s.V), jnp.float32),
        "w_out": (inverted["w"], (B, steps, HV, s.C, s.K), operand),
    }
    outputs = {name: kind for name, kind in kinds.items() if with_map or name in ("ht", "X_out")}
    specs = prepared | {"v": inverted["v"], "initial_state": passed["initial_state"]}
    present = [(name, name in outputs) for name in kinds]
    out = launcher.pallas_call(
        launcher.named(_map_kernel, operands, present, list(scratch), static=static, s=s),
        *(getattr(x, name) for name in operands),
        name=f"chunk_gated_delta_rule_summary_c{s.C}",
        num_scalar_prefetch=1,
        # Batch and head blocks are independent; time is sequential, the state stays in VMEM. Two more turns, because
        # the state passes a chunk two turns after the one that prepares it.
        grid=(B, HV // s.heads, steps + 2),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=kernel.in_specs(x, specs)[: len(operands) - 1],
        out_specs=[kind[0] for kind in outputs.values()],
        out_shape=[compat.out_struct(*kind[1:], x.k, x.v, x.g, x.beta, x.initial_state) for kind in outputs.values()],
        scratch_shapes=list(scratch.values()),
        cost_estimate=cost.states_cost(**static.sizes() | {"V": channels}, itemsize=operand.itemsize),
        vmem_limit_bytes=static.config.vmem_bytes,
        in_bounds=True,
    )  # fmt: skip
    return {name.removesuffix("_out"): y for name, y in zip(outputs, out, strict=True)}
