"""Between serving engines and operators: gates and heads for all engines, step and convolution for tpu-inference."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.causal_conv1d import causal_conv1d_update
from chunkwise.layers import Step
from chunkwise.layers.mixer import running
from chunkwise.shared.call import checks


def raw_gates(A_log: jax.Array, dt_bias: jax.Array, raw_beta: bool = True) -> dict[str, Any]:
    """Return the arguments of a delta rule for raw gates, and for queries and keys of unit length."""
    return dict(
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log.astype(jnp.float32),
        dt_bias=dt_bias.astype(jnp.float32), use_beta_sigmoid_in_kernel=raw_beta,
    )  # fmt: skip


def split_heads(name: str, x: jax.Array, *sizes: tuple[int, int]) -> list[jax.Array]:
    """Return channels [T, ...] cut into arrays [1, T, heads, size], one for every pair (heads, size) of `sizes`."""
    *ends, dim = itertools.accumulate(heads * size for heads, size in sizes)
    checks.check(x.shape[1] == dim, f"`{name}` must have {dim} channels, as its heads have; got {x.shape[1]}.")
    parts = jnp.split(x[None], ends, axis=2)
    return [part.reshape(1, -1, heads, size) for part, (heads, size) in zip(parts, sizes, strict=True)]


def step_of(starts, write, distribution, seq_lens, read, offsets, guesses: int) -> dict[str, Any]:
    """Return a step of tpu-inference as arguments of chunkwise.

    The middle entry of `distribution` is not read, because all requests that are no decodes are treated alike.
    """
    N, starts = write.shape[0], starts.astype(jnp.int32)
    write, read = write.astype(jnp.int32), read.astype(jnp.int32)
    if guesses and offsets is not None:
        # Only decodes start from the state after an accepted token; a prompt starts from the first slot.
        read = read + jnp.where(jnp.arange(N) < distribution[0], offsets.astype(jnp.int32), 0)
    return Step(
        cu_seqlens=starts,
        state_indices=write[:, None] + jnp.arange(guesses + 1, dtype=jnp.int32) if guesses else write,
        has_initial_state=seq_lens > starts[1:] - starts[:-1],
        num_decodes=distribution[0],
        num_sequences=jnp.minimum(distribution[2], N),
        read_indices=read,
    )._asdict()


def convolve(x, pool, weight, bias, kernel_size: int, step: dict[str, Any], implementation: str | None):
    """Return silu of the convolution of channels [T, dim], and the pool after it."""
    wanted = (x.shape[1], 1, kernel_size)
    checks.check(weight.shape == wanted, f"`conv_weight` must have shape {wanted}; got {weight.shape}.")
    # A wrong name passes here, because the operator refuses it.
    name = running.AROUND.get(implementation, "pallas")
    y, pool = causal_conv1d_update(x[None], pool, weight[:, 0], bias, activation="silu", **step, implementation=name)
    return y[0], pool
