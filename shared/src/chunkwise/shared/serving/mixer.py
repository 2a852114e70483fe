"""What the kernel of `mixer_kernel` runs: an operator alone, or all of a layer between its projections.

That is the convolution with its pool, the gates, the operator and the gated norm.
"""

import jax

from chunkwise.shared.call.arguments import Arguments, Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.serving.decode_kernel import DecodeStatic
from chunkwise.shared.serving.mixer_tile import Mixer, MixerStatic, OutputNorm
from chunkwise.shared.serving.state_pool import StatePool


def static_of(
    H: int, HV: int, K: int, V: int, activation: GateActivation, norm: OutputNorm | None = None
) -> MixerStatic:
    """Return the static description of a layer that scales queries and keys to unit length and convolves with SiLU.

    Args:
      H, HV, K, V: key heads, value heads and their channels.
      activation: the activation of gates and step sizes, as for the operators.
      norm: the norm of the output, or None.
    """
    step_size = 1.0 + activation.allow_neg_eigval if activation.use_beta_sigmoid_in_kernel else None
    return MixerStatic(H, HV, K, V, K**-0.5, activation.law, step_size, True, "silu", norm, "decode_mixer_fwd")


# The output of a step [T, HV V], the pools of its convolutions and the pool of its states.
Step = tuple[jax.Array, tuple[jax.Array, ...], StatePool]


def of_rule(static: DecodeStatic, x: Arguments) -> Mixer | None:
    """Return the decodes of an operator alone, whose arguments are prepared; None if the kernel has no such rule."""
    if x.p is not None or static.erase_before_decay or not static.single:
        return None
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    row = lambda y: y.reshape(-1, y[0, 0].size)
    return Mixer(
        MixerStatic(H, HV, K, V, static.scale, None, None, static.normalise, None, None, static.name, static.W),
        tuple(map(row, (x.q, x.k, x.v))), row(x.g), None if x.beta is None else row(x.beta),
    )  # fmt: skip


def columns(slots: Slots) -> int:
    """Return how many slots a sequence has."""
    return 1 if slots.state_indices.ndim == 1 else slots.state_indices.shape[1]
