"""The kernel: a grid step takes some sequences, reads what their slots hold, and writes what their tokens leave.

While it computes what `mixer_tile` says, the copies of the next sequences come in, and the copies of earlier ones go
out. The first grid step reads out of the boundaries and slots of the call which token and which slots a sequence has,
so that XLA does nothing around the launch.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared import tuning
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.kernels import launcher, packed, pools, tiles
from chunkwise.shared.serving import mixer_tile
from chunkwise.shared.serving.mixer_tile import Mixer, MixerStatic

# Buffers of a group of sequences, in turn.
_BUFFERS = 2
# The rows of the table in scalar memory.
_START, _SOURCE, _TARGET = range(3)
# Channels may come in so many arrays: queries, keys and values by themselves, or in one.
_ARRAYS = 3
# The states that a grid step works on at most, and the most value heads: each is code.
_STATES = 32
_MOST_HEADS = 64


class MixerRefs(NamedTuple):
    """The Refs of the kernel. Channels are those of queries, keys and values, in one array or in three.

    Attributes:
      boundaries: int32 [N + 1].
      write, read: int32 [N], slots as the call has them.
      continues: int32 [N], 0 for a sequence that starts from zeros, or None.
      decodes, sequences: int32 [1], the counts of the call.
      x0, x1, x2: [T, channels], inputs of the convolution.
      g, beta, z: [T, lanes], raw gates, raw step sizes and gates of the output, or None.
      w0, w1, w2, b0, b1, b2: [channels, W] and [1, channels], of the convolution.
      A_log, dt_bias, norm: [1, lanes], or None.
      conv0, conv1, conv2, states: the pools.
      o: [T, HV V].
      table: int32 [3, sequences] in scalar memory: the token of a sequence, and its slots, below 0 for none.
      taps: float32 [W, channels of all arrays], the weights with channels in the lanes.
      tokens: float32 [T, lanes], all that tokens bring, side by side; each in whole registers.
      rows: float32 [n, lanes], of the sequences of a grid step.
      outputs: float32 [T + 1, HV V], whose last row is of tokens that do not exist.
      in0, in1, in2, out0, out1, out2, before, after: buffers of slots, [2, n, ...].
      parts: float32 [HV 8 n, K], what is multiplied by states; products: float32 [HV 8 n, V].
      made: float32 [n, HV V], what the delta rule writes.
      reads, stores: semaphores of the copies, [2].
    """

    boundaries: jax.Ref
    write: jax.Ref
    read: jax.Ref
    continues: jax.Ref
    decodes: jax.Ref
    sequences: jax.Ref
    x0: jax.Ref
    x1: jax.Ref
    x2: jax.Ref
    g: jax.Ref
    beta: jax.Ref
    z: jax.Ref
    w0: jax.Ref
    w1: jax.Ref
    w2: jax.Ref
    b0: jax.Ref
    b1: jax.Ref
    b2: jax.Ref
    A_log: jax.Ref
    dt_bias: jax.Ref
    norm: jax.Ref
    conv0: jax.Ref
    conv1: jax.Ref
    conv2: jax.Ref
    states: jax.Ref
    o: jax.Ref
    conv0_out: jax.Ref
    conv1_out: jax.Ref
    conv2_out: jax.Ref
    states_out: jax.Ref
    table: jax.Ref
    taps: jax.Ref
    tokens: jax.Ref
    rows: jax.Ref
    outputs: jax.Ref
    in0: jax.Ref
    in1: jax.Ref
    in2: jax.Ref
    out0: jax.Ref
    out1: jax.Ref
    out2: jax.Ref
    before: jax.Ref
    after: jax.Ref
    parts: jax.Ref
    products: jax.Ref
    made: jax.Ref
    reads: jax.Ref
    stores: jax.Ref

    def arrays(self, name: str, suffix: str = "") -> list[jax.Ref]:
        """Return the Refs of a name, one for every array of channels."""
        found = (getattr(self, f"{name}{i}{suffix}") for i in range(_ARRAYS))
        return [ref for ref in found if ref is not None]

    @property
    def lanes(self) -> dict[str, slice]:
        """Where in `tokens` is what: the channels, one array after the other, and the gates."""
        found, at = {}, 0
        for name in ("x0", "x1", "x2", "g", "beta", "z"):
            if (ref := getattr(self, name)) is not None:
                found[name] = slice(at, at + ref.shape[1])
                at += packed.pad_lanes(ref.shape[1])
        return found


def _mixer_kernel(refs: MixerRefs, s: MixerStatic):
    i, n = pl.program_id(0), refs.rows.shape[0]
    last = refs.table.shape[1] // n - 1

    @pl.when(i == 0)
    def _():
        _fill_table(refs)
        _load_tokens(refs)
        _copy_slots(refs, i, pools.start)

    # A buffer is written to again when its copies have gone out.
    pl.when(i >= _BUFFERS)(lambda: _copy_slots(refs, i - _BUFFERS, pools.wait, out=True))
    pl.when(i < last)(lambda: _copy_slots(refs, i + 1, pools.start))
    _copy_slots(refs, i, pools.wait)
    _clear_new(refs, i)
    _run_sequences(refs, s, i)
    _copy_slots(refs, i, pools.start, out=True)

    @pl.when(i == last)
    def _():
        pl.when(i >= 1)(lambda: _copy_slots(refs, i - 1, pools.wait, out=True))
        _copy_slots(refs, i, pools.wait, out=True)
        T = refs.o.shape[0]
        refs.o[...] = refs.outputs[:T].astype(refs.o.dtype)


def _fill_table(refs: MixerRefs) -> None:
    """Fill the table of sequences, total on any int32: tokens lie within the stream, and slots within the pools."""
    N, T = refs.write.shape[0], jnp.int32(refs.o.shape[0])
    slots = jnp.int32(min(pool.shape[0] for pool in (refs.states_out, *refs.arrays("conv", "_out"))))
    least = jnp.minimum(refs.decodes[0], refs.sequences[0])
    existing = lambda slot: jnp.where((slot >= 0) & (slot < slots), slot, jnp.int32(-1))

    def fill(n, begin):
        inside = jnp.minimum(n, jnp.int32(N - 1))
        decodes = (n < least) & (n < jnp.int32(N))
        end = jnp.where(decodes, jnp.clip(refs.boundaries[inside + 1], begin, T), begin)
        some = end > begin
        source = existing(refs.read[inside])
        if refs.continues is not None:
            source = jnp.where(refs.continues[inside] > 0, source, jnp.int32(-1))
        refs.table[_START, n] = jnp.where(some, begin, T)
        refs.table[_SOURCE, n] = jnp.where(some, source, jnp.int32(-1))
        refs.table[_TARGET, n] = jnp.where(some, existing(refs.write[inside]), jnp.int32(-1))
        return end

    first = jnp.clip(refs.boundaries[0], jnp.int32(0), T)
    lax.fori_loop(jnp.int32(0), jnp.int32(refs.table.shape[1]), fill, first)


def _load_tokens(refs: MixerRefs) -> None:
    """Put all tokens side by side as float32, of which a row may be loaded at any place."""
    T = refs.o.shape[0]
    for name, lanes in refs.lanes.items():
        refs.tokens[:T, lanes] = getattr(refs, name)[...].astype(jnp.float32)
        # The token of a sequence that has none.
        refs.tokens[T:, lanes] = jnp.zeros((1, lanes.stop - lanes.start), jnp.float32)
    for name, weight in zip(("x0", "x1", "x2"), refs.arrays("w"), strict=False):
        refs.taps[:, refs.lanes[name]] = weight[...].astype(jnp.float32).T
    # Tokens of no sequence are zero.
    refs.outputs[...] = jnp.zeros_like(refs.outputs)


def _each(refs: MixerRefs, i, act) -> None:
    """Call act(place in the buffer, sequence) for the sequences of grid step i, both int32."""
    n = refs.rows.shape[0]
    for place in range(n):
        act(jnp.int32(place), i * jnp.int32(n) + jnp.int32(place))


def _buffer(i) -> jax.Array:
    return jnp.bitwise_and(i, jnp.int32(_BUFFERS - 1))


def _copy_slots(refs: MixerRefs, i, act, out: bool = False) -> None:
    """Start, or wait for, the copies of the slots that grid step i reads, or with `out` of those that it writes."""
    b, kind = _buffer(i), "out" if out else "in"
    buffers = refs.after if out else refs.before, *refs.arrays(kind)
    row, semaphores = (_TARGET, refs.stores) if out else (_SOURCE, refs.reads)

    def copy(place, sequence):
        slot = refs.table[row, sequence]

        @pl.when(slot >= 0)
        def _():
            for pool, buffer in zip((refs.states_out, *refs.arrays("conv", "_out")), buffers, strict=True):
                ends = pool.at[slot], buffer.at[b, place]
                act(pltpu.make_async_copy(*(ends[::-1] if out else ends), semaphores.at[b]))

    _each(refs, i, copy)


def _clear_new(refs: MixerRefs, i) -> None:
    """Put zeros where a sequence starts from none: a freed slot may hold anything."""
    b = _buffer(i)

    def clear(place, sequence):
        @pl.when(refs.table[_SOURCE, sequence] < 0)
        def _():
            for buffer in (refs.before, *refs.arrays("in")):
                buffer[b, place] = jnp.zeros(buffer.shape[2:], buffer.dtype)

    _each(refs, i, clear)


def _run_sequences(refs: MixerRefs, s: MixerStatic, i) -> None:
    """Run the tokens of the sequences of grid step i."""
    b, n = _buffer(i), refs.rows.shape[0]
    starts = [refs.table[_START, i * jnp.int32(n) + jnp.int32(place)] for place in range(n)]
    for place, start in enumerate(starts):
        refs.rows[place : place + 1, :] = refs.tokens[pl.ds(start, 1), :]
    channels = [x for j in range(len(refs.arrays("x"))) for x in _channels(refs, s, b, j)]
    q, k, v = (
        _by_head(channels, *heads) for heads in ((0, s.H, s.K), (s.H * s.K, s.H, s.K), (2 * s.H * s.K, s.HV, s.V))
    )
    if s.normalise:
        q, k = [tiles.l2norm(x) for x in q], [tiles.l2norm(x) for x in k]
    q = [x * jnp.float32(s.scale) for x in q]
    decays = _decays(refs, s)
    beta = None if refs.beta is None else mixer_tile.step_size(refs.rows[:, refs.lanes["beta"]], s)
    S_k, S_q = _read_states(refs, s, b, q, k, decays)
    for h in range(s.HV):
        at = slice(h * s.V, (h + 1) * s.V)
        new = v[h] if beta is None else beta[:, h : h + 1] * (v[h] - S_k[h])
        refs.made[:, at] = new
        # The state after the token is read without it: o = a S^T q + (k . q) new.
        o = S_q[h] + jnp.sum(q[h // s.group] * k[h // s.group], axis=1, keepdims=True) * new
        if s.norm is not None:
            first = refs.lanes["z"].start + h * s.V
            o = mixer_tile.norm_head(o, refs.rows[:, first : first + s.V], refs.norm[...].astype(jnp.float32), s.norm)
        # The channels of a token have been read, and there are more of them than of an output.
        refs.rows[:, at] = o
    for place, start in enumerate(starts):
        refs.outputs[pl.ds(start, 1), :] = refs.rows[place : place + 1, : s.HV * s.V]
    for place in range(n):
        one = slice(place, place + 1)
        for key in range(s.H):
            column = tiles.to_column(k[key][one][None])[0]
            for h in range(key * s.group, (key + 1) * s.group):
                S = refs.before[b, place, h].astype(jnp.float32)
                S = mixer_tile.next_state(S, decays[h][one], column, refs.made[one, h * s.V : (h + 1) * s.V])
                refs.after[b, place, h] = S.astype(refs.after.dtype)


def _channels(refs: MixerRefs, s: MixerStatic, b, j: int) -> list[jax.Array]:
    """Return the channels of array j as the rule takes them, 128 at a time, [n, 128] each."""
    x = refs.rows[:, refs.lanes[f"x{j}"]]
    if refs.w0 is not None:
        weight, biases = refs.taps[:, refs.lanes[f"x{j}"]], refs.arrays("b")
        before, after = refs.arrays("in")[j], refs.arrays("out")[j]
        taps = [*(before[b, :, t].astype(jnp.float32) for t in range(weight.shape[0] - 1)), x]
        for t in range(weight.shape[0] - 1):
            after[b, :, t] = taps[t + 1].astype(after.dtype)
        bias = biases[j][...].astype(jnp.float32) if biases else None
        x = mixer_tile.convolve(taps, weight, bias, s)
    return [x[:, at : at + packed.LANES] for at in range(0, x.shape[1], packed.LANES)]


def _by_head(channels: list[jax.Array], first: int, heads: int, D: int) -> list[jax.Array]:
    """Return the heads of D channels that begin at channel `first`, [n, D] each."""
    width = D // packed.LANES
    starts = range(first // packed.LANES, first // packed.LANES + heads * width, width)
    return [jnp.concatenate(channels[at : at + width], axis=1) for at in starts]


def _decays(refs: MixerRefs, s: MixerStatic) -> list[jax.Array]:
    """Return the decays of every value head, [n, 1] or [n, K] each."""
    g = refs.rows[:, refs.lanes["g"]]
    A_log, dt_bias = (None if ref is None else ref[...].astype(jnp.float32) for ref in (refs.A_log, refs.dt_bias))
    size = g.shape[1] // s.HV
    if size == 1:
        found = mixer_tile.decay(g, A_log, dt_bias, s)
        return [found[:, h : h + 1] for h in range(s.HV)]
    part: Callable[..., Any] = lambda x, h, size: None if x is None else x[:, h * size : (h + 1) * size]
    return [mixer_tile.decay(part(g, h, size), part(A_log, h, 1), part(dt_bias, h, size), s) for h in range(s.HV)]


def _read_states(refs: MixerRefs, s: MixerStatic, b, q, k, decays) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return what keys and queries read of decayed states, [n, V] of every value head."""
    n, per_channel = refs.rows.shape[0], decays[0].shape[1] > 1
    S_k, S_q = [], []
    for h in range(s.HV):
        rows = [x[h // s.group] * decays[h] if per_channel else x[h // s.group] for x in (k, q)]
        first = 8 * n * h
        if refs.before.dtype == jnp.bfloat16:
            # Row j n + i is part j of sequence i, so that a load with a stride has the rows of a sequence. The last two
            # are zeros.
            parts = [part for x in rows for part in mixer_tile.exact_parts(x)]
            parts += [jnp.zeros_like(parts[0])] * (8 - len(parts))
            for j, part in enumerate(parts):
                refs.parts[first + j * n : first + (j + 1) * n, :] = part
            for i in range(n):
                some = refs.parts[pl.ds(first + i, 8, stride=n), :]
                at = slice(first + 8 * i, first + 8 * (i + 1))
                refs.products[at, :] = mixer_tile.read_on_matrix_unit(refs.before[b, i, h], some)
            of_part = [refs.products[pl.ds(first + j, n, stride=8), :] for j in range(2 * mixer_tile.PARTS)]
            found = sum(of_part[: mixer_tile.PARTS]), sum(of_part[mixer_tile.PARTS :])
        else:
            for i in range(n):
                S = refs.before[b, i, h]
                for j, x in enumerate(rows):
                    refs.products[first + j * n + i : first + j * n + i + 1, :] = mixer_tile.read_on_vector_unit(
                        S, x[i : i + 1]
                    )
            found = (refs.products[first + j * n : first + (j + 1) * n, :] for j in range(2))
        found = [x if per_channel else decays[h] * x for x in found]
        S_k.append(found[0])
        S_q.append(found[1])
    return S_k, S_q


def sequences_a_step(x: Mixer, conv: tuple, states, N: int) -> int | None:
    """Return how many sequences a grid step takes, None if the kernel does not take these sizes and types."""
    s = x.static
    whole = s.K % packed.LANES == 0 and s.V % packed.LANES == 0
    if not whole or s.HV > _MOST_HEADS or states.dtype not in (jnp.float32, jnp.bfloat16):
        return None
    width, T, constants = x.lanes, _rows(x, N), jax.eval_shape(lambda: x.constants)
    # Tokens come in, and are float32 beside one another. Outputs are float32, and go out.
    fixed = T * (width * (4 + x.x[0].dtype.itemsize) + s.HV * s.V * (4 + 2 * x.x[0].dtype.itemsize))
    fixed += sum(4 * packed.round_up(y.shape[0], 8) * packed.pad_lanes(y.shape[1]) for y in constants.values())
    slot = s.HV * s.K * s.V * states.dtype.itemsize + sum(8 * y.shape[2] * 4 for y in conv)
    each = 2 * _BUFFERS * slot + 4 * (2 * width + 8 * s.HV * (s.K + s.V))
    return next((n for n in sequences_of(s.HV) if fixed + n * each <= tuning.VMEM_LIMIT_BYTES), None)


def sequences_of(heads: int) -> list[int]:
    """Return how many sequences of so many value heads a grid step may take, the best number first."""
    return [n for n in (8, 4, 2, 1) if n * heads <= max(_STATES, heads)]


def _rows(x: Mixer, N: int) -> int:
    """Return how many tokens the kernel sees: as many as N decodes can have, in whole registers of every type."""
    return min(x.x[0].shape[0], packed.round_up(N, 32))


def launch(
    x: Mixer, conv: tuple[jax.Array, ...], states: jax.Array, cu_seqlens: jax.Array, slots: Slots
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    """Run the first tokens of a stream, those of its decodes.

    Args:
      x: the tokens of the stream, and the weights.
      conv: pools [slots, W - 1, channels] of the convolution, one for every array of x.
      states: the pool [slots, HV, K, V].
      cu_seqlens: as the caller gave it.
      slots: of the step; `state_indices` is [N], and a number of decodes is given.

    Returns:
      The outputs of the first tokens [rows, HV V], zeros where no decode has one, and the pools.
    """
    s, N = x.static, slots.state_indices.shape[0]
    n, T = sequences_a_step(x, conv, states, N), _rows(x, N)
    assert n is not None
    groups, rows = -(-N // n), s.HV * s.V
    count = lambda y: jnp.reshape(jnp.asarray(y, jnp.int32), (1,))
    tables: dict[str, Any] = dict(
        boundaries=cu_seqlens, write=slots.state_indices,
        read=slots.state_indices if slots.read_indices is None else slots.read_indices,
        continues=None if slots.has_initial_state is None else slots.has_initial_state.astype(jnp.int32),
        decodes=count(slots.num_decodes), sequences=count(N if slots.num_sequences is None else slots.num_sequences),
    )  # fmt: skip
    held = {f"conv{j}": y for j, y in enumerate(conv)} | {"states": states}
    first = lambda shape: pl.BlockSpec(shape, lambda i, *_: (0,) * len(shape), pipeline_mode=pl.Buffered(1))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    buffer = lambda y: pltpu.VMEM((_BUFFERS, n, *y.shape[1:]), y.dtype)
    scratch: dict[str, Any] = dict(table=pltpu.SMEM((3, groups * n), jnp.int32), tokens=(T + 1, x.lanes))
    scratch |= dict(rows=(n, x.lanes), outputs=(T + 1, rows))
    if x.weight:
        scratch["taps"] = x.weight[0].shape[1], sum(y.shape[1] for y in x.x)
    scratch |= {f"{kind}{j}": buffer(y) for kind in ("in", "out") for j, y in enumerate(conv)}
    scratch |= dict(before=buffer(states), after=buffer(states), parts=(s.HV * 8 * n, s.K))
    scratch |= dict(products=(s.HV * 8 * n, s.V), made=(n, rows))
    scratch |= {name: pltpu.SemaphoreType.DMA((_BUFFERS,)) for name in ("reads", "stores")}
    out = launcher.launch(
        functools.partial(_mixer_kernel, s=s),
        MixerRefs,
        name=s.name,
        grid=(groups,),
        dimension_semantics=("arbitrary",),
        tables=tables,
        inputs={name: (y, first((T, *y.shape[1:]))) for name, y in x.tokens.items()}
        | {name: (y, first(y.shape)) for name, y in x.constants.items()}
        | {name: (y, in_hbm) for name, y in held.items()},
        outputs={"o": (first((T, rows)), (T, rows), x.x[-1].dtype)}
        | {name: (in_hbm, y.shape, y.dtype) for name, y in held.items()},
        scratch=scratch,
        in_place={name: name for name in held},
        cost_estimate=_cost(N, held, s),
        # The table holds slots that exist, and tokens that the stream has.
        in_bounds=True,
    )
    return out["o"], tuple(out[f"conv{j}"] for j in range(len(conv))), out["states"]


def _cost(N: int, held: dict[str, jax.Array], s: MixerStatic) -> pl.CostEstimate:
    """Return what N decodes cost: a slot is read once and written once."""
    slot = sum(y.size // y.shape[0] * y.dtype.itemsize for y in held.values())
    return pl.CostEstimate(
        flops=7 * N * s.HV * s.K * s.V, transcendentals=8 * N * s.HV * s.V, bytes_accessed=2 * N * slot
    )
