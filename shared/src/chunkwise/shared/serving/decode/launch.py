"""The launch of `decode.kernel`: sequences of a grid step, buffers, and the cost."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared import tuning
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.kernels import chunking, launcher, packed, windows
from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.serving.decode import copies, kernel, table
from chunkwise.shared.serving.decode.records import Decodes, DecodeStatic
from chunkwise.shared.serving.decode.refs import DecodeRefs
from chunkwise.shared.serving.state_pool import StatePool

# The most states of a grid step, and the most value heads: the kernel has code for each of them.
_STATES = 64
MOST_HEADS = 128
# The most bytes of the states that a grid step reads: the first step waits for them, and the last one for those that it
# writes. Less of them would take more grid steps, each of which has its own cost.
_STATE_BYTES = 2 * 2**20
# The most value heads of a decode of several tokens.
_MOST_HEADS_OF_DRAFTS = 64
# The most states of a grid step over rings, of one token and of several. They write few states, and many sequences fill
# the time in which products wait.
_RING_STATES = 256
_RING_STATES_OF_DRAFTS = 128
# The most lanes of value heads that lie side by side.
_MOST_LANES = 1024
# The most launches that take parts of the heads of an operator.
_MOST_LAUNCHES = 8
# The most slots with rings, whose numbers of tokens are in scalar memory.
_RING_SLOTS = 2**14


def sequences_a_step(x: Decodes, conv: tuple, pool: StatePool, N: int) -> int | None:
    """Return how many sequences a grid step takes, None if the kernel does not take these sizes and types."""
    s, states = _static_of_pool(x, pool), pool.states
    x = x._replace(static=s)
    heads = MOST_HEADS if s.decode_tokens == 1 else _MOST_HEADS_OF_DRAFTS
    few = heads >= s.gates and not (s.loops and (pool.replay or x.of_layer))
    if not few or states.dtype not in (jnp.float32, jnp.bfloat16, jnp.int8):
        return None
    if pool.replay and (x.echo is not None or not _takes_rings(x, pool)):
        return None
    width, outputs, T = x.lanes, packed.pad_lanes(s.HV * s.V), _rows(x, N)
    constants = jax.eval_shape(lambda: x.constants)
    # Tokens have input blocks and a float32 copy; outputs have a float32 buffer and output blocks.
    fixed = T * (width * (4 + x.x[0].dtype.itemsize) + outputs * (4 + 2 * x.x[0].dtype.itemsize))
    fixed += sum(4 * packed.round_up(y.shape[0], 8) * packed.pad_lanes(y.shape[1]) for y in constants.values())
    slot = sum(8 * y.shape[2] * 4 * s.decode_tokens for y in conv)
    state = s.HV * _state_bytes(s, states.dtype)
    if pool.scales is not None:
        state += 4 * packed.round_up(s.HV, 8) * s.K
    if pool.replay:
        slot += pool.replay * _ring_bytes(x, pool)
        fixed += 4 * pool.replay * s.HV * (packed.pad_lanes(s.K) + packed.pad_lanes(s.V))
    buffers = 2 * slot + (1 + (1 if s.loops else targets_of(x, pool))) * state
    between = s.loops * s.HV * _state_bytes(s, jnp.dtype(jnp.float32))
    keys = 1 + (x.echo is not None)
    rows = 8 * s.HV * (2 * packed.pad_lanes(s.K) + packed.pad_lanes(s.V)) + (keys - 1) * outputs
    products = 4 * s.decode_tokens * (2 * width + rows)
    each = copies.BUFFERS * buffers + between + products
    some = _sequences_of(s, states.dtype, pool.replay > 0)
    return next((n for n in some if n < 2 * N and fixed + n * each <= tuning.VMEM_LIMIT_BYTES), None)


def _state_bytes(s: DecodeStatic, dtype) -> int:
    """Return the fast memory that the state of a head takes."""
    rows, lanes = (s.V // (1 + s.paired), s.K) if s.transposed else (s.K, s.V)
    return packed.round_up(rows, 32 // dtype.itemsize) * packed.pad_lanes(lanes) * dtype.itemsize


def _static_of_pool(x: Decodes, pool: StatePool) -> DecodeStatic:
    """Return the static description of decodes over a pool: where its states lie transposed, with fewer, wider heads.

    The value heads of a key head lie side by side, because one product reads the states of all of them, unless each of
    them reads by a row of its own.
    """
    s = x.static
    if pool.paired:
        size = dict(H=s.HV // 2, HV=s.HV // 2, K=2 * s.K, V=2 * s.V)
        return s._replace(**size, transposed=True, side_by_side=2, paired=True)
    if pool.replay or not pools.lies_transposed(s.K, s.V):
        return s
    alone = x.per_channel or x.p is not None or pool.scales is not None
    some = 1 if alone else tuning.largest_divisor(s.group, max(_MOST_LANES // s.V, 1))
    return s._replace(HV=s.HV // some, V=s.V * some, first=s.first // some, transposed=True, side_by_side=some)


def _as_it_lies(states: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return the states [slots, HV, K, V] of a pool as the kernel takes them; XLA moves no data for it."""
    if s.paired or not s.transposed:
        return states[:, :, 0] if s.paired else states
    return jnp.swapaxes(states, 2, 3).reshape(states.shape[0], -1, s.V, s.K)


def _takes_rings(x: Decodes, pool: StatePool) -> bool:
    """Return whether the kernel takes decodes over these rings."""
    s = x.static
    few = pool.shape[0] <= _RING_SLOTS and s.decode_tokens <= pool.replay
    return few and x.per_channel == _by_channel(pool) and pool.keys.shape[2:] == (s.H, s.K)


def _in_rows(pool: StatePool) -> bool:
    """Return whether XLA stores the heads of the tokens in a ring as rows of one matrix, without padding."""
    H, size = pool.keys.shape[2], pool.keys.dtype.itemsize
    return (H in (1, 2, 4, 8) or H % 8 == 0) and H * size >= 4


def _ring_bytes(x: Decodes, pool: StatePool) -> int:
    """Return the fast memory that a token of a ring takes."""
    s, size = x.static, pool.keys.dtype.itemsize
    H = s.H if _in_rows(pool) else packed.round_up(s.H, 32 // size)
    keys, values = packed.pad_lanes(s.K), packed.pad_lanes(s.V)
    gates = 4 * s.group * H * keys if _by_channel(pool) else 4 * packed.pad_lanes(s.HV)
    return size * H * (keys + s.group * values) + gates


def launches_of(x: Decodes, conv: tuple, pool: StatePool, N: int) -> int | None:
    """Return how many launches take the heads, each a part of them; None if the kernel does not take them."""
    s = x.static
    heads, most = s.H if s.H > 1 else s.HV, 1 if x.of_layer or pool.replay or pool.paired else _MOST_LAUNCHES
    some = [n for n in range(1, most + 1) if heads % n == 0]
    return next((n for n in some if sequences_a_step(x.of_heads(n, 0) if n > 1 else x, conv, pool, N)), None)


def _by_channel(pool: StatePool) -> bool:
    """Return whether the rings of a pool have gates per channel."""
    return pool.gates is not None and pool.gates.ndim == 5


def _sequences_of(s: DecodeStatic, dtype, rings: bool) -> list[int]:
    """Return how many sequences, with states of this type, a grid step may take, the best number first."""
    heads, tokens = s.HV if s.paired else s.gates, s.decode_tokens
    if rings:
        most = (_RING_STATES if tokens == 1 else _RING_STATES_OF_DRAFTS) // heads
    else:
        # Eight sequences fill the rows of a register; more are faster where there is little for each of them.
        most = min(16 if s.paired else 8, _STATES // (heads * tokens), _STATE_BYTES // (s.HV * _state_bytes(s, dtype)))
    return [n for n in (16, 8, 4, 2, 1) if n <= max(most, 1)]


def targets_of(x: Decodes, pool: StatePool) -> int:
    """Return how many slots a sequence writes: without rings one for each token of a decode."""
    return 1 if pool.replay else x.static.W


def _rows(x: Decodes, N: int) -> int:
    """Return how many tokens the kernel sees: as many as N decodes can have, rounded up to registers of every type."""
    T, s = x.x[0].shape[0], x.static
    return min(T, packed.round_up(N * s.W, 32)) if s.single else T


def launch(
    x: Decodes, conv: tuple[jax.Array, ...], pool: StatePool, cu_seqlens: jax.Array, slots: Slots
) -> tuple[jax.Array, tuple[jax.Array, ...], StatePool]:
    """Run the first tokens of a stream, which are its decodes.

    Args:
      x: the tokens of the stream, and the weights.
      conv: pools [slots, W - 1, channels] of the convolution, one for every array of x; with a slot for each token of a
        decode for each slot of the states.
      pool: the pool of states, float32, bfloat16 or int8, with rings or without.
      cu_seqlens: the boundaries as the caller gave them.
      slots: the slots of the serving step; `state_indices` has a slot for each sequence, or without rings for each
        token of a decode; and a number of decodes is given.

    Returns:
      The outputs of all tokens [T, HV V], zeros for tokens of no decode, and the pools.
    """
    s, N, targets = x.static, cu_seqlens.shape[0] - 1, targets_of(x, pool)
    n, T = sequences_a_step(x, conv, pool, N), _rows(x, N)
    if n is None:
        return _launch_in_parts(x, pool, cu_seqlens, slots)
    x = x._replace(static=_static_of_pool(x, pool))
    s, grid_steps, rows = x.static, -(-N // n), s.HV * s.V
    count = lambda y: jnp.reshape(jnp.asarray(y, jnp.int32), (1,))
    tables: dict[str, Any] = dict(
        boundaries=cu_seqlens, write=slots.state_indices.reshape(-1), read=slots.read_indices,
        continues=None if slots.has_initial_state is None else slots.has_initial_state.astype(jnp.int32),
        accepted=slots.num_accepted_tokens, decodes=count(slots.num_decodes),
        sequences=count(N if slots.num_sequences is None else slots.num_sequences),
    )  # fmt: skip
    fields = {name: y for name, y in pool._asdict().items() if y is not None}
    fields["states"] = _as_it_lies(pool.states, s)
    # The tokens of a ring become the rows of one matrix, for which XLA moves no data.
    in_rows = ("keys", "writes", *(["gates"] if _by_channel(pool) else [])) if pool.replay and _in_rows(pool) else ()
    fields |= {name: y.reshape(pool.shape[0], -1, y.shape[-1]) for name, y in fields.items() if name in in_rows}
    held = {f"conv{j}": y for j, y in enumerate(conv)} | fields
    first = functools.partial(windows.along, pipeline_mode=pl.Buffered(1))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    buffer = lambda y, *each: pltpu.VMEM((copies.BUFFERS, n, *each, *y.shape[1:]), y.dtype)
    m, numbers = n * s.decode_tokens, pltpu.SMEM((grid_steps * n * table.numbers(targets),), jnp.int32)
    scratch: dict[str, Any] = dict(table=numbers, side_by_side=(T + 1, x.lanes), rows=(m, x.lanes))
    scratch["outputs"] = T + 1, rows
    if x.weight:
        scratch["taps"] = x.weight[0].shape[1], sum(packed.pad_lanes(y.shape[1]) for y in x.x)
    scratch |= {f"in{j}": buffer(y) for j, y in enumerate(conv)}
    each = (s.decode_tokens,) if s.decode_tokens > 1 else ()
    scratch |= {f"out{j}": buffer(y, *each) for j, y in enumerate(conv)}
    written, states, scales = each if targets > 1 else (), fields["states"][:, : s.HV], pool.scales
    scratch |= dict(before=buffer(states), after=buffer(states, *written), parts=(s.HV * 8 * m, s.K))
    if scales is not None:
        scales = scales[:, : s.HV]
        scratch |= dict(scale_in=buffer(scales), scale_out=buffer(scales, *written))
    if s.loops:
        scratch["between"] = n, *states.shape[1:]
    scratch |= dict(products=(s.HV * 8 * m, s.V), made=(m, rows * (1 + (x.echo is not None))))
    if pool.replay:
        scratch |= _ring_scratch(s, pool, held, n)
    scratch |= {name: pltpu.SemaphoreType.DMA((copies.BUFFERS,)) for name in ("reads", "stores")}
    out = launcher.launch(
        functools.partial(kernel.decode_kernel, s=s),
        DecodeRefs.of_names,
        name=s.name,
        grid=(grid_steps,),
        dimension_semantics=("arbitrary",),
        # They hold only slots that exist and tokens of the stream.
        tables=tables,
        inputs={name: (y, first((T, *y.shape[1:]))) for name, y in x.tokens.items()}
        | {name: (y, first(y.shape)) for name, y in x.constants.items()}
        | {name: (y, in_hbm) for name, y in held.items()},
        outputs={"o": (first((T, rows)), (T, rows), x.x[-1].dtype)}
        | {name: (in_hbm, y.shape, y.dtype) for name, y in held.items()},
        scratch=scratch,
        in_place={name: name for name in held},
        cost_estimate=_cost(T, N, targets, held, x),
    )
    o, after = chunking.pad_tokens(out["o"][None], x.x[0].shape[0])[0], {name: out[name] for name in fields}
    if s.transposed and not s.paired:
        after["states"] = jnp.swapaxes(after["states"].reshape(*pool.shape[:2], pool.shape[3], s.K), 2, 3)
    after = pool._replace(**{name: y.reshape(getattr(pool, name).shape) for name, y in after.items()})
    return o, tuple(out[f"conv{j}"] for j in range(len(conv))), after


def _launch_in_parts(x: Decodes, pool: StatePool, cu_seqlens: jax.Array, slots: Slots):
    """Do the same as `launch` for an operator alone by several launches, each for a part of the heads."""
    parts, outputs = launches_of(x, (), pool, cu_seqlens.shape[0] - 1), []
    assert parts is not None
    for i in range(parts):
        o, _, pool = launch(x.of_heads(parts, i), (), pool, cu_seqlens, slots)
        outputs.append(o)
    return jnp.concatenate(outputs, axis=1), (), pool


def _ring_scratch(s: DecodeStatic, pool: StatePool, held: dict[str, jax.Array], n: int) -> dict[str, Any]:
    """Return the scratch for the rings of n sequences; `held` has the arrays of the pool as the kernel sees them."""
    m, by_channel, several = n * s.decode_tokens, _by_channel(pool), [s.decode_tokens] * (s.decode_tokens > 1)
    keys, writes, gates = (held[name] for name in ("keys", "writes", "gates"))
    buffer = lambda y: pltpu.VMEM((copies.BUFFERS, n, *y.shape[1:]), y.dtype)
    of_token = lambda y, rows: (rows, y.shape[2]) if y.ndim == 3 else y.shape[2:]
    token = lambda y, rows: pltpu.VMEM((copies.BUFFERS, n, *several, *of_token(y, rows)), y.dtype)
    scratch: dict[str, Any] = dict(ring_key=buffer(keys), ring_write=buffer(writes), ring_gate=buffer(gates))
    scratch |= dict(new_key=token(keys, s.H), new_write=token(writes, s.HV))
    scratch["new_gate"] = token(gates, s.HV) if by_channel else buffer(gates)
    scratch |= dict(folded_keys=(pool.replay * s.HV, s.K), folded_writes=(pool.replay * s.HV, s.V))
    scratch["folded_decay"] = s.HV, s.K
    if by_channel:
        scratch["starts"] = n * s.HV, s.K
    if by_channel or pool.scales is not None:
        scratch["ring_parts"] = s.HV * 8 * m, s.K
    scratch |= {name: pltpu.SMEM(pool.count.shape, jnp.int32) for name in ("counts", "drafts_of")}
    return scratch | dict(ring_reads=(2 * s.HV * m, s.V), counting=pltpu.SemaphoreType.DMA)


def _cost(T: int, N: int, targets: int, held: dict[str, jax.Array], x: Decodes) -> pl.CostEstimate:
    """Return the cost of N decodes of T tokens in all: each reads a slot, and writes some."""
    slot, s, echo = sum(y.size // y.shape[0] * y.dtype.itemsize for y in held.values()), x.static, x.echo is not None
    return pl.CostEstimate(
        flops=flops(T, s.HV, s.K, s.V, echo or x.beta is not None, echo),
        transcendentals=8 * T * s.HV * s.V,
        bytes_accessed=(1 + targets) * N * slot,
    )


def flops(tokens: int, HV: int, K: int, V: int, delta: bool = True, echo: bool = False) -> int:
    """Return the flops of an operator token by token: 5, 7 or 9 for a token and an entry of its states.

    A state is decayed, a product of a key and a value is added to it, and it is read; the delta rule reads it once
    more, and an echo adds one product more.
    """
    return (5 + 2 * delta + 2 * echo) * tokens * HV * K * V
