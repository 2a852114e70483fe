"""Mamba-2 as simple gated linear attention, whose kernels weigh tokens by their step sizes and add the skip.

C, B and x are queries, keys and values. Other implementations and decodes take the values dt x, and the skip is added
to their output.
"""

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gla import config
from chunkwise.fused_gla import operator as gla
from chunkwise.shared import composition
from chunkwise.shared.call import arguments, checks, configs, signature
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation import implementations
from chunkwise.shared.kernels import chunking

# It has the implementations of simple gated linear attention. Its tensors are checked by their own names.
OPERATOR = dataclasses.replace(gla.SIMPLE_GLA, name="mamba2", check=lambda x, options: None)
# Weights are at least this. It changes no result, and a step of 0 has a gradient.
LEAST_WEIGHT = 2.0**-100


def _run(form: str, named: dict[str, Any]) -> tuple[jax.Array, Any]:
    x, options, implementation = checked(named)
    x, options = composition.check_counts(x.with_int32(), options, form)
    valid = composition.valid_tokens(x, options)
    dt, A = step_sizes(named, valid), jnp.asarray(named["A"], jnp.float32)
    skip = None if named["D"] is None else jnp.asarray(named["D"], jnp.float32)
    skip = skip if skip is None or skip.ndim == 2 else jnp.broadcast_to(skip[:, None], x.v.shape[2:])
    x, z = x._replace(g=A[None, None] * dt, skip=skip), named["z"]
    if form == "ragged" or (form == "chunk" and _fused(x, options, implementation)):
        # The gradient passes the maximum: the kernels have that of a log, which is as small as the weight.
        weight = dt + lax.stop_gradient(jnp.maximum(dt, LEAST_WEIGHT) - dt)
        o, state = getattr(OPERATOR, form)(x._replace(log_weight=jnp.log(weight)), options, implementation)
    else:
        weighted, with_skip = arguments.weigh(x._replace(v=jnp.asarray(x.v)), dt, valid)
        o, state = getattr(OPERATOR, form)(weighted, options, implementation)
        o = o if skip is None else with_skip(o)
    if z is not None:
        # XLA would turn whole arrays around for the gradients of projections, if z were taken by head.
        flat = lambda y: y.reshape(*y.shape[:2], -1).astype(jnp.float32)
        gated = flat(o) * jax.nn.silu(flat(chunking.select_tokens(valid, jnp.asarray(z))))
        o = gated.astype(o.dtype).reshape(o.shape)
    return o, state


# Functions of the arguments of a call by name.
chunk = functools.partial(_run, "chunk")
recurrent = functools.partial(_run, "recurrent")
ragged = functools.partial(_run, "ragged")


def _fused(x: Arguments, options: Options, implementation: str | None) -> bool:
    """Return whether the kernels over whole sequences take the arguments."""
    return implementations.choose(OPERATOR.implementations, implementation, x, options).name == "fused"


def step_sizes(named: dict[str, Any], valid: jax.Array | None) -> jax.Array:
    """Return the step sizes [B, T, HV] float32 of the arguments of a call, of tokens that are `valid`."""
    dt = chunking.select_tokens(valid, jnp.asarray(named["dt"], jnp.float32))
    if named["dt_bias"] is not None:
        dt = dt + jnp.asarray(named["dt_bias"], jnp.float32)[None, None]
    if named["dt_softplus"]:
        dt = jax.nn.softplus(dt)
    low, high = map(float, named["dt_limit"])
    # The default limits need no operation: a softplus is never below 0, and other step sizes must not be.
    return dt if (low, high) == (0.0, math.inf) else jnp.clip(dt, low, high)


def checked(named: dict[str, Any]) -> tuple[Arguments, Options, str | None]:
    """Return the records of a call, without gates; its tensors are checked by the names that the user has for them."""
    x, options, implementation = signature.to_records(named | dict(q=named["C"], k=named["B"], v=named["x"], scale=1.0))
    B, T, H, K = checks.check_array("B", x.k, "B T H K")
    checks.check_array("C", x.q, "B T H K", (B, T, H, K))
    HV, V = checks.check_array("x", x.v, "B T HV V", (B, T, None, None))[2:]
    checks.check(HV % H == 0, f"`x` must have a multiple of the heads of `B`; got {HV} heads for {H}.")
    checks.check_array("dt", named["dt"], "B T HV", (B, T, HV))
    checks.check_array("A", named["A"], "HV", (HV,))
    D, z, bias = (named[name] for name in ("D", "z", "dt_bias"))
    if D is not None:
        by_head = getattr(D, "ndim", 1) == 1
        checks.check_array("D", D, "HV" if by_head else "HV V", (HV,) if by_head else (HV, V))
    if z is not None:
        checks.check_array("z", z, "B T HV V", (B, T, HV, V))
    if bias is not None:
        checks.check_array("dt_bias", bias, "HV", (HV,))
    checks.check_flags(dt_softplus=named["dt_softplus"])
    limit = named["dt_limit"]
    pair = isinstance(limit, tuple | list) and len(limit) == 2 and all(isinstance(n, numbers.Real) for n in limit)
    ordered = pair and 0 <= float(limit[0]) <= float(limit[1])
    checks.check(ordered, f"`dt_limit` must be two numbers, 0 <= least <= most; got {checks.shown(limit)}.")
    checks.check_packed(x.cu_seqlens, B)
    configs.check_config(options.config, config)
    return x._replace(dt_bias=None), options, implementation
