"""What the kernels of decodes run: an operator alone, or all of a layer between its projections.

That is the convolution with its pool, the gates, the operator and the gated norm.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.kernels import gate_activation, packed, tiles

# The most tokens of a decode that the kernel takes at once: it has code for each pair of them.
MOST_TOKENS = 8


class DecodeStatic(NamedTuple):
    """The static description of decodes.

    Attributes:
      H, HV, K, V: key heads, value heads and their channels.
      W: the most tokens of a decode.
      single: whether a decode has at most W tokens, each with a slot if there are no rings; otherwise it may have any
        number, of which the last one has the slot, and W is 1.
      scale: the number by which the kernel multiplies the output.
      normalise: whether queries and keys are scaled to unit length.
      name: the name of the kernel.
      erase_before_decay: whether erase keys read the state before the decay.
      law: the law of raw gates; None if gates are decays in nats.
      step_size: the factor of the sigmoids of raw step sizes; None if step sizes are final.
      activation: the activation of the convolution.
      first: how many value heads of the pool come before those of the launch.
      norm_gate: the activation of the gate of the output.
      eps: added to the mean of the squares in the norm of the output; None for no norm.
      norm_heads: how many value heads a norm goes over together.
      gate_first: whether the gate multiplies the output before the norm, and not after it.
      dt_limit: the least and the largest of the time steps of Mamba-2, which raw gates then are: a step multiplies the
        value of its token, and makes its decay; None for other gates.
      transposed: whether states lie as [V, K].
      side_by_side: how many value heads are one head for the kernel, in which each of them has its own lanes of values
        and its own decay.
      paired: whether they are two heads with their own lanes of keys, too, beside which they share a state [V / 2, K].
    """

    H: int
    HV: int
    K: int
    V: int
    W: int
    single: bool
    scale: float
    normalise: bool
    name: str
    erase_before_decay: bool = False
    law: gate_activation.Law | None = None
    step_size: float | None = None
    activation: str | None = None
    first: int = 0
    norm_gate: str | None = None
    eps: float | None = None
    norm_heads: int = 1
    gate_first: bool = False
    dt_limit: tuple[float, float] | None = None
    transposed: bool = False
    side_by_side: int = 1
    paired: bool = False

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.HV // self.H

    @property
    def gates(self) -> int:
        """How many value heads have a decay of their own."""
        return self.HV * self.side_by_side

    @property
    def loops(self) -> bool:
        """Whether a loop takes the tokens of a decode one after the other."""
        return not self.single or self.W > MOST_TOKENS

    @property
    def decode_tokens(self) -> int:
        """How many tokens of a decode the kernel takes at once."""
        return 1 if self.loops else self.W


class Decodes(NamedTuple):
    """The arrays of a layer between its projections, or of an operator alone, for a stream of T tokens.

    Attributes:
      static: the static description.
      x: channels of queries, keys and values before the convolution, in one array [T, channels] or in three.
      g: decays in nats, or raw gates, [T, HV] or [T, HV K]; None for the decays `gamma`.
      beta: step sizes, raw or final, [T, HV]; None without the delta rule.
      z: gates of the output [T, HV V], or None.
      weight, bias: weights and biases of the convolution, [channels, W] and [channels] for every array of x; empty if
        there are none.
      A_log, dt_bias: the arrays of the law, [HV], and [HV] or [HV, K]; None for zeros.
      norm: the weight of the norm, [V] for all heads or [HV V], or None.
      norm_bias: the bias of a layer norm, [HV V]; None for a norm that neither subtracts means nor has a bias.
      own: [H K], the weights of channels in a sum of q k, the share of its value that a token has in its normed output;
        None for no share. It comes with norm_bias and a scale of 1.
      p: erase keys [T, HV K], which the kernel does not scale to unit length; None for k.
      echo: keys [T, H K] that write what erase keys read, beside k, which writes v; then there is no beta. Or None.
      gamma: decays in nats [HV] that are the same for all tokens, or None.
      skip: [HV], how much of its value a token has in its output, or None.
    """

    static: DecodeStatic
    x: tuple[jax.Array, ...]
    g: jax.Array | None
    beta: jax.Array | None = None
    z: jax.Array | None = None
    weight: tuple[jax.Array, ...] = ()
    bias: tuple[jax.Array, ...] = ()
    A_log: jax.Array | None = None
    dt_bias: jax.Array | None = None
    norm: jax.Array | None = None
    norm_bias: jax.Array | None = None
    own: jax.Array | None = None
    p: jax.Array | None = None
    echo: jax.Array | None = None
    gamma: jax.Array | None = None
    skip: jax.Array | None = None

    @property
    def of_layer(self) -> bool:
        """Whether it is a layer between its projections, and not an operator alone."""
        return self.weight != () or self.z is not None

    @property
    def per_channel(self) -> bool:
        """Whether gates are per channel of the key."""
        return self.g is not None and self.g.shape[1] > self.static.HV

    @property
    def tokens(self) -> dict[str, jax.Array]:
        """The arrays of tokens, by the names of their Refs."""
        named = {f"x{j}": y for j, y in enumerate(self.x)} | {"g": self.g, "beta": self.beta, "z": self.z}
        named |= {"p": self.p, "echo": self.echo}
        return {name: y for name, y in named.items() if y is not None}

    def of_heads(self, parts: int, i: int) -> "Decodes":
        """Return the decodes of part i of the heads of an operator alone."""
        s = self.static
        # The value heads of a single key head share it.
        H = s.H // parts if s.H > 1 else 1
        cut = lambda y, heads: y if heads == 1 < parts else jnp.split(y, parts, axis=1)[i]
        q, k, v = (cut(y, heads) for y, heads in zip(self.x, (s.H, s.H, s.HV), strict=True))
        g, beta, p = (None if y is None else cut(y, s.HV) for y in (self.g, self.beta, self.p))
        echo = None if self.echo is None else cut(self.echo, s.H)
        gamma = None if self.gamma is None else jnp.split(self.gamma, parts)[i]
        static = s._replace(H=H, HV=s.HV // parts, first=i * s.HV // parts)
        return self._replace(static=static, x=(q, k, v), g=g, beta=beta, p=p, echo=echo, gamma=gamma)

    @property
    def lanes(self) -> int:
        """The lanes of a token, with each of its arrays in whole registers."""
        return sum(packed.pad_lanes(y.shape[1]) for y in self.tokens.values())

    @property
    def constants(self) -> dict[str, jax.Array]:
        """The arrays that all tokens share, by the names of their Refs: rows, except weights of convolutions."""
        rows = {f"b{j}": y for j, y in enumerate(self.bias)}
        rows |= {name: getattr(self, name) for name in ("norm", "norm_bias", "own", "gamma", "skip")}
        if self.g is not None and (self.static.law is not None or self.static.dt_limit is not None):
            zeros = lambda size: jnp.zeros(size, jnp.float32)
            rows["A_log"] = zeros(self.static.HV) if self.A_log is None else self.A_log
            rows["dt_bias"] = zeros(self.g.shape[1]) if self.dt_bias is None else self.dt_bias
        rows = {name: y.reshape(1, -1) for name, y in rows.items() if y is not None}
        return {f"w{j}": y for j, y in enumerate(self.weight)} | rows


def static_of(H: int, HV: int, K: int, V: int, activation: GateActivation) -> DecodeStatic:
    """Return the static description of a layer that scales queries and keys to unit length and convolves with SiLU.

    Args:
      H, HV, K, V: key heads, value heads and their channels.
      activation: the activation of gates and step sizes, as for the operators.
    """
    step_size = 1.0 + activation.allow_neg_eigval if activation.use_beta_sigmoid_in_kernel else None
    return DecodeStatic(
        H, HV, K, V, 1, True, K**-0.5, True, "decode_layer_fwd",
        law=activation.law, step_size=step_size, activation="silu",
    )  # fmt: skip


def static_of_rule(name: str, W: int, single: bool, x: Arguments, options: Options) -> DecodeStatic:
    """Return the static description of an operator alone, from prepared arguments."""
    (H, K), (HV, V), normalise = x.q.shape[2:], x.v.shape[2:], options.use_qk_l2norm_in_kernel
    return DecodeStatic(H, HV, K, V, W, single, options.scale, normalise, name, options.erase_before_decay)


def of_rule(static: DecodeStatic, x: Arguments) -> Decodes:
    """Return the decodes of an operator alone, from prepared arguments."""

    def row(y: jax.Array | None) -> Any:
        """Return the heads of every token side by side."""
        return None if y is None else y.reshape(-1, y[0, 0].size)

    gamma = None
    if x.g is None:
        gamma = jnp.zeros(static.HV, jnp.float32) if x.g_gamma is None else tiles.clip_gate(x.g_gamma)
    rows = {name: row(getattr(x, name)) for name in ("g", "beta", "p", "echo")}
    return Decodes(static, tuple(map(row, (x.q, x.k, x.v))), **rows, gamma=gamma)
