"""The text that functions over whole sequences share, which `docstrings.completed` adds after this line.

Shapes: {shapes}; o [B, T, HV, V]; final_state [N, HV, K, V].

    o, final_state = {function}({arrays}, output_final_state=True)

Value head n has key head n // (HV // H).

Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
C chunk size, N sequences: B, or len(cu_seqlens) - 1.

Args:
  q, k: queries and keys [B, T, H, K]. Every tensor is float32, bfloat16 or float16, in any mixture.
  v: values [B, T, HV, V]. Products take bfloat16 operands if q, k and v are all bfloat16, and else float32 operands at
    full precision; all sums, gates, step sizes and states are float32.
  beta: step sizes [B, T, HV], in (0, 1), or in (0, 2) if negative eigenvalues are allowed. Keys should have unit length
    (or pass use_qk_l2norm_in_kernel): the recurrence itself diverges if beta |k|^2 > 2.
  scale: multiplies the output; defaults to K ** -0.5. It is a number, which is static, or a scalar array, which may be
    traced.
  initial_state: [N, HV, K, V] of any of these types; None for zeros.
  output_final_state: return the state after every sequence; static.
  use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
  min_gate: a promise that no g is below it, in nats; None or a number, static. It changes no gate. A lower_bound (see
    below) is such a promise too. If the promise is -16.6 or more, one matrix product takes the place of three
    everywhere; otherwise only if all tensors are bfloat16, for rows whose gates are weak enough. The result is the same
    as long as entries of q and k stay below 2^31, because they are multiplied by factors of up to 2^96. "staged" makes
    no use of it.
  use_gate_in_kernel: g is a raw gate; a law makes the log decay of it in float32: -exp(A_log) softplus(g + dt_bias) or,
    if a lower_bound is given, lower_bound * sigmoid(exp(A_log) (g + dt_bias)). True, or the name of this law,
    "softplus" or "sigmoid"; static.
  A_log: [HV] or [1, 1, HV, 1], any of these types; needed with use_gate_in_kernel, but with a lower_bound None stands
    for zeros. Without use_gate_in_kernel, A_log, dt_bias and lower_bound must be None.
  dt_bias: [HV] for gates per head; [HV, K], or flat [HV * K], for gates per channel; None for zeros.
  lower_bound: the bound that log decays stay above, a negative number in nats, which selects the law "sigmoid"; static.
  use_beta_sigmoid_in_kernel: beta is raw, and the step size is sigmoid(beta), in float32; static.
  allow_neg_eigval: with use_beta_sigmoid_in_kernel, the step size is 2 sigmoid(beta); static.
  cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: new values never recompile. B must be 1. Sequences
    may be empty. Tokens from cu_seqlens[N] on are padding: they may hold anything, NaN too, and their outputs and
    gradients are zeros. The boundaries are checked outside of jit only. If no state goes in or comes out, chunks stay
    aligned to the stream and the cost follows the tokens; with states, the work of a chunk is done once for every
    sequence in it.
  segment_ids: int32 [B, T], traced, instead of cu_seqlens and for any B: in every row the state starts anew where the
    id changes, and tokens with ids below 0 are padding, which may hold anything, and whose outputs and gradients are
    zeros. initial_state and final_state are then [B, HV, K, V]: before the first segment of a row and after the last
    one. Ids add no cost. Under "fused", NaN or infinity in one segment does not change a bit of the results of other
    segments; under the other implementations it may change their rounding. With a context_axis they are the ids of the
    device's tokens.
  chunk_size: C, one of 16, 32, 64, 128, or None for the best; static. The results of all sizes agree up to rounding.
  implementation: "xla" (plain JAX, runs everywhere), "staged" (a chain of Pallas TPU kernels, one for every stage;
    chunkwise.pipeline brings it), "fused" (one Pallas TPU kernel for each direction); off TPU the kernels are
    interpreted. None is the best for the backend: off TPU "xla"; on a TPU "fused" if its kernels take these sizes,
    else "staged" or "xla". The accuracy below holds for "xla" and "fused". "staged" hands one float32 sum of gates from
    stage to stage: if a chunk holds weak and strong gates at once, its error with float32 tensors can reach 5e-5.
  sharding: how v is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec; static.
    With explicit axes the type of v says how. Rows, tokens, value heads and value channels may be split, also over
    several axes each; every device computes its part, and only gradients of arguments that devices share are sums over
    the devices.
  context_axis: the axis or axes of a mesh, inside a `shard_map`, over which T is split; static. Each device has
    consecutive tokens. cu_seqlens has the boundaries of the tokens of all devices, and states are before the first and
    after the last of these tokens, the same on every device.
  config: tile sizes of the kernels of "fused"; None for the best.

Returns:
  o [B, T, HV, V] in the type of v, and final_state [N, HV, K, V] float32, None unless asked for. Every floating-point
  argument has a gradient, of the type of the argument: the kernels can be differentiated once and in reverse mode,
  "xla" by any transform of JAX. NaN or infinity in one sequence does not change a bit of the results of other
  sequences; in the same sequence it spoils the results from its chunk on, and may reach all heads.

Raises:
  ValueError: an argument has the wrong rank, shape or type, or blocks of `config` are neither whole groups of value
    heads nor parts of one.
  NotImplementedError: "fused" with K or V above 256.
"""
