"""The stages of the gated delta rule in float64 numpy, chunk by chunk, straight from their definitions.

They are the oracle of a single stage: they take the same, already rounded arguments as the stage, so they show the
error of that stage alone. The oracle of the whole chain is the token recurrence of `chunkwise.shared.testing.oracle`.

Shapes, packing and the order of chunks are the same as in the stage packages; cu_seqlens must be concrete.
"""

import itertools
from typing import NamedTuple

import numpy as np

from chunkwise.shared.kernels import chunking
from chunkwise.shared.testing import conv_norm_oracle


class Chunk(NamedTuple):
    """One chunk: its batch row, its place among the chunks of that row, its sequence and its tokens."""

    row: int
    place: int
    sequence: int
    tokens: slice


def chunks_of(B: int, T: int, chunk_size: int, cu_seqlens=None) -> list[Chunk]:
    """Return the chunks of a batch, or of a packed batch, by sequence and then by time."""
    places = [itertools.count() for _ in range(B)]
    return [
        Chunk(x.row, next(places[x.row]), x.state, slice(a, min(a + chunk_size, x.end)))
        for x in conv_norm_oracle.sequences(B, T, cu_seqlens)
        for a in range(x.start, x.end, chunk_size)
    ]


def cumsum(g, chunk_size: int = 64, cu_seqlens=None, reverse: bool = False) -> np.ndarray:
    """Return the inclusive sum of g [B, T, HV, ...] inside every chunk, from its end if `reverse`."""
    g = np.asarray(g, np.float64)
    out = np.zeros(g.shape)
    order = slice(None, None, -1 if reverse else 1)
    for c in chunks_of(*g.shape[:2], chunk_size, cu_seqlens):
        out[c.row, c.tokens] = np.cumsum(g[c.row, c.tokens][order], axis=0)[order]
    return out


def kkt(k, beta, g_cum, chunk_size: int = 64, cu_seqlens=None) -> np.ndarray:
    """Return A_ij = beta_i <k_i, e^(G_i - G_j) k_j> for i > j as [B, T, HV, C]; g_cum [B, T, HV] or [B, T, HV, K]."""
    B, T, HV = np.shape(beta)
    k, beta, g_cum = _heads(k, HV), _heads(beta, HV), _heads(g_cum, HV)
    A = np.zeros((B, T, HV, chunk_size))
    for c in chunks_of(B, T, chunk_size, cu_seqlens):
        k_c, beta_c, G = k[c.row, :, c.tokens], beta[c.row, :, c.tokens], g_cum[c.row, :, c.tokens]
        rows = beta_c[..., None] * _scores(k_c, k_c, G, -1)
        A[c.row, c.tokens, :, : rows.shape[-1]] = np.moveaxis(rows, 0, 1)
    return A


def inverse(A, cu_seqlens=None) -> np.ndarray:
    """Return (I + A)^-1 of every chunk as [B, T, HV, C]."""
    A = np.asarray(A, np.float64)
    out = np.zeros(A.shape)
    for c in chunks_of(*A.shape[:2], A.shape[3], cu_seqlens):
        rows = np.moveaxis(A[c.row, c.tokens], 0, 1)
        length = rows.shape[1]
        inverse = np.linalg.inv(np.eye(length) + np.tril(rows[..., :length], -1))
        out[c.row, c.tokens, :, :length] = np.moveaxis(inverse, 0, 1)
    return out


def w_u(k, v, beta, A_inv, g_cum, cu_seqlens=None) -> tuple[np.ndarray, np.ndarray]:
    """Return w = A_inv (beta k e^G) [B, T, HV, K] and u = A_inv (beta v) [B, T, HV, V]; gates as in `kkt`."""
    B, T, HV, C = np.shape(A_inv)
    k, v, A_inv = _heads(k, HV), _heads(v, HV), _heads(A_inv, HV)
    beta, g_cum = _heads(beta, HV)[..., None], _heads(g_cum, HV)
    g_cum = g_cum if g_cum.ndim == 4 else g_cum[..., None]
    w, u = np.zeros((B, T, HV, k.shape[-1])), np.zeros((B, T, HV, v.shape[-1]))
    for c in chunks_of(B, T, C, cu_seqlens):
        at = (c.row, slice(None), c.tokens)
        inverse = A_inv[at][..., : c.tokens.stop - c.tokens.start]
        w[c.row, c.tokens] = np.moveaxis(inverse @ (beta[at] * k[at] * np.exp(g_cum[at])), 0, 1)
        u[c.row, c.tokens] = np.moveaxis(inverse @ (beta[at] * v[at]), 0, 1)
    return w, u


def states(k, w, u, g_cum, initial_state=None, chunk_size: int = 64, cu_seqlens=None):
    """Return h [B, NT, HV, K, V], v_new = u - w S [B, T, HV, V] and final_state [N, HV, K, V].

    Gates are per head [B, T, HV] or per channel [B, T, HV, K]; without w, v_new is u.
    """
    B, T, HV, V = np.shape(u)
    per_channel = np.ndim(g_cum) == 4
    k, u, g_cum = (_heads(x, HV) for x in (k, u, g_cum))
    w = np.zeros_like(k) if w is None else _heads(w, HV)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    final = np.zeros((N, HV, k.shape[-1], V)) if initial_state is None else np.array(initial_state, np.float64)
    h = np.zeros((B, chunking.num_chunks(T, chunk_size, None if cu_seqlens is None else N), *final.shape[1:]))
    v_new = np.zeros((B, T, HV, V))
    for c in chunks_of(B, T, chunk_size, cu_seqlens):
        at = (c.row, slice(None), c.tokens)
        S = h[c.row, c.place] = final[c.sequence]
        new = u[at] - w[at] @ S
        v_new[c.row, c.tokens] = np.moveaxis(new, 0, 1)
        G = g_cum[at] if per_channel else g_cum[at][..., None]
        final[c.sequence] = np.exp(G[:, -1:]).mT * S + (k[at] * np.exp(G[:, -1:] - G)).mT @ new
    return h, v_new, final


def output(q, k, v, h, g_cum, scale=None, chunk_size: int = 64, cu_seqlens=None) -> np.ndarray:
    """Return o_i = scale (S^T (e^G_i q_i) + sum over j <= i of <q_i, e^(G_i - G_j) k_j> v_j) as [B, T, HV, V].

    Gates as in `kkt`.
    """
    B, T, HV, V = np.shape(v)
    scale = np.shape(k)[-1] ** -0.5 if scale is None else scale
    q, k, v, g_cum, h = (*(_heads(x, HV) for x in (q, k, v, g_cum)), np.asarray(h, np.float64))
    o = np.zeros((B, T, HV, V))
    for c in chunks_of(B, T, chunk_size, cu_seqlens):
        at = (c.row, slice(None), c.tokens)
        G = g_cum[at]
        carried = (q[at] * np.exp(G if G.ndim == 3 else G[..., None])) @ h[c.row, c.place]
        inside = _scores(q[at], k[at], G, 0) @ v[at]
        o[c.row, c.tokens] = scale * np.moveaxis(carried + inside, 0, 1)
    return o


def chain(q, k, v, g, beta, initial_state=None, chunk_size: int = 64, cu_seqlens=None) -> dict[str, np.ndarray]:
    """Return the result of every stage of the gated delta rule, by name."""
    g_cum = cumsum(g, chunk_size, cu_seqlens)
    A = kkt(k, beta, g_cum, chunk_size, cu_seqlens)
    A_inv = inverse(A, cu_seqlens)
    w, u = w_u(k, v, beta, A_inv, g_cum, cu_seqlens)
    h, v_new, final_state = states(k, w, u, g_cum, initial_state, chunk_size, cu_seqlens)
    o = output(q, k, v_new, h, g_cum, None, chunk_size, cu_seqlens)
    return dict(g_cum=g_cum, A=A, A_inv=A_inv, w=w, u=u, h=h, v_new=v_new, final_state=final_state, o=o)


def _heads(x, HV: int) -> np.ndarray:
    """Return tokens [B, T, H, ...] in float64 as [B, HV, T, ...]; a head is repeated for each of its value heads."""
    x = np.moveaxis(np.asarray(x, np.float64), 2, 1)
    return np.repeat(x, HV // x.shape[1], axis=1)


def _scores(q: np.ndarray, k: np.ndarray, G: np.ndarray, diagonal: int) -> np.ndarray:
    """Return <q_i, e^(G_i - G_j) k_j> [HV, c, c] of the lower triangle from `diagonal` down, else 0."""
    G = G if G.ndim == 3 else G[..., None]
    pairs = np.tril(np.ones(2 * G.shape[1:2], bool), diagonal)[..., None]
    decay = np.where(pairs, np.exp(np.where(pairs, G[:, :, None] - G[:, None], 0.0)), 0.0)
    if decay.shape[-1] == 1:
        return q @ k.mT * decay[..., 0]
    return np.einsum("hic,hijc,hjc->hij", q, decay, k)
