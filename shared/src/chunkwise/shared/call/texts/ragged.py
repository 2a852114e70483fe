"""The text that functions for a serving step share, which `docstrings.completed` adds after this line.

Shapes: {shapes}; o [B, T, HV, V].

    o, states = {function}({arrays})

Every sequence starts from the state in a slot of the pool, and its last state goes to a slot. If the pool is donated to
the jitted program (donate_argnums), it is updated in place, and slots that no sequence names keep every bit. What
changes from step to step is traced: one program serves all steps of the same T, N and W.

Dims: B is 1, T tokens of all sequences, H query and key heads, HV value heads (a multiple of H), K and V key and value
dimensions, N the most sequences of a step, W the most tokens of a decode, M the most blocks of a prefill.

Args:
  states: the pool [slots, HV, K, V], of any of these types; the new pool has the same type. States are computed in
    float32, and rounded where they are stored. Or a `StatePool` of `make_pool`, whose states may be int8, and which may
    have a ring of tokens, so that a decode writes no state.
  cu_seqlens: boundaries of the sequences, int32 [N + 1], rising from 0, the decodes first. Empty sequences
    read and write nothing. Tokens after the last sequence are padding: they may hold anything, NaN too, and their
    outputs are zeros. A boundary that is less than the one before it acts as the one before it, and a boundary above T
    acts as T.
  state_indices: int32 [N], the slot that a sequence starts from and that gets its last state; or [N, W]: slot
    state_indices[n, t] gets the state after token t of a decode, slot state_indices[n, 0] the state after a prefill,
    and num_accepted_tokens says where a sequence starts. From a negative slot a sequence starts with zeros, and a state
    that goes to a negative slot is dropped, so negative slots may repeat. A slot past the end acts as a negative one,
    here and in the arguments below. A slot that is written must not be named twice, nor be read by another sequence.
  has_initial_state: bool [N], False for a sequence that starts from zeros whatever its slot holds, such as the state of
    a finished request; None for True everywhere.
  num_decodes: how many sequences are decodes, which go token by token. They come first, and have at most W tokens each,
    1 where state_indices is [N]. A number or a traced int32 scalar; with the number 0 no decode is compiled.
  num_sequences: how many of the N sequences exist, a number or a traced int32 scalar; None for all. The entries of the
    other sequences may hold anything. A count beyond N acts as N, and a negative one as 0; decodes beyond num_sequences
    do not exist.
  read_indices: int32 [N], the slot that a sequence starts from in place of a slot of state_indices, such as the slot of
    a cached prefix. It stays as it is, and several sequences may share it; a negative one stands for zeros.
  num_accepted_tokens: int32 [N], how many tokens of a sequence's last decode are accepted. Where state_indices is
    [N, W]: 1 to W, and the sequence starts from slot state_indices[n, num_accepted_tokens[n] - 1], with any other
    number from zeros; None for 1; not read with read_indices. Over a pool with a ring: how many of these tokens stay in
    the ring of the slot that the sequence starts from; None for all; not read after a prefill.
  decode_tokens: the most tokens of a decode over a pool with a ring, at most as many as the ring holds; static, None
    for 1. state_indices are then [N]. None where there is no ring.
  block_state_indices: int32 [N, M], the slot of the state after every block of `block_size` tokens of a prefill,
    counted from its first token in this call; a negative slot is not written. None to store no such states.
  block_size: tokens of a block, a multiple of the chunk size; static.
  chunk_size: tokens of a chunk of a prefill, one of 16, 32, 64, 128, or None for the best; static.
  implementation: "xla" (plain JAX, runs everywhere), "fused" (one Pallas TPU kernel for the decodes and one for the
    prefills, which read and write the pool themselves), "staged" (decodes as in "fused"; for the prefills a chain of
    kernels, which gets copies of their states; chunkwise.pipeline brings it). Off TPU the kernels are interpreted. None
    is the best for the backend: off TPU "xla"; on a TPU "fused" if its kernels take these sizes, else "staged" or
    "xla".
  sharding: how v is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec; static.
    With explicit axes the type of v says how. Value heads and value channels may be split, and the pool is split like
    them.

Returns:
  o [1, T, HV, V] in the type of v, and the pool. The kernels have no gradient: serving needs none.

Raises:
  ValueError: an argument has the wrong rank, shape or type. Values are checked outside of jit only; for values under
    jit there is `check_step` of chunkwise.pipeline.
  NotImplementedError: "fused" with sizes that its kernels do not take.

Accuracy: decodes are as accurate as `recurrent_{name}`, and prefills as `chunk_{name}`; in
  addition, states are rounded to the type of the pool.
Cost: a decode reads one state and writes a state for every token; prefills cost as much as
  `chunk_{name}` with states, and decodes do not add to that.
Source: the scheduling of vLLM's gated delta net attention.
"""
