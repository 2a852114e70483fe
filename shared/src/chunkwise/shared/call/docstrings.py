"""Docstrings of public functions: paragraphs, sections and entries that functions of one kind share.

The docstring of a function in the source has only the text that is particular to the function; `completed` adds the
rest, so that `help()` and the documentation site show the whole. It opens with the call: a summary, the equation, the
shapes and an example. A text of a kind has `{name}` in the place of an operator's name, `{function}` of the function's,
`{arrays}` and `{shapes}` of the arrays that every call gives, and `{names}` and `{results}` of what the function
returns.
"""

import inspect
import itertools
import re
import textwrap
from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)

CHUNK = """
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

RECURRENT = """
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

RAGGED = """
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

STAGE = """
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

KINDS = {"chunk": CHUNK, "recurrent": RECURRENT, "ragged": RAGGED}

_LABELS = ("Dims", "Args", "Returns", "Raises", "Accuracy", "Cost", "Source")
_LABEL = re.compile(rf"^({'|'.join(_LABELS)}):", re.MULTILINE)
_NAMES = re.compile(r"^  (\w+(?:, \w+)*):", re.MULTILINE)


def completed(kind: str, like: Callable | None = None) -> Callable[[Function], Function]:
    """Return a decorator that completes the docstring of a function by the text of its kind.

    An equation is a block of code after the summary; where the function has none, it has the equation of `like`. The
    paragraphs of the kind follow it, and then the other paragraphs of the function. A section of the kind is added
    where the function has no such section. Args gets an entry for every parameter that the function does not describe:
    the entry of the kind or, where the kind has none, the entry in the docstring of `like`, a function with the same
    argument.
    """

    def decorate(function: Function) -> Function:
        if function.__doc__:
            parameters = inspect.signature(function).parameters
            common = kind.replace("{name}", function.__name__.partition("_")[2])
            others = None if like is None else like.__doc__
            whole = _merge(function.__doc__, common, others or "", tuple(parameters))
            # Without gates a rule forgets nothing, so an example has them.
            arrays = [name for name, x in parameters.items() if x.default is x.empty or name == "g"]
            function.__doc__ = _with_call(whole, function.__name__, arrays)
        return function

    return decorate


def _merge(text: str, kind: str, like: str, parameters: tuple[str, ...]) -> str:
    (first, sections), (second, common), (third, others) = map(_split, (text, kind, like))
    summary, equation, rest = _opening(first)
    merged = common | sections
    for label, names in (("Args", parameters), ("Raises", ("ValueError", "NotImplementedError"))):
        if label in merged:
            entries: dict[str, str] = {}
            for each in (others, common, sections):
                entries |= _entries(each.get(label, ""))
            known = itertools.groupby((name for name in names if name in entries), entries.__getitem__)
            merged[label] = "".join(f"\n  {', '.join(group)}:{entry}" for entry, group in known)
    whole = "\n\n".join(filter(None, (summary, equation or _opening(third)[1], second, rest)))
    for label in (label for label in _LABELS if label in merged):
        # Accuracy, Cost and Source make one block of lines.
        whole += ("\n" if label in ("Cost", "Source") else "\n\n") + f"{label}:{merged[label]}"
    return whole


def _opening(first: str) -> tuple[str, str, str]:
    """Return the summary, the equation after it, and the other paragraphs of the text before the sections."""
    summary, *rest = first.split("\n\n")
    equation = rest.pop(0) if rest and rest[0].startswith("    ") else ""
    return summary, equation, "\n\n".join(rest)


def _with_call(text: str, function: str, arrays: list[str]) -> str:
    """Fill in the call: an array has the first shape in its entry, and Returns names the results with their shapes."""
    if "{shapes}" not in text:
        return text
    sections = _split(text)[1]
    entries = _entries(sections["Args"])
    results = re.findall(r"(\w+) (\[.*?\])", sections["Returns"])
    by_shape = lambda pairs: "; ".join(
        f"{', '.join(name for name, other in pairs if other == shape)} {shape}"
        for shape in dict.fromkeys(shape for _, shape in pairs)
    )
    filled = {
        "function": function,
        "arrays": ", ".join(arrays),
        "shapes": by_shape([(name, shape[0]) for name in arrays if (shape := re.search(r"\[.*?\]", entries[name]))]),
        "names": ", ".join(name for name, _ in results),
        "results": by_shape(results),
    }
    for name, value in filled.items():
        text = text.replace(f"{{{name}}}", value)
    # A line ends after a semicolon, not inside of a shape.
    wrap = lambda line: textwrap.fill(re.sub("(?<!;) ", "\0", line[0]), 120).replace("\0", " ")
    return re.sub(r"^Shapes: .*$", wrap, text, count=1, flags=re.MULTILINE)


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Return the paragraphs of a docstring before its sections, and its sections by their labels."""
    first, *parts = map(str.rstrip, _LABEL.split(inspect.cleandoc(text)))
    return first, dict(zip(parts[::2], parts[1::2], strict=True))


def _entries(section: str) -> dict[str, str]:
    """Return the text of every entry of a section by the name that it describes."""
    parts = _NAMES.split(section)[1:]
    pairs = zip(parts[::2], map(str.rstrip, parts[1::2]), strict=True)
    return {name: entry for names, entry in pairs for name in names.split(", ")}
