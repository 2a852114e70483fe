"""The gradient of the fused launch, at the layout of the kernels: JAX transposes the way of the arrays there."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.fused_gdn import kernel, kernel_bwd
from chunkwise.shared.kernels import chunking, layout, remat


class Tensors(NamedTuple):
    """The floating-point arrays of the operator, as the user has them, or their shapes and types.

    Attributes:
      q, k: [B, T, H, K].
      v: [B, T, HV, V].
      g, beta: [B, T, HV].
      initial_state: [N, HV, K, V], or None.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    initial_state: Any

    def types(self) -> "Tensors":
        """Return the shapes and types of arrays."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self)


def to_blocks(x: jax.Array, heads: int, T: int) -> jax.Array:
    """Return a value per token [B, t, HV] as [B, HV / heads, T, heads], zeros past the last token."""
    x = chunking.pad_tokens(x, T)
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, heads), 2, 1)


def from_blocks(x: jax.Array, T: int) -> jax.Array:
    """Return [B, blocks, t, heads] as [B, T, HV]; the inverse of `to_blocks`."""
    return jnp.moveaxis(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)[:, :T]


def repacked(X: jax.Array, p: int) -> jax.Array:
    """Return packed inverses [B, steps, HV / n, C, n C] with p heads side by side; the same if n is p."""
    B, steps, packs, C, width = X.shape
    if width == p * C:
        return X
    heads = jnp.swapaxes(X.reshape(B, steps, packs, C, width // C, C), 3, 4)  # [B, steps, packs, n, C, C]
    heads = jnp.swapaxes(heads.reshape(B, steps, -1, p, C, C), 3, 4)  # [B, steps, HV / p, C, p, C]
    return heads.reshape(B, steps, -1, C, p * C)


def lay_out(x: Tensors, tables: tuple, dtype, static: kernel.Static, heads: int) -> kernel.Operands:
    """Return the operands of the forward kernel.

    Args:
      x: the user's arrays.
      tables: `Operands.table` and `Operands.owner`.
      dtype: the type in which products take q, k and v.
      static: what is known.
      heads: value heads of a step.
    """
    q, k, v = (layout.to_lanes(y.astype(dtype), static.T) for y in (x.q, x.k, x.v))
    # No TPU loads float16.
    wide = lambda y: y.astype(jnp.float32) if y.dtype == jnp.float16 else y
    g, beta = (to_blocks(wide(y), heads, static.T) for y in (x.g, x.beta))
    return kernel.Operands(tables[0], q, k, v, g, beta, layout.pad_states(x.initial_state), tables[1])


def _trim(x: kernel.Operands, like: Tensors) -> Tensors:
    """Return what `lay_out` was given, of these shapes and types: it holds no padding, and XLA makes no copy of it."""

    def tokens(y, to):
        return layout.from_lanes(y, to.shape[2], to.shape[3], to.shape[1]).astype(to.dtype)

    h0, to = x.h0, like.initial_state
    return Tensors(
        *(tokens(y, to) for y, to in ((x.q, like.q), (x.k, like.k), (x.v, like.v))),
        *(from_blocks(y, to.shape[1]).astype(to.dtype) for y, to in ((x.g, like.g), (x.beta, like.beta))),
        None if h0 is None else h0[:, :, : to.shape[2], : to.shape[3]].astype(to.dtype),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def fused(x: kernel.Operands, cu_seqlens: jax.Array | None, static: kernel.Static, like: Tensors, final_state: bool):
    """Run the forward.

    Args:
      x: operands of the forward kernel. With X, of an earlier launch, neither direction computes it again, and with u
        and w of it the forward computes less. These have no gradients of their own, and u and w are not kept.
      cu_seqlens: int32 [N + 1], or None.
      static: what is known.
      like: shapes and types of the user's arrays, which is what the backward keeps.
      final_state: whether the final states are wanted.

    Returns:
      o [B, T, HV V], and the final states [N, HV, K, V] or None; that of an empty sequence is undefined.
    """
    out = kernel.launch(x, static, ("o", "ht") if final_state else ("o",))
    return out["o"], out.get("ht")


def _forward(x, cu_seqlens, static, like, final_state):
    kept = () if x.X is not None else ("X",)
    out = remat.keep(kernel.launch(x, static, ("o", "ht", *kept) if final_state else ("o", *kept)))
    return (out["o"], out.get("ht")), (_trim(x, like), (x.table, x.owner), cu_seqlens, out.get("X", x.X))


def _backward(static, like, final_state, residuals, cotangents):
    tensors, tables, cu_seqlens, X = residuals
    do, dht = cotangents
    config = static.config
    x = lay_out(tensors, tables, do.dtype, static, config.heads)._replace(X=X)
    states = kernel.launch(x, static, ("h", "W"))
    if config.heads_bwd != config.heads:
        x = lay_out(tensors, tables, do.dtype, static, config.heads_bwd)._replace(X=X)
    x = x._replace(h=states["h"], W=states["W"], do=do, dht=dht)
    d = kernel_bwd.launch(x, static, (*kernel_bwd.ALL, "dh0") if x.h0 is not None else kernel_bwd.ALL)
    if config.heads_bwd != config.heads:
        for name in ("dg", "dbeta"):
            d[name] = to_blocks(from_blocks(d[name], static.T), config.heads, static.T)
    # The kernel does not visit empty sequences, and their final states do not come from it.
    dh0 = None if x.h0 is None else layout.unless_empty(d["dh0"], None, cu_seqlens)
    dg, dbeta = d["dg"].astype(x.g.dtype), d["dbeta"].astype(x.beta.dtype)
    return kernel.Operands(None, d["dq"], d["dk"], d["dv"], dg, dbeta, dh0), None


fused.defvjp(_forward, _backward)
