"""The kernel that takes the gradient of the state back through the chunks: its body and its launcher."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.chunk_h import config, kernel, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import gating, launcher, tiles, windows


def _state_bwd_kernel(
    action_ref, sequence_ref, end_ref, k_ref, w_ref, g_ref, h_ref, v_ref, dh_ref, dv_ref, dht_ref,
    dk_ref, dw_ref, du_ref, dg_ref, dh0_ref, dS_ref,
):  # fmt: skip
    del sequence_ref  # read by the index maps only
    n = pl.num_programs(1) - 1 - pl.program_id(1)

    @pl.when(pl.program_id(1) == 0)
    def _():
        # The unused chunks, which are after the last sequence, come first. Nobody reads their results, but zeros keep
        # them finite.
        dS_ref[...] = jnp.zeros_like(dS_ref)

    # Of the chunks of a sequence the last one comes first. It starts from the gradient of the final state.
    @pl.when(end_ref[n] < k_ref.shape[1])
    def _():
        dS_ref[...] = dht_ref[...]

    dk, dw, dv, dg, dS = tile.state_bwd_tile(
        h_ref[...],  # [heads, K, V]
        k_ref[...],  # [key heads, C, K]
        kernel.load(w_ref),  # [heads, C, K]
        v_ref[...],  # [heads, C, V]
        g_ref[...],
        dS_ref[...],  # [heads, K, V]
        dh_ref[...],  # [heads, K, V]
        kernel.load(dv_ref),  # [heads, C, V]
        end_ref[n],
    )
    dk_ref[...] = dk
    du_ref[...] = dv.astype(du_ref.dtype)
    dg_ref[...] = dg
    if dw_ref is not None:
        dw_ref[...] = dw
    dS_ref[...] = dS
    # All chunks of a sequence write this block; the first chunk, which comes last, leaves the right value.
    dh0_ref[...] = dS


def launch(
    x: kernel.ChunkHOperands, h, v_new, table: kernel.Table, end: jax.Array, dh, dv_new, dht, cut: config.Config
) -> kernel.ChunkHOperands:
    """Run the kernel.

    Args:
      x: the operands of the forward.
      h, v_new: the results of the forward; without w, v_new is u.
      table: the table of the forward.
      end: int32 [NC], the row of the last token of a sequence that ends in the chunk, else C.
      dh, dv_new, dht: cotangents of the results of the forward; dv_new is None without w.
      cut: tile sizes.

    Returns:
      The gradients of the operands, in their types; dh0 is zero for sequences without a chunk, and None without an
      initial state.
    """
    NC, H, C, K = x.k.shape
    _, HV, _, V = x.u.shape
    N, heads = dht.shape[0], cut.heads

    def reverse(*tail, group=1):
        return windows.head_block(heads, *tail, group=group, axes=(1, 0), backwards_from=NC - 1)

    def like(array, *tail):
        return kernel.given(array, compat.out_struct((NC, HV, *tail), jnp.float32, *x))

    state = pl.BlockSpec((None, heads, K, V), lambda h, n, a, sequence, end: (sequence[NC - 1 - n], h, 0, 0))
    gates = reverse(*x.g.shape[2:])
    keys, values = kernel.given(x.w, reverse(C, K)), reverse(C, V)
    dk, dw, du, dg, dh0 = launcher.pallas_call(
        _state_bwd_kernel,
        *table,
        end,
        x.k,
        x.w,
        x.g,
        h,
        v_new,
        dh,
        dv_new,
        dht,
        name=kernel.name_of(x, "bwd"),
        num_scalar_prefetch=3,
        # Blocks of heads are independent; chunks pass the gradient of the state on, from the last to the first.
        grid=(HV // heads, NC),
        dimension_semantics=("parallel", "arbitrary"),
        in_specs=[
            reverse(C, K, group=HV // H),
            keys,
            gates,
            reverse(K, V),
            values,
            reverse(K, V),
            kernel.given(dv_new, values),
            state,
        ],
        out_specs=[reverse(C, K), keys, values, gates, state],
        out_shape=[
            like(x.k, C, K),
            like(x.w, C, K),
            compat.out_struct(x.u.shape, x.u.dtype, *x),
            like(x.g, *x.g.shape[2:]),
            compat.out_struct((N, HV, K, V), jnp.float32, *x),
        ],
        scratch_shapes=[pltpu.VMEM((heads, K, V), jnp.float32)],
        cost_estimate=config.cost(**gating.sizes(x.k, x.g), V=V, delta_rule=x.w is not None, backward=True),
    )
    if x.w is not None:
        dw = dw.astype(x.w.dtype)
    if x.initial_state is not None:
        action, sequence = table
        started = jnp.zeros((N,), bool).at[sequence].max(action == kernel.RESTART)
        dh0 = jnp.where(started[:, None, None, None], dh0, 0.0)
    return kernel.ChunkHOperands(
        tiles.sum_groups(dk, H).astype(x.k.dtype), dw, du, dg, None if x.initial_state is None else dh0
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def states(x: kernel.ChunkHOperands, table: kernel.Table, end: jax.Array, N: int, cut: config.Config):
    """Run the forward kernel; see `kernel.launch`, and `launch` for `end`."""
    return kernel.launch(x, table, N, cut)


def _forward(x, table, end, N, cut):
    h, v_new, final_state = kernel.launch(x, table, N, cut)
    return (h, v_new, final_state), (x, table, end, h, v_new)


def _backward(N, cut, residuals, cotangents):
    x, table, end, h, v_new = residuals
    dh, dv_new, dht = cotangents
    v_new = x.u if v_new is None else v_new
    return launch(x, h, v_new, table, end, dh, dv_new, dht, cut), None, None


states.defvjp(_forward, _backward)
