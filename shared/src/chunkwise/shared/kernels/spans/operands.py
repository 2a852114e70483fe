"""The operands of the launches of all fused operators, and the static description of a launch, with the same names."""

import dataclasses
from typing import Any, Self

import jax

from chunkwise.shared.kernels import chunking
from chunkwise.shared.kernels.spans import chunk_spans

# An array that a launch does not have. The operator and the launch tell which arrays there are; a type cannot.
ABSENT: Any = None


@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays that a launch reads, in the layout of the kernels; None for an array that it does not have.

    A package whose kernels read other arrays too has a class of its own, with these and the others.

    Tokens are flat, [B, T, heads * D], with head dimensions as `packed.pad_channels` has them. A kernel holds a state
    as [K, V], or transposed as [V, K]: see the package. The package says the layout of values per token, too.

    Attributes:
      table, count: the table of spans in scalar memory and how many it has, or None: see `chunk_spans`.
      q, k: [B, T, H * K].
      v: [B, T, HV * V].
      g: decays in nats, or the raw gates of a law.
      beta: step sizes.
      initial_state: [N, HV, K, V] or [N, HV, V, K] float32.
      owner: int32 [B * NT, 1, lanes], the `coded_owners` of tokens where a chunk may hold several sequences.
      pool: the user's pool of states [slots, HV, K, V], in place of initial_state; it is neither padded nor transposed.
      A_inv: the inverses of all spans, float32, p heads side by side.
      h: the states before all spans, [B, spans, HV, K, V] or [B, spans, HV, V, K].
      v_new_over_beta: the new values divided by beta, float32, laid out as v.
      do: the cotangent of the output, laid out as v.
      dht: the cotangent of the final states, laid out as initial_state.
    """

    table: jax.Array | None = None
    count: jax.Array | None = None
    q: jax.Array = ABSENT
    k: jax.Array = ABSENT
    v: jax.Array = ABSENT
    g: jax.Array = ABSENT
    beta: jax.Array = ABSENT
    initial_state: jax.Array | None = None
    owner: jax.Array | None = None
    pool: jax.Array | None = None
    A_inv: jax.Array = ABSENT
    h: jax.Array = ABSENT
    v_new_over_beta: jax.Array = ABSENT
    do: jax.Array = ABSENT
    dht: jax.Array | None = None

    def spans(self, static: "FusedStatic") -> Any:
        """Return how many spans a launch has for a row of the batch: a number, or a traced scalar."""
        return static.spans if self.count is None else self.count

    def in_spans_of(self, static: "FusedStatic") -> Self:
        """Return the operands of a launch whose spans have `static.chunks` chunks, of which a row may have a few more.

        Only a table of chunks that may hold several sequences tells where a row ends.
        """
        if self.table is None or self.owner is None or static.chunks == 1:
            return self
        table, owner = chunk_spans.whole_spans(self.table, self.owner, static.B, static.chunks)
        return dataclasses.replace(self, table=table, owner=owner)

    def gradients(self) -> dict[str, Any]:
        """Return the operands by the names of their gradients, which have the same tokens."""
        return {f"d{name}": x for name, x in vars(self).items()}


jax.tree_util.register_dataclass(Operands)


@dataclasses.dataclass(frozen=True)
class FusedStatic:
    """The static description of a launch of a fused operator; a package may add to it.

    Attributes:
      B, T: rows of the batch and their tokens.
      H, HV: heads of q and k, and of v: value head n reads key head n // (HV // H).
      K, V: head dimensions, padded.
      C: tokens of a chunk.
      N: how many states go in and out.
      scale: the number that multiplies the queries, or the output.
      config: tile sizes of the package.
      varlen: every packed sequence has a state, and a span is a piece of a chunk, of one sequence.
      readable: tokens of a row that may be read. Rows of its last chunk behind them must not be: they are past the end
        of the arrays, or a law would make decays of their zeros.
      chunks: chunks of a span.
      listed: how many spans the table of a pool lists, where blocks of tokens end spans too; None for no pool.
      p: heads that lie side by side in the lanes.
      normalise: queries and keys are scaled to unit length first.
      compensate: step sizes make up for the rounding of keys, as `tiles.unit_keys` says, because step sizes may exceed
        1.
      per_channel: gates are per channel of the key.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    C: int
    N: int
    scale: float
    config: Any
    varlen: bool
    readable: int
    chunks: int = 1
    listed: int | None = None
    p: int = 1
    normalise: bool = False
    compensate: bool = False
    per_channel: bool = False

    @property
    def spans(self) -> int:
        """The spans of a row of the batch; each is some chunks, or a piece of them, of one sequence."""
        if self.listed is not None:
            return self.listed
        return chunking.num_chunks(self.T, self.chunks * self.C) + self.N * self.varlen

    @property
    def partial(self) -> bool:
        """Whether the last span of a row has rows that must not be read."""
        return self.readable % (self.chunks * self.C) > 0

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.HV // self.H

    def key_blocks(self, heads: int) -> tuple[int, int]:
        """Return the key heads of a block of value heads, and how many blocks share a key head."""
        return max(heads // self.group, 1), max(self.group // heads, 1)

    def in_spans_of(self, chunks: int) -> Self:
        """Return the description of a launch whose spans have so many chunks, where those of this one have one."""
        return dataclasses.replace(self, chunks=chunks)

    def in_long_spans(self) -> Self:
        """Return the description of a forward whose spans may have several chunks, as pieces have already.

        A span of a row is a quarter of it at most, because the stages of a kernel fill and empty once a row.
        """
        return self if self.varlen else self.in_spans_of(max(1, min(self.config.chunks, self.spans // 4)))

    def in_even_spans(self) -> Self:
        """Return the description of a backward whose spans may have several chunks, as pieces have already.

        There are about as many chunks in the last span of a row as in the others.
        """
        spans = -(-self.spans // self.config.chunks_bwd)
        return self if self.varlen else self.in_spans_of(-(-self.spans // spans))

    def sizes(self) -> dict[str, Any]:
        """Return the sizes that costs depend on, by name."""
        return dict(B=self.B, T=self.T, H=self.H, HV=self.HV, K=self.K, V=self.V, C=self.C)
