"""Isolation: NaN or infinity in one sequence must not change one bit of any other sequence."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.kernels import chunking
from chunkwise.shared.testing import compare, conv_norm_oracle
from chunkwise.shared.testing.inputs import boundaries
from tests.gradients import gradient_program

# Arrays that are not tokens [B, T, ...]: one entry for every sequence [N, ...], one for every chunk [B, NT, ...].
STATES = frozenset({"initial_state", "final_state"})
CHUNKS = frozenset({"h"})


def assert_isolated(
    fn: Callable[[dict, Any], dict],
    x: dict[str, jax.Array],
    cu_seqlens: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    shared: Collection[str] = (),
    visible: bool = True,
    tolerance: float = 0.0,
) -> None:
    """Fail unless NaN and infinity in one sequence leave every bit of the other sequences as it was.

    Every input, and the cotangent of every result, is poisoned in turn, in every sequence that has tokens: with NaN in
    the whole of its first token, then with infinity in one number of its last token. The padding of a packed batch is
    poisoned like a sequence, and must not change anything at all. Results and gradients are compared.

    Args:
      fn: a function of named arrays and cu_seqlens, or segment_ids, that returns named results. Arrays named in
        `STATES` have an entry for every sequence, or row of segments, [N, ...], arrays in `CHUNKS` one for every chunk
        [B, NT, ...], all others are tokens [B, T, ...].
      x: inputs, all finite and of floating type.
      cu_seqlens: concrete boundaries of a packed batch; without them the rows of the batch are the sequences.
      segment_ids: concrete ids of the segments of rows, in the place of cu_seqlens.
      chunk_size: tokens of a chunk; needed if a result or an input has an entry for every chunk of a packed batch.
      shared: inputs that all sequences share, such as g_gamma: they are not poisoned, nor are their gradients compared.
      tolerance: how much other sequences may change, by RMS; 0 for not one bit.
      visible: demand that NaN in an input makes some result of the same sequence not finite, so that nothing is hidden.
    """
    packing = cu_seqlens if segment_ids is None else segment_ids
    results = jax.eval_shape(fn, x, packing)
    rng = np.random.default_rng(7)
    cotangents = {name: jnp.asarray(rng.standard_normal(y.shape), y.dtype) for name, y in results.items()}
    run = gradient_program(fn)
    clean = _numpy(run(x, packing, cotangents))
    for name, value in clean.items():
        assert np.isfinite(value.astype(np.float64)).all(), f"{name} is not finite before anything is poisoned"
    B, T = next(y.shape[:2] for name, y in x.items() if name not in STATES | CHUNKS | set(shared))
    cu, ids = (None if y is None else np.asarray(y) for y in (cu_seqlens, segment_ids))
    owners = _Owners(B, T, cu, ids, chunk_size)
    gradients = {f"d{name}": name for name in x}
    for group, arrays in (("input", x), ("cotangent of", cotangents)):
        for name in arrays:
            if name in shared:
                continue
            for n, label, dirty in owners.poisoned(name, arrays[name]):
                inputs = (x | {name: dirty}, cotangents) if group == "input" else (x, cotangents | {name: dirty})
                got = _numpy(run(inputs[0], packing, inputs[1]))
                what = f"{label} in the {group} {name} of {owners.name(n)}"
                for result, want in clean.items():
                    base = gradients.get(result, result)
                    if base not in shared:
                        others = owners.mask(base) != n if n < owners.N else np.ones(owners.mask(base).shape, bool)
                        _assert_same(result, got[result][others], want[others], what, tolerance)
                if visible and group == "input" and label == "NaN" and n < owners.N:
                    poisoned = [got[y][owners.mask(y) == n] for y in results]
                    seen = not all(np.isfinite(y.astype(np.float64)).all() for y in poisoned)
                    assert seen, f"{what} is hidden: all of its results are finite"


def assert_operator_isolated(
    operator: Callable, make: Callable[..., dict[str, jax.Array]], of: str, lengths: Collection[int], **options
) -> None:
    """Fail unless an operator in chunks of 16 tokens isolates sequences: heads of one sequence may spoil one another.

    Args:
      operator: its function over chunks.
      make: from rows, tokens and the named number of states to inputs by name.
      of: "rows" or "sequences", the sequences of a pack, or either of them "with states".
      lengths: of the sequences of a pack of 52 tokens; the rest is padding.
      **options: of the operator.
    """
    states, cu_seqlens = "states" in of, boundaries(*lengths) if "sequences" in of else None
    B, T, N = (2, 20, 2) if cu_seqlens is None else (1, 52, len(lengths))

    def run(x, cu_seqlens):
        o, state = operator(**x, output_final_state=states, cu_seqlens=cu_seqlens, chunk_size=16, **options)
        return dict(o=o, final_state=state) if states else dict(o=o)

    assert_isolated(run, make(B, T, num_states=N if states else 0), cu_seqlens, shared=("g_gamma",))


class _Owners:
    """Which sequence owns an entry of an array; padding and unused chunks have the owner N."""

    def __init__(
        self, B: int, T: int, cu_seqlens: np.ndarray | None, segment_ids: np.ndarray | None, chunk_size: int | None
    ):
        self.packed = cu_seqlens is not None or segment_ids is not None
        if segment_ids is not None:
            found = conv_norm_oracle.sequences(B, T, segment_ids=segment_ids)
            self.N = len(found) + B
            self.tokens = np.full((B, T), self.N)
            # A row has one state before its first segment and one after its last, also if all of it is padding.
            self.states, self.final = np.arange(len(found), self.N), np.arange(len(found), self.N)
            for n, s in enumerate(found):
                self.tokens[s.row, s.start : s.end] = n
                if s.has_initial:
                    self.states[s.row] = n
                if s.has_final:
                    self.final[s.row] = n
            return
        if cu_seqlens is None:
            self.N = B
            self.tokens = self.chunks = self.states = self.final = np.arange(B)
            return
        self.N = N = len(cu_seqlens) - 1
        lengths = np.diff(cu_seqlens)
        self.states = self.final = np.arange(N)
        self.tokens = np.concatenate([np.repeat(np.arange(N), lengths), np.full(T - cu_seqlens[-1], N)])[None]
        if chunk_size is not None:
            used = np.repeat(np.arange(N), -(-lengths // chunk_size))
            self.chunks = np.full((1, chunking.num_chunks(T, chunk_size, N)), N)
            self.chunks[0, : len(used)] = used

    def mask(self, name: str) -> np.ndarray:
        """Return the owner of every leading entry of the array with this name."""
        if name == "final_state":
            return self.final
        return self.states if name in STATES else self.chunks if name in CHUNKS else self.tokens

    def name(self, n: int) -> str:
        """Return the name of an owner for a message."""
        return "the padding" if n == self.N else f"sequence {n}" if self.packed else f"row {n}"

    def poisoned(self, name: str, x: jax.Array) -> Iterator[tuple[int, str, jax.Array]]:
        """Yield (owner, what was written, poisoned copy) for every owner that has something of x."""
        owner, clean = self.mask(name), np.asarray(x)
        for n in np.unique(owner):
            entries = np.argwhere(owner == n)
            first, last = tuple(entries[0]), tuple(entries[-1])
            dirty = clean.copy()
            dirty[owner == n if n == self.N else first] = np.nan
            yield int(n), "NaN", jnp.asarray(dirty)
            dirty = clean.copy()
            dirty[(*last, *(-1,) * (x.ndim - len(last)))] = np.inf
            yield int(n), "infinity", jnp.asarray(dirty)


def _numpy(results: dict) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in results.items() if value is not None}


def _assert_same(name: str, got: np.ndarray, want: np.ndarray, what: str, tolerance: float) -> None:
    if tolerance and want.any():
        compare.assert_close(f"{what}: {name} of others", got, want, tolerance)
    elif got.tobytes() != want.tobytes():
        wrong = int(np.sum(~(got == want)))
        raise AssertionError(f"{what} changed {name} of others: {wrong} of {want.size} numbers differ")
