"""Which kernel decodes: the one place that knows it, for operators alone and for whole layers."""

import jax.numpy as jnp

from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Arguments, Slots
from chunkwise.shared.serving import states_kernel
from chunkwise.shared.serving.decode import launch, records
from chunkwise.shared.serving.decode.records import Decodes, DecodeStatic
from chunkwise.shared.serving.state_pool import StatePool


def kernel_of(
    implementation: str | None, x: Decodes | Arguments, pool: StatePool, slots: Slots,
    static: DecodeStatic | None = None, conv: tuple = (), strict: bool = False,
) -> str | None:  # fmt: skip
    """Return the kernel that decodes: "decode" or "states"; None for plain JAX, or for a layer in parts.

    Args:
      implementation: the name of the implementation; None for the best one of the backend.
      x: a layer between its projections, or prepared arguments of an operator alone. Only the shapes and types of these
        arrays and of the others are read.
      pool: the pool of states; for a layer it may be of any kind and shape.
      slots: the slots of the sequences, decodes first.
      static: the static description of the decodes of an operator alone.
      conv: the pools of the convolutions of a layer.
      strict: whether it is an error if no kernel takes the decodes.

    Raises:
      NotImplementedError: with `strict`, why no kernel takes the decodes.
    """
    if not runs_kernels(implementation, whole=static is None):
        return None
    if isinstance(x, Decodes):
        fits = _agrees(x, conv, pool) and _decode_limit(x, conv, pool, slots) is None
        return "decode" if fits else None
    assert static is not None
    rule = records.of_rule(static, x)
    # The tokens of an operator alone may be any number, and then the states are an array.
    name, limit = "decode", "" if rule is None else _decode_limit(rule, (), pool, slots)
    # The other kernel takes neither int8 states nor rings.
    if limit is not None and pool.is_array and pool.states.dtype != jnp.float16:
        name, limit = "states", _states_limit(x, pool)
    if limit is None:
        return name
    if strict:
        raise NotImplementedError(f'"fused" {limit}: use implementation="xla".')
    return None


def runs_kernels(implementation: str | None, whole: bool) -> bool:
    """Return whether an implementation decodes by kernels; with `whole` whether one kernel runs a whole layer."""
    name = checks.choose_implementation(implementation, ("fused", "staged", "xla"), "fused")
    return name == "fused" or (name == "staged" and not whole)


def _agrees(x: Decodes, conv: tuple, pool: StatePool) -> bool:
    """Return whether the arrays of a layer have shapes that agree; where they do not, its other way has the errors."""
    s, channels, W = x.static, [y.shape[1] for y in x.x], x.weight[0].shape[-1]
    return (
        hasattr(pool.states, "dtype")
        and pool.states.shape[1:] == (s.HV, s.K, s.V)
        and sum(channels) == 2 * s.H * s.K + s.HV * s.V
        and [y.shape for y in x.weight] == [(n, W) for n in channels]
        and [y.shape[1:] for y in conv] == [(W - 1, n) for n in channels]
        # Over rings the convolutions have as many slots for each state as decodes have tokens.
        and (not pool.replay or all(y.shape[0] == s.decode_tokens * pool.shape[0] for y in conv))
    )


def _decode_limit(x: Decodes, conv: tuple, pool: StatePool, slots: Slots) -> str | None:
    """Return why the kernel of `decode.kernel` does not take tokens of these sizes, and slots of this form."""
    if pool.states.dtype == jnp.float16:
        return "takes pools of float32, bfloat16 and int8; got float16"
    # The ring of a sequence with one slot says which tokens of its last decode are kept.
    slots_fit = columns(slots) == launch.targets_of(x, pool)
    if slots_fit and launch.sequences_a_step(x, conv, pool, slots.state_indices.shape[0]) is not None:
        return None
    s, ring = x.static, f" with rings of {pool.replay}" if pool.replay else ""
    return (
        f"takes decodes of at most {launch.MOST_TOKENS} tokens and {launch.MOST_HEADS} value heads; "
        f"{slots.state_indices.shape[0]} decodes of {s.decode_tokens} tokens, and slots of states {pool.shape[1:]}"
        f"{ring}, do not fit into VMEM"
    )


def _states_limit(x: Arguments, pool: StatePool) -> str | None:
    """Return why the kernel of `states_kernel` does not take these tokens over this pool."""
    if states_kernel.key_heads_a_step(x) is not None:
        return None
    (B, T, H, K), (HV, V) = x.q.shape, x.v.shape[2:]
    return (
        f"takes a few tokens per sequence; {B * T} tokens and states [{K}, {V}] of {HV // H} value heads for a key "
        f"head do not fit into VMEM"
    )


def columns(slots: Slots) -> int:
    """Return how many slots a sequence has."""
    return 1 if slots.state_indices.ndim == 1 else slots.state_indices.shape[1]
