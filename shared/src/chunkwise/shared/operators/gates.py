"""What operators do with raw gates and step sizes: the checks, and the laws over all tokens.

A decay is made of a raw gate by a law of `shared.kernels.gate_activation`. A step size is sigmoid(y) or 2 sigmoid(y) of
the raw y.
"""

import functools
import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import chunking, gate_activation
from chunkwise.shared.operators import checks


class GateActivation(NamedTuple):
    """Which activation an operator applies, by the names of its arguments: all static.

    Attributes:
      use_gate_in_kernel: the gate is raw.
      lower_bound: of the decay, a negative number, for the second law; None for the first.
      use_beta_sigmoid_in_kernel: the step size is raw.
      allow_neg_eigval: it, or the erase gate, is doubled.
      use_erase_sigmoid_in_kernel, use_write_sigmoid_in_kernel: the erase gate, or the write gate, is raw.
    """

    use_gate_in_kernel: bool = False
    lower_bound: float | None = None
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    use_erase_sigmoid_in_kernel: bool = False
    use_write_sigmoid_in_kernel: bool = False


def check_gate_activation(activation: GateActivation, A_log, dt_bias, g) -> None:
    """Check the activation, and the arrays that they take for gates g [B, T, HV] or [B, T, HV, K]."""
    flags = {name: value for name, value in activation._asdict().items() if name != "lower_bound"}
    checks.check_flags(**flags)
    raw = activation.use_beta_sigmoid_in_kernel or activation.use_erase_sigmoid_in_kernel
    doubled = activation.allow_neg_eigval and not raw
    checks.check(not doubled, "`allow_neg_eigval` must be False without `use_beta_sigmoid_in_kernel`; got True.")
    if not activation.use_gate_in_kernel:
        for name, x in dict(A_log=A_log, dt_bias=dt_bias, lower_bound=activation.lower_bound).items():
            checks.check(x is None, f"`{name}` must be None without `use_gate_in_kernel`; got {checks.shown(x)}.")
        return
    bound = activation.lower_bound
    number = isinstance(bound, numbers.Real) and not isinstance(bound, bool)
    checks.check(
        bound is None or (number and -math.inf < bound < 0),
        f"`lower_bound` must be None or a finite number < 0{checks.when_built(bound)}; got {checks.shown(bound)}.",
    )
    HV, *channels = g.shape[2:]
    checks.check(
        A_log is not None or bound is not None,
        "`A_log` must be an array [HV] with `use_gate_in_kernel` and without `lower_bound`; got None.",
    )
    if len(getattr(A_log, "shape", ())) == 4:  # as checkpoints have it
        checks.check_array("A_log", A_log, "1 1 HV 1", (1, 1, HV, 1))
    elif A_log is not None:
        checks.check_array("A_log", A_log, "HV", (HV,))
    if dt_bias is None:
        return
    if channels and len(getattr(dt_bias, "shape", ())) != 1:
        checks.check_array("dt_bias", dt_bias, "HV K", (HV, *channels))
    else:
        checks.check_array("dt_bias", dt_bias, "HV*K" if channels else "HV", (math.prod(g.shape[2:]),))


def by_head(A_log: jax.Array | None, activation: GateActivation, heads: int) -> jax.Array | None:
    """Return A_log [HV] of a law; a law with a lower bound has zeros for None. Without a law it is None."""
    if A_log is None:
        return jnp.zeros(heads, jnp.float32) if activation.use_gate_in_kernel else None
    return A_log.reshape(-1)


def lay_out_activation(
    A_log: jax.Array, dt_bias: jax.Array | None, heads: tuple[int, ...], lower_bound: float | None
) -> tuple[jax.Array, jax.Array]:
    """Return A_log and dt_bias as `gate_activation.in_range`, float32 of the shape `heads`, (HV,) or (HV, K)."""
    A_log = jnp.broadcast_to(A_log.astype(jnp.float32).reshape(-1, *(1,) * (len(heads) - 1)), heads)
    dt_bias = jnp.zeros(heads, jnp.float32) if dt_bias is None else dt_bias.astype(jnp.float32).reshape(heads)
    return gate_activation.in_range(A_log, dt_bias, lower_bound)


@functools.partial(jax.jit, static_argnames="lower_bound")
# Recomputed in the backward: what would be kept otherwise is larger than the raw gates.
@functools.partial(jax.checkpoint, static_argnums=3)
def decays(
    g: jax.Array, A_log: jax.Array, dt_bias: jax.Array | None, lower_bound: float | None, valid: jax.Array | None
) -> jax.Array:
    """Return the decays of raw gates g [B, T, HV] or [B, T, HV, K] of any type.

    Tokens that are not `valid`, bool [B, T], may hold anything; None if all are.
    """
    A_log, dt_bias = (y[None, None] for y in lay_out_activation(A_log, dt_bias, g.shape[2:], lower_bound))
    g = g if valid is None else chunking.select_tokens(valid, g)
    return gate_activation.decay(g.astype(jnp.float32), A_log, dt_bias, lower_bound)


@functools.partial(jax.jit, static_argnames="doubled")
def step_sizes(beta: jax.Array, doubled: bool, valid: jax.Array | None) -> jax.Array:
    """Return step sizes, or gates, of raw ones [B, T, ...] of any type; those not `valid` may hold anything."""
    beta = beta if valid is None else chunking.select_tokens(valid, beta)
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))
    return 2.0 * beta if doubled else beta
