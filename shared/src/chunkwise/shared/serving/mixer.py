"""Decodes of one token by the kernel of `mixer_kernel`: which of them it takes, and how they become a launch.

It takes an operator alone, and the whole mixer of a layer: the convolution with its pool, the gates, the operator and
the gated norm, with one launch between the projections.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Arguments, Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.kernels import chunking
from chunkwise.shared.serving import mixer_kernel, step_table
from chunkwise.shared.serving.decode_kernel import DecodeStatic
from chunkwise.shared.serving.mixer_kernel import MixerInputs
from chunkwise.shared.serving.mixer_tile import MixerStatic, OutputNorm


class Mixer(NamedTuple):
    """What a layer has between its projections, for a stream of T tokens.

    Attributes:
      H, HV, K, V: key heads, value heads and their channels.
      x: channels of queries, keys and values before the convolution, [T, channels]: one array, or three.
      g, beta: raw gates [T, HV] or [T, HV K], and step sizes [T, HV], raw or not.
      weight, bias: of the convolution, [channels, W] and [channels] for every array of x; no bias is an empty tuple.
      A_log, dt_bias: of the law of the gates, [HV], and [HV] or [HV, K].
      activation: of gates and step sizes, as the operators name it.
      z, norm, output: gates of the output [T, HV V], and the weight [V] of its norm, and how it is normed; or None.
    """

    H: int
    HV: int
    K: int
    V: int
    x: tuple[jax.Array, ...]
    g: jax.Array
    beta: jax.Array
    weight: tuple[jax.Array, ...]
    bias: tuple[jax.Array, ...]
    A_log: jax.Array | None
    dt_bias: jax.Array | None
    activation: GateActivation
    z: jax.Array | None = None
    norm: jax.Array | None = None
    output: OutputNorm | None = None

    def prepared(self) -> tuple[MixerInputs, MixerStatic]:
        """Return what the kernel takes. Queries and keys get unit length, and the convolution has SiLU."""
        law, doubled = self.activation.law, self.activation.allow_neg_eigval
        row: Callable[[Any], Any] = lambda y: None if y is None else y.reshape(1, -1)
        # A law takes zeros for none.
        zeros = lambda size: jnp.zeros((1, size), jnp.float32)
        inputs = MixerInputs(
            self.x, self.g, self.beta, self.z, self.weight, tuple(map(row, self.bias)),
            zeros(self.HV) if self.A_log is None else row(self.A_log),
            zeros(self.g.shape[1]) if self.dt_bias is None else row(self.dt_bias), row(self.norm),
        )  # fmt: skip
        step_size = 1.0 + doubled if self.activation.use_beta_sigmoid_in_kernel else None
        static = MixerStatic(
            self.H, self.HV, self.K, self.V, self.K**-0.5, law, step_size, True, "silu", self.output, "decode_mixer_fwd"
        )
        return inputs, static

    def fits(self, conv: tuple[jax.Array, ...], states, slots: Slots) -> bool:
        """Return whether one launch takes decodes over these pools, which may be of any kind and shape."""
        channels, W = [x.shape[1] for x in self.x], self.weight[0].shape[-1]
        agree = (
            hasattr(states, "dtype")
            and states.shape[1:] == (self.HV, self.K, self.V)
            and sum(channels) == 2 * self.H * self.K + self.HV * self.V
            and [x.shape for x in self.weight] == [(n, W) for n in channels]
            and [x.shape[1:] for x in conv] == [(W - 1, n) for n in channels]
        )
        if not agree or not _one_slot_each(slots):
            return False
        inputs, static = jax.eval_shape(lambda: self.prepared()[0]), self.prepared()[1]
        return takes(inputs, conv, states, slots, static)

    def decode(
        self, conv: tuple[jax.Array, ...], states: jax.Array, cu_seqlens: jax.Array, slots: Slots
    ) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
        """Return the output [T, HV V] of a step of decodes alone, and the pools; it must fit."""
        inputs, static = self.prepared()
        o, conv, states = mixer_kernel.launch(inputs, conv, states, cu_seqlens, _column(slots), static)
        return chunking.pad_tokens(o[None], self.x[0].shape[0])[0], conv, states


def in_one_launch(
    mixer: Mixer,
    pools: tuple[tuple[jax.Array, ...], jax.Array],
    cu_seqlens: jax.Array,
    slots: Slots,
    implementation: str | None,
    otherwise: Callable[[], Any],
    make: Callable[[jax.Array, tuple[jax.Array, ...], jax.Array], Any],
) -> Any:
    """Return what a serving step makes: by one launch if all of its sequences decode, else otherwise().

    Which sequences decode is known when the step runs, so a program has both ways.

    Args:
      mixer: of the tokens of the step.
      pools: of the convolutions, and of states; not every kind is one for this kernel.
      cu_seqlens, slots: of the step.
      implementation: of the operator, as the user names it.
      otherwise: the step by one operation after the other.
      make: from the output [T, HV V] and the pools to what `otherwise` returns.
    """
    slots = step_table.with_counts(Slots(*map(checks.as_int32, slots)))
    if slots.num_decodes is None or not takes_mixer(mixer, pools, slots, implementation):
        return otherwise()
    N = slots.state_indices.shape[0]
    sequences = N if slots.num_sequences is None else jnp.minimum(slots.num_sequences, N)
    together = lambda: make(*mixer.decode(*pools, checks.as_int32(cu_seqlens), slots))
    return lax.cond(slots.num_decodes >= sequences, together, otherwise)


def takes_mixer(
    mixer: Mixer, pools: tuple[tuple[jax.Array, ...], jax.Array], slots: Slots, implementation: str | None
) -> bool:
    """Return whether one launch is for a mixer whose operator has this implementation, and takes it."""
    name = checks.choose_implementation(implementation, ("fused", "staged", "xla"), "fused")
    return name == "fused" and mixer.fits(*pools, slots)


def takes(x: MixerInputs, conv: tuple[jax.Array, ...], states, slots: Slots, static: MixerStatic) -> bool:
    """Return whether the kernel takes tokens of these sizes."""
    return mixer_kernel.sequences_a_step(x, conv, states, slots.state_indices.shape[0], static) is not None


def decode_rule(
    static: DecodeStatic, x: Arguments, pool: jax.Array, cu_seqlens: jax.Array, slots: Slots
) -> tuple[jax.Array, jax.Array] | None:
    """Return the output of decodes of one token, like v, and the pool; None where the kernel does not take them.

    Args:
      static: of the decode.
      x: prepared arguments, as `decode_kernel.launch` takes them.
      pool: [slots, HV, K, V].
      cu_seqlens, slots: of the sequences, of which those that decode come first.
    """
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    if x.p is not None or static.W != 1 or not static.single or not _one_slot_each(slots):
        return None
    row = lambda y: y.reshape(-1, y[0, 0].size)
    inputs = MixerInputs(tuple(map(row, (x.q, x.k, x.v))), row(x.g), None if x.beta is None else row(x.beta))
    mixer = MixerStatic(H, HV, K, V, static.scale, None, None, static.normalise, None, None, static.name)
    if not takes(inputs, (), pool, slots, mixer):
        return None
    o, _, pool = mixer_kernel.launch(inputs, (), pool, cu_seqlens, _column(slots), mixer)
    return chunking.pad_tokens(o[None], inputs.g.shape[0]).reshape(x.v.shape), pool


def _one_slot_each(slots: Slots) -> bool:
    """Return whether every sequence has one slot, from which it starts whatever the last decode was."""
    one = slots.state_indices.ndim == 1 or slots.state_indices.shape[1] == 1
    return one and slots.num_accepted_tokens is None


def _column(slots: Slots) -> Slots:
    return slots._replace(state_indices=slots.state_indices.reshape(-1))
