"""The kernel that takes the state through the chunks: its table, its body and its launcher."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.chunk_h import config, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import gating, launcher, windows

# The action of a chunk: it reads the carried state, or starts from the initial state, or has no tokens.
CONTINUE, RESTART, UNUSED = 0, 1, 2


class ChunkHOperands(NamedTuple):
    """The arrays that the kernel reads, cut into chunks.

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


# For the index maps, int32 [NC] each: CONTINUE, RESTART or UNUSED, and the sequence of the chunk, which does not fall.
Table = tuple[jax.Array, jax.Array]


def make_table(first: jax.Array, length: jax.Array, sequence: jax.Array) -> Table:
    """Return the table from the flag `first`, the valid rows and the sequence of every chunk."""
    return jnp.where(length == 0, UNUSED, first.astype(jnp.int32)).astype(jnp.int32), sequence


def load(ref):
    """Return the tile of a Ref, or None for None."""
    return None if ref is None else ref[...]


def _state_kernel(action_ref, sequence_ref, k_ref, w_ref, u_ref, g_ref, h0_ref, h_ref, v_ref, ht_ref, S_ref):
    del sequence_ref  # read by the index maps only
    action = action_ref[pl.program_id(1)]

    # Scratch memory is uninitialised in grid step 0, and the first chunk of a sequence must not read an older state.
    @pl.when(action == RESTART)
    def _():
        S_ref[...] = jnp.zeros_like(S_ref) if h0_ref is None else h0_ref[...]

    S = S_ref[...]  # [heads, K, V]
    # This is a selection and not a product, because the carried state may hold NaN, and unused chunks must be zero.
    h_ref[...] = jnp.where(action == UNUSED, 0.0, S)
    v_new = tile.new_values_tile(S, load(w_ref), u_ref[...])  # [heads, C, V]
    if v_ref is not None:
        v_ref[...] = v_new
    S = tile.next_state_tile(S, k_ref[...], v_new, *tile.decays_tile(g_ref[...]))  # [heads, K, V]
    # An unused chunk holds only zeros, so it writes the final state of the sequence before it once more.
    S_ref[...] = S
    ht_ref[...] = S


def name_of(x: ChunkHOperands, direction: str) -> str:
    """Return the name of the kernel of a direction, "fwd" or "bwd"."""
    return f"chunk_{'fwd_h' if x.w is None else 'gated_delta_rule_fwd_h'}_{direction}_{gating.suffix(x.k, x.g)}"


def given(array: jax.Array | None, spec: object) -> Any:
    """Return a spec, or the type of a result, for an array; None for an array that there is not."""
    return None if array is None else spec


def launch(x: ChunkHOperands, table: Table, N: int, cut: config.Config):
    """Run the kernel.

    Args:
      x: the operands.
      table: which chunk belongs where.
      N: number of sequences.
      cut: tile sizes.

    Returns:
      h [NC, HV, K, V] float32, v_new [NC, HV, C, V] float32 (None without w), and the final states [N, HV, K, V]
      float32, undefined for a sequence that has no chunk.
    """
    NC, H, C, K = x.k.shape
    _, HV, _, V = x.u.shape
    heads, axes = cut.heads, (1, 0)
    state = pl.BlockSpec((None, heads, K, V), lambda h, n, action, sequence: (sequence[n], h, 0, 0))
    values = windows.head_block(heads, C, V, axes=axes)

    return launcher.pallas_call(
        _state_kernel,
        *table,
        *x,
        name=name_of(x, "fwd"),
        num_scalar_prefetch=2,
        # Blocks of heads are independent; chunks pass the state on in scratch, so they run in order.
        grid=(HV // heads, NC),
        dimension_semantics=("parallel", "arbitrary"),
        in_specs=[
            windows.head_block(heads, C, K, group=HV // H, axes=axes),
            given(x.w, windows.head_block(heads, C, K, axes=axes)),
            values,
            windows.head_block(heads, *x.g.shape[2:], axes=axes),
            given(x.initial_state, state),
        ],
        out_specs=(windows.head_block(heads, K, V, axes=axes), given(x.w, values), state),
        out_shape=(
            compat.out_struct((NC, HV, K, V), jnp.float32, *x),
            given(x.w, compat.out_struct(x.u.shape, jnp.float32, *x)),
            compat.out_struct((N, HV, K, V), jnp.float32, *x),
        ),
        scratch_shapes=[pltpu.VMEM((heads, K, V), jnp.float32)],
        cost_estimate=config.cost(**gating.sizes(x.k, x.g), V=V, delta_rule=x.w is not None),
    )
