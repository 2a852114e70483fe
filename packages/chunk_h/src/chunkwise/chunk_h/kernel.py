"""The pass of the state over the chunks: tile mathematics, kernel body, launcher.

v_new = u - w S;  S' = e^{G_last} S + (k e^{G_last - G})^T v_new. Without w, v_new is u: plain linear attention.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.chunk_h.config import Config
from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import (
    dot,
    dot_tn,
    gate_kind,
    head_block,
    last_valid,
    pallas_call,
    per_channel,
    repeat_heads,
    to_column,
)

# What a chunk does to the carried state before it reads it.
CONTINUE, RESTART, UNUSED = 0, 1, 2


class Operands(NamedTuple):
    """What the pass reads, cut into chunks.

    Attributes:
      k: keys [NC, H, C, K].
      w: effective keys [NC, HV, C, K]; None without the delta rule.
      u: values [NC, HV, C, V].
      g: cumulative gates in nats, rows [NC, HV, 1, C] or per channel [NC, HV, C, K].
      initial_state: [N, HV, K, V] float32, or None for zeros.
    """

    k: jax.Array
    w: jax.Array | None
    u: jax.Array
    g: jax.Array
    initial_state: jax.Array | None


class Table(NamedTuple):
    """Which chunk belongs where, for the index maps; int32 [NC] each.

    Attributes:
      action: CONTINUE, RESTART or UNUSED.
      sequence: the sequence of the chunk, nondecreasing.
    """

    action: jax.Array
    sequence: jax.Array


def make_table(first: jax.Array, length: jax.Array, sequence: jax.Array) -> Table:
    """Return the table from the flag `first`, the valid rows and the sequence of every chunk."""
    action = jnp.where(length == 0, UNUSED, lax.convert_element_type(first, jnp.int32)).astype(jnp.int32)
    return Table(action, sequence)


def decays_tile(g):
    """Return the decay from each token to the end of the chunk and the one over the whole chunk.

    From rows [HV, 1, C]: [HV, C, 1] and [HV, 1, 1]. From gates per channel [HV, C, K]: [HV, C, K] and [HV, K, 1].
    """
    if per_channel(g):
        g_last = g[:, -1:]
        return jnp.exp(g_last - g), to_column(jnp.exp(g_last))
    g_last = last_valid(g)
    return jnp.exp(g_last - to_column(g)), jnp.exp(g_last)


def new_values_tile(S, w, u):
    """Return v_new = u - w S [HV, C, V] float32 from the state S [HV, K, V]; u itself if w is None."""
    u = u.astype(jnp.float32)
    return u if w is None else u - dot(w, S)


def next_state_tile(S, k, v_new, to_end, through):
    """Return the state after the chunk.

    Args:
      S: [HV, K, V], the state before the chunk.
      k: [h, C, K], keys of the key heads.
      v_new: [HV, C, V] float32.
      to_end, through: from `decays_tile`.
    """
    return through * S + dot_tn(repeat_heads(k, S.shape[0]) * to_end, v_new)


def load(ref):
    """Return the tile of a Ref; None for an operand that is not there."""
    return None if ref is None else ref[...]


def _state_kernel(action_ref, sequence_ref, k_ref, w_ref, u_ref, g_ref, h0_ref, h_ref, v_ref, ht_ref, S_ref):
    del sequence_ref  # read by the index maps only
    action = action_ref[pl.program_id(1)]

    @pl.when(action == RESTART)
    def _():
        S_ref[...] = jnp.zeros_like(S_ref) if h0_ref is None else h0_ref[...]

    S = S_ref[...]
    h_ref[...] = jnp.where(action == UNUSED, 0.0, S)
    v_new = new_values_tile(S, load(w_ref), u_ref[...])
    if v_ref is not None:
        v_ref[...] = v_new
    S = next_state_tile(S, k_ref[...], v_new, *decays_tile(g_ref[...]))
    # An unused chunk holds zeros only, so it repeats the final state of the sequence before it.
    S_ref[...] = S
    ht_ref[...] = S


def suffix(x: Operands) -> str:
    """Return what names the variant of a kernel: its chunk size and the kind of its gates."""
    return f"c{x.k.shape[2]}{gate_kind(x.g)}"


def launch(x: Operands, table: Table, N: int, config: Config):
    """Run the kernel.

    Args:
      x: the operands.
      table: which chunk belongs where.
      N: number of sequences.
      config: tile sizes.

    Returns:
      h [NC, HV, K, V] float32, v_new [NC, HV, C, V] float32 (None without w), and the final states [N, HV, K, V]
      float32, undefined for a sequence that has no chunk.
    """
    NC, H, C, K = x.k.shape
    _, HV, _, V = x.u.shape
    heads, axes = config.heads, (1, 0)
    state = pl.BlockSpec((None, heads, K, V), lambda h, n, action, sequence: (sequence[n], h, 0, 0))
    values = head_block(heads, C, V, axes=axes)

    def given(array, spec):
        return None if array is None else spec

    return pallas_call(
        _state_kernel,
        *table,
        *x,
        name=f"chunk_{'fwd_h' if x.w is None else 'gated_delta_rule_fwd_h'}_fwd_{suffix(x)}",
        num_scalar_prefetch=2,
        # Blocks of heads are independent; chunks pass the state on in scratch, so they run in order.
        grid=(HV // heads, NC),
        dimension_semantics=("parallel", "arbitrary"),
        in_specs=[
            head_block(heads, C, K, group=HV // H, axes=axes),
            given(x.w, head_block(heads, C, K, axes=axes)),
            values,
            head_block(heads, *x.g.shape[2:], axes=axes),
            given(x.initial_state, state),
        ],
        out_specs=[head_block(heads, K, V, axes=axes), given(x.w, values), state],
        out_shape=[
            out_struct((NC, HV, K, V), jnp.float32, *x),
            given(x.w, out_struct(x.u.shape, jnp.float32, *x)),
            out_struct((N, HV, K, V), jnp.float32, *x),
        ],
        scratch_shapes=[pltpu.VMEM((heads, K, V), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=2 * NC * HV * C * K * V * (1 if x.w is None else 2),
            transcendentals=x.g.size,
            bytes_accessed=sum(a.nbytes for a in x if a is not None) + 4 * NC * HV * (K + C) * V,
        ),
    )
