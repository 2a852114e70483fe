"""The gradient of the pass of the state: tile mathematics, kernel body, launcher.

Backwards over the chunks, dS' being the gradient of the state after the chunk and e the decay to its end:

    dv = dv_new + (e k) dS';  dk = e (v_new dS'^T);  dw = -dv S^T;  du = dv
    dS = dh + e^{G_last} dS' - w^T dv
    dG = -k dk, and on the last row the sum of k dk over the others and of e^{G_last} S dS'
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.chunk_h.config import Config
from chunkwise.chunk_h.kernel import RESTART, Operands, Table, decays_tile, suffix
from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import (
    dot,
    dot_nt,
    dot_tn,
    gate_gradient,
    head_block,
    pallas_call,
    per_channel,
    repeat_heads,
    sum_groups,
    to_row,
)


def state_gate_gradient_tile(kdk, SdS, through, g, end):
    """Return dG in the form of g.

    The token at the end adds its key undecayed, whatever the gates: added and subtracted, its k dk would swamp terms
    of e^-30.

    Args:
      kdk: k * dk [HV, C, K].
      SdS: S * dS' [HV, K, V].
      through: the decay over the whole chunk, [HV, 1, 1] or [HV, K, 1].
      g: the gates.
      end: the last row of a token, or more than all rows for the last of the chunk.
    """
    decayed, time = gate_gradient(kdk, g), 1 if per_channel(g) else 2
    at_end = lax.broadcasted_iota(jnp.int32, decayed.shape, time) == jnp.minimum(end, kdk.shape[1] - 1)
    decayed = jnp.where(at_end, 0.0, decayed)
    last = through * jnp.sum(SdS, axis=2, keepdims=True)
    last = to_row(last) if per_channel(g) else jnp.sum(last, axis=1, keepdims=True)
    last += jnp.sum(decayed, axis=time, keepdims=True)
    return jnp.where(at_end, last, -decayed)


def _state_bwd_kernel(
    action_ref, sequence_ref, end_ref, k_ref, w_ref, g_ref, h_ref, v_ref, dh_ref, dv_ref, dht_ref,
    dk_ref, dw_ref, du_ref, dg_ref, dh0_ref, dS_ref,
):  # fmt: skip
    del sequence_ref  # read by the index maps only
    n = pl.num_programs(1) - 1 - pl.program_id(1)

    @pl.when(pl.program_id(1) == 0)
    def _():
        # The chunks after the last sequence are unused: no result, but what they compute must be finite.
        dS_ref[...] = jnp.zeros_like(dS_ref)

    @pl.when(end_ref[n] < k_ref.shape[1])
    def _():
        dS_ref[...] = dht_ref[...]

    k = repeat_heads(k_ref[...], h_ref.shape[0])
    g = g_ref[...]
    to_end, through = decays_tile(g)
    S, dS = h_ref[...], dS_ref[...]
    dv = dot(k * to_end, dS)
    if dv_ref is not None:
        dv += dv_ref[...]
    dk = to_end * dot_nt(v_ref[...].astype(jnp.float32), dS)
    dk_ref[...] = dk
    du_ref[...] = dv.astype(du_ref.dtype)
    dg_ref[...] = state_gate_gradient_tile(k * dk, S * dS, through, g, end_ref[n])
    dS = through * dS + dh_ref[...]
    if w_ref is not None:
        dw_ref[...] = -dot_nt(dv, S)
        dS -= dot_tn(w_ref[...].astype(jnp.float32), dv)
    dS_ref[...] = dS
    dh0_ref[...] = dS


def launch(x: Operands, h, v_new, table: Table, end: jax.Array, dh, dv_new, dht, config: Config) -> Operands:
    """Run the kernel.

    Args:
      x: the operands of the forward.
      h, v_new: its results; v_new is u without w.
      table: the table of the forward.
      end: int32 [NC], the row of the last token of a sequence that ends in the chunk, else C.
      dh, dv_new, dht: cotangents of its results; dv_new is None without w.
      config: tile sizes.

    Returns:
      The gradients of the operands, in their types; that of initial_state is zero for sequences without a chunk, and
      None without one.
    """
    NC, H, C, K = x.k.shape
    _, HV, _, V = x.u.shape
    N, heads = dht.shape[0], config.heads

    def reverse(*tail, group=1):
        return head_block(heads, *tail, group=group, axes=(1, 0), backwards_from=NC - 1)

    def given(array, spec):
        return None if array is None else spec

    def like(array, *tail):
        return None if array is None else out_struct((NC, HV, *tail), jnp.float32, *x)

    state = pl.BlockSpec((None, heads, K, V), lambda h, n, a, sequence, end: (sequence[NC - 1 - n], h, 0, 0))
    gates = reverse(*x.g.shape[2:])
    keys, values = given(x.w, reverse(C, K)), reverse(C, V)
    dk, dw, du, dg, dh0 = pallas_call(
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
        name=f"chunk_{'fwd_h' if x.w is None else 'gated_delta_rule_fwd_h'}_bwd_{suffix(x)}",
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
            given(dv_new, values),
            state,
        ],
        out_specs=[reverse(C, K), keys, values, gates, state],
        out_shape=[
            like(x.k, C, K),
            like(x.w, C, K),
            out_struct(x.u.shape, x.u.dtype, *x),
            like(x.g, *x.g.shape[2:]),
            out_struct((N, HV, K, V), jnp.float32, *x),
        ],
        scratch_shapes=[pltpu.VMEM((heads, K, V), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=2 * NC * HV * C * K * V * (2 if x.w is None else 4),
            transcendentals=x.g.size,
            bytes_accessed=sum(a.nbytes for a in (*x, h, v_new, dh, dv_new) if a is not None) * 2,
        ),
    )
    if x.w is not None:
        dw = dw.astype(x.w.dtype)
    if x.initial_state is not None:
        started = jnp.zeros((N,), bool).at[table.sequence].max(table.action == RESTART)
        dh0 = jnp.where(started[:, None, None, None], dh0, 0.0)
    return Operands(sum_groups(dk, H).astype(x.k.dtype), dw, du, dg, None if x.initial_state is None else dh0)
