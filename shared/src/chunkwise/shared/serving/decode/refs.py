"""The Refs of the kernel of `decode.kernel`, in records of one kind each."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import packed

# The most arrays of channels: one each for queries, keys and values, or one for all.
_ARRAYS = 3


class StepRefs(NamedTuple):
    """Which sequences there are, and their slots.

    Attributes:
      boundaries: int32 [N + 1].
      write: int32 [N targets], the slots in the call.
      read: int32 [N], the slots of other sequences that sequences start from, or None.
      continues: int32 [N], 0 for a sequence that starts from zeros, or None.
      accepted: int32 [N], how many tokens of the decode before are kept, or None: over rings for all, else for one.
      decodes, sequences: int32 [1], the counts of the call.
      table: int32 [sequences numbers] in scalar memory, some numbers for a sequence: its first token; its slot to read,
        below 0 for none; over rings how many tokens its ring holds, or -1 minus that number if the ring is folded; for
        decodes of several tokens how many it has, and over rings the slot of convolutions that it reads; and its slots
        to write.
    """

    boundaries: jax.Ref
    write: jax.Ref
    read: jax.Ref
    continues: jax.Ref
    accepted: jax.Ref
    decodes: jax.Ref
    sequences: jax.Ref
    table: jax.Ref


class TokenRefs(NamedTuple):
    """The tokens of the serving step, and of a grid step. Queries, keys and values are channels of one or three arrays.

    Attributes:
      x: [T, channels] each, inputs of the convolution.
      g, beta, z, p, echo: [T, lanes], raw gates, raw step sizes, gates of the output, erase keys, and keys that write
        what these read, or None.
      o: [T, HV V].
      side_by_side: float32 [T + 1, lanes], all arrays of tokens, each in whole registers; the last row is zeros.
      rows: float32 [m, lanes], the tokens of the n sequences of a grid step: the first tokens, then the second ones,
        with m = n times the tokens of a decode.
      outputs: float32 [T + 1, HV V]; the last row is for sequences without a token.
    """

    x: tuple[jax.Ref, ...]
    g: jax.Ref
    beta: jax.Ref
    z: jax.Ref
    p: jax.Ref
    echo: jax.Ref
    o: jax.Ref
    side_by_side: jax.Ref
    rows: jax.Ref
    outputs: jax.Ref

    @property
    def named(self) -> dict[str, jax.Ref]:
        """The arrays of tokens by their names, in their order side by side."""
        named = {f"x{i}": ref for i, ref in enumerate(self.x)}
        named |= {"g": self.g, "beta": self.beta, "z": self.z, "p": self.p, "echo": self.echo}
        return {name: ref for name, ref in named.items() if ref is not None}


class PoolRefs(NamedTuple):
    """The pools in HBM, updated in place.

    Attributes:
      conv: the pools of convolutions.
      states, scales, keys, writes, gates, count, drafts: the arrays of the `StatePool`, or None. Tokens of a ring are
        rows of one matrix for a slot: keys [slots, L H, K], writes [slots, L HV, V], and gates [slots, L, HV], or per
        channel [slots, L HV, K].
    """

    conv: tuple[jax.Ref, ...]
    states: jax.Ref
    scales: jax.Ref
    keys: jax.Ref
    writes: jax.Ref
    gates: jax.Ref
    count: jax.Ref
    drafts: jax.Ref


class BufferRefs(NamedTuple):
    """The buffers of slots, between which and the pools the kernel copies, and the semaphores of copies.

    Attributes:
      conv_in: buffers of slots of the convolutions, [2, n, W - 1, channels] each; conv_out: the same, or for decodes of
        several tokens [2, n, tokens, W - 1, channels].
      before, scale_in: the states and scales that are read, [2, n, ...]; where states lie transposed, those of heads
        that lie side by side are one matrix.
      after, scale_out: the states and scales that are written, [2, n, ...], or [2, n, targets, ...] if a sequence
        writes several states.
      ring_key, ring_write, ring_gate: buffers of rings, [2, n, ...].
      new_key, new_write: the tokens that are added to rings, [2, n, H, K] and [2, n, HV, V]; decodes of several tokens
        have a dimension of tokens after n.
      new_gate: gates per channel of these tokens, [2, n, HV, K], or all gates per head of the rings, [2, n, L, HV].
      counts, drafts_of: int32 [slots] in scalar memory, the numbers of tokens of rings.
      reads, stores, counting: the semaphores of copies: of slots that are read and that are written, [2], and of the
        numbers of tokens of rings.
    """

    conv_in: tuple[jax.Ref, ...]
    conv_out: tuple[jax.Ref, ...]
    before: jax.Ref
    after: jax.Ref
    scale_in: jax.Ref
    scale_out: jax.Ref
    ring_key: jax.Ref
    ring_write: jax.Ref
    ring_gate: jax.Ref
    new_key: jax.Ref
    new_write: jax.Ref
    new_gate: jax.Ref
    counts: jax.Ref
    drafts_of: jax.Ref
    reads: jax.Ref
    stores: jax.Ref
    counting: jax.Ref


class WorkRefs(NamedTuple):
    """What a grid step computes with: buffers, and the weights of a layer, empty or None for an operator alone.

    Attributes:
      taps: float32 [W, channels of all arrays], the weights of the convolution with channels in the lanes.
      parts: float32 [HV 8 m, K], parts of keys and queries; products: float32 [HV 8 m, V], parts times states.
      ring_parts: the same for reads from rings; None if they are the same.
      starts: float32 [n HV, K], the decays of states over rings for gates per channel; None for other gates.
      ring_reads: float32 [m 2 HV, V], the values that keys and queries read from rings.
      folded_keys, folded_writes: float32 [L HV, K] and [L HV, V], the decayed keys and the writes of a ring;
        folded_decay: float32 [HV, K], the decays of its states.
      made: float32 [m, HV V], the values that the tokens write by k, and beside them those that they write by `echo`.
      between: float32 [n, HV, K, V], the states between the tokens of decodes that a loop takes; else None.
      w, b: [channels, W] and [1, channels] each, weights and biases of the convolution.
      A_log, dt_bias, norm, norm_bias, own, gamma, skip: [1, lanes], the arrays of the law, the weight and bias of the
        norm, the weights of a token's own share, constant decays and the shares of values in outputs.
    """

    taps: jax.Ref
    parts: jax.Ref
    ring_parts: jax.Ref
    starts: jax.Ref
    products: jax.Ref
    ring_reads: jax.Ref
    folded_keys: jax.Ref
    folded_writes: jax.Ref
    folded_decay: jax.Ref
    made: jax.Ref
    between: jax.Ref
    w: tuple[jax.Ref, ...]
    A_log: jax.Ref
    dt_bias: jax.Ref
    norm: jax.Ref
    norm_bias: jax.Ref
    own: jax.Ref
    gamma: jax.Ref
    skip: jax.Ref
    b: tuple[jax.Ref, ...]


class DecodeRefs(NamedTuple):
    """The Refs of the kernel, in records."""

    step: StepRefs
    tokens: TokenRefs
    pools: PoolRefs
    buffers: BufferRefs
    work: WorkRefs

    @classmethod
    def of_names(cls, **named: jax.Ref) -> "DecodeRefs":
        """Return the Refs by the names that the launch gives them; a name that is missing becomes None."""
        each = lambda begin, end: (named.get(f"{begin}{i}{end}") for i in range(_ARRAYS))
        arrays = lambda begin, end="": tuple(ref for ref in each(begin, end) if ref is not None)
        known: dict[str, Any] = named | {name: named.get(f"{name}_out") for name in PoolRefs._fields}
        known |= dict(x=arrays("x"), w=arrays("w"), b=arrays("b"), conv=arrays("conv", "_out"))
        known |= dict(conv_in=arrays("in"), conv_out=arrays("out"))

        kinds: Any = StepRefs, TokenRefs, PoolRefs, BufferRefs, WorkRefs
        return cls(*(kind(**{name: known.get(name) for name in kind._fields}) for kind in kinds))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of copies."""
        return "conv", "states", *(("keys", "writes", "gates") if self.has_rings else ())

    @property
    def targets(self) -> int:
        """How many slots a sequence writes: without rings one for each token of a decode."""
        return self.step.write.shape[0] // (self.step.boundaries.shape[0] - 1)

    @property
    def first_row(self) -> int:
        """0 if erase keys and queries read states, 1 if queries alone do."""
        return int(self.tokens.beta is None and self.tokens.echo is None)

    @property
    def has_rings(self) -> bool:
        """Whether the states have rings."""
        return self.pools.keys is not None

    def state(self, b, place: int, head: int) -> jax.Array:
        """Return the state [K, V] of a value head before the tokens that the kernel takes at once."""
        return self.buffers.before[b, place, head] if self.work.between is None else self.work.between[place, head]

    @property
    def ring_tokens(self) -> int:
        """How many tokens a ring can hold."""
        return self.work.folded_keys.shape[0] // self.work.folded_decay.shape[0]

    def ring(self, name: str, b, place: int) -> jax.Array:
        """Return the keys, writes or gates of a ring in the buffers as one matrix, the rows of its tokens in turn."""
        x = getattr(self.buffers, f"ring_{name}")[b, place]
        if x.ndim == 2:
            return x
        rows = [x[at].astype(jnp.float32) for at in itertools.product(*map(range, x.shape[:-2]))]
        return jnp.concatenate(rows).astype(x.dtype)

    @property
    def lanes(self) -> dict[str, slice]:
        """The lanes of each array side by side: the channels, one array after the other, and the gates."""
        found, at = {}, 0
        for name, ref in self.tokens.named.items():
            found[name] = slice(at, at + ref.shape[1])
            at += packed.pad_lanes(ref.shape[1])
        return found
