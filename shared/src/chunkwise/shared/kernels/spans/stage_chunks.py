"""The chunks of a grid step: which rows of them a stage may read, and where they keep sequences apart."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels.spans import chunk_spans, layout, nonfinite
from chunkwise.shared.kernels.spans.operands import ABSENT, FusedStatic


class Rows(enum.Enum):
    """Which rows of its chunks a grid step may use; this chooses the variant of its body.

    Attributes:
      ALL: every row, all of one sequence.
      SOME: some rows, all of one sequence; the others belong to another span or are past the last token, and may hold
        anything.
      MIXED: rows of several sequences, which masks keep apart, or padding.
    """

    ALL = enum.auto()
    SOME = enum.auto()
    MIXED = enum.auto()


class StageChunk(NamedTuple):
    """The chunk that a stage of a grid step works on, and which of its rows the stage may read.

    Attributes:
      span: the span of the launch.
      masks: how the sequences lie in the chunk; None unless the rows of the grid step are mixed.
      valid: bool [C, 1], the rows to read; others may hold anything. None for all rows.
      nonfinite_rows: float32 [1, C, 1], the rows of sequences that are not finite; None until `isolate` looks for them.
      index: the number of the chunk among the chunks of the grid step.
    """

    span: chunk_spans.Span
    masks: layout.SequenceMasks = ABSENT
    valid: jax.Array = ABSENT
    nonfinite_rows: jax.Array = ABSENT
    index: Any = 0

    @property
    def same(self) -> Any:
        """Pairs of one sequence, bool [1, C, w]; None if all rows are of one sequence."""
        return None if self.masks is None else self.masks.same

    @property
    def carried(self) -> Any:
        """Rows of the sequence that is open where the chunk begins, bool [1, C, 1]; None if all rows belong to it."""
        return None if self.masks is None else self.masks.carried

    @property
    def ending(self) -> Any:
        """Rows of the sequence that is open where the chunk ends, bool [1, C, 1]; None if all rows belong to it."""
        return None if self.masks is None else self.masks.ending

    def rows(self, C: int) -> slice:
        """Return which rows of a block of tokens are the chunk's."""
        return slice(self.index * C, (self.index + 1) * C)

    def isolate(self, find: Callable[[], jax.Array], *states: tuple, stages: int = 1) -> "StageChunk":
        """Return the chunk without the rows of sequences that are not finite, so that no product reads them.

        `nonfinite.isolate` describes the arguments and the changes of the states. In a pipeline of several stages there
        may be nothing to find, because the chunk of another stage is the mixed one.
        """
        if self.masks is None:
            return self
        mixed = None if stages == 1 else self.span.mixed == 1
        valid, nonfinite_rows = nonfinite.isolate(self.masks, find, *states, mixed=mixed)
        return self._replace(valid=valid, nonfinite_rows=nonfinite_rows)

    def poison(self, results: Sequence, *states: tuple, in_lanes: Sequence = ()) -> None:
        """Store NaN in the results of the sequences that `isolate` found: see `nonfinite.poison`."""
        if self.masks is not None:
            nonfinite.poison(self.nonfinite_rows, self.masks, results, *states, in_lanes=in_lanes)

    def state_in(self, S: jax.Array, owned: jax.Array, part: slice = slice(None)) -> tuple["StageChunk", jax.Array]:
        """Return the chunk, and the state before it without what is not finite; its sequence has the rows `owned`.

        The chunk that is returned knows whether the state was finite, for `decay_out` and `poisoned`. They do without a
        branch, which would stand between the chunks of a grid step. `part` is described in `nonfinite.take_state`.
        """
        if self.masks is None:
            return self, S
        S, nonfinite_rows = nonfinite.take_state(S, self.nonfinite_rows, owned, part)
        return self._replace(nonfinite_rows=nonfinite_rows), S

    def decay_out(self, decay: jax.Array, owned: jax.Array) -> jax.Array:
        """Return the decay of the state over the chunk; NaN if the state after it, with the rows `owned`, is to be."""
        return decay if self.masks is None else nonfinite.give_state(decay, self.nonfinite_rows, owned)

    def poisoned(self, x: jax.Array) -> jax.Array:
        """Return results [heads, C, w] of the chunk with NaN in the sequences that are not finite."""
        if self.masks is None:
            return x
        return jnp.where((self.masks.code >= 0) & (self.nonfinite_rows > 0.0), jnp.full_like(x, jnp.nan), x)


def stage_chunk(span: chunk_spans.Span, rows: Rows, C: int, owner_ref: jax.Ref, index: Any = 0) -> StageChunk:
    """Return the chunk of a stage in the variant for these rows; owner_ref holds the owners of tokens [n, 1, lanes]."""
    masks = layout.sequence_masks(owner_ref[index], C, span.before, span.final) if rows is Rows.MIXED else ABSENT
    return StageChunk(span, masks, span.rows(C) if rows is Rows.SOME else ABSENT, index=index)


def chunks_of(
    span: chunk_spans.Span, static: FusedStatic, rows: Rows | None = None, owner_ref: jax.Ref = ABSENT
) -> list[StageChunk]:
    """Return the chunks of a span, of which some may have no tokens; owner_ref as in `stage_chunk`.

    Without `rows`, they are the rows of a row of the batch that is one sequence.
    """
    rows = rows or (Rows.SOME if static.partial else Rows.ALL)
    return [stage_chunk(span.of_chunk(jnp.int32(i)), rows, static.C, owner_ref, i) for i in range(static.chunks)]


def load_each(ref, chunks: list[StageChunk]) -> jax.Array:
    """Load an array with an entry [n, rows, lanes] for every chunk of a block, [chunks n, rows, lanes].

    The entry of a chunk without tokens holds anything, and becomes zeros.
    """

    def load(chunk: StageChunk) -> jax.Array:
        x = ref[chunk.index]
        if chunk.valid is None:
            return x
        filled = jnp.max(jnp.where(chunk.valid, jnp.float32(1.0), jnp.float32(0.0)), axis=0, keepdims=True) > 0.0
        return jnp.where(filled, x, jnp.zeros_like(x))

    return jnp.concatenate([load(x) for x in chunks])
