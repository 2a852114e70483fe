"""The definitions of operators that run another operator, token by token in float64, with JAX's gradients.

They share no code with the operators that they judge, and do not know into which tokens these take a token apart.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# From the state [HV, K, V] and the arrays of a token, heads first, to the next state and the output [HV, V].
Step = Callable[[jax.Array, dict[str, jax.Array], float], tuple[jax.Array, jax.Array]]


def gated_delta_product(S: jax.Array, token: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    """Decay the state once, and take a step of the delta rule for each of the n keys [n, HV, K]."""
    S, (HV, _, V) = jnp.exp(token["g"])[:, None, None] * S, S.shape
    steps = (token[name].reshape(-1, HV, *rest) for name, rest in (("k", S.shape[1:2]), ("v", (V,)), ("beta", ())))
    for k, v, beta in zip(*steps, strict=True):
        error = v - jnp.einsum("hkv,hk->hv", S, k)
        S = S + jnp.einsum("h,hk,hv->hkv", beta, k, error)
    return S, scale * jnp.einsum("hkv,hk->hv", S, token["q"])


def dplr_delta_rule(S: jax.Array, token: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    """Multiply the state by a diagonal matrix plus one of rank 1, which is no decay of it, and add k v^T."""
    read = jnp.einsum("hkv,hk->hv", S, token["a"])
    S = jnp.exp(token["gk"])[:, :, None] * S + jnp.einsum("hk,hv->hkv", token["b"], read)
    S = S + jnp.einsum("hk,hv->hkv", token["k"], token["v"])
    return S, scale * jnp.einsum("hkv,hk->hv", S, token["q"])


def reference(
    step: Step,
    x: dict[str, Any],
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens=None,
    segment_ids=None,
    do=None,
    dht=None,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return o, the final states, and the gradients of sum(o * do) + sum(states * dht) by name, in float64.

    Without cotangents there are no gradients.

    Args:
      step: a definition of this module.
      x: the inputs by name, of any types: q [B, T, H, K] and the tensors of the operator, whose T may be a multiple of
        that of q; initial_state [N, HV, K, V], if there is one.
      scale, use_qk_l2norm_in_kernel, cu_seqlens, segment_ids: as in the operator.
      do, dht: the cotangents; one that is None counts as zeros.
    """
    x = {name: np.asarray(y, np.float64) for name, y in x.items()}
    (B, T, _, K), (HV, V) = x["q"].shape, x["v"].shape[2:]
    begins, valid, ends = sequences(B, T, cu_seqlens, segment_ids)
    N = len(ends)
    x = {"initial_state": np.zeros((N, HV, K, V))} | x
    inside = lambda y: np.where(
        np.repeat(valid, y.shape[1] // T, 1).reshape(*y.shape[:2], *(1,) * (y.ndim - 2)), y, 0.0
    )
    x = {name: y if name == "initial_state" else inside(y) for name, y in x.items()}
    scale = K**-0.5 if scale is None else float(scale)
    with jax.enable_x64(True):
        x = {name: jnp.asarray(y) for name, y in x.items()}
        run = functools.partial(_run, step, scale, use_qk_l2norm_in_kernel)
        places = begins, valid, np.asarray([(-1, -1) if end is None else end for end in ends])
        if do is None and dht is None:
            o, states = run(x, *places)
            return np.asarray(o), np.asarray(states), {}
        do = np.zeros((B, T, HV, V)) if do is None else inside(np.asarray(do, np.float64))
        dht = np.zeros((N, HV, K, V)) if dht is None else np.asarray(dht, np.float64)
        (o, states), pull = jax.vjp(lambda x: run(x, *places), x)
        (gradients,) = pull((jnp.asarray(do), jnp.asarray(dht)))
        return np.asarray(o), np.asarray(states), {name: np.asarray(y) for name, y in gradients.items()}


def sequences(B: int, T: int, cu_seqlens, segment_ids) -> tuple[np.ndarray, np.ndarray, list]:
    """Return how sequences lie in the rows.

    Returns:
      int [B, T], the initial state with which a token begins, N for zeros, and -1 where it continues a sequence; bool
      [B, T], False for padding; and for every state the row and the token that end in it, None for no token.
    """
    begins, valid, ends = np.full((B, T), -1), np.zeros((B, T), bool), []
    if cu_seqlens is not None:
        for n, (start, stop) in enumerate(itertools.pairwise(np.asarray(cu_seqlens))):
            if stop > start:
                begins[0, start] = n
            valid[0, start:stop] = True
            ends.append((0, int(stop) - 1) if stop > start else None)
        return begins, valid, ends
    ids = np.zeros((B, T), int) if segment_ids is None else np.asarray(segment_ids)
    for row in range(B):
        before = None
        for t in np.flatnonzero(ids[row] >= 0):
            if before is None or ids[row, t] != ids[row, t - 1]:
                begins[row, t] = row if before is None else B
            before = int(t)
        ends.append(None if before is None else (row, before))
    return begins, ids >= 0, ends


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(step: Step, scale: float, normalise: bool, x: dict[str, jax.Array], begins, valid, ends):
    """Return o and the final states; heads of keys are repeated for their value heads."""
    first, (B, T) = x["initial_state"], begins.shape
    HV = first.shape[1]
    x = {name: y for name, y in x.items() if name != "initial_state"}
    if normalise:
        unit = lambda y: y / jnp.sqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)
        x = x | {name: unit(x[name]) for name in ("q", "k")}
    x = {name: jnp.repeat(y, HV // y.shape[2], axis=2) for name, y in x.items()}
    # The arrays with n entries for a token have [n, HV, ...] in a token.
    x = {name: y if y.shape[1] == T else y.reshape(B, T, -1, *y.shape[2:]) for name, y in x.items()}
    states = jnp.concatenate([first, jnp.zeros_like(first[:1])])

    def one(S, token):
        begin, exists, arrays = token
        S = jnp.where(begin >= 0, states[begin], S)
        after, o = step(S, arrays, scale)
        S = jnp.where(exists, after, S)
        return S, (jnp.where(exists, o, 0.0), S)

    row = lambda begins, valid, x: jax.lax.scan(one, states[-1], (begins, valid, x))[1]
    o, after = jax.vmap(row)(begins, valid, x)
    exists = (ends[:, 0] >= 0)[:, None, None, None]
    return o, jnp.where(exists, after[ends[:, 0], ends[:, 1]], first)
