"""The oracle: every operator as its token recurrence in float64 numpy, with gradients, on the host's CPU."""

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


def _forward(x: dict, places: tuple, scale: float, normalise: bool, early: bool, keep: bool):
    """Run the recurrence in numpy, which compiles nothing and shares no code with the operators that it judges.

    The tokens of padding are zeros, which leave the state unchanged.

    Returns:
      o, the final states, and with `keep` the states before all tokens.
    """
    q, k, v, g, beta, p = _arguments(x, normalise)
    begins, _, ends = places
    starts, final = np.pad(x["initial_state"], [(0, 1)] + [(0, 0)] * 3), x["initial_state"].copy()
    S, decay, o, before = np.zeros((len(v), *starts.shape[1:])), _decay(g), np.empty(v.shape), []
    for t in range(k.shape[1]):
        first, last = begins[:, t] >= 0, ends[:, 1] == t
        S[first] = starts[begins[first, t]]
        before += [S] if keep else []
        erased, S = S, decay[:, t] * S
        added = v[:, t]
        if beta is not None:
            added = beta[:, t, :, None] * (added - (p[:, t, :, None] @ (erased if early else S))[:, :, 0])
        S = S + k[:, t, :, :, None] * added[:, :, None]
        o[:, t] = scale * (q[:, t, :, None] @ S)[:, :, 0]
        final[last] = S[ends[last, 0]]
    return o, final, before


def _backward(x: dict, places: tuple, scale: float, normalise: bool, early: bool, before: list, do, dht) -> dict:
    """Return the gradients of sum(o * do) + sum(final states * dht), given the states before all tokens."""
    q, k, v, g, beta, p = _arguments(x, normalise)
    begins, valid, ends = places
    dstarts, dS, decay = np.pad(dht, [(0, 1)] + [(0, 0)] * 3), np.zeros((len(v), *dht.shape[1:])), _decay(g)
    dq, dk, dv, dg, dp = (np.empty(y.shape) for y in (q, k, v, g, p))
    dbeta: Any = None if beta is None else np.empty(beta.shape)
    column = lambda y: y[..., None]
    for t in reversed(range(k.shape[1])):
        first, last = begins[:, t] >= 0, ends[:, 1] == t
        dS[ends[last, 0]] += dht[last]
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
        dstarts[begins[first, t]], dS[first] = dS[first], 0.0
    dg[~valid] = 0.0
    keys = x.get("p", x["k"])
    unit = np.repeat(keys / _norm(keys) if normalise else keys, k.shape[2] // keys.shape[2], axis=2)
    found, dp = dict(b=unit * dp), x.get("b", 1.0) * dp
    dk = dk if "p" in x else dk + dp
    each = dict(q=dq, k=dk) | (dict(p=dp) if "p" in x else {})
    found |= {name: _back_to_heads(dy, x[name], normalise) for name, dy in each.items()}
    found |= dict(v=x.get("w", 1.0) * dv, w=x["v"] * dv, g=dg, beta=dbeta, initial_state=dstarts[:-1])
    if "g_gamma" in x:
        found["g_gamma"] = np.sum(dg if dg.ndim == 3 else dg.sum(axis=-1), axis=(0, 1))
    return found


def _back_to_heads(dy, x, normalise: bool):
    """Return the gradient of x [B, T, H, K], given the gradient of its normalised copies for all value heads."""
    dy = dy.reshape(*x.shape[:3], dy.shape[2] // x.shape[2], x.shape[3]).sum(axis=3)
    if not normalise:
        return dy
    y = x / _norm(x)
    return (dy - y * np.sum(dy * y, axis=-1, keepdims=True)) / _norm(x)


_PER_TOKEN = ("q", "k", "v", "g", "beta", "p", "b", "w")


def reference(
    q, k, v, g=None, beta=None, *, g_gamma=None, scale=None, initial_state=None, cu_seqlens=None, segment_ids=None,
    use_qk_l2norm_in_kernel=False, do=None, dht=None, p=None, b=None, w=None, erase_before_decay=None,
) -> tuple[Any, ...]:  # fmt: skip
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
    named, (B, T, HV, V), K = [*x], x["v"].shape, k.shape[-1]
    places = _, valid, ends = conv_norm_oracle.token_places(B, T, cu_seqlens, segment_ids)
    inside = lambda y: np.where(valid.reshape(B, T, *(1,) * (y.ndim - 2)), y, 0.0)
    states = np.zeros((len(ends), HV, K, V))
    x = {"initial_state": states} | {name: inside(y) if name in _PER_TOKEN else y for name, y in x.items()}
    x["inside"] = valid[..., None]
    how = places, K**-0.5 if scale is None else float(scale), bool(use_qk_l2norm_in_kernel), erase_before_decay
    graded = do is not None or dht is not None
    o, final, before = _forward(x, *how, graded)
    if not graded:
        return o, final
    do = np.zeros(x["v"].shape) if do is None else inside(np.asarray(do, np.float64))
    gradients = _backward(x, *how, before, do, states if dht is None else np.asarray(dht, np.float64))
    return o, final, {name: gradients[name] for name in named}
