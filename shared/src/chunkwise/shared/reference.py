"""The oracle: every operator as its token recurrence in float64, with gradients, on the host's CPU."""

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.recurrence import l2norm, recurrence


def _run(x: dict, scale: float, normalise: bool):
    q, k = (l2norm(x["q"]), l2norm(x["k"])) if normalise else (x["q"], x["k"])
    HV = x["v"].shape[2]
    q, k = (jnp.repeat(y, HV // y.shape[2], axis=2) for y in (q, k))
    g = x.get("g")
    g = jnp.zeros(x["v"].shape[:3]) if g is None else g
    if x.get("g_gamma") is not None:
        constant = x["g_gamma"] * x["inside"]
        g = g + (constant[..., None] if g.ndim == 4 else constant)
    return recurrence(q, k, x["v"], g, x.get("beta"), scale, x.get("initial_state"), jnp.float64)


def _sequences(x, cu_seqlens):
    """Return tokens [1, T, ...] as [N, longest, ...], padded with zeros, which leave the recurrence unchanged."""
    lengths = np.diff(cu_seqlens)
    out = np.zeros((len(lengths), max(1, lengths.max()), *x.shape[2:]))
    for n, (start, length) in enumerate(zip(cu_seqlens, lengths, strict=False)):
        out[n, :length] = x[0, start : start + length]
    return out


def _tokens(x, cu_seqlens, T):
    """The inverse of `_sequences`; tokens of no sequence are zero."""
    out = np.zeros((1, T, *x.shape[2:]))
    for n, (start, length) in enumerate(zip(cu_seqlens, np.diff(cu_seqlens), strict=False)):
        out[0, start : start + length] = x[n, :length]
    return out


_PER_TOKEN = ("q", "k", "v", "g", "beta", "inside")


def reference(
    q, k, v, g=None, beta=None, *, g_gamma=None, scale=None, initial_state=None, cu_seqlens=None,
    use_qk_l2norm_in_kernel=False, do=None, dht=None,
):  # fmt: skip
    """Run an operator in float64 and, given cotangents, its gradients.

    The rank of g selects a gate per head [B, T, HV] or per channel [B, T, HV, K]; beta selects the delta rule.

    Args:
      q, k, v, g, beta, g_gamma, initial_state: arrays of any floating type, shapes as in the operators.
      scale: defaults to K ** -0.5.
      cu_seqlens: concrete boundaries of a packed batch.
      use_qk_l2norm_in_kernel: normalise q and k first.
      do: cotangent of o.
      dht: cotangent of the final state.

    Returns:
      (o, final_state) as float64 numpy arrays; with do or dht a third entry, a dict of gradients by argument name.
    """
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta, g_gamma=g_gamma, initial_state=initial_state)
    x = {name: np.asarray(value, np.float64) for name, value in arrays.items() if value is not None}
    x["inside"] = np.ones((*x["v"].shape[:2], 1))  # zero on the rows that only pad a short sequence
    T, cu = x["v"].shape[1], None if cu_seqlens is None else np.asarray(cu_seqlens)
    cut = (lambda y: y) if cu is None else (lambda y: _sequences(y, cu))
    paste = (lambda y: y) if cu is None else (lambda y: _tokens(y, cu, T))
    x = {name: cut(value) if name in _PER_TOKEN else value for name, value in x.items()}
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        run = jax.jit(lambda y: _run(y, scale, use_qk_l2norm_in_kernel))
        if do is None and dht is None:
            o, state = run(x)
            return paste(np.asarray(o)), np.asarray(state)
        (o, state), pullback = jax.vjp(run, {name: jnp.asarray(value) for name, value in x.items()})
        do = np.zeros(o.shape) if do is None else cut(np.asarray(do, np.float64))
        dht = np.zeros(state.shape) if dht is None else np.asarray(dht, np.float64)
        (grads,) = pullback((jnp.asarray(do), jnp.asarray(dht)))
    grads = {n: paste(np.asarray(d)) if n in _PER_TOKEN else np.asarray(d) for n, d in grads.items() if n != "inside"}
    return paste(np.asarray(o)), np.asarray(state), grads
