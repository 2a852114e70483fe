"""The text that functions for a few tokens share, which `docstrings.completed` adds after this line.

Shapes: {shapes}; o [B, T, HV, V]; states [N, HV, K, V].

    o, states = {function}({arrays}, output_final_state=True)

Value head n has key head n // (HV // H).

Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
N sequences: B, or len(cu_seqlens) - 1.

Args:
  q, k: queries and keys [B, T, H, K]. Every tensor is float32, bfloat16 or float16, in any mixture; everything is
    computed in float32.
  v: values [B, T, HV, V].
  initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] with state_indices, of any of these types; None for zeros. A
    pool keeps its type.
  min_gate: a promise that no g is below it; this function makes no use of it.
  cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: sequence n has the tokens cu_seqlens[n] to
    cu_seqlens[n + 1] - 1. B must be 1. Tokens from cu_seqlens[N] on are padding: they may hold anything, and give
    zeros. The values are checked outside of jit only.
  state_indices: int32 [N], traced, for serving: the slot of every sequence in the pool that initial_state is, as in
    `o, pool = {function}(..., initial_state=pool, output_final_state=True, state_indices=slots)`.
    If the pool is donated to the jitted program (donate_argnums), its states are updated in place and nothing else of
    it is touched. No slot may be named twice, which is checked outside of jit. A sequence with a negative slot starts
    from zeros and its state is dropped, so negative slots may repeat. A slot past the end acts as a negative one.
    Devices that split the rows of a batch split the pool too: the slot of a sequence must lie in the part of its
    device; where it does not, the output is NaN and the state is dropped. With a pool, tokens may not be split over
    devices.
  has_initial_state: bool [N], traced: False for a sequence that starts from zeros whatever its slot holds, such as the
    state of a finished request; None for True everywhere.
  implementation: "fused" (one Pallas TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
    "fused"), None ("fused" on a TPU if the tokens and states fit into its fast memory, else "xla").

Returns:
  o [B, T, HV, V] in the type of v, and the states after the tokens, None unless asked for: with state_indices the pool,
  in its type, whose other slots keep every bit, and else [N, HV, K, V] float32. Every floating-point argument has a
  gradient; "xla" takes any transform of JAX.

Raises:
  ValueError: an argument has the wrong rank, shape or type.
  NotImplementedError: "fused" with more tokens or larger states than fit into VMEM: about 1,000 tokens of K = V = 128
    in all.
"""
