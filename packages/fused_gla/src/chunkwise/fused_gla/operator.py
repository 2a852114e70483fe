"""The records of GLA and simple GLA: their checks, the layout of their arrays, and the kernels that they share."""

import jax.numpy as jnp

from chunkwise.fused_gla import config, kernel, kernel_bwd, xla
from chunkwise.fused_gla.operands import GlaOperands, GlaStatic
from chunkwise.shared import tuning
from chunkwise.shared.call import checks, configs
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation import fused
from chunkwise.shared.implementation.implementations import Implementation, plain
from chunkwise.shared.kernels import chunking, matmul, packed, tiles
from chunkwise.shared.kernels.spans import layout
from chunkwise.shared.operator import define


def check(x: Arguments, options: Options) -> None:
    """Check the tensors of an operator, with gates per head or per channel."""
    B, T, H, K = checks.check_array("k", x.k, "B T H K")
    checks.check_array("q", x.q, "B T H K", (B, T, H, K))
    HV, _ = checks.check_value_heads(x.v, (B, T, H, K))
    checks.check_gates("g", x.g, (B, T, HV), K)
    if x.g_gamma is not None:
        checks.check_array("g_gamma", x.g_gamma, "HV", (HV,))
    checks.check_packed(x.cu_seqlens, B)
    configs.check_config(options.config, config)


def _check_by_channel(x: Arguments, options: Options) -> None:
    if x.g is not None:
        checks.check_array("g", x.g, "B T HV K")
    check(x, options)


def _check_by_head(x: Arguments, options: Options) -> None:
    if x.g is not None:
        checks.check_array("g", x.g, "B T HV")
    check(x, options)


def _default_config(x: Arguments, options: Options) -> config.Config | None:
    """Return the tile sizes for these arguments, None if a head is too large for fast memory."""
    (_, T, H, K), (HV, V) = x.q.shape, x.v.shape[2:]
    C = options.chunk_size
    itemsize = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype).itemsize
    return config.default_for(H, HV, K, V, C, chunking.num_chunks(T, C), itemsize, _per_channel(x))


def _per_channel(x: Arguments) -> bool:
    return x.g is not None and x.g.ndim == 4


def config_for(x: Arguments, options: Options) -> config.Config | str:
    """Return the tile sizes for these arguments, checked, or why the kernels do not take them in both directions."""
    H, HV = x.q.shape[2], x.v.shape[2]
    sizes = options.config or _default_config(x, options)
    if sizes is None:
        return (
            f'"fused" keeps the states of a head in VMEM; K = {x.q.shape[3]} and V = {x.v.shape[3]} need more of it '
            f'than there is: use implementation="xla".'
        )
    configs.check_blocks(sizes, H, HV, *map(packed.pad_channels, (x.q.shape[3], x.v.shape[3])))
    return sizes


def for_states(x: Arguments, options: Options) -> Options:
    """Return options with larger chunks for gates per channel, if a grid step takes as many heads of them.

    Without scores, the work of a token does not grow with the chunk, and a state goes through half as many chunks.
    """
    if not _per_channel(x) or options.config is not None:
        return options
    best = tuning.best_chunk_size("fused", x.q.shape[1], state=x.k.shape[3] * x.v.shape[3])
    larger = options._replace(chunk_size=max(options.chunk_size, best))
    found, otherwise = _default_config(x, larger), _default_config(x, options)
    return larger if found is not None and otherwise is not None and found.heads >= otherwise.heads else options


def static_for(x: Arguments, options: Options, requested: frozenset[str]) -> GlaStatic:
    """Return the static description of a launch."""
    (B, T, H, K), (HV, V), C, N = x.q.shape, x.v.shape[2:], options.chunk_size, x.num_states
    K, V, sizes = packed.pad_channels(K), packed.pad_channels(V), options.config
    constant = x.g is None and x.cu_seqlens is None and x.segment_ids is None and T % C == 0
    # A pack of heads is one register of lanes, whose heads share a key head.
    p = packed.packing(V, HV // H, sizes.heads, sizes.heads_bwd)
    alone = _per_channel(x) or constant or x.least is not None or p * V != packed.LANES
    return GlaStatic(
        B, T, H, HV, K, V, C, N, options.scale, sizes,
        varlen=x.cu_seqlens is not None and (x.with_state or bool(options.output_final_state)),
        readable=T,
        chunks=tuning.largest_divisor(chunking.num_chunks(T, C), options.config.num_steps),
        p=1 if alone else p,
        per_channel=_per_channel(x),
        constant=constant,
        # The gradient of constant gates is a sum over all tokens, whose terms cancel; see `tile`.
        parts=2 if x.g_gamma is not None and "g_gamma" in requested else 1,
        eps=None if x.least is None else options.eps,
    )  # fmt: skip


def lay_out(x: Arguments, static: GlaStatic, backward: bool) -> GlaOperands:
    """Return the operands of a launch.

    Gates per head are rows of chunks [B, NT, HV, 1, C] float32, gates per channel flat [B, T, HV K]. States are [V, K].
    Tokens keep their types, and are not padded.
    """
    rows = lambda g: layout.to_rows(g.astype(jnp.float32), static.C)[:, :, :, None]
    gates = {name: rows(y) for name in ("g", "log_weight", "least") if (y := getattr(x, name)) is not None}
    if static.per_channel:
        gates["g"] = layout.to_lanes(x.g, static.T)
    if x.skip is not None:
        gates["skip"] = layout.to_lanes(x.skip.astype(jnp.float32)[None, None], 1)[0]
    g_gamma = None if x.g_gamma is None else tiles.clip_gate(x.g_gamma)[:, None, None]
    q, k, v = (layout.to_lanes(y, static.T) for y in (x.q, x.k, x.v))
    states = fused.kernel_states(x.initial_state, transposed=True, sums=x.least is not None)
    return GlaOperands(q=q, k=k, v=v, **gates, g_gamma=g_gamma, initial_state=states)


KERNELS = fused.Kernels(
    config_for,
    static_for,
    lay_out,
    kernel.launch,
    kernel_bwd.launch,
    kernel.launch,
    residuals=("h",),
    optional=("g", "g_gamma", "log_weight", "least", "skip"),
    transposed=True,
    makes_map=lambda x, _: _per_channel(x),
    for_states=for_states,
)


def _implementations() -> tuple[Implementation, Implementation]:
    return fused.implementation(KERNELS), plain(xla.RULE)


GLA = define("gla", _check_by_channel, *_implementations())
SIMPLE_GLA = define("simple_gla", _check_by_head, *_implementations())
# With weights, and outputs that are divided. There the gradient of states alone takes the whole backward.
DIVIDED = fused.implementation(KERNELS, "eps")._replace(at_once=True)
DIVIDED_SIMPLE_GLA = define("simple_gla", _check_by_head, DIVIDED, plain(xla.RULE))
