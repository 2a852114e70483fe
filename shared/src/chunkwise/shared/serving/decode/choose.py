"""Whether the kernel decodes: the one place that knows it, for operators alone and for whole layers."""

import jax.numpy as jnp

from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Arguments, Slots
from chunkwise.shared.serving.decode import launch, records
from chunkwise.shared.serving.decode.records import Decodes, DecodeStatic
from chunkwise.shared.serving.state_pool import StatePool


def by_kernel(
    implementation: str | None, x: Decodes | Arguments, pool: StatePool, slots: Slots,
    static: DecodeStatic | None = None, conv: tuple = (), strict: bool = False,
) -> bool:  # fmt: skip
    """Return whether the kernel decodes; otherwise it is plain JAX, or a layer in parts.

    Args:
      implementation: the name of the implementation; None for the best one of the backend.
      x: a layer between its projections, or prepared arguments of an operator alone. Only the shapes and types of these
        arrays and of the others are read.
      pool: the pool of states; for a layer it may be of any kind and shape.
      slots: the slots of the sequences, decodes first.
      static: the static description of the decodes of an operator alone.
      conv: the pools of the convolutions of a layer.
      strict: whether it is an error if the kernel does not take the decodes.

    Raises:
      NotImplementedError: with `strict`, why the kernel does not take the decodes.
    """
    if not runs_kernels(implementation, whole=static is None):
        return False
    if isinstance(x, Decodes):
        return _agrees(x, conv, pool) and _limit(x, conv, pool, slots) is None
    assert static is not None
    limit = _limit(records.of_rule(static, x), (), pool, slots)
    if strict and limit is not None:
        raise NotImplementedError(f'"fused" {limit}: use implementation="xla".')
    return limit is None


def runs_kernels(implementation: str | None, whole: bool) -> bool:
    """Return whether an implementation decodes by kernels; with `whole` whether one kernel runs a whole layer."""
    name = checks.choose_implementation(implementation, ("fused", "staged", "xla"), "fused")
    return name == "fused" or (name == "staged" and not whole)


def _agrees(x: Decodes, conv: tuple, pool: StatePool) -> bool:
    """Return whether the arrays of a layer have shapes that agree; where they do not, its other way has the errors."""
    s, channels, W = x.static, [y.shape[1] for y in x.x], x.weight[0].shape[-1] if x.weight else 1
    return (
        hasattr(pool.states, "dtype")
        and pool.shape[1:] == (s.HV, s.K, s.V)
        and sum(channels) == 2 * s.H * s.K + s.HV * s.V
        and [y.shape for y in x.weight] == [(n, W) for n in channels if x.weight]
        and [y.shape[1:] for y in conv] == [(W - 1, n) for n in channels if x.weight]
        # Over rings the convolutions have as many slots for each state as decodes have tokens.
        and (not pool.replay or all(y.shape[0] == s.decode_tokens * pool.shape[0] for y in conv))
    )


def _limit(x: Decodes, conv: tuple, pool: StatePool, slots: Slots) -> str | None:
    """Return why the kernel of `decode.kernel` does not take tokens of these sizes, and slots of this form."""
    if pool.states.dtype == jnp.float16:
        return "takes pools of float32, bfloat16 and int8; got float16"
    # The ring of a sequence with one slot says which tokens of its last decode are kept.
    slots_fit = columns(slots) == launch.targets_of(x, pool)
    if slots_fit and launch.launches_of(x, conv, pool, slots.state_indices.shape[0]) is not None:
        return None
    if pool.replay and x.static.W > records.MOST_TOKENS:
        return f"takes decodes of at most {records.MOST_TOKENS} tokens over rings; got {x.static.W}"
    ring = f" with rings of {pool.replay}" if pool.replay else ""
    return (
        f"takes a few tokens per sequence; {x.x[0].shape[0]} tokens and slots of states {pool.shape[1:]}{ring} do not "
        f"fit into VMEM"
    )


def columns(slots: Slots) -> int:
    """Return how many slots a sequence has."""
    return 1 if slots.state_indices.ndim == 1 else slots.state_indices.shape[1]
