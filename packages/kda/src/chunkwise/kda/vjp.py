"""The gradient of the fused launch."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.kda import kernel, kernel_bwd
from chunkwise.kda.kernel import Operands, Static


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fused(x: Operands, static: Static, final_state: bool):
    """Return (o [NC C, HV V], the final states [N, HV, V, K] or None)."""
    out = kernel.launch(x, static, final_state)
    return out["o"], out.get("ht")


def _forward(x, static, final_state):
    out = kernel.launch(x, static, final_state, keep=True)
    return (out["o"], out.get("ht")), (x, out["h"], out["W"], out["X"], out["both"])


def _backward(static, final_state, residuals, cotangents):
    x, *kept = residuals
    do, dht = cotangents
    dq, dk, dv, dg, dbeta, dh0 = kernel_bwd.launch(x, *kept, do, dht, static)
    if dh0 is not None:
        visited = jnp.zeros((static.N,), bool).at[x.sequence].set(True)
        dh0 = jnp.where(visited[:, None, None, None], dh0, 0.0)
    tables = {"first": None, "sequence": None, "last": None, "opening": None, "owner": None}
    return (x._replace(**tables, q=dq, k=dk, v=dv, g=dg, beta=dbeta, initial_state=dh0),)


fused.defvjp(_forward, _backward)
