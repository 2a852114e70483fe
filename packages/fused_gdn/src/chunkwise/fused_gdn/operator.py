"""The record of the gated delta rule: its checks, the layout of its arrays, its kernels and its plain form."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.fused_gdn import config, few_heads, few_heads_bwd, kernel, kernel_bwd, kernel_map, xla
from chunkwise.shared import tuning
from chunkwise.shared.call import checks, configs
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation import fused
from chunkwise.shared.implementation.implementations import plain
from chunkwise.shared.kernels import chunking, interleaved, launcher, matmul, packed
from chunkwise.shared.kernels.spans import layout
from chunkwise.shared.kernels.spans.operands import FusedStatic, Operands
from chunkwise.shared.operator import define
from chunkwise.shared.plain import state_map


def check(x: Arguments, options: Options) -> None:
    """Check the tensors of the operator, and the tile sizes."""
    configs.check_config(options.config, config)
    checks.check_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens)


def config_for(x: Arguments, options: Options) -> config.Config | str:
    """Return the tile sizes for these arguments, checked, or why the kernels do not take them."""
    if too_many := fused.most_channels(x):
        return too_many
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    K, V = packed.pad_channels(K), packed.pad_channels(V)
    sizes = options.config or config.default_for(H, HV, options.chunk_size, K, V)
    keys = H * config.key_repeats(H, HV, sizes)
    for name in ("heads", "heads_bwd"):
        heads = getattr(sizes, name)
        checks.check(
            HV % heads == 0,
            f"`config.{name}` must divide {HV} value heads; got {heads}.",
        )
        checks.check(
            tuning.divides_groups(heads, keys, HV, K, V),
            f"`config.{name}` must be all {HV} value heads, or so many that those of K = {K} and of V = {V} channels "
            f"each fill whole registers of {tuning.LANES}; got {heads}.",
        )
    return sizes


def static_for(x: Arguments, options: Options, requested: frozenset[str]) -> FusedStatic:
    """Return the static description of a launch."""
    (B, T, H, K), (HV, V), C = x.q.shape, x.v.shape[2:], options.chunk_size
    # Groups of value heads that are too large for a grid step are divided, and each part gets a key head.
    sizes = options.config
    repeats = config.key_repeats(H, HV, sizes)
    # Residuals are packed, so the number of heads in a pack must be the same in both directions.
    group = HV // (H * repeats)
    p = min(config.lane_packing(heads, group, C) for heads in (sizes.heads, sizes.heads_bwd))
    varlen = x.cu_seqlens is not None and (x.with_state or bool(options.output_final_state))
    return FusedStatic(
        B=B, T=max(T, C), H=H * repeats, HV=HV, K=packed.pad_channels(K), V=packed.pad_channels(V), C=C, N=x.num_states,
        scale=options.scale, config=sizes, varlen=varlen, readable=max(T, C), p=p,
        normalise=bool(options.use_qk_l2norm_in_kernel),
        compensate=bool(options.use_qk_l2norm_in_kernel and options.large_steps),
    )  # fmt: skip


def lay_out(x: Arguments, static: FusedStatic, backward: bool) -> Operands:
    """Return the operands of a launch; values per token are cut in blocks of its heads, [B, blocks, T, heads]."""
    heads = static.config.heads_bwd if backward else static.config.heads
    dtype, repeats = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype), static.H // x.q.shape[2]
    repeat = functools.partial(jnp.repeat, repeats=repeats, axis=2)
    q, k = jax.tree.map(repeat, (x.q, x.k)) if repeats > 1 else (x.q, x.k)
    kinds = interleaved.kinds(q)
    q, k, v = (layout.to_lanes(y.astype(dtype), static.T, kinds) for y in (q, k, x.v))
    of_heads: Any = lambda y: None if y is None else to_blocks(launcher.without_float16(y), heads, static.T)
    g, beta = map(of_heads, (x.g, x.beta))
    return Operands(q=q, k=k, v=v, g=g, beta=beta, initial_state=fused.kernel_states(x.initial_state))


def to_blocks(x: jax.Array, heads: int, T: int) -> jax.Array:
    """Return a value per token [B, t, HV] as [B, HV / heads, T, heads], zeros past the last token."""
    x = chunking.pad_tokens(x, T)
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, heads), 2, 1)


def launch_states(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> dict[str, jax.Array]:
    """Run the launch that only takes states through the tokens; segments take one chunk a grid step there.

    Without M, of which `kernel_map` is the kernel, it is a forward without an output.
    """
    whole = kernel_map if "M" in outputs else kernel
    module = few_heads if x.owner is None and few_heads.supports(x, static) else whole
    return launcher.launch(**module.plan(x, static, outputs))


KERNELS = fused.Kernels(
    config_for,
    static_for,
    lay_out,
    fused.by_chunks(few_heads, kernel),
    fused.by_chunks(few_heads_bwd, kernel_bwd),
    launch_states,
    residuals=("A_inv",),
    recomputed=("h", "v_new_over_beta"),
    precomputed=("A_inv",),
    makes_map=lambda x, _: sum(packed.pad_channels(y.shape[3]) for y in (x.q, x.v)) <= state_map.MOST_CHANNELS,
    several_chunks=True,
    owner_repeats=lambda static: static.p,
)


OPERATOR = define(
    "gated_delta_rule",
    check,
    fused.implementation(KERNELS, "use_qk_l2norm_in_kernel"),
    plain(xla.RULE, "use_qk_l2norm_in_kernel"),
)
