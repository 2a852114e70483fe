"""The Refs of the kernel of `decode.kernel`."""

from typing import NamedTuple

import jax

from chunkwise.shared.kernels import packed

# The most arrays of channels: one each for queries, keys and values, or one for all.
_ARRAYS = 3


class DecodeRefs(NamedTuple):
    """The Refs of the kernel. Queries, keys and values are channels of one array or of three.

    Attributes:
      boundaries: int32 [N + 1].
      write: int32 [N targets], the slots in the call.
      read: int32 [N], the slots of other sequences that sequences start from, or None.
      continues: int32 [N], 0 for a sequence that starts from zeros, or None.
      accepted: int32 [N], how many tokens of the decode before are kept, or None: over rings for all, else for one.
      decodes, sequences: int32 [1], the counts of the call.
      x0, x1, x2: [T, channels], inputs of the convolution, None for arrays that there are not.
      g, beta, z: [T, lanes], raw gates, raw step sizes and gates of the output, or None.
      w0, w1, w2, b0, b1, b2: [channels, W] and [1, channels], weights and biases of the convolution, or None.
      A_log, dt_bias, norm: [1, lanes], the arrays of the law and the weight of the norm, or None.
      conv0, conv1, conv2: pools of convolutions.
      states, scales, keys, writes, gates, count, drafts: the arrays of the `StatePool`, or None. Tokens of a ring are
        rows of one matrix for a slot: keys [slots, L H, K], writes [slots, L HV, V], and gates [slots, L, HV], or per
        channel [slots, L HV, K].
      o: [T, HV V].
      table: int32 [sequences numbers] in scalar memory, some numbers for a sequence: its first token; its slot to read,
        below 0 for none; over rings how many tokens its ring holds, or -1 minus that number if the ring is folded; for
        decodes of several tokens how many it has, and over rings the slot of convolutions that it reads; and its slots
        to write.
      taps: float32 [W, channels of all arrays], the weights of the convolution with channels in the lanes.
      tokens: float32 [T + 1, lanes], all arrays of tokens side by side, each in whole registers; the last row is zeros.
      rows: float32 [m, lanes], the tokens of the n sequences of a grid step: the first tokens, then the second ones,
        with m = n times the tokens of a decode.
      outputs: float32 [T + 1, HV V]; the last row is for sequences without a token.
      in0, in1, in2: buffers of slots of the convolutions, [2, n, W - 1, channels]; out0, out1, out2: the same, or
        for decodes of several tokens [2, n, tokens, W - 1, channels].
      before, after, scale_in, scale_out: buffers of slots, [2, n, ...], of those that are written [2, n, targets, ...]
        if a sequence writes several.
      ring_key, ring_write, ring_gate: buffers of rings, [2, n, ...].
      new_key, new_write, new_gate: buffers of tokens that are added to rings, [2, n, H, K] and [2, n, HV, V], and of
        their gates, [2, n, HV, K], or of all gates of rings, [2, n, L, HV]. Those of several tokens have a dimension
        of tokens after n.
      counts, drafts_of: int32 [slots] in scalar memory, the numbers of tokens of rings.
      parts: float32 [HV 8 m, K], parts of keys and queries; products: float32 [HV 8 m, V], parts times states.
      ring_parts: the same for reads from rings; None if they are the same.
      starts: float32 [n HV, K], the decays of states over rings for gates per channel; None for other gates.
      ring_reads: float32 [m 2 HV, V], the values that keys and queries read from rings.
      made: float32 [m, HV V], the values that the tokens write.
      reads, stores: semaphores of the copies, [2]; counting: the semaphore of the copies of counts.
    """

    boundaries: jax.Ref
    write: jax.Ref
    read: jax.Ref
    continues: jax.Ref
    accepted: jax.Ref
    decodes: jax.Ref
    sequences: jax.Ref
    x0: jax.Ref
    x1: jax.Ref
    x2: jax.Ref
    g: jax.Ref
    beta: jax.Ref
    z: jax.Ref
    w0: jax.Ref
    w1: jax.Ref
    w2: jax.Ref
    b0: jax.Ref
    b1: jax.Ref
    b2: jax.Ref
    A_log: jax.Ref
    dt_bias: jax.Ref
    norm: jax.Ref
    conv0: jax.Ref
    conv1: jax.Ref
    conv2: jax.Ref
    states: jax.Ref
    scales: jax.Ref
    keys: jax.Ref
    writes: jax.Ref
    gates: jax.Ref
    count: jax.Ref
    drafts: jax.Ref
    o: jax.Ref
    conv0_out: jax.Ref
    conv1_out: jax.Ref
    conv2_out: jax.Ref
    states_out: jax.Ref
    scales_out: jax.Ref
    keys_out: jax.Ref
    writes_out: jax.Ref
    gates_out: jax.Ref
    count_out: jax.Ref
    drafts_out: jax.Ref
    table: jax.Ref
    taps: jax.Ref
    tokens: jax.Ref
    rows: jax.Ref
    outputs: jax.Ref
    in0: jax.Ref
    in1: jax.Ref
    in2: jax.Ref
    out0: jax.Ref
    out1: jax.Ref
    out2: jax.Ref
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
    parts: jax.Ref
    ring_parts: jax.Ref
    starts: jax.Ref
    products: jax.Ref
    ring_reads: jax.Ref
    made: jax.Ref
    reads: jax.Ref
    stores: jax.Ref
    counting: jax.Ref

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of copies."""
        return "conv", "states", *(("keys", "writes", "gates") if self.has_rings else ())

    @property
    def targets(self) -> int:
        """How many slots a sequence writes: without rings one for each token of a decode."""
        return self.write.shape[0] // (self.boundaries.shape[0] - 1)

    @property
    def has_rings(self) -> bool:
        """Whether the states have rings."""
        return self.keys is not None

    def arrays(self, name: str, suffix: str = "") -> list[jax.Ref]:
        """Return the Refs of a name, one for every array of channels."""
        found = (getattr(self, f"{name}{i}{suffix}") for i in range(_ARRAYS))
        return [ref for ref in found if ref is not None]

    @property
    def lanes(self) -> dict[str, slice]:
        """The lanes of each array in `tokens`: the channels, one array after the other, and the gates."""
        found, at = {}, 0
        for name in ("x0", "x1", "x2", "g", "beta", "z"):
            if (ref := getattr(self, name)) is not None:
                found[name] = slice(at, at + ref.shape[1])
                at += packed.pad_lanes(ref.shape[1])
        return found
