"""The text that stages of the chain share, which `docstrings.completed` adds after this line.

Shapes: {shapes}; {results}.

    {names} = {function}({arrays})

Args:
  g_cum: chunk-local inclusive cumulative log decay in nats, nonincreasing inside a chunk, float32 from
    `chunkwise.cumsum.chunk_local_cumsum` (narrower types are widened): [B, T, HV] per head, [B, T, HV, K] per channel
    of the key, None for no decay.
  g_gamma: constant log decay per head [HV] in nats, float32, bfloat16 or float16, added to the decay in g_cum.
  initial_state: [N, HV, K, V], of any of these types; None for zeros.
  output_final_state: return the state after every sequence; static.
  cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Chunks restart at every sequence. Tokens
    from cu_seqlens[N] on are padding and give zeros. The values are checked outside of jit only.
  chunk_size: C, one of 16, 32, 64, 128, or None for 64; static. The stages of a chain must agree.
  implementation: "pallas" (TPU kernel, interpreted elsewhere), "xla" (plain JAX), None (the best for the backend).
  config: tile sizes of the kernel, which divide what it cuts; "xla" has none. None for the best.

Raises:
  ValueError: an argument has the wrong rank, shape or type, or a static argument is traced.
  NotImplementedError: `implementation` is one that only whole operators have, or "xla" with a `config`.
"""
