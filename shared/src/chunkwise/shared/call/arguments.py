"""The arguments of an operator on their way from the call to an implementation."""

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from chunkwise.shared import compat
from chunkwise.shared.call import checks, faults, gates
from chunkwise.shared.kernels import chunking, interleaved, launcher, tiles
from chunkwise.shared.kernels.interleaved import Interleaved
from chunkwise.shared.kernels.spans.operands import ABSENT

# Gates that are differences of large numbers may round to more than 0.
_ABOVE = 1e-2


class Slots(NamedTuple):
    """Where the states of N sequences lie, and for a serving step which sequences there are; all int32, traced.

    Attributes:
      state_indices: [N], the slot of every sequence in a pool of states [slots, HV, K, V]. Slots are distinct.
        A sequence with a negative slot, or a slot past the end, starts from zeros, and its state is dropped; such slots
        may repeat. None puts the state of sequence n in slot n. In a serving step also [N, W]: the slot of the state
        after every token of a decode; the state after a prefill goes to the first of them.
      has_initial_state: bool [N], False for a sequence that starts from zeros whatever its slot holds; None for True.
      read_indices: [N], the slot to start from instead; None to start from state_indices.
      num_accepted_tokens: [N], one more than the column of state_indices to start from; None for 1.
      block_state_indices: [N, M], the slot of the state after every block of tokens, or None.
      num_decodes: scalar, how many sequences are decodes, which come first, have at most W tokens and go token by
        token; None for 0.
      num_sequences: scalar, how many of the N sequences exist; None for all.
    """

    state_indices: jax.Array = ABSENT
    has_initial_state: jax.Array | None = None
    read_indices: jax.Array | None = None
    num_accepted_tokens: jax.Array | None = None
    block_state_indices: jax.Array | None = None
    # A caller may give a number, and a type cannot say where it is an array.
    num_decodes: Any = None
    num_sequences: jax.Array | int | None = None


class Arguments(NamedTuple):
    """The arrays of an operator; None where it has no such argument, or none was given.

    Attributes:
      q, k: [B, T, H, K].
      v: [B, T, HV, V].
      g: log decay in nats, [B, T, HV] or [B, T, HV, K], or the raw gate of a law.
      beta: step sizes [B, T, HV], or raw ones; None beside erase keys or gates for ones.
      g_gamma: constant log decay [HV].
      scale: a number, or a scalar array, which may be traced.
      initial_state: [N, HV, K, V], or with slots the pool [slots, HV, K, V], or a StatePool.
      cu_seqlens: int32 [N + 1].
      A_log, dt_bias: arrays of the law of raw gates, [HV], and [HV] or [HV, K].
      segment_ids: int32 [B, T].
      slots: where the states of the sequences lie in a pool; None for no pool.
      p: erase keys of a delta rule that does not erase by k, [B, T, H, K] or [B, T, HV, K].
      echo: keys [B, T, H, K] that write what erase keys read, beside k, which writes v; then there is no beta.
      b, w: erase gates [B, T, HV, K], which multiply k to make p, and write gates [B, T, HV, V], which multiply v.
      log_weight: logs of the weights with which tokens are written, [B, T, HV].
      least: [B, T, HV], the least divisors of outputs that are divided by what queries read from the sums of keys. Then
        states have these sums as one more channel. It has no gradient.
      skip: [HV, V], multiplies v, and is added to the output.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array = ABSENT
    beta: jax.Array = ABSENT
    g_gamma: jax.Array | None = None
    scale: Any = None
    initial_state: Any = None
    cu_seqlens: jax.Array = ABSENT
    A_log: jax.Array | None = None
    dt_bias: jax.Array | None = None
    segment_ids: jax.Array | None = None
    slots: Any = None
    p: jax.Array | None = None
    echo: jax.Array | None = None
    b: jax.Array | None = None
    w: jax.Array | None = None
    log_weight: jax.Array | None = None
    least: jax.Array | None = None
    skip: jax.Array | None = None

    @property
    def channels(self) -> int:
        """The channels of a state, beside those of keys."""
        return self.v.shape[3] + (self.least is not None)

    @property
    def erases(self) -> bool:
        """Whether there are erase keys, or the gates that make them."""
        return self.p is not None or self.b is not None

    def arrays(self) -> dict[str, Any]:
        """Return the arguments that are arrays, and the arrays of the slots, by name."""
        named = self._asdict() | ({} if self.slots is None else self.slots._asdict())
        return {name: x for name, x in named.items() if hasattr(x, "shape") and hasattr(x, "dtype")}

    def with_int32(self) -> "Arguments":
        """Return arguments whose boundaries, ids and slots are int32, if they are numpy integers that fit."""
        slots = None if self.slots is None else type(self.slots)(*map(checks.as_int32, self.slots))
        ids, ends = checks.as_int32(self.segment_ids), checks.as_int32(self.cu_seqlens)
        return self._replace(cu_seqlens=ends, segment_ids=ids, slots=slots)

    def with_arrays(self, arrays: dict[str, Any]) -> "Arguments":
        """Return arguments with these arrays in the place of `self.arrays()`; an array that is missing becomes None."""
        named: dict[str, Any] = dict.fromkeys(self.arrays()) | arrays
        of = lambda fields: {name: x for name, x in named.items() if name in fields}
        slots = None if self.slots is None else self.slots._replace(**of(Slots._fields))
        return self._replace(**of(Arguments._fields), slots=slots)

    @property
    def num_states(self) -> int:
        """N, the number of sequences: rows of the batch, or packed sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def with_state(self) -> bool:
        """Whether there is an initial state."""
        return self.initial_state is not None


class Options(NamedTuple):
    """The static arguments of an operator, which are known when its program is built.

    Attributes:
      output_final_state: return the states after the last tokens.
      use_qk_l2norm_in_kernel: scale queries and keys to unit length.
      chunk_size: tokens of a chunk; None for the best.
      min_gate: a promise that every gate is at least this, in nats; None for no promise.
      activation: the activations of raw gates and step sizes.
      sharding: how v is split over a mesh with automatic axes; None if the type of v says it.
      context_axis: the axes of a mesh, inside a `shard_map`, over which tokens are split; None for none.
      block_size: tokens of a block after which a state is stored; None for no blocks.
      decode_tokens: the most tokens of a decode over a pool with a ring; None where state_indices say it.
      config: tile sizes of the fused kernels, the `Config` of the package; None for the best.
      erase_before_decay: whether erase keys read the state before the decay of their token, a law of the operator.
      scale: the number that multiplies the output, beside `Arguments.scale`, which is then an array or None; None
        before it is chosen.
      large_steps: step sizes or erase gates may exceed 1; False where a sigmoid makes them.
      disable_recompute: keep every array of the forward that the backward reads, also where it is made again otherwise.
      eps: is added to the divisors of outputs.
    """

    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    chunk_size: int = ABSENT
    min_gate: float | None = None
    activation: gates.GateActivation = gates.GateActivation()
    sharding: checks.Sharding | None = None
    context_axis: str | tuple[str, ...] | None = None
    block_size: int | None = None
    decode_tokens: int | None = None
    config: Any = None
    erase_before_decay: bool = False
    scale: float = ABSENT
    large_steps: bool = True
    disable_recompute: bool = False
    eps: float = 0.0


def fold_weights(x: Arguments) -> tuple[Arguments, Callable[[jax.Array], jax.Array]]:
    """Return arguments whose values have the weights of their tokens, and the function that adds the skip to o.

    Padding, which may hold anything, becomes zeros.
    """
    if x.log_weight is None:
        return x, lambda o: o
    valid = chunking.valid_tokens(x.cu_seqlens, None, x.v.shape[1])
    return weigh(x._replace(log_weight=None), jnp.exp(x.log_weight), valid)


def weigh(
    x: Arguments, weight: jax.Array, valid: jax.Array | None
) -> tuple[Arguments, Callable[[jax.Array], jax.Array]]:  # fmt: skip
    """Return what `fold_weights` does, for weights [B, T, HV] that are no logs, and for the tokens that are `valid`."""
    v = chunking.select_tokens(valid, x.v).astype(jnp.float32)
    own = 0.0 if x.skip is None else x.skip[None, None] * v
    weighted = (weight[..., None] * v).astype(x.v.dtype)
    return x._replace(v=weighted, skip=None), lambda o: (o.astype(jnp.float32) + own).astype(o.dtype)


def total_gate(x: Arguments) -> jax.Array:
    """Return the sum of g and g_gamma, [B, T, HV] or [B, T, HV, K] float32; a gate that is None counts as zeros."""
    total = jnp.zeros(x.v.shape[:3], jnp.float32) if x.g is None else tiles.clip_gate(x.g)
    if x.g_gamma is None:
        return total
    constant = tiles.clip_gate(x.g_gamma)
    return total + (constant[None, None, :, None] if total.ndim == 4 else constant[None, None])


def as_two_tokens(x: Arguments) -> Arguments:
    """Return two tokens in the place of each token with an `echo`: one erases alone, and one writes alone.

    The first one has the gate, and adds by a value of zeros and a step size of -1 what its erase key reads. The second
    one has the query. Boundaries stay those of x.
    """
    first, second = (lambda y: interleaved.place(y, 2, 0)), lambda y: interleaved.place(y, 2, 1)
    echo: Any = x.echo
    dtype = x.k.dtype if x.k.dtype == echo.dtype else jnp.float32
    signs = jnp.tile(jnp.asarray([-1.0, 1.0], jnp.float32), x.v.shape[1])
    beta = jnp.broadcast_to(signs[None, :, None], (x.v.shape[0], signs.size, x.v.shape[2]))
    written: Any = Interleaved(echo.astype(dtype), x.k.astype(dtype))
    tokens: Any = dict(q=second(x.q), k=written, v=second(x.v), p=first(x.p), g=first(x.g), beta=beta)
    return x._replace(**tokens, echo=None)


def one_gate(x: Arguments) -> Arguments:
    """Return arguments with g_gamma added to g; without g a launch of decodes takes g_gamma as it is, or None."""
    return x if x.g is None else x._replace(g=total_gate(x), g_gamma=None)


def choose_scale(x: Arguments, options: Options) -> tuple[Arguments, Options]:
    """Return arguments whose scale is an array or None, and options with the number that multiplies it."""
    number, array = launcher.split_scale(x.q.shape[-1] ** -0.5 if x.scale is None else x.scale)
    return x._replace(scale=array), options._replace(scale=number)


def whole_scale(x: Arguments, options: Options) -> jax.Array:
    """Return the scale of the output, a float32 scalar."""
    return jnp.asarray(options.scale, jnp.float32) if x.scale is None else options.scale * x.scale


def check_shared(x: Arguments, options: Options) -> Arguments:
    """Check the arguments that all operators share, but for the tensors, the implementation and the sizes of tiles.

    Returns:
      The arguments, with the A_log of a law as [HV].
    """
    flags = "output_final_state", "use_qk_l2norm_in_kernel", "disable_recompute"
    checks.check_flags(**{name: getattr(options, name) for name in flags})
    checks.check_scale(x.scale)
    gates.check_gate_activation(options.activation, x.A_log, x.dt_bias, x.g)
    B, T = x.q.shape[:2]
    if x.slots is None or x.slots.num_sequences is None:
        # The boundaries are of the tokens of all devices, and T is a device's part of them under a `context_axis`.
        checks.check_cu_seqlens(x.cu_seqlens, B, T * lax.axis_size(checks.check_context_axis(options.context_axis)))
    else:
        # The boundaries of sequences that do not exist may be anything.
        checks.check_packed(x.cu_seqlens, B)
    checks.check_segment_ids(x.segment_ids, B, T, x.cu_seqlens)
    return x._replace(A_log=gates.by_head(x.A_log, options.activation, x.v.shape[2]))


def warn_head_first(x: Arguments, options: Options) -> None:
    """Warn the caller of an operator whose tensors seem to be [B, H, T, K]: read as [B, T, H, K], they have T <= H.

    Such tensors raise an error elsewhere if value heads are grouped, or if another argument shows how many heads or how
    many tokens there are. Under a `context_axis` a small T is usual, because it is a device's part of the tokens.
    """
    q = interleaved.first(x.q)
    T, H = q.shape[1:3]
    telling = (x.initial_state, x.cu_seqlens, x.segment_ids, x.g_gamma, x.A_log, options.context_axis)
    if isinstance(T, int) and T <= H == x.v.shape[2] and H > 1 and all(y is None for y in telling):
        warnings.warn(
            f"`q` should have shape [B, T, H, K]; got {tuple(q.shape)}, with T = {T} and H = {H}: are the tensors "
            f"head-first, [B, H, T, K]?",
            stacklevel=_level_of_caller(),
        )


def warn_decays(x: Arguments, options: Options) -> None:
    """Warn the caller of gates above 0, as decays are where their logs belong, if their values are known."""
    read = jax.tree.leaves((x.g, x.cu_seqlens, x.segment_ids))
    concrete = lambda y: isinstance(y, jax.Array | np.ndarray) and getattr(y, "is_fully_addressable", True)
    known = faults.are_known(read) and all(map(concrete, read))
    if x.g is None or options.activation.law is not None or not known:
        return
    # Inside of jit, JAX would otherwise trace computations on constants, too.
    with jax.ensure_compile_time_eval():
        g = x.g.whole() if isinstance(x.g, interleaved.Interleaved) else x.g
        valid = chunking.valid_tokens(x.cu_seqlens, x.segment_ids, g.shape[1])
        most = float(jax.device_get(jnp.max(chunking.select_tokens(valid, g))))
    if most > _ABOVE:
        warnings.warn(
            f"`g` should be the log of a decay, at most 0; got {most:.3g}: is it the decay itself, or a raw gate?",
            stacklevel=_level_of_caller(),
        )


def _level_of_caller() -> int:
    """Return how many calls lie between the caller of this function and the line outside of chunkwise, for `warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("chunkwise."):
        level, frame = level + 1, frame.f_back
    return level


def with_final_gates(x: Arguments, options: Options, raw_gates: bool = False) -> tuple[Arguments, Options]:
    """Return arguments whose step sizes are final and whose gates are decays, and options that say so.

    With `raw_gates`, raw gates per channel, erase gates and write gates stay as they are, for an implementation that
    takes them. Without it, erase keys take the place of erase gates.
    """
    activation, valid = options.activation, chunking.valid_tokens(x.cu_seqlens, x.segment_ids, x.q.shape[1])
    if activation.use_beta_sigmoid_in_kernel:
        x = x._replace(beta=gates.step_sizes(x.beta, activation.allow_neg_eigval, valid))
    if activation.use_erase_sigmoid_in_kernel:
        x = x._replace(b=gates.step_sizes(x.b, activation.allow_neg_eigval, valid))
    if activation.use_write_sigmoid_in_kernel and x.w is not None:
        x = x._replace(w=gates.step_sizes(x.w, False, valid))
    if x.erases and x.beta is None and x.echo is None:
        x = x._replace(beta=compat.varying_zeros(x.v.shape[:3], *x.arrays().values()) + 1.0)
    if x.erases and not raw_gates:
        x, options = _with_erase_keys(x, options, valid)
    raw_gates = raw_gates and x.g is not None and (x.g.ndim == 4 or not x.erases)
    left = activation.of_gates() if raw_gates else gates.GateActivation()
    if activation.law is not None and not raw_gates:
        x = x._replace(g=gates.decays(x.g, x.A_log, x.dt_bias, activation.law, valid), A_log=None, dt_bias=None)
    raw = activation.use_beta_sigmoid_in_kernel or activation.use_erase_sigmoid_in_kernel
    large = activation.allow_neg_eigval or not raw
    return x, options._replace(activation=left, min_gate=_promised(options), large_steps=large)


def _with_erase_keys(x: Arguments, options: Options, valid: jax.Array | None) -> tuple[Arguments, Options]:
    """Return arguments with erase keys of every value head in place of erase gates, and with the values to be written.

    These arrays are float32, and queries and keys have unit length if the options ask for it. Tokens that are not
    `valid` may hold anything, and become zeros.
    """
    named = {name: getattr(x, name) for name in ("q", "k", "v", "p", "echo", "b", "w")}
    named = {name: chunking.select_tokens(valid, y).astype(jnp.float32) for name, y in named.items() if y is not None}
    if options.use_qk_l2norm_in_kernel:
        named |= {name: tiles.l2norm(named[name]) for name in ("q", "k", "p") if name in named}
    p = jnp.repeat(named.get("p", named["k"]), x.v.shape[2] // x.q.shape[2], axis=2)
    p, v = (p * named["b"] if "b" in named else p), named["v"] * named.get("w", 1.0)
    x = x._replace(q=named["q"], k=named["k"], v=v, p=p, echo=named.get("echo"), b=None, w=None)
    return x, options._replace(use_qk_l2norm_in_kernel=False)


def _promised(options: Options) -> float | None:
    """Return the bound that no gate is below, the higher one of `min_gate` and `lower_bound`; None for no bound."""
    bounds = [x for x in (options.min_gate, options.activation.lower_bound) if x is not None]
    return max(bounds, default=None)
