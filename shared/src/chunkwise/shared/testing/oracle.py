"""The oracle: every operator as its token recurrence in float64 numpy, with gradients, on the host's CPU."""

import functools
from typing import Any

import numpy as np

from chunkwise.shared.testing import conv_norm_oracle


def _arguments(x: dict, normalise: bool):
    """Return q, k, v, g, beta and p with a head per value head, q, k and p normalised, constant gates added.

    If p is not given, it is k. It is multiplied by the erase gate and v by the write gate, if there are any. Beside
    erase gates, beta is 1 if it is not given.
    """
    q, k, p = x["q"], x["k"], x.get("p", x["k"])
    if normalise:
        q, k, p = (y / _norm(y) for y in (q, k, p))
    HV = x["v"].shape[2]
    q, k, p = (np.repeat(y, HV // y.shape[2], axis=2) for y in (q, k, p))
    g = x.get("g")
    g = np.zeros(x["v"].shape[:3]) if g is None else g
    if x.get("g_gamma") is not None:
        constant = x["g_gamma"][None, None] * x["inside"]
        g = g + (constant[..., None] if g.ndim == 4 else constant)
    beta = x.get("beta", np.ones(x["v"].shape[:3]) if "b" in x else None)
    return q, k, x["v"] * x.get("w", 1.0), g, beta, p * x.get("b", 1.0)


def _norm(x):
    return np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _decay(g):
    """Return e^g, [B, T, HV, K, 1] or [B, T, HV, 1, 1], which multiplies states."""
    return np.exp(g if g.ndim == 4 else g[..., None])[..., None]


def _forward(x: dict, scale: float, normalise: bool, keep: bool = False, early: bool = False):
    """Run the recurrence in numpy, which compiles nothing and shares no code with the operators that it judges.

    Returns:
      o, the final state, and with `keep` the states before all tokens.
    """
    q, k, v, g, beta, p = _arguments(x, normalise)
    B, T, HV, K = k.shape
    S = np.zeros((B, HV, K, v.shape[-1])) + x.get("initial_state", 0.0)
    decay, o, before = _decay(g), np.empty(v.shape), []
    for t in range(T):
        before += [S] if keep else []
        erased, S = S, decay[:, t] * S
        added = v[:, t]
        if beta is not None:
            added = beta[:, t, :, None] * (added - (p[:, t, :, None] @ (erased if early else S))[:, :, 0])
        S = S + k[:, t, :, :, None] * added[:, :, None]
        o[:, t] = scale * (q[:, t, :, None] @ S)[:, :, 0]
    return o, S, before


def _backward(x: dict, scale: float, normalise: bool, before: list, do, dht, early: bool = False) -> dict:
    """Return the gradients of sum(o * do) + sum(final_state * dht), given the states before all tokens."""
    q, k, v, g, beta, p = _arguments(x, normalise)
    decay, dS = _decay(g), dht
    dq, dk, dv, dg, dp = (np.empty(y.shape) for y in (q, k, v, g, p))
    dbeta: Any = None if beta is None else np.empty(beta.shape)
    column = lambda y: y[..., None]
    for t in reversed(range(k.shape[1])):
        q_t, k_t, do_t, S = column(q[:, t]), column(k[:, t]), column(do[:, t]), decay[:, t] * before[t]
        p_t = column(p[:, t])
        erased = before[t] if early else S
        error = column(v[:, t]) - (0.0 if beta is None else erased.mT @ p_t)
        rate = 1.0 if beta is None else beta[:, t, :, None, None]
        after = S + k_t @ (rate * error).mT
        dq[:, t] = scale * (after @ do_t)[..., 0]
        dS = dS + scale * (q_t @ do_t.mT)
        dadded = dS.mT @ k_t
        dv[:, t] = (rate * dadded)[..., 0]
        dk[:, t], dp[:, t], derased = (dS @ (rate * error))[..., 0], 0.0, 0.0
        if beta is not None:
            dbeta[:, t] = np.sum(dadded * error, axis=(-2, -1))
            dp[:, t] = -(erased @ (rate * dadded))[..., 0]
            derased = -(p_t @ (rate * dadded).mT)
            dS, derased = (dS, derased) if early else (dS + derased, 0.0)
        dg[:, t] = np.sum(dS * S, axis=-1 if g.ndim == 4 else (-2, -1))
        dS = decay[:, t] * dS + derased
    keys = x.get("p", x["k"])
    unit = np.repeat(keys / _norm(keys) if normalise else keys, k.shape[2] // keys.shape[2], axis=2)
    found, dp = dict(b=unit * dp), x.get("b", 1.0) * dp
    dk = dk if "p" in x else dk + dp
    each = dict(q=dq, k=dk) | (dict(p=dp) if "p" in x else {})
    found |= {name: _back_to_heads(dy, x[name], normalise) for name, dy in each.items()}
    found |= dict(v=x.get("w", 1.0) * dv, w=x["v"] * dv, g=dg, beta=dbeta, initial_state=dS)
    if "g_gamma" in x:
        found["g_gamma"] = np.einsum("bth,bti->h", dg if dg.ndim == 3 else dg.sum(axis=-1), x["inside"])
    return {name: found[name] for name in x if name in found}


def _back_to_heads(dy, x, normalise: bool):
    """Return the gradient of x [B, T, H, K], given the gradient of its normalised copies for all value heads."""
    dy = dy.reshape(*x.shape[:3], dy.shape[2] // x.shape[2], x.shape[3]).sum(axis=3)
    if not normalise:
        return dy
    y = x / _norm(x)
    return (dy - y * np.sum(dy * y, axis=-1, keepdims=True)) / _norm(x)


def _sequences(x, cu_seqlens):
    """Return tokens [1, T, ...] as [N, longest, ...], padded with zeros, which leave the recurrence unchanged.

    Rows of a batch, without boundaries, stay as they are.
    """
    if cu_seqlens is None:
        return x
    lengths = np.diff(cu_seqlens)
    out = np.zeros((len(lengths), max(1, lengths.max(initial=0)), *x.shape[2:]))
    for n, (start, length) in enumerate(zip(cu_seqlens, lengths, strict=False)):
        out[n, :length] = x[0, start : start + length]
    return out


def _tokens(x, cu_seqlens, T):
    """The inverse of `_sequences`; tokens of no sequence are zero."""
    if cu_seqlens is None:
        return x
    out = np.zeros((1, T, *x.shape[2:]))
    for n, (start, length) in enumerate(zip(cu_seqlens, np.diff(cu_seqlens), strict=False)):
        out[0, start : start + length] = x[n, :length]
    return out


def _in_segments(x: dict, segment_ids: np.ndarray, do, dht, options: dict):
    """Run `reference` over the segments of rows as over the sequences of a packed batch."""
    (B, T, HV, V), K = x["v"].shape, x["k"].shape[3]
    found = conv_norm_oracle.sequences(B, T, segment_ids=segment_ids)
    nothing = np.zeros(0, int)  # all may be padding
    rows = np.concatenate([nothing, *(np.full(s.end - s.start, s.row) for s in found)])
    tokens = np.concatenate([nothing, *(np.arange(s.start, s.end) for s in found)])
    pack = lambda y: np.asarray(y, np.float64)[rows, tokens][None]
    # The states of a row go in before its first segment and come out after its last.
    (first, opening), (last, closing) = (
        np.array([(n, s.row) for n, s in enumerate(found) if getattr(s, end)], int).reshape(-1, 2).T
        for end in ("has_initial", "has_final")
    )

    def to_segments(states, at, row):
        out = np.zeros((len(found), HV, K, V))
        out[at] = np.asarray(states, np.float64)[row]
        return out

    def to_rows(states, at, row, otherwise):
        out = np.zeros((B, HV, K, V)) if otherwise is None else np.array(otherwise, np.float64)
        out[row] = states[at]
        return out

    def unpack(y):
        out = np.zeros((B, T, *y.shape[2:]))
        out[rows, tokens] = y[0]
        return out

    packed = {name: pack(y) if name in _PER_TOKEN else y for name, y in x.items()}
    before = x.get("initial_state")
    if before is not None:
        packed["initial_state"] = to_segments(before, first, opening)
    cu_seqlens = np.cumsum([0, *(s.end - s.start for s in found)])
    o, states, *grads = reference(
        **packed, **options, cu_seqlens=cu_seqlens, do=None if do is None else pack(do),
        dht=None if dht is None else to_segments(dht, last, closing),
    )  # fmt: skip
    results = unpack(o), to_rows(states, last, closing, before)
    if not grads:
        return results
    (grads,) = grads
    if before is not None:
        grads["initial_state"] = to_rows(grads["initial_state"], first, opening, dht)
    return *results, {name: unpack(d) if name in _PER_TOKEN else d for name, d in grads.items()}


_PER_TOKEN = ("q", "k", "v", "g", "beta", "inside", "p", "b", "w")


def reference(
    q, k, v, g=None, beta=None, *, g_gamma=None, scale=None, initial_state=None, cu_seqlens=None, segment_ids=None,
    use_qk_l2norm_in_kernel=False, do=None, dht=None, p=None, b=None, w=None, erase_before_decay=None,
):  # fmt: skip
    """Run an operator in float64 and, given cotangents, its gradients.

    The rank of g selects a gate per head [B, T, HV] or per channel [B, T, HV, K]; beta or b selects the delta rule.

    Args:
      q, k, v, g, beta, g_gamma, initial_state: arrays of any floating type, shapes as in the operators.
      scale: defaults to K ** -0.5.
      cu_seqlens: concrete boundaries of a packed batch.
      segment_ids: concrete ids of the tokens [B, T], in the place of cu_seqlens.
      use_qk_l2norm_in_kernel: normalise q and k first.
      do: cotangent of o.
      dht: cotangent of the final state.
      p: erase keys [B, T, H, K], in the place of k.
      erase_before_decay: whether erase keys read the state before the decay of their token; None for True where there
        is p, which is the law of Comba.
      b, w: erase gates [B, T, HV, K], which multiply the erase keys, and write gates [B, T, HV, V] of the values.

    Returns:
      (o, final_state) as float64 numpy arrays; with do or dht a third entry, a dict of gradients by argument name.
    """
    erase_before_decay = p is not None if erase_before_decay is None else erase_before_decay
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta, g_gamma=g_gamma, initial_state=initial_state, p=p, b=b, w=w)
    x = {name: np.asarray(value, np.float64) for name, value in arrays.items() if value is not None}
    if segment_ids is not None:
        options = dict(
            scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, erase_before_decay=erase_before_decay
        )
        return _in_segments(x, np.asarray(segment_ids), do, dht, options)
    x["inside"] = np.ones((*x["v"].shape[:2], 1))  # zero on the rows that only pad a short sequence
    T, cu = x["v"].shape[1], None if cu_seqlens is None else np.asarray(cu_seqlens)
    cut, paste = functools.partial(_sequences, cu_seqlens=cu), functools.partial(_tokens, cu_seqlens=cu, T=T)
    x = {name: cut(value) if name in _PER_TOKEN else value for name, value in x.items()}
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    normalise = bool(use_qk_l2norm_in_kernel)
    if do is None and dht is None:
        o, state, _ = _forward(x, scale, normalise, early=erase_before_decay)
        return paste(o), state
    do = np.zeros(x["v"].shape) if do is None else cut(np.asarray(do, np.float64))
    N, HV, K, V = x["v"].shape[0], x["v"].shape[2], k.shape[-1], x["v"].shape[-1]
    dht = np.zeros((N, HV, K, V)) if dht is None else np.asarray(dht, np.float64)
    o, state, before = _forward(x, scale, normalise, keep=True, early=erase_before_decay)
    grads = _backward(x, scale, normalise, before, do, dht, erase_before_decay)
    return paste(o), state, {name: paste(d) if name in _PER_TOKEN else d for name, d in grads.items()}
