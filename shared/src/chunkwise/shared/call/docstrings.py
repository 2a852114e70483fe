"""Docstrings of public functions: paragraphs, sections and entries that functions of one kind share.

The docstring of a function in the source has only what is particular to it; `completed` adds the rest, so that
`help()` and the documentation site show the whole. A text of a kind has `{name}` for the name of an operator.
"""

import inspect
import itertools
import re
from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)

CHUNK = """
Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
C chunk size, N sequences: B, or len(cu_seqlens) - 1.

Args:
  q, k: queries and keys [B, T, H, K]. Every tensor is float32, bfloat16 or float16, in any mixture.
  v: values [B, T, HV, V]. Only if q, k and v are all bfloat16 do products take bfloat16 operands, else float32 ones at
    full precision; all sums, gates, step sizes and states are float32.
  beta: step sizes [B, T, HV], in (0, 1), or in (0, 2) if negative eigenvalues are allowed. Keys should have unit length
    (or pass use_qk_l2norm_in_kernel): the recurrence itself diverges if beta |k|^2 > 2.
  scale: multiplies q, and with q the output; defaults to K ** -0.5. A number, static, or a scalar array, which may be
    traced and multiplies the output.
  initial_state: [N, HV, K, V] of any of these types; None for zeros.
  output_final_state: return the state after every sequence; static.
  use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
  min_gate: a promise that every g >= it, in nats; None or a number, static. It changes no gate; the lower_bound below
    names a law, and promises the same. From -16.6 on one product replaces three where not all tensors are bfloat16, and
    in the backward. The result is the same, while entries of q and k stay below 2^31: they meet factors of up to 2^96.
  use_gate_in_kernel: g is the raw gate, and the decay is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
    lower_bound * sigmoid(exp(A_log) (g + dt_bias)), in float32; static. Also the name of this law, "softplus" or
    "sigmoid".
  A_log: [HV] or [1, 1, HV, 1], any of these types; needed with use_gate_in_kernel and None without it, as the next
    two. With a lower_bound None stands for zeros.
  dt_bias: [HV] for gates per head; [HV, K], or flat [HV * K], for gates per channel; None for zeros.
  lower_bound: of the decay, a negative number: it selects the second law; static.
  use_beta_sigmoid_in_kernel: beta is raw, and the step size is sigmoid(beta), in float32; static.
  allow_neg_eigval: with use_beta_sigmoid_in_kernel, the step size is 2 sigmoid(beta); static.
  cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: new values never recompile. B must be 1. Sequences
    may be empty. Tokens from cu_seqlens[N] on are padding: they may hold anything, NaN too, and their outputs and
    gradients are zeros. The values are checked outside of jit only. Without states in or out, chunks stay aligned to
    the stream and the cost follows the tokens; with states, a chunk takes as many steps as it holds sequences.
  segment_ids: int32 [B, T], traced, instead of cu_seqlens and for any B: in every row the state starts anew where the
    id changes, and tokens of ids below 0 are padding, which may hold anything and give zeros. initial_state and
    final_state are then [B, HV, K, V]: before the first segment of a row and after its last. The same tokens cost
    as much without ids. NaN or infinity in one segment does not change a bit of the results of others under "fused";
    elsewhere it may change their rounding.
  chunk_size: C, one of 16, 32, 64, 128, or None for the best; static. All agree up to rounding.
  implementation: "xla" (plain JAX, runs everywhere), "staged" (a chain of Pallas TPU kernels, one for every stage;
    chunkwise.pipeline brings it), "fused" (one Pallas TPU kernel for each direction); off TPU the kernels are
    interpreted. None is the best for the backend: off TPU "xla"; on a TPU "fused" if its kernels take these sizes,
    else "staged" or "xla". The accuracy below holds for "xla" and "fused". "staged" hands one float32 sum of gates from
    stage to stage: if a chunk holds weak and strong gates at once, its error with float32 tensors can reach 5e-5.
  sharding: how v is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec; static.
    Over explicit axes the type of v says it. Rows, tokens, value heads and value channels may be split, also over
    several axes each; every device computes its part, and only gradients of arguments that devices share are sums over
    the devices.
  context_axis: the axis or axes of a mesh, inside a `shard_map`, over which T is split; static. Each device has
    consecutive tokens. cu_seqlens has the boundaries of all tokens, and states lie before the first and after the last
    of all tokens, the same on all devices. segment_ids has the ids of the device's tokens.
  config: tile sizes of the kernels of "fused"; None for the best.

Returns:
  o [B, T, HV, V] in the type of v, and final_state [N, HV, K, V] float32, None unless asked for. Differentiable in
  every floating-point argument: once, in reverse; "xla" by any transform of JAX. Gradients have the types of their
  inputs. NaN or infinity in one sequence does not change a bit of the results of others; in its sequence it spoils
  the results from its chunk on, and may reach all heads.

Raises:
  ValueError: an argument has the wrong rank, shape or type, or blocks of `config` are neither whole groups of value
    heads nor parts of one.
  NotImplementedError: "fused" with K or V above 256.
"""

RECURRENT = """
For serving, initial_state may be a pool of states::

    o, pool = recurrent_{name}(..., initial_state=pool, output_final_state=True, state_indices=slots)

If the pool is donated to the jitted program (donate_argnums), its states are updated in place and nothing else of it
is touched.

Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
N sequences: B, or len(cu_seqlens) - 1.

Args:
  q, k: queries and keys [B, T, H, K]. All tensors are float32, bfloat16 or float16, and may differ; all is computed in
    float32.
  v: values [B, T, HV, V].
  initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] with state_indices, of any of these types; None for zeros. A
    pool keeps its type.
  min_gate: a promise that every g >= it; it changes nothing here.
  cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: sequence n has the tokens cu_seqlens[n] to
    cu_seqlens[n + 1] - 1. B must be 1. Tokens from cu_seqlens[N] on are padding: they may hold anything, and give
    zeros. The values are checked outside of jit only.
  state_indices: int32 [N], traced: the slot of every sequence. A slot is named only once, which is checked outside of
    jit. A sequence with a negative slot starts from zeros and its state is dropped: negative slots are neither read nor
    written and may repeat. A slot past the end acts as a negative one. Devices that split the rows of a batch split the
    pool too: the slot of a sequence must lie in the part of its device; where it does not, the output is NaN and the
    state is dropped. A pool does not go with tokens that are split.
  has_initial_state: bool [N], traced: False if a sequence starts from zeros whatever its slot holds, as in a slot that
    was freed; None for True.
  implementation: "fused" (one Pallas TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
    "fused"), None ("fused" on a TPU if the tokens and states fit into its fast memory, else "xla").

Returns:
  o [B, T, HV, V] in the type of v, and the states after the tokens, None unless asked for: the pool, in its type, in
  which slots that no sequence names keep every bit; without state_indices [N, HV, K, V] float32. Differentiable in
  every floating-point argument; "xla" by any transform of JAX.

Raises:
  ValueError: an argument has the wrong rank, shape or type.
  NotImplementedError: "fused" with more tokens or larger states than fit into VMEM: about 1,000 tokens of K = V = 128
    in all.
"""

RAGGED = """
A sequence starts from a slot of the pool and ends in one. If the pool is donated to the jitted program
(donate_argnums), it is updated in place, and slots that no sequence names keep every bit. What changes from step to
step is traced: one program serves all steps of the same T, N and W.

Dims: B is 1, T tokens of all sequences, H query and key heads, HV value heads (a multiple of H), K and V key and value
dimensions, N the most sequences of a step, W the most tokens of a decode, M the most blocks of a prefill.

Args:
  states: the pool [slots, HV, K, V], of any of these types, which it keeps. States are float32 inside, and are rounded
    where they are stored. Or a `StatePool` of `make_pool`, whose states may be int8, and which may have a ring of
    tokens, so that a decode writes no state.
  cu_seqlens: boundaries of the sequences, int32 [N + 1], rising from 0, the decodes first. Empty sequences
    read and write nothing. Tokens after the last sequence are padding: they may hold anything, NaN too, and their
    outputs are zeros. A boundary that falls acts as the one before it, and one past the end as T.
  state_indices: int32 [N], the slot that a sequence reads and writes, after its last token; or [N, W]: after token t of
    a decode its state goes to slot state_indices[n, t], and after a prefill to state_indices[n, 0];
    num_accepted_tokens says where a sequence starts. A negative slot is neither read, so that the sequence starts from
    zeros, nor written, and may repeat; a slot past the end acts as a negative one, here and in the arguments below. No
    slot that is written may be named twice, nor be read by another sequence.
  has_initial_state: bool [N], False if a sequence starts from zeros whatever its slot holds, as in a slot that was
    freed; None for True.
  num_decodes: how many sequences, the first ones, go token by token. They have at most W tokens each, 1 where
    state_indices is [N]. A number or a traced int32 scalar; the number 0 compiles no decode.
  num_sequences: how many of the N sequences exist, a number or a traced int32 scalar; None for all. The other entries
    may hold anything. A count beyond N acts as N, and a negative one as 0; decodes beyond num_sequences do not exist.
  read_indices: int32 [N], the slot that a sequence starts from instead, such as the slot of a cached prefix. It stays
    as it is, and several sequences may share it; negative for zeros.
  num_accepted_tokens: int32 [N], 1 to W: a sequence, decode or prefill, starts from slot
    state_indices[n, num_accepted_tokens[n] - 1], the state after as many tokens of the step before as were accepted,
    and from zeros for any other number. None for 1; not read with read_indices. Over a pool with a ring: how many
    tokens of the decode before, in the slot that the sequence starts from, are kept; None for all. It is not read
    after a prefill, which is kept whole.
  decode_tokens: the most tokens of a decode over a pool with a ring, at most as many as the ring holds; static, None
    for 1. state_indices are then [N]. None where there is no ring.
  block_state_indices: int32 [N, M], the slot of the state after every block of `block_size` tokens of a prefill,
    counted from its first token in this call; negative ones are not written. None for none.
  block_size: tokens of a block, a multiple of the chunk size; static.
  chunk_size: tokens of a chunk of a prefill, one of 16, 32, 64, 128, or None for the best; static.
  implementation: "xla" (plain JAX, runs everywhere), "fused" (one Pallas TPU kernel for the decodes and one for the
    prefills, which read and write the pool themselves), "staged" (decodes as in "fused"; for the prefills a chain of
    kernels, which gets copies of their states; chunkwise.pipeline brings it). Off TPU the kernels are interpreted. None
    is the best for the backend: off TPU "xla"; on a TPU "fused" if its kernels take these sizes, else "staged" or
    "xla".
  sharding: how v is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec; static.
    Over explicit axes the type of v says it. Value heads and value channels may be split, and the pool is split as
    they are.

Returns:
  o [1, T, HV, V] in the type of v, and the pool. No gradient is defined: serving needs none.

Raises:
  ValueError: an argument has the wrong rank, shape or type. Values are checked outside of jit only; for values under
    jit there is `check_step` of chunkwise.pipeline.
  NotImplementedError: "fused" with sizes that its kernels do not take.

Accuracy: decodes are as accurate as `recurrent_{name}`, and prefills as `chunk_{name}`; the
  states are rounded to the type of the pool besides.
Cost: a decode reads the state of every sequence once and writes one for every token; prefills cost what
  `chunk_{name}` costs with states, and nothing for decodes.
Source: the scheduling of vLLM's gated delta net attention.
"""

STAGE = """
Args:
  g_cum: chunk-local inclusive cumulative log decay in nats, nonincreasing inside a chunk, float32 from
    `chunkwise.cumsum.chunk_local_cumsum` (narrower types are widened): [B, T, HV] per head, [B, T, HV, K] per channel
    of the key, None for no decay.
  g_gamma: constant log decay per head [HV] in nats, any floating type, added to the one of g_cum.
  initial_state: [N, HV, K, V], any floating type; None for zeros.
  output_final_state: return the state after every sequence; static.
  cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Chunks restart at every sequence. Tokens
    from cu_seqlens[N] on are padding and give zeros. The values are checked outside of jit only.
  chunk_size: C, one of 16, 32, 64, 128, or None for 64; static. The stages of a chain must agree.
  implementation: "pallas" (TPU kernel, interpreted elsewhere), "xla" (plain JAX), None (the best for the backend).
  config: tile sizes of the kernel.

Raises:
  ValueError: an argument has the wrong rank, shape or type, or a static one is traced.
  NotImplementedError: `implementation` is one that only whole operators have.
"""

KINDS = {"chunk": CHUNK, "recurrent": RECURRENT, "ragged": RAGGED}

_LABELS = ("Dims", "Args", "Returns", "Raises", "Accuracy", "Cost", "Source")
_LABEL = re.compile(rf"^({'|'.join(_LABELS)}):", re.MULTILINE)
_NAMES = re.compile(r"^  (\w+(?:, \w+)*):", re.MULTILINE)


def completed(kind: str, like: Callable | None = None) -> Callable[[Function], Function]:
    """Return a decorator that completes the docstring of a function by the text of its kind.

    Paragraphs of the kind follow the paragraphs of the function, and sections of the kind stand where the function has
    none. Args gets an entry for every parameter that the function does not describe: the entry of the kind or, where
    the kind has none, the entry in the docstring of `like`, a function with the same argument.
    """

    def decorate(function: Function) -> Function:
        if function.__doc__:
            parameters = tuple(inspect.signature(function).parameters)
            common = kind.replace("{name}", function.__name__.partition("_")[2])
            others = None if like is None else like.__doc__
            function.__doc__ = _merge(function.__doc__, common, others or "", parameters)
        return function

    return decorate


def _merge(text: str, kind: str, like: str, parameters: tuple[str, ...]) -> str:
    (first, sections), (second, common), (_, others) = map(_split, (text, kind, like))
    merged = common | sections
    for label, names in (("Args", parameters), ("Raises", ("ValueError", "NotImplementedError"))):
        if label in merged:
            entries: dict[str, str] = {}
            for each in (others, common, sections):
                entries |= _entries(each.get(label, ""))
            known = itertools.groupby((name for name in names if name in entries), entries.__getitem__)
            merged[label] = "".join(f"\n  {', '.join(group)}:{entry}" for entry, group in known)
    whole = "\n\n".join(filter(None, (first, second)))
    for label in (label for label in _LABELS if label in merged):
        # Figures follow one another line by line.
        whole += ("\n" if label in ("Cost", "Source") else "\n\n") + f"{label}:{merged[label]}"
    return whole


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Return the paragraphs of a docstring before its sections, and its sections by their labels."""
    first, *parts = map(str.rstrip, _LABEL.split(inspect.cleandoc(text)))
    return first, dict(zip(parts[::2], parts[1::2], strict=True))


def _entries(section: str) -> dict[str, str]:
    """Return the text of every entry of a section by the name that it describes."""
    parts = _NAMES.split(section)[1:]
    pairs = zip(parts[::2], map(str.rstrip, parts[1::2]), strict=True)
    return {name: entry for names, entry in pairs for name in names.split(", ")}
