"""Operators as compiled for a TPU: shapes of their inputs, and the program of their outputs and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.shared.testing import tpu
from chunkwise.shared.testing.inputs import spec


def tokens(B: int, T: int, H: int, HV: int, K: int, V: int, dtype=jnp.bfloat16, *, per_channel: bool = False) -> dict:
    """Return the shapes of the inputs of a delta rule by name; gates and step sizes are float32."""
    q, gates = spec(B, T, H, K, dtype=dtype), [K] * per_channel
    return dict(q=q, k=q, v=spec(B, T, HV, V, dtype=dtype), g=spec(B, T, HV, *gates), beta=spec(B, T, HV))


def compile_gradient(operator: Callable, x: dict[str, Any], cu_seqlens: Any, chip: str, **options) -> str:
    """Return the text of the output and all gradients of the kernels of an operator, compiled for a TPU."""

    def run(x, cu_seqlens):
        def loss(x):
            o, state = operator(**x, cu_seqlens=cu_seqlens, implementation="fused", **options)
            return o.astype(jnp.float32).sum() + (0.0 if state is None else state.sum()), o

        return jax.grad(loss, has_aux=True)(x)

    return tpu.compile_for(run, x, cu_seqlens, chip=chip).as_text()
