"""Decodes by the kernel of `mixer_kernel`: which decodes the kernel takes, and when it runs.

The kernel takes an operator alone, or the whole mixer of a layer: the convolution with its pool, the gates, the
operator and the gated norm, in one launch between the projections.
"""

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Arguments, Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.kernels import chunking
from chunkwise.shared.serving import mixer_launch, step_table
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


def fits(x: Mixer, conv: tuple[jax.Array, ...], pool: StatePool, slots: Slots) -> bool:
    """Return whether one launch takes decodes of a layer over these pools, which may be of any kind and shape."""
    s, channels, W = x.static, [y.shape[1] for y in x.x], x.weight[0].shape[-1]
    agree = (
        hasattr(pool.states, "dtype")
        and pool.states.shape[1:] == (s.HV, s.K, s.V)
        and sum(channels) == 2 * s.H * s.K + s.HV * s.V
        and [y.shape for y in x.weight] == [(n, W) for n in channels]
        and [y.shape[1:] for y in conv] == [(W - 1, n) for n in channels]
        # Over rings the convolutions have as many slots for each state as decodes have tokens.
        and (not pool.replay or all(y.shape[0] == s.decode_tokens * pool.shape[0] for y in conv))
    )
    return agree and _takes(x, conv, pool, slots)


def decode(
    x: Mixer, conv: tuple[jax.Array, ...], pool: StatePool, cu_seqlens: jax.Array, slots: Slots
) -> tuple[jax.Array, tuple[jax.Array, ...], StatePool]:
    """Return the output [T, HV V] of a step that has only decodes, and the pools; `fits` must hold."""
    o, conv, pool = mixer_launch.launch(x, conv, pool, cu_seqlens, slots)
    return chunking.pad_tokens(o[None], x.x[0].shape[0])[0], conv, pool


def in_one_launch(
    x: Mixer,
    pools: tuple[tuple[jax.Array, ...], StatePool],
    cu_seqlens: jax.Array,
    slots: Slots,
    implementation: str | None,
    otherwise: Callable[[], Any],
    make: Callable[[jax.Array, tuple[jax.Array, ...], StatePool], Any],
) -> Any:
    """Return the result of a serving step: by one launch if all of its sequences decode, else otherwise().

    Where a count of the step is traced, the program has both branches.

    Args:
      x: the mixer of the tokens of the step.
      pools: the pools of the convolutions, and the pool of states; the kernel does not take every kind of pool.
      cu_seqlens, slots: the boundaries and the slots of the step.
      implementation: the user's name of the operator's implementation, or None.
      otherwise: returns the result of the step, by one operation after the other.
      make: makes such a result from the output [T, HV V] and the pools.
    """
    given = slots
    slots = step_table.with_counts(Slots(*map(checks.as_int32, slots)))
    if not pools[1].replay:
        # A decode has a slot for each of its tokens.
        x = x._replace(static=x.static._replace(decode_tokens=_columns(slots)))
    if slots.num_decodes is None or not takes_mixer(x, pools, slots, implementation):
        return otherwise()
    N = slots.state_indices.shape[0]
    together = lambda: make(*decode(x, *pools, checks.as_int32(cu_seqlens), slots))
    sequences = N if given.num_sequences is None else given.num_sequences
    if all(isinstance(count, numbers.Integral) for count in (given.num_decodes, sequences)):
        if given.num_decodes < min(sequences, N):
            return otherwise()
        # The other way has all checks of arguments.
        jax.eval_shape(otherwise)
        return together()
    return lax.cond(slots.num_decodes >= jnp.minimum(sequences, N), together, otherwise)


def takes_mixer(
    x: Mixer, pools: tuple[tuple[jax.Array, ...], StatePool], slots: Slots, implementation: str | None
) -> bool:
    """Return whether the operator's implementation runs the mixer in one launch, and the launch takes it."""
    name = checks.choose_implementation(implementation, ("fused", "staged", "xla"), "fused")
    return name == "fused" and fits(x, *pools, slots)


def decode_rule(
    static: DecodeStatic, x: Arguments, pool: StatePool, cu_seqlens: jax.Array, slots: Slots
) -> tuple[jax.Array, StatePool] | None:
    """Return the output of decodes, shaped as v, and the pool; None if the kernel does not take them.

    Args:
      static: the static description of the decodes.
      x: prepared arguments, as `decode_kernel.launch` takes them.
      pool: the pool of states.
      cu_seqlens, slots: the boundaries and slots of the sequences, decodes first.
    """
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    if x.p is not None or static.erase_before_decay or not static.single:
        return None
    row = lambda y: y.reshape(-1, y[0, 0].size)
    mixer = Mixer(
        MixerStatic(H, HV, K, V, static.scale, None, None, static.normalise, None, None, static.name, static.W),
        tuple(map(row, (x.q, x.k, x.v))), row(x.g), None if x.beta is None else row(x.beta),
    )  # fmt: skip
    if not _takes(mixer, (), pool, slots):
        return None
    o, _, pool = decode(mixer, (), pool, cu_seqlens, slots)
    return o.reshape(x.v.shape), pool


def _takes(x: Mixer, conv: tuple[jax.Array, ...], pool: StatePool, slots: Slots) -> bool:
    """Return whether the kernel takes tokens of these sizes, and slots of this form."""
    # The ring of a sequence with one slot says which tokens of its last decode are kept.
    if _columns(slots) != mixer_launch.targets_of(x, pool):
        return False
    return mixer_launch.sequences_a_step(x, conv, pool, slots.state_indices.shape[0]) is not None


def _columns(slots: Slots) -> int:
    """Return how many slots a sequence has."""
    return 1 if slots.state_indices.ndim == 1 else slots.state_indices.shape[1]
