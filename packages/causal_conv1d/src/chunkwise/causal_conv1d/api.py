"""The contract: signatures and documentation; `part` has the records that they call."""

import jax

from chunkwise.causal_conv1d import config as tiles
from chunkwise.causal_conv1d import part
from chunkwise.shared.call import checks, unknown_arguments


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
    sharding: checks.Sharding | None = None,
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
      config: tile sizes of the kernels, for which "xla" is a NotImplementedError; None for the best.

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
    return part.SEQUENCES(locals())


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
    sharding: checks.Sharding | None = None,
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
    named = locals()
    return part.update_for(named)(named)
