"""Functions of JAX as functions of torch, for tests of projects that have torch."""

import jax
import jax.numpy as jnp
import torch


def to_jax(x: torch.Tensor) -> jax.Array:
    """Return an array of torch as one of JAX, integers as int32."""
    x = x.detach()
    if not x.is_floating_point():
        return jnp.asarray(x.numpy(), jnp.int32)
    return jnp.asarray(x.float().numpy(), str(x.dtype).removeprefix("torch."))


def to_torch(x: jax.Array) -> torch.Tensor:
    """Return an array of JAX as one of torch."""
    return torch.from_numpy(jax.device_get(x.astype(jnp.float32)).copy()).to(getattr(torch, x.dtype.name))


class Ours(torch.autograd.Function):
    """A function of JAX in torch: `run` takes arrays by their names, and returns a tuple of arrays."""

    @staticmethod
    def forward(ctx, run, names, *tensors):
        out, ctx.pull = jax.vjp(lambda *xs: run(**dict(zip(names, xs, strict=True))), *map(to_jax, tensors))
        return tuple(map(to_torch, out))

    @staticmethod
    def backward(ctx, *cotangents):
        return None, None, *map(to_torch, ctx.pull(tuple(map(to_jax, cotangents))))
