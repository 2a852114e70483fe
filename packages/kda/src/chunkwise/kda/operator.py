"""The record of Kimi delta attention: its checks, the layout of its arrays, its kernels and its plain form."""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from chunkwise.kda import config, few_heads, few_heads_bwd, kernel, kernel_bwd, kernel_map, tile, xla
from chunkwise.kda.operands import KdaOperands, KdaStatic
from chunkwise.shared.call import checks, configs, gates
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation import fused
from chunkwise.shared.implementation.implementations import plain
from chunkwise.shared.kernels import launcher, matmul, packed
from chunkwise.shared.kernels.spans import lanes, layout
from chunkwise.shared.operator import define
from chunkwise.shared.plain import state_map

# The options that the kernels and the plain form read.
OPTIONS = "use_qk_l2norm_in_kernel", "min_gate"


def check(x: Arguments, options: Options) -> None:
    """Check the tensors of the operator, and the promise about its gates."""
    checks.check_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens, per_channel=True)
    check_options(options)


def check_options(options: Options) -> None:
    """Check the promise about gates, and the tile sizes."""
    configs.check_config(options.config, config)
    bound = options.min_gate
    number = isinstance(bound, numbers.Real) and not isinstance(bound, bool)
    checks.check(
        bound is None or (number and bound <= 0),
        f"`min_gate` must be None or a number <= 0{checks.when_built(bound)}; got {checks.shown(bound)}.",
    )


def config_for(x: Arguments, options: Options) -> config.Config | str:
    """Return the tile sizes for these arguments, checked, or why the kernels do not take them."""
    if too_many := fused.most_channels(x):
        return too_many
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    K, V = packed.pad_channels(K), packed.pad_channels(V)
    sizes = options.config or config.default_for(
        H, HV, options.chunk_size, K, V, _dtype(x).itemsize,
        gates=(x.b is not None) + (x.w is not None),
    )  # fmt: skip
    configs.check_blocks(sizes, H, HV, K, V)
    return sizes


def _dtype(x: Arguments):
    return matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype)


def _narrow(x):
    """Return gates in bfloat16 as they are, and others in float32, because no TPU loads float16."""
    return x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)


def static_for(x: Arguments, options: Options, requested: frozenset[str]) -> KdaStatic:
    """Return the static description of a launch."""
    (B, T, H, K), (HV, V), C, N = x.q.shape, x.v.shape[2:], options.chunk_size, x.num_states
    varlen = x.cu_seqlens is not None and (x.with_state or bool(options.output_final_state))
    # Fewer tokens than a chunk are padded with zeros; a law would make decays of these.
    readable = T if options.activation.use_gate_in_kernel else max(T, C)
    return KdaStatic(
        B=B, T=max(T, C), readable=readable, H=H, HV=HV, K=packed.pad_channels(K), V=packed.pad_channels(V), C=C, N=N,
        scale=options.scale, normalise=bool(options.use_qk_l2norm_in_kernel),
        compensate=bool(options.use_qk_l2norm_in_kernel and options.large_steps), varlen=varlen, config=options.config,
        p=packed.packing(C, options.config.heads, options.config.heads_bwd),
        base=tile.base_block(options.min_gate, _dtype(x)),
        bounded=tile.base_block(options.min_gate, jnp.float32) > 1,
        gate_law=options.activation.law, per_channel=x.g is not None and x.g.ndim == 4,
        erase_before_decay=options.erase_before_decay,
        m=config.heads_of_tile(H, HV, C, K, V, options.config.heads, options.config.heads_bwd),
    )  # fmt: skip


def lay_out(x: Arguments, static: KdaStatic, backward: bool) -> KdaOperands:
    """Return the operands of a launch; numbers per head are rows of chunks [B, NT, HV, C], states are [V, K]."""
    g: Any = None if x.g is None else x.g.astype(jnp.float32)
    law = None
    if x.A_log is not None and static.gate_law is not None:
        g = _narrow(x.g)
        law = jnp.stack(gates.lay_out_activation(x.A_log, x.dt_bias, g.shape[2:], static.gate_law))  # [2, HV, K]
        law = layout.to_lanes(law[None], 2)[0]
    q, k, v = (layout.to_lanes(y.astype(_dtype(x)), static.T) for y in (x.q, x.k, x.v))
    e = None if x.p is None else layout.to_lanes(x.p.astype(_dtype(x)), static.T)
    b, w = (None if y is None else layout.to_lanes(_narrow(y), static.T) for y in (x.b, x.w))
    of_gates = layout.to_lanes if static.per_channel else layout.to_rows
    size = static.T if static.per_channel else static.C
    laid_out: Any = lambda y: None if y is None else of_gates(y, size)
    return KdaOperands(
        q=q, k=k, v=v, e=e, b=b, w=w, g=laid_out(g),
        beta=layout.to_rows(x.beta.astype(jnp.float32), static.C),
        law=law, initial_state=fused.kernel_states(x.initial_state, transposed=True),
    )  # fmt: skip


def launch(
    plan: fused.Launch, x: KdaOperands, static: KdaStatic, outputs: tuple[str, ...], finish: Callable | None = None
) -> dict[str, Any]:
    """Run the launch of a plan on operands of `lay_out`, whose states are [N, HV, V, K], and the law as users have it.

    Tiles of several heads hold their states side by side, [N, HV / m, V, m K]; a law has the lanes of tiles. `finish`
    completes the results.
    """
    m, keys = static.m, static.keys
    pack = lambda y: None if y is None else lanes.pack_states(y, m)
    law = None if x.law is None else keys.pad(x.law.reshape(2, -1, keys.used)).reshape(2, -1)
    x = dataclasses.replace(x, law=law, initial_state=pack(x.initial_state), dht=pack(x.dht))
    out = launcher.launch(**plan(x, static, outputs))
    out = out if finish is None else finish(out, x, static)
    out |= {name: lanes.unpack_states(out[name], m) for name in ("ht", "dh0") if name in out}
    if "dlaw" in out:
        out["dlaw"] = keys.cut(out["dlaw"].reshape(2, -1, keys.size)).reshape(2, -1)
    return out


def makes_map(x: Arguments, options: Options) -> bool:
    """Return whether `kernel_map` makes the map: it pads the channels of M and of the states each by itself."""
    K, V = x.q.shape[3], x.v.shape[3]
    channels = packed.pad_channels(K) + packed.pad_channels(V)
    fits = channels == packed.pad_channels(K + V) <= state_map.MOST_CHANNELS
    alone = x.cu_seqlens is None and x.segment_ids is None
    return fits and alone and kernel_map.supports(static_for(x, options, frozenset()), _dtype(x))


def launch_states(
    forward: fused.Launch, operator: str, x: KdaOperands, static: KdaStatic, outputs: tuple[str, ...]
) -> dict[str, Any]:
    """Run the launch that only takes states through the tokens; without M, it is a forward without an output."""
    if "M" in outputs:
        plan = lambda *args: kernel_map.plan(*args, operator)
        return launch(plan, x, dataclasses.replace(static, m=1), outputs)
    if x.initial_state is not None and x.initial_state.shape[2] > static.V:  # channels without values
        static = dataclasses.replace(static, m=1)
    return forward(x, static, outputs)


def kernels(operator: str) -> fused.Kernels:
    """Return the kernels of an operator, which have its name."""
    forward = functools.partial(launch, fused.plan_by_chunks(few_heads, kernel, operator=operator))
    backward = fused.plan_by_chunks(few_heads_bwd, kernel_bwd, operator=operator)
    return fused.Kernels(
        config_for,
        static_for,
        lay_out,
        forward,
        functools.partial(launch, backward, finish=kernel_bwd.finish),
        functools.partial(launch_states, forward, operator),
        residuals=("h", "v_new_over_beta", "A_inv", "scores"),
        precomputed=("A_inv", "scores"),
        transposed=True,
        makes_map=makes_map,
        most_channels=state_map.MOST_CHANNELS,
        several_chunks=True,
    )


OPERATOR = define(
    "kda",
    check,
    fused.implementation(kernels("kda"), *OPTIONS, raw_gates=True),
    plain(xla.RULE, *OPTIONS),
)
