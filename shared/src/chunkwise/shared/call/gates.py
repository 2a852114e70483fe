"""Raw gates and step sizes of operators: their checks, and the laws that make decays of them, over all tokens.

A decay is made of a raw gate by a law of `shared.kernels.gate_activation.LAWS`. A step size is sigmoid(y) or
2 sigmoid(y) of the raw y.
"""

import functools
import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.shared.call import checks
from chunkwise.shared.kernels import chunking, gate_activation


class GateActivation(NamedTuple):
    """The activations of raw gates and step sizes that an operator applies; the fields are its static arguments.

    Attributes:
      use_gate_in_kernel: the gate is raw: the name of its law, or True for the law that follows from `lower_bound`.
      lower_bound: the bound that decays stay above, a negative number in nats, for the law "sigmoid"; None for
        "softplus".
      use_beta_sigmoid_in_kernel: the step size is raw.
      allow_neg_eigval: the step size that a sigmoid makes, or the erase gate, is doubled.
      use_erase_sigmoid_in_kernel, use_write_sigmoid_in_kernel: the erase gate, or the write gate, is raw.
    """

    use_gate_in_kernel: bool | str = False
    lower_bound: float | None = None
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    use_erase_sigmoid_in_kernel: bool = False
    use_write_sigmoid_in_kernel: bool = False

    @property
    def law_name(self) -> str:
        """The name of the law of raw gates."""
        if isinstance(self.use_gate_in_kernel, str):
            return self.use_gate_in_kernel
        return "softplus" if self.lower_bound is None else "sigmoid"

    @property
    def law(self) -> gate_activation.Law | None:
        """The law of raw gates with its bound; None where gates are decays."""
        if not self.use_gate_in_kernel:
            return None
        return gate_activation.LAWS[self.law_name](-math.inf if self.lower_bound is None else self.lower_bound)

    def of_gates(self) -> "GateActivation":
        """Return the activation of gates alone."""
        return self._replace(**dict.fromkeys(_OF_STEP_SIZES, False))


_OF_STEP_SIZES = (
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_erase_sigmoid_in_kernel", "use_write_sigmoid_in_kernel",
)  # fmt: skip


def check_gate_activation(activation: GateActivation, A_log, dt_bias, g) -> None:
    """Check the activation, and the arrays of its law for gates g [B, T, HV] or [B, T, HV, K], or None."""
    flags, laws = activation._asdict(), gate_activation.LAWS
    bound: float | None = flags.pop("lower_bound")
    if isinstance(activation.use_gate_in_kernel, str):
        name = flags.pop("use_gate_in_kernel")
        rule = f"must be True, False or the name of a law of {tuple(laws)}"
        checks.check(name in laws, f"`use_gate_in_kernel` {rule}; got {name!r}.")
    checks.check_flags(**flags)
    raw = activation.use_beta_sigmoid_in_kernel or activation.use_erase_sigmoid_in_kernel
    doubled = activation.allow_neg_eigval and not raw
    checks.check(not doubled, "`allow_neg_eigval` must be False without `use_beta_sigmoid_in_kernel`; got True.")
    if not activation.use_gate_in_kernel:
        for name, x in dict(A_log=A_log, dt_bias=dt_bias, lower_bound=bound).items():
            checks.check(x is None, f"`{name}` must be None without `use_gate_in_kernel`; got {checks.shown(x)}.")
        return
    raw = activation.use_gate_in_kernel
    checks.check(g is not None, f"`use_gate_in_kernel` must be False without `g`; got {raw!r}.")
    number = isinstance(bound, numbers.Real) and not isinstance(bound, bool)
    checks.check(
        bound is None or (number and -math.inf < bound < 0),
        f"`lower_bound` must be None or a finite number < 0{checks.when_built(bound)}; got {checks.shown(bound)}.",
    )
    law = laws[activation.law_name]
    rule = f"must be {'a number < 0' if law.bounded else 'None'} for the law {activation.law_name!r}"
    checks.check(law.bounded == (bound is not None), f"`lower_bound` {rule}; got {bound}.")
    HV, *channels = g.shape[2:]
    checks.check(
        A_log is not None or not law.needs_rate,
        "`A_log` must be an array [HV] with `use_gate_in_kernel` and without `lower_bound`; got None.",
    )
    if len(getattr(A_log, "shape", ())) == 4:  # the shape in checkpoints
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
    """Return A_log [HV] of a law, zeros for None. Without a law it is None."""
    if A_log is None:
        return jnp.zeros(heads, jnp.float32) if activation.use_gate_in_kernel else None
    return A_log.reshape(-1)


def lay_out_activation(
    A_log: jax.Array, dt_bias: jax.Array | None, heads: tuple[int, ...], law: gate_activation.Law
) -> tuple[jax.Array, jax.Array]:
    """Return A_log and dt_bias in the range of a law, float32 of the shape `heads`, (HV,) or (HV, K)."""
    A_log = jnp.broadcast_to(A_log.astype(jnp.float32).reshape(-1, *(1,) * (len(heads) - 1)), heads)
    dt_bias = jnp.zeros(heads, jnp.float32) if dt_bias is None else dt_bias.astype(jnp.float32).reshape(heads)
    return law.in_range(A_log, dt_bias)


@functools.partial(jax.jit, static_argnames="law")
# The backward computes the decays again: the float32 arrays to keep for it would be larger than the raw gates.
@functools.partial(jax.checkpoint, static_argnums=3)
def decays(
    g: jax.Array, A_log: jax.Array, dt_bias: jax.Array | None, law: gate_activation.Law, valid: jax.Array | None
) -> jax.Array:
    """Return the decays of raw gates g [B, T, HV] or [B, T, HV, K] of any type.

    Tokens that are not `valid`, bool [B, T], may hold anything; None if all tokens are valid.
    """
    A_log, dt_bias = (y[None, None] for y in lay_out_activation(A_log, dt_bias, g.shape[2:], law))
    g = chunking.select_tokens(valid, g)
    return _decay(law, g.astype(jnp.float32), A_log, dt_bias)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _decay(law: gate_activation.Law, x: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """Return the decays of a law, with its own gradient."""
    return law.decay(x, A_log, dt_bias)


@_decay.defjvp
def _decay_jvp(law: gate_activation.Law, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    x, A_log, dt_bias = primals
    dx, dA_log, ddt_bias = tangents
    g = law.decay(x, A_log, dt_bias)
    slope, slope_of_rate = law.gradient(x, A_log, dt_bias, jnp.ones_like(g))
    return g, slope * (dx + ddt_bias) + slope_of_rate * dA_log


@functools.partial(jax.jit, static_argnames="doubled")
def step_sizes(beta: jax.Array, doubled: bool, valid: jax.Array | None) -> jax.Array:
    """Return sigmoid(beta), or twice it, of beta [B, T, ...] of any type; tokens that are not `valid` hold anything."""
    # XLA would turn the step sizes of channels around, if they were computed by head after a projection.
    flat = chunking.select_tokens(valid, beta).reshape(*beta.shape[:2], -1).astype(jnp.float32)
    size = jax.nn.sigmoid(flat).reshape(beta.shape)
    return 2.0 * size if doubled else size
