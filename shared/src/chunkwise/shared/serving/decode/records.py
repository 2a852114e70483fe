"""What the kernels of decodes run: an operator alone, or all of a layer between its projections.

That is the convolution with its pool, the gates, the operator and the gated norm.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.shared.call.arguments import Arguments
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.kernels import gate_activation, packed


class DecodeStatic(NamedTuple):
    """The static description of decodes by any kernel, without sizes of arrays.

    Attributes:
      W: the most tokens of a decode; in `states_kernel` the grid steps of a sequence, after each of which states may be
        written to a slot.
      single: whether a grid step takes at most one token; otherwise W is 1, and the step takes all tokens of the
        sequence.
      scale: the number by which the kernel multiplies the output.
      normalise: whether queries and keys are scaled to unit length.
      name: the name of the kernel.
      erase_before_decay: whether erase keys read the state before the decay.
    """

    W: int
    single: bool
    scale: float
    normalise: bool
    name: str
    erase_before_decay: bool = False


class OutputNorm(NamedTuple):
    """The gated norm of the output.

    Attributes:
      activation: the activation of the gate.
      eps: added to the mean of the squares.
    """

    activation: str | None
    eps: float


class KernelStatic(NamedTuple):
    """The static description of a launch of the kernel in this folder.

    Attributes:
      H, HV, K, V: key heads, value heads and their channels.
      rule: the description of the rule.
      law: the law of raw gates; None if gates are decays in nats.
      step_size: the factor of the sigmoids of raw step sizes; None if step sizes are final.
      activation: the activation of the convolution.
      norm: the norm of the output, or None.
    """

    H: int
    HV: int
    K: int
    V: int
    rule: DecodeStatic
    law: gate_activation.Law | None
    step_size: float | None
    activation: str | None
    norm: OutputNorm | None

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.HV // self.H

    @property
    def width(self) -> int:
        """The lanes of a value head of a token."""
        return packed.pad_lanes(self.V)

    @property
    def decode_tokens(self) -> int:
        """The most tokens of a decode."""
        return self.rule.W

    def with_tokens(self, W: int) -> "KernelStatic":
        """Return the description of decodes of at most W tokens."""
        return self._replace(rule=self.rule._replace(W=W))


class Decodes(NamedTuple):
    """The arrays of a layer between its projections, or of an operator alone, for a stream of T tokens.

    Attributes:
      static: the static description.
      x: channels of queries, keys and values before the convolution, in one array [T, channels] or in three.
      g: decays in nats, or raw gates, [T, HV] or [T, HV K].
      beta: step sizes, raw or final, [T, HV]; None without the delta rule.
      z: gates of the output [T, HV V], or None.
      weight, bias: weights and biases of the convolution, [channels, W] and [channels] for every array of x; empty if
        there are none.
      A_log, dt_bias: the arrays of the law, [HV], and [HV] or [HV, K]; None for zeros.
      norm: the weight of the norm, [V], or None.
      p: erase keys [T, HV K], which the kernel does not scale to unit length; None for k.
    """

    static: KernelStatic
    x: tuple[jax.Array, ...]
    g: jax.Array
    beta: jax.Array | None = None
    z: jax.Array | None = None
    weight: tuple[jax.Array, ...] = ()
    bias: tuple[jax.Array, ...] = ()
    A_log: jax.Array | None = None
    dt_bias: jax.Array | None = None
    norm: jax.Array | None = None
    p: jax.Array | None = None

    @property
    def tokens(self) -> dict[str, jax.Array]:
        """The arrays of tokens, by the names of their Refs."""
        named = {f"x{j}": y for j, y in enumerate(self.x)} | {"g": self.g, "beta": self.beta, "z": self.z, "p": self.p}
        return {name: y for name, y in named.items() if y is not None}

    @property
    def lanes(self) -> int:
        """The lanes of a token, with each of its arrays in whole registers."""
        return sum(packed.pad_lanes(y.shape[1]) for y in self.tokens.values())

    @property
    def constants(self) -> dict[str, jax.Array]:
        """The arrays that all tokens share, by the names of their Refs: rows, except weights of convolutions."""
        rows = {f"b{j}": y for j, y in enumerate(self.bias)} | {"norm": self.norm}
        if self.static.law is not None:
            zeros = lambda size: jnp.zeros(size, jnp.float32)
            rows["A_log"] = zeros(self.static.HV) if self.A_log is None else self.A_log
            rows["dt_bias"] = zeros(self.g.shape[1]) if self.dt_bias is None else self.dt_bias
        rows = {name: y.reshape(1, -1) for name, y in rows.items() if y is not None}
        return {f"w{j}": y for j, y in enumerate(self.weight)} | rows


def static_of(
    H: int, HV: int, K: int, V: int, activation: GateActivation, norm: OutputNorm | None = None
) -> KernelStatic:
    """Return the static description of a layer that scales queries and keys to unit length and convolves with SiLU.

    Args:
      H, HV, K, V: key heads, value heads and their channels.
      activation: the activation of gates and step sizes, as for the operators.
      norm: the norm of the output, or None.
    """
    step_size = 1.0 + activation.allow_neg_eigval if activation.use_beta_sigmoid_in_kernel else None
    rule = DecodeStatic(1, True, K**-0.5, True, "decode_layer_fwd")
    return KernelStatic(H, HV, K, V, rule, activation.law, step_size, "silu", norm)


def of_rule(static: DecodeStatic, x: Arguments) -> Decodes | None:
    """Return the decodes of an operator alone, from prepared arguments; None if the kernel does not run its tokens."""
    if not static.single:
        return None
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    s = KernelStatic(H, HV, K, V, static, None, None, None, None)

    def row(y: Any, by_channel=True) -> Any:
        """Return the heads of every token side by side, each in whole registers if they have channels."""
        if y is None:
            return None
        if by_channel:
            y = jnp.pad(y, ((0, 0),) * 3 + ((0, packed.pad_lanes(y.shape[3]) - y.shape[3]),))
        return y.reshape(-1, y[0, 0].size)

    return Decodes(
        s, tuple(map(row, (x.q, x.k, x.v))), row(x.g, x.g.ndim == 4), row(x.beta, by_channel=False), p=row(x.p)
    )
