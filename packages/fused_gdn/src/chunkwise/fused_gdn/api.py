"""The contract: documentation, argument checks, choice of implementation and gradient wiring."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.fused_gdn import config as tiles
from chunkwise.fused_gdn import kernel, kernel_bwd, xla
from chunkwise.fused_gdn.kernel import Options
from chunkwise.fused_gdn.tile import Shape
from chunkwise.shared.compat import vary_alike
from chunkwise.shared.kernels import Chunking, operand_dtype, pad_lanes, pad_tokens, pieces, scaled, split_scale
from chunkwise.shared.operators import (
    check,
    check_chunk_size,
    check_delta_rule,
    check_initial_state,
    check_scale,
    check_slots,
    choose_implementation,
    decode,
    decode_fits,
)

# The kernels keep whole states of a head in fast memory.
MOST_CHANNELS = 256


def fused_chunk_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
    config: tiles.Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated delta rule over whole sequences in one kernel launch, differentiable.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S~  = e^g_t S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions
    up to 256, C chunk size, N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: queries and keys [B, T, H, K]. All tensors are float32, bfloat16 or float16, and may differ. Keys should
        have unit length (or pass use_qk_l2norm_in_kernel): the recurrence itself diverges where beta |k|^2 > 2.
      v: values [B, T, HV, V]. Only if q, k and v are all bfloat16 do products take bfloat16 operands, else float32.
      g: log decay [B, T, HV] in nats, <= 0, any strength; -inf forgets everything. Computed with in float32, as beta.
      beta: step sizes [B, T, HV], in (0, 1), or (0, 2) where negative eigenvalues are allowed.
      scale: multiplies q; defaults to K ** -0.5. A number, static, or a traced scalar, which multiplies the output.
      initial_state: [N, HV, K, V], None for zeros. States are float32 inside.
      output_final_state: return the state after every sequence; static.
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: new values never recompile. B must be 1.
        Sequences may be empty. Tokens from cu_seqlens[N] on are padding: they may hold anything, NaN too, and their
        outputs and gradients are zeros. The values are checked outside of jit only. Without states in or out, chunks
        stay aligned to the stream and the cost follows the tokens; with states, a chunk takes as many steps as it
        holds sequences.
      chunk_size: C, one of 16, 32, 64, 128; static. All agree up to rounding.
      implementation: "pallas" (TPU kernels, interpreted elsewhere), "xla" (plain JAX, in chunks of at most 32), None
        ("pallas" on a TPU, "xla" elsewhere).
      config: tile sizes of the kernels. A group of value heads too large for a step is cut, and q and k are repeated.

    Returns:
      o [B, T, HV, V] in the type of v, and final_state [N, HV, K, V] float32, None unless asked for.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "pallas" with K or V above 256.

    Differentiable once, in reverse, in every floating-point argument; "xla" by any transform of JAX.
    Accuracy: RMS error over RMS of the float64 recurrence, for any gate. float32: o and states 3e-7, gradients 2e-6.
    bfloat16: o and states 3e-3, gradients of g and beta 6e-3, others 4e-3. Worst is one key for all tokens with
    beta 1.9 and no decay: float32 o 6e-6, gradients of g and beta 7e-5; bfloat16 o 3e-3, gradients of g and beta 7e-2,
    others 9e-3. The cumulative gate, the inverse and the state are float32 in both.
    Cost: about 2 B T HV (C + K) (2 K + V) flops; q, k and v are read once and o is written once. Kept for the
    backward: the inputs and the float32 inverse, 4 B T HV C bytes. The backward takes two launches: the states before
    every chunk, then one reverse pass.
    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024), section 3.3.
    """
    B, T, H, HV, K, V = check_delta_rule(q, k, v, g, beta, cu_seqlens)
    check_chunk_size(chunk_size)
    check_scale(scale)
    check_initial_state(initial_state, (B if cu_seqlens is None else cu_seqlens.shape[0] - 1, HV, K, V))
    implementation = choose_implementation(implementation, ("pallas", "xla"), on_tpu="pallas")
    scale = K**-0.5 if scale is None else scale
    if implementation == "xla":
        return _xla(
            q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, chunk_size
        )
    if max(K, V) > MOST_CHANNELS:
        raise NotImplementedError(
            f'"pallas" takes K and V up to {MOST_CHANNELS}; got {K} and {V}; use implementation="xla".'
        )
    config = config or tiles.default_for(H, HV, chunk_size, pad_lanes(K), pad_lanes(V))
    for name in ("heads", "heads_bwd"):
        heads = getattr(config, name)
        check(
            heads >= 1 and HV % heads == 0,
            f"`config.{name}` must divide {HV} value heads; got {heads}.",
        )
    inside, after = split_scale(scale)
    static = Static(chunk_size, inside, use_qk_l2norm_in_kernel,
                    output_final_state, config)  # fmt: skip
    o, final_state = _fused(static, q, k, v, g, beta, initial_state, cu_seqlens)
    return scaled(o, after), final_state


_xla = jax.jit(xla.gated_delta_rule, static_argnums=(7, 9, 10))


class Static(NamedTuple):
    """The static arguments."""

    chunk_size: int
    scale: float
    normalise: bool
    output_final_state: bool
    config: tiles.Config


class Layout:
    """How the user's arrays become what the kernels read, and back.

    Without states a packed batch stays one stream whose chunks may hold several sequences; with states a chunk takes
    as many steps as it holds sequences.
    """

    def __init__(self, static: Static, inputs, backward: bool = False):
        q, _, v, _, _, initial_state, cu_seqlens = inputs
        with_states = initial_state is not None or static.output_final_state
        self.B, T, H, self.K = q.shape
        self.HV, self.V = v.shape[2:]
        self.T, self.H, C, group = T, H, static.chunk_size, self.HV // H
        self.dtype = operand_dtype(*(x.dtype for x in inputs[:3]))
        each = (static.config.heads, static.config.heads_bwd)
        self.heads = heads = each[backward]
        # What the forward keeps is packed alike.
        p = min(tiles.lane_packing(n, group, C) for n in each)
        self.shape = Shape(C, pad_lanes(self.K), pad_lanes(self.V), heads, group, p)
        packed = cu_seqlens is not None
        self.N = cu_seqlens.shape[0] - 1 if packed else self.B
        self.padded = max(T, C)
        self.options = Options(self.padded, packed and with_states, static.normalise, static.scale)
        self.owner, self.empty = None, None
        if self.options.pieces:
            self.empty = jnp.diff(cu_seqlens) == 0
            self.table = jnp.stack([x.astype(jnp.int32) for x in pieces(T, C, cu_seqlens)])
            return
        chunks = Chunking(self.B, T, C)
        rows = [chunks.sequence, chunks.first.astype(jnp.int32), chunks.last.astype(jnp.int32)]
        if packed:
            token = jnp.arange(chunks.NC * C, dtype=jnp.int32)
            owner = jnp.searchsorted(cu_seqlens[1:], token, side="right").astype(jnp.int32)
            owner = jnp.where(token < T, owner, self.N).reshape(-1, C)
            final = owner[:, -1]
            filled = jnp.sum(owner < self.N, axis=1, dtype=jnp.int32)
            rows += [jnp.concatenate([owner[:1, 0], final[:-1]]), final, filled]
            self.owner = jnp.tile(owner, (1, p))[:, None]
        self.table = jnp.stack(rows)

    def tokens(self, x: jax.Array, width: int) -> jax.Array:
        """Return [B, T, heads, D] as the flat view [B, T', heads * width], one type for all.

        A reshape for whole lanes and chunks.
        """
        x = pad_tokens(x.astype(self.dtype), self.padded)
        if x.shape[3] != width:
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[3])])
        return x.reshape(*x.shape[:2], -1)

    def from_tokens(self, x: jax.Array, heads: int, size: int) -> jax.Array:
        """Return the flat view as [B, T, heads, size]."""
        return x.reshape(*x.shape[:2], heads, -1)[:, : self.T, :, :size]

    def scalars(self, x: jax.Array) -> jax.Array:
        """Return [B, T, HV] as [B, blocks, T', heads], in a type that a TPU loads."""
        x = pad_tokens(x.astype(operand_dtype(x.dtype)), self.padded)
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, self.heads), 2, 1)

    def from_scalars(self, x: jax.Array) -> jax.Array:
        """Return [B, blocks, T', heads] as [B, T, HV]."""
        return jnp.moveaxis(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)[:, : self.T]

    def states(self, x: jax.Array | None) -> jax.Array | None:
        """Return states [N, HV, K, V] float32, padded to whole lanes."""
        if x is None:
            return None
        pad = [(0, 0), (0, 0), (0, self.shape.K - self.K), (0, self.shape.V - self.V)]
        return jnp.pad(x.astype(jnp.float32), pad)

    def from_states(self, x: jax.Array, empty: jax.Array | None) -> jax.Array:
        """Return states without padding; those of empty sequences are `empty`, None for zeros."""
        x = x[:, :, : self.K, : self.V]
        if self.empty is None:
            return x
        return jnp.where(self.empty[:, None, None, None], 0.0 if empty is None else empty.astype(jnp.float32), x)

    def operands(self, q, k, v, g, beta, initial_state):
        """Return the operands of the forward kernel."""
        s = self.shape
        return (
            self.tokens(q, s.K), self.tokens(k, s.K), self.tokens(v, s.V), self.scalars(g), self.scalars(beta),
            self.states(initial_state), self.table, self.owner,
        )  # fmt: skip


def _forward(static, *inputs, keep: bool = False) -> Any:
    layout, initial_state = Layout(static, inputs), inputs[5]
    want = ("o", *["ht"] * static.output_final_state, *["X"] * keep)
    operands = layout.operands(*inputs[:6])
    out = kernel.launch(*operands, None, layout.N, want, static.config, layout.options, layout.shape)
    final_state = layout.from_states(out["ht"], initial_state) if static.output_final_state else None
    results = layout.from_tokens(out["o"], layout.HV, layout.V).astype(inputs[2].dtype), final_state
    return (results, (inputs, out["X"])) if keep else results


def _backward(static, residuals, cotangents):
    inputs, X = residuals
    q, k, v, g, beta, initial_state, _ = inputs
    do, dht = cotangents
    layout = Layout(static, inputs, backward=True)
    s, operands = layout.shape, layout.operands(*inputs[:6])
    kept = kernel.launch(*operands, X, layout.N, ("h", "W"), static.config, layout.options, s)
    flat_q, flat_k, _, flat_g, flat_beta, _, table, owner = operands
    operands = (
        flat_q, flat_k, flat_g, flat_beta, kept["h"], kept["W"], X, layout.tokens(do, s.V), layout.states(dht),
        table, owner,
    )  # fmt: skip
    out = kernel_bwd.launch(operands, layout.N, initial_state is not None, static.config, layout.options, s)
    dh0 = None
    if initial_state is not None:
        dh0 = layout.from_states(out["dh0"], dht).astype(initial_state.dtype)
    return (
        layout.from_tokens(out["dq"], layout.H, layout.K).astype(q.dtype),
        layout.from_tokens(out["dk"], layout.H, layout.K).astype(k.dtype),
        layout.from_tokens(out["dv"], layout.HV, layout.V).astype(v.dtype),
        layout.from_scalars(out["dg"]).astype(g.dtype),
        layout.from_scalars(out["dbeta"]).astype(beta.dtype),
        dh0,
        None,
    )


_differentiable = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_differentiable.defvjp(functools.partial(_forward, keep=True), _backward)


@functools.partial(jax.jit, static_argnums=0)
def _fused(static, q, k, v, g, beta, initial_state, cu_seqlens):
    """Run the kernels where groups are cut and operands replicated: JAX sums the gradients of their copies."""
    repeats = tiles.key_repeats(q.shape[2], v.shape[2], static.config)
    if repeats > 1:
        q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    return _differentiable(static, *vary_alike(q, k, v, g, beta, initial_state, cu_seqlens))


def recurrent_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: jax.Array | None = None,
    state_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated delta rule token by token, the decode path: one new token or a few for every sequence, in one launch.

    The equation, arguments and results of `fused_chunk_gated_delta_rule`, less chunk_size. For serving, initial_state
    may be a pool of states::

        o, pool = recurrent_gated_delta_rule(q, k, v, g, beta, None, pool, True, state_indices=slots)

    Under jit with the pool donated (donate_argnums), its states are updated in place and nothing else of it is touched.

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: [B, T, H, K]. All tensors are float32, bfloat16 or float16, and may differ; all is computed in float32.
      v: [B, T, HV, V].
      g: log decay [B, T, HV] in nats, <= 0, any strength; -inf forgets everything.
      beta: step sizes [B, T, HV].
      scale: multiplies q; defaults to K ** -0.5. A number, static, or a traced scalar, which multiplies the output.
      initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] with state_indices; None for zeros. A pool that is not
        float32 is copied.
      output_final_state: return the states after the tokens; static.
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
      cu_seqlens: int32 [N + 1], traced: sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. B must be 1.
      state_indices: int32 [N], traced: the slot of every sequence. Slots must be distinct and exist; the values are
        not checked.
      has_initial_state: bool [N], traced: False where a sequence starts from zero, whatever its slot holds, as in a
        slot that was freed; None for True.
      implementation: "pallas" (TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
        "pallas"), None ("pallas" on a TPU, "xla" elsewhere).

    Returns:
      o [B, T, HV, V] in the type of v, and the states float32 in the shape of initial_state, None unless asked for.
      Slots that are not named keep every bit.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "pallas" with more tokens than fit into VMEM: about 1,000 of K = V = 128 in all.

    Accuracy: 3e-7 relative to the recurrence in float64, plus the rounding of o to its type.
    Cost: 7 flops per token and state entry; every state is read and written once.
    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024).
    """
    B, T, H, HV, K, V = check_delta_rule(q, k, v, g, beta, cu_seqlens)
    check_scale(scale)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_slots(initial_state, state_indices, has_initial_state, N, HV, K, V)
    on_tpu = "pallas" if decode_fits(q, k, v, g, beta) else "xla"
    o, states = decode(
        q, k, v, g, beta, K**-0.5 if scale is None else scale, initial_state, cu_seqlens, state_indices,
        has_initial_state, normalise=use_qk_l2norm_in_kernel, name="recurrent_gated_delta_rule_fwd",
        implementation=choose_implementation(implementation, ("pallas", "xla"), on_tpu),
    )  # fmt: skip
    return o, states if output_final_state else None
