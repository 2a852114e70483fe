"""The convolution and the gated norm of a layer in float64 numpy, straight from the definitions.

The arguments are the same as in the packages; cu_seqlens and segment_ids must be concrete.
"""

import itertools
from typing import NamedTuple

import numpy as np


class Sequence(NamedTuple):
    """One sequence of a batch: tokens start to end - 1 of a row.

    Attributes:
      row, start, end: the tokens of the sequence.
      state: the index of its initial state and of its final state.
      has_initial, has_final: whether it starts from the initial state, and whether it ends in the final state.
    """

    row: int
    start: int
    end: int
    state: int
    has_initial: bool = True
    has_final: bool = True


def sequences(B: int, T: int, cu_seqlens=None, segment_ids=None) -> list[Sequence]:
    """Return the sequences of a batch: its rows, the packed sequences, or the segments of its rows."""
    if cu_seqlens is not None:
        return [Sequence(0, int(a), int(b), n) for n, (a, b) in enumerate(itertools.pairwise(np.asarray(cu_seqlens)))]
    if segment_ids is None:
        return [Sequence(row, 0, T, row) for row in range(B)]
    found = []
    for row, ids in enumerate(np.asarray(segment_ids)):
        runs = [(int(x[0]), len(x)) for x in np.split(ids, np.flatnonzero(np.diff(ids)) + 1)]
        ends = np.cumsum([n for _, n in runs])
        spans = [(int(end) - n, int(end)) for (name, n), end in zip(runs, ends, strict=True) if name >= 0]
        found += [Sequence(row, *x, row, i == 0, i == len(spans) - 1) for i, x in enumerate(spans)]
    return found


def token_places(B: int, T: int, cu_seqlens=None, segment_ids=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how sequences lie in the rows.

    Returns:
      int [B, T], the initial state with which a token begins, N for zeros, and -1 where it continues a sequence; bool
      [B, T], False for padding; and int [N, 2], the row and the token that end in a state, -1 for no token.
    """
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    begins, valid, ends = np.full((B, T), -1), np.zeros((B, T), bool), np.full((N, 2), -1)
    for s in sequences(B, T, cu_seqlens, segment_ids):
        if s.end > s.start:
            begins[s.row, s.start] = s.state if s.has_initial else N
            valid[s.row, s.start : s.end] = True
            if s.has_final:
                ends[s.state] = s.row, s.end - 1
    return begins, valid, ends


def activation(x: np.ndarray, name: str | None) -> np.ndarray:
    """Return the activation of x by its name: "silu", "sigmoid", or None for x itself."""
    s = np.exp(-np.logaddexp(0.0, -x))
    return {None: x, "sigmoid": s, "silu": x * s}[name]


def causal_conv1d(
    x, weight, bias=None, initial_state=None, *, name: str | None = None, cu_seqlens=None, segment_ids=None
):  # fmt: skip
    """Return (y, final state) of the short convolution, token by token; zeros for tokens of no sequence."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    (B, T, D), W = x.shape, weight.shape[1]
    y = np.zeros(x.shape)
    final = np.zeros((B if cu_seqlens is None else len(cu_seqlens) - 1, W - 1, D))
    states = final.copy() if initial_state is None else np.array(initial_state, np.float64)
    final[...] = states
    shift = 0.0 if bias is None else np.asarray(bias, np.float64)
    for s in sequences(B, T, cu_seqlens, segment_ids):
        inputs = np.concatenate([states[s.state] if s.has_initial else np.zeros((W - 1, D)), x[s.row, s.start : s.end]])
        for t in range(s.end - s.start):
            y[s.row, s.start + t] = activation(np.sum(inputs[t : t + W] * weight.T, axis=0) + shift, name)
        if s.has_final:
            final[s.state] = inputs[len(inputs) - (W - 1) :]
    return y, final


def rms_norm_gated(x, z, weight, *, name: str | None = "silu", norm_before_gate: bool = True, eps: float = 1e-6):
    """Return the RMSNorm over the last axis, with a gate, or without one where z is None."""
    x, weight = (np.asarray(y, np.float64) for y in (x, weight))
    gate = np.ones_like(x) if z is None else activation(np.asarray(z, np.float64), name)
    u = x if norm_before_gate else x * gate
    y = weight * u / np.sqrt(np.mean(u**2, axis=-1, keepdims=True) + eps)
    return y * gate if norm_before_gate else y
