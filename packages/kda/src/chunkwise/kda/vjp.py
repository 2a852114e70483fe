"""The gradient of the fused launch, at the layout of the kernels: JAX transposes the way of the arrays there."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.kda import kernel, kernel_bwd
from chunkwise.shared.kernels import layout, remat


def _results(final_state: bool) -> tuple[str, ...]:
    return ("o", "ht") if final_state else ("o",)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fused(x: kernel.Operands, static: kernel.Static, final_state: bool):
    """Return (o [B, T, HV V], the final states [N, HV, V, K] or None).

    With X and scores, of an earlier launch, neither direction computes them again; they have no gradient of their own.
    """
    out = kernel.launch(x, static, _results(final_state))
    return out["o"], out.get("ht")


def _trim(x: jax.Array, heads: int, lanes: int, size: int) -> jax.Array:
    """Return flat tokens [B, T, heads lanes] without padding, [B, T, heads, size]; x itself if it has none."""
    return x if size == lanes else layout.from_lanes(x, heads, size, x.shape[1])


def _pad(x: jax.Array) -> jax.Array:
    """Return what `_trim` was given."""
    return layout.to_lanes(x, x.shape[1]) if x.ndim == 4 else x


def _forward(x, static, final_state):
    made = () if x.X is not None else ("X", "scores")
    out = remat.keep(kernel.launch(x, static, (*_results(final_state), "h", "W", *made)))
    K, V = static.head_sizes
    # What is kept for the backward holds no padding: it would be more than half of it if K is 60.
    kept = dict(
        q=_trim(x.q, static.H, static.K, K),
        k=_trim(x.k, static.H, static.K, K),
        g=_trim(x.g, static.HV, static.K, K),
        W=_trim(out["W"], static.HV, static.V, V),
        h=out["h"][..., :V, :K],
        **{name: out.get(name, getattr(x, name)) for name in ("X", "scores")},
        **{name: getattr(x, name) for name in ("table", "owner", "beta", "law")},
    )
    return (out["o"], out.get("ht")), kept


def _backward(static, final_state, kept, cotangents):
    do, dht = cotangents
    K, V = static.head_sizes
    tokens = {name: _pad(kept[name]) for name in ("q", "k", "g", "W")}
    states = jnp.pad(kept["h"], [(0, 0)] * 3 + [(0, static.V - V), (0, static.K - K)])
    x = kernel_bwd.Operands(**kept | tokens | dict(h=states), do=do, dht=dht)
    d = kernel_bwd.launch(x, static, (*kernel_bwd.ALL, "dh0") if static.with_state else kernel_bwd.ALL)
    cotangents: dict[str, Any] = dict.fromkeys(("table", "owner"))
    cotangents |= {name: d[f"d{name}"] for name in ("q", "k", "v", "g", "beta", "law")}
    return (kernel.Operands(**cotangents, initial_state=d.get("dh0")),)


fused.defvjp(_forward, _backward)
