"""The contract: documentation, argument checks and the choice of implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.causal_conv1d import config as tiles
from chunkwise.causal_conv1d import context, kernel, sequences, vjp, xla
from chunkwise.shared import compat
from chunkwise.shared.call import arguments, checks, unknown_arguments
from chunkwise.shared.kernels import chunking, derivatives
from chunkwise.shared.mesh import devices, partition
from chunkwise.shared.serving import slot_kernel, slot_rows, step_table

_LAYOUT = partition.Layout(
    leading="x",
    parts={"b": "rows", "t": "tokens", "d": "channels"},
    arguments={
        "x": "btd",
        "weight": "d",
        "bias": "d",
        "initial_state": "s.d",
        "cu_seqlens": "",
        "segment_ids": "bt",
    },
    results=("btd", "s.d"),
)
_POOL_LAYOUT = partition.Layout(
    leading="x",
    parts=_LAYOUT.parts,
    arguments={
        "x": "btd",
        "states": "s.d",
        "weight": "d",
        "bias": "d",
        "cu_seqlens": "",
        **devices.SLOT_DIMENSIONS,
    },
    results=("btd", "s.d"),
)


def _check_weights(weight, bias, D: int) -> int:
    """Check weight and bias for D channels and return the width."""
    W = checks.check_array("weight", weight, "D W", (D, None))[1]
    widths = tiles.WIDTHS
    checks.check(W in widths, f"`weight` must have a width of {widths[0]} to {widths[-1]}; got {W}.")
    if bias is not None:
        checks.check_array("bias", bias, "D", (D,))
    return W


def _check_initial_state(initial_state, x, shape: tuple[int, int, int]) -> None:
    """Check the initial states; by position flash-linear-attention has a residual there, of the shape of x."""
    found = getattr(initial_state, "shape", None)
    checks.check(
        found != x.shape or found == shape,
        f"`initial_state` must have shape [N, W-1, D] = {shape}; got {found}, the shape of `x`, which `residual` has, "
        "the fourth argument of flash-linear-attention: add a residual to the result.",
    )
    checks.check_array("initial_state", initial_state, "N W-1 D", shape)


@unknown_arguments.explained
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    activation: str | None = None,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    config: tiles.Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the depthwise causal convolution over time of every sequence, and its last inputs.

        y_t = act(bias + sum_j weight[:, W - 1 - j] * x_{t-j}),        j = 0 ... W - 1

    Shapes: x, y [B, T, D]; weight [D, W]; final_state [N, W - 1, D].

        y, final_state = causal_conv1d(x, weight, output_final_state=True)

    Before a sequence x_t is 0, or a row of the initial state.

    Dims: B batch, T tokens, D channels, W width, N sequences: B, or len(cu_seqlens) - 1.

    Args:
      x: inputs [B, T, D], float32, bfloat16 or float16; computed in float32.
      weight: [D, W], W from 2 to 8, the oldest token first, of any of these types.
      bias: [D], of any of these types, or None for zeros.
      initial_state: the W - 1 inputs before every sequence [N, W - 1, D], the oldest first, of any of these types; None
        for zeros. The final state has the same type, whatever the type of x is, so a `lax.scan` can carry it.
        causal-conv1d and vLLM hold it as [N, D, W - 1], and flash-linear-attention as [N, D, W] with one input more. By
        position flash-linear-attention has a residual [B, T, D] here, which is added to the result.
      output_final_state: whether to return the last inputs; static.
      activation: "silu", "sigmoid" or None for the identity; static. The layers of models have "silu".
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Sequences may be empty; tokens from
        cu_seqlens[N] on are padding. The values are checked outside of jit only.
      segment_ids: int32 [B, T], traced, instead of cu_seqlens: a sequence begins where the id changes, and tokens with
        an id below 0 are padding. States are then [B, W - 1, D]: the initial state precedes the first sequence of a
        row, and the final state has the last inputs of the last sequence of the row.
      implementation: "pallas" (one TPU kernel for each direction, interpreted elsewhere), "xla" (plain JAX), None (the
        best for the backend).
      sharding: how x is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec;
        static. With explicit axes the type of x says how. Rows, tokens and channels may be split, also over several
        axes each; every device computes its part, and only gradients of arguments that devices share are sums over
        these devices.
      context_axis: the axis or axes of a mesh, inside a `shard_map`, over which T is split; static. Each device has
        consecutive tokens, at least W - 1, and sends its last W - 1 inputs to the next device. cu_seqlens has the
        boundaries of the tokens of all devices, and states are before the first and after the last of these tokens, the
        same on every device. segment_ids has the ids of the device's tokens.
      config: tile sizes of the kernels.

    Returns:
      y [B, T, D] in the type of x, and the last W - 1 inputs of every sequence [N, W - 1, D], None unless asked for.
      The last inputs have the type of the initial state, or without one the type of x. If a sequence is shorter than W
      - 1, they begin with the end of its initial state. Padding may hold anything and gives zeros. x, weight, bias and
      initial_state have gradients under both implementations; over a mesh, by sharding or by the type of x, in reverse
      mode only.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.

    NaN or infinity in one sequence changes no bit of the other sequences, but the gradients of weight and bias are sums
    over all sequences.
    Accuracy: 1e-7 relative to the definition in float64 for float32 inputs, 2e-3 for bfloat16 inputs, whose result is
    rounded to bfloat16; gradients 3e-7 and 3e-3.
    Cost: 2 B T D W flops; x is read and y is written once. The backward reads x and dy and writes dx once.
    Source: the short convolution of H3 (2022) and of Mamba (2023), as in the causal-conv1d package.
    """
    B, T, D = checks.check_array("x", x, "B T D")
    W = _check_weights(weight, bias, D)
    given = {
        "x": x, "weight": weight, "bias": bias, "initial_state": initial_state, "cu_seqlens": cu_seqlens,
        "segment_ids": segment_ids,
    }  # fmt: skip
    cu_seqlens = checks.check_cu_seqlens(cu_seqlens, B, T * lax.axis_size(partition.token_axes(None, context_axis)))
    checks.check_segment_ids(segment_ids, B, T, cu_seqlens)
    segment_ids = checks.as_int32(segment_ids)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        _check_initial_state(initial_state, x, (N, W - 1, D))
    checks.check_activation(activation)
    checks.check_flags(output_final_state=output_final_state)
    implementation = checks.choose_implementation(implementation, ("pallas", "xla"), on_tpu="pallas")
    if config is not None:
        fits = config.tokens % 16 == 0 and config.channels % 128 == 0 and min(config.tokens, config.channels) > 0
        checks.check(fits, f"`config` must have multiples of 16 tokens and of 128 channels; got {config}.")
    given = {name: y for name, y in given.items() if y is not None}
    # They become float32 before devices share them, so that the sums of their gradients over devices are rounded only
    # once.
    given |= {name: given[name].astype(jnp.float32) for name in ("weight", "bias") if name in given}
    division = partition.find_division(given, _LAYOUT, sharding)
    tokens = partition.token_axes(division, context_axis)
    held = T if division is None else T // partition.size_of(division.mesh, division.tokens)
    checks.check(
        not tokens or held >= W - 1,
        f"`x` must have at least W - 1 = {W - 1} tokens on each of the devices along {tokens}; got {held}.",
    )
    # The type of the final states, None if nobody asks for them.
    final = (x if initial_state is None else initial_state).dtype if output_final_state else None

    def on_device(given):
        x, weight, bias, *others = (given.get(name) for name in _LAYOUT.arguments)
        if lax.axis_size(tokens) == 1:
            return _run(x, weight, bias, *others, final, activation, implementation, config)
        *part, ends = context.find_part(x, *others, W, final is not None, tokens)
        y, states = _run(x, weight, bias, *part, final, activation, implementation, config)
        return y, None if final is None else jnp.where(ends[:, None, None], states, jnp.zeros((), final))

    if division is None and not tokens:
        return on_device(given)
    return partition.over_mesh(on_device, given, division, tokens, final is not None)


@functools.partial(jax.jit, static_argnums=(6, 7, 8, 9))
def _run(x, weight, bias, states, cu_seqlens, segment_ids, final: Any, activation, implementation, config):
    (B, T, D), W = x.shape, weight.shape[1]
    # Here once; otherwise JAX does it at every use, and sums each part of a gradient over the devices separately.
    x, weight, bias, states = compat.vary_alike(x, weight, bias, states)
    s = sequences.find(B, T, cu_seqlens, segment_ids)
    rows = weight.astype(jnp.float32).T  # [W, D]
    shift = jnp.zeros((1, D), jnp.float32) if bias is None else bias.astype(jnp.float32)[None]
    before = None if states is None else sequences.state_rows(rows, states)  # [N, W - 1, D]
    if implementation == "xla":
        y = xla.convolve(x, rows, shift, before, s, activation)
    else:
        static = kernel.ConvStatic(T, W, activation, config or tiles.default_for(T, D))
        operands = derivatives.of_kernel("causal_conv1d", _operands(x, rows, shift, before, s, static))
        y = vjp.convolve(operands, static)
    return y, None if final is None else sequences.final_states(x, states, W, s, final)


def _operands(x, weight, bias, before, s: sequences.ConvSequences, static: kernel.ConvStatic) -> kernel.ConvOperands:
    blocks, sequences, reach = kernel.tables(s, x.shape[0], before is not None, static)
    rows = None if before is None else before.reshape(-1, 1, x.shape[2])
    return kernel.ConvOperands(*compat.vary_alike(blocks, sequences, x, reach, weight, bias, rows))


@unknown_arguments.explained
def causal_conv1d_update(
    x: jax.Array,
    states: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: jax.Array | None = None,
    state_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    num_decodes: int | jax.Array = 0,
    num_sequences: int | jax.Array | None = None,
    read_indices: jax.Array | None = None,
    num_accepted_tokens: jax.Array | None = None,
    block_state_indices: jax.Array | None = None,
    block_size: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the convolution of one new token, or a few, of every sequence, and the pool of states after these tokens.

        y_t = act(bias + sum_j weight[:, W - 1 - j] * x_{t-j}),        j = 0 ... W - 1

    Shapes: x, y [B, T, D]; states [N, W - 1, D]; weight [D, W].

        y, states = causal_conv1d_update(x, states, weight)

    This is `causal_conv1d` for serving, also from and to a pool of states::

        y, pool = causal_conv1d_update(x, pool, weight, bias, state_indices=slots)

    Under jit with the pool donated (donate_argnums), its states are updated in place. In a serving step this function
    takes the same stream, boundaries and indices as the operator after it, such as `ragged_gated_delta_rule` of
    chunkwise.pipeline, with a pool for the convolution::

        y, pool = causal_conv1d_update(
            x, pool, weight, bias, cu_seqlens=boundaries, state_indices=slots, num_decodes=decodes
        )

    Dims: B batch, T new tokens, D channels, W width, N sequences: B, or len(cu_seqlens) - 1, U the most tokens of a
    decode, M the most blocks of a prefill.

    Args:
      x, weight, bias, activation, cu_seqlens: as in `causal_conv1d`. In a serving step, a boundary that is less than
        the one before it acts as the one before it, and a boundary above T acts as T.
      states: the last W - 1 inputs of every sequence [N, W - 1, D], or with state_indices a pool [slots, W - 1, D], of
        float32, bfloat16 or float16, which the result has, too.
      state_indices: int32 [N], traced: the slot of every sequence. No slot may be named twice, which is checked outside
        of jit. A sequence with a negative slot starts from zeros and its state is dropped, so negative slots may
        repeat. A slot past the end acts as a negative one. In a serving step also [N, U]: the state after token t of a
        decode goes to slot state_indices[n, t], and the state after a prefill to slot state_indices[n, 0]. Both start
        from slot state_indices[n, num_accepted_tokens[n] - 1].
      has_initial_state: bool [N], traced: False for a sequence that starts from zeros whatever its slot holds; None for
        True everywhere.
      num_decodes: how many sequences are decodes. They come first, and have at most U tokens each, 1 where
        state_indices is [N]. A number or a traced int32 scalar. This argument and all down to block_size need
        cu_seqlens.
      num_sequences: how many of the N sequences exist, a number or a traced int32 scalar; None for all. A count beyond
        N acts as N, a negative one as 0.
      read_indices: int32 [N], the slot that a sequence starts from in place of a slot of state_indices; it stays as it
        is. A negative one stands for zeros.
      num_accepted_tokens: int32 [N], 1 to U: a sequence starts from slot state_indices[n, num_accepted_tokens[n] - 1].
        With any other number it starts from zeros.
      block_state_indices: int32 [N, M], the slot of the state after every block of `block_size` tokens of a prefill,
        counted from its first token in this call; a negative slot is not written.
      block_size: tokens of a block; static.
      implementation: "pallas" (one TPU kernel, interpreted elsewhere), "xla" (plain JAX), None: "xla" if all sequences
        are decodes, and else the best for the backend.
      sharding: how x is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec;
        static. With explicit axes the type of x says how. Channels may be split, and without cu_seqlens also rows; the
        states are split in the same way, and no device sends anything. Devices that split the rows also split the slots
        of a pool, evenly, and the slot of a sequence must lie on the device of its row: otherwise its y is NaN.

    Returns:
      y [B, T, D] in the type of x, and the pool in its type, in which slots that no sequence names keep every bit. x,
      states, weight and bias have gradients; over a mesh, by sharding or by the type of x, in reverse mode only.

    Raises:
      ValueError: an argument has the wrong rank, shape or type. The values of a serving step are checked outside of jit
        only; for values under jit there is `check_step` of chunkwise.pipeline.

    Accuracy: as `causal_conv1d`.
    Cost: 2 B T D W flops; every state is read and written once.
    Source: as `causal_conv1d`.
    """
    B, T, D = checks.check_array("x", x, "B T D")
    W = _check_weights(weight, bias, D)
    checks.check_cu_seqlens(cu_seqlens, B, T) if num_sequences is None else checks.check_packed(cu_seqlens, B)
    cu_seqlens, state_indices = checks.as_int32(cu_seqlens), checks.as_int32(state_indices)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    checks.check_array("states", states, "slots W-1 D", (N if state_indices is None else None, W - 1, D))
    checks.check_activation(activation)
    slots = arguments.Slots(
        state_indices, has_initial_state, read_indices, num_accepted_tokens, block_state_indices, num_decodes,
        num_sequences,
    )  # fmt: skip
    slots = arguments.Slots(*map(checks.as_int32, slots))
    none = isinstance(num_decodes, int) and num_decodes == 0
    more = (block_size, *slots._replace(state_indices=None, has_initial_state=None, num_decodes=None))
    is_step = getattr(state_indices, "ndim", 1) == 2 or not none or any(y is not None for y in more)
    # In a serving step both are given, which a type cannot say.
    boundaries: Any = cu_seqlens
    named: Any = state_indices
    if is_step:
        checks.check(cu_seqlens is not None, "`cu_seqlens` must be given in a serving step; got None.")
        checks.check_step_types(slots, N, block_size)
        find = functools.partial(step_table.find_faults, boundaries, slots, states.shape[0], T, block_size)
        checks.check_known_values((boundaries, *slots), find)
        slots = step_table.with_counts(slots)
    else:
        checks.check_slots(state_indices, has_initial_state, N)
        checks.check_slot_values(state_indices, "states", states.shape[0])
        slots = arguments.Slots(state_indices, has_initial_state)
    best = "pallas" if is_step and named.size < T else "xla"
    implementation = checks.choose_implementation(implementation, ("pallas", "xla"), on_tpu=best)
    given = {"x": x, "states": states, "weight": weight, "bias": bias, "cu_seqlens": cu_seqlens} | slots._asdict()
    given = {name: y for name, y in given.items() if y is not None}
    # As in `causal_conv1d`, sums of gradients are rounded only once.
    given |= {name: given[name].astype(jnp.float32) for name in ("weight", "bias") if name in given}
    division = partition.find_division(given, _POOL_LAYOUT, sharding)
    devices.check_pool(given, division, "states")
    tokens = partition.token_axes(division, None)
    checks.check(not tokens, f"`x` must have tokens that are not split; got them over {tokens}.")

    def on_device(given) -> tuple[jax.Array, Any]:
        given, elsewhere = (
            (given, None) if division is None else devices.local_slots(given, division.axes["s"], "states")
        )
        x, *others = (given.get(name) for name in ("x", "states", "weight", "bias", "cu_seqlens"))
        slots = arguments.Slots(*(given.get(name) for name in arguments.Slots._fields))
        if is_step:
            return _step(x, *others, slots, activation, implementation, block_size)
        y, states = _update(x, *others, slots, activation, implementation)
        return devices.without_elsewhere(y, elsewhere), states

    if division is None:
        return on_device(given)
    results: Any = partition.over_mesh(on_device, given, division, (), with_states=True)
    return results


@functools.partial(jax.jit, static_argnums=(6, 7))
def _update(x, states, weight, bias, cu_seqlens, slots: arguments.Slots, activation, implementation):
    if cu_seqlens is not None:
        cu_seqlens = chunking.rising(cu_seqlens, x.shape[1])
    before = slot_rows.read_states(states, slots)
    y, _ = _run(x, weight, bias, before, cu_seqlens, None, None, activation, implementation, None)
    s = sequences.find(*x.shape[:2], cu_seqlens, None)
    return y, slot_rows.write_states(states, slots, sequences.final_states(x, before, weight.shape[1], s, states.dtype))


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _step(x, pool, weight, bias, cu_seqlens, slots: arguments.Slots, activation, implementation, block_size):
    """Run a serving step: a decode writes a state to a slot after every token, and a prefill after its last token."""
    step, W = step_table.find_step(cu_seqlens, slots, pool.shape[0], x.shape[1]), weight.shape[1]
    decodes, prefills, boundaries = step.decodes, step.prefills, step.boundaries
    rows = slot_kernel if implementation == "pallas" and slot_kernel.takes(pool) else slot_rows
    # A sequence is either a decode or a prefill; in the table of the other kind it has no tokens and reads no slot.
    before = rows.read(pool, jnp.maximum(decodes.source, prefills.source))
    y, _ = _run(x, weight, bias, before, boundaries, None, None, activation, implementation, None)
    s = sequences.find(*x.shape[:2], boundaries, None)

    def write(pool, slot, end):
        return rows.write(pool, slot, sequences.final_states(x, before, W, s._replace(end=end), pool.dtype))

    after_tokens = lambda count: s.start + jnp.int32(count)
    end = jnp.where(prefills.start < prefills.end, s.end, after_tokens(1))
    pool = write(pool, jnp.maximum(decodes.target[:, 0], prefills.target[:, 0]), end)
    for t in range(1, decodes.target.shape[1]):
        pool = write(pool, decodes.target[:, t], after_tokens(t + 1))
    if slots.block_state_indices is not None:
        _, slot = step_table.full_blocks(prefills, block_size)
        for m in range(slot.shape[1]):
            pool = write(pool, slot[:, m], after_tokens((m + 1) * block_size))
    return y, pool
