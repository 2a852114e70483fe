"""The kernels: a grid step takes a block of tokens and channels, and computes it strip by strip.

To read the inputs j tokens before a strip, a kernel loads from j rows before it. So the block is copied as float32 into
a window, behind the last tokens of the block before it. The window has one plane [tokens, 128] for every 128 channels,
because a load from such a plane may begin at any row.

Blocks in which a sequence begins or ends, and a last block of a row that is not full, are *mixed*: only these look for
the ends of sequences. Channels past the end of the array hold anything, and results of them are not stored.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.causal_conv1d import config, tile
from chunkwise.shared.kernels import activations, chunking, launcher, packed, tiles, windows
from chunkwise.shared.kernels.spans import layout, row_sequences

# Tokens of a strip.
_STRIP = 32
# How many tokens before a block the backward loads again; a block of bfloat16 has at least 16 rows.
_BEFORE = 16


class ConvOperands(NamedTuple):
    """The arrays that launches read; None for an array that a launch does not read.

    Attributes:
      blocks: int32 [3, B * blocks]: whether a block is mixed, and the range of sequences whose first W - 1 tokens may
        lie in it. None if no block is mixed.
      sequences: int32 [2, N]: start and length of every sequence; None without initial states.
      x: [B, T, D].
      reach: float32 [B, blocks, 2, tokens]: age and left of `RowSequences`; None if no block is mixed.
      weight: float32 [W, D], the oldest token first.
      bias: float32 [1, D].
      rows: float32 [N * (W - 1), 1, D], `edges.state_rows`, or None. Its first axis is not tiled, so a kernel may
        take any entry.
      dy: the cotangent of y, shaped and typed as y.
    """

    blocks: jax.Array | None
    sequences: jax.Array | None
    x: jax.Array
    reach: jax.Array | None
    weight: jax.Array
    bias: jax.Array
    rows: jax.Array | None
    dy: jax.Array | None = None


class ConvStatic(NamedTuple):
    """The static description of a launch.

    Attributes:
      T: tokens of a row of the batch.
      W: width.
      activation: the activation of the output.
      config: tile sizes.
    """

    T: int
    W: int
    activation: str | None
    config: config.Config

    @property
    def blocks(self) -> int:
        """Blocks of a row of the batch."""
        return -(-self.T // self.config.tokens)


class ConvRefs(NamedTuple):
    """The Refs of both kernels; None for a Ref that a launch lacks. The channels of a block are cut into planes."""

    x: jax.Ref  # [tokens, channels]
    weight: jax.Ref  # [W, channels]
    bias: jax.Ref  # [1, channels]
    window: jax.Ref  # float32 [planes, halo + tokens, 128], the block behind the tokens before it
    blocks: jax.Ref  # int32 [3, B * blocks]
    sequences: jax.Ref  # int32 [2, N]
    before: jax.Ref  # [16, channels], the tokens before the block
    reach: jax.Ref  # float32 [2, tokens]
    rows: jax.Ref  # float32 [N * (W - 1), 1, channels]
    dy: jax.Ref  # [tokens, channels]
    y: jax.Ref  # [tokens, channels]
    dx: jax.Ref  # [tokens, channels]
    dweight: jax.Ref  # [W + 1, 8, channels]
    drows: jax.Ref  # float32 [N * (W - 1), 1, channels]
    wide: jax.Ref  # float32 [2, tokens, 128], reach over all lanes
    added: jax.Ref  # float32 [planes, tokens, 128], terms of initial states in a mixed block
    dpre: jax.Ref  # float32 [planes, tokens + halo, 128], the gradient before the activation


def tables(
    s: row_sequences.RowSequences, B: int, with_states: bool, static: ConvStatic
) -> tuple[jax.Array | None, ...]:
    """Return `ConvOperands.blocks`, `.sequences` and `.reach`."""
    size, count, most = static.config.tokens, static.blocks, static.W - 1
    ragged = static.T % size > 0
    if s.age is None and not with_states and not ragged:
        return None, None, None
    whole = jnp.full((B, static.T), most, jnp.int32)
    fill = lambda x: jnp.pad(x, ((0, 0), (0, count * size - static.T)), constant_values=-1).reshape(B, count, size)
    age, left = (fill(whole if x is None else jnp.minimum(x, most)) for x in (s.age, s.left))
    mixed = jnp.any((age < most) | (left < most), axis=2)  # [B, blocks]
    reach = jnp.stack([age, left], axis=2).astype(jnp.float32)
    low = high = jnp.zeros((B, count), jnp.int32)
    sequences = None
    if with_states:
        begin = jnp.arange(B * count, dtype=jnp.int32) * size
        # Sequences are in the order of their tokens, rows of the batch one after the other.
        start = s.row * jnp.int32(count * size) + s.start
        # How many sequences begin before a token, for the first tokens that a block and the next one can start.
        before = lambda token: jnp.sum(start[None] < token[:, None], axis=1, dtype=jnp.int32).reshape(B, count)
        low, high = before(begin - jnp.int32(most - 1)), before(begin + jnp.int32(size))
        mixed |= low < high
        sequences = jnp.stack([start, s.length])
    return jnp.stack([mixed.astype(jnp.int32), low, high]).reshape(3, -1), sequences, reach


def _planes(s: ConvStatic) -> range:
    return range(s.config.channels // packed.LANES)


def _lanes(n: int) -> slice:
    """Return the channels of a plane."""
    return slice(n * packed.LANES, (n + 1) * packed.LANES)


def _fill(refs, s: ConvStatic) -> None:
    """Copy the block of x into the window, behind the halo."""
    for n in _planes(s):
        for at, rows in _strips(s):
            refs.window[n, config.HALO + at : config.HALO + at + rows] = refs.x[at : at + rows, _lanes(n)].astype(
                jnp.float32
            )


def _spread_reach(refs) -> None:
    """Store the age of every token, and how many tokens are left after it, in all lanes."""
    for i in range(2):
        column = tiles.to_column(refs.reach[i : i + 1][None])[0]  # [tokens, 1]
        refs.wide[i] = jnp.broadcast_to(column, refs.wide.shape[1:])


def _first_rows(refs, block, s: ConvStatic, visit) -> None:
    """Call visit(row of the block, row of `ConvOperands.rows`) for the first W - 1 tokens of sequences in a block."""

    def sequence(n, _):
        first = refs.sequences[0, n] - block * jnp.int32(s.config.tokens)
        for age in range(s.W - 1):
            row = first + jnp.int32(age)
            inside = (row >= 0) & (row < jnp.int32(s.config.tokens)) & (jnp.int32(age) < refs.sequences[1, n])
            pl.when(inside)(lambda row=row, age=age: visit(row, n * jnp.int32(s.W - 1) + jnp.int32(age)))

    lax.fori_loop(refs.blocks[1, block], refs.blocks[2, block], sequence, None)


def _add_rows(refs, block, s: ConvStatic) -> None:
    """Put the terms of the initial states in a mixed block into scratch memory."""
    layout.clear(refs.added)

    def visit(row, source):
        for n in _planes(s):
            refs.added[n, pl.ds(row, 1)] = refs.rows[source, :, _lanes(n)]

    _first_rows(refs, block, s, visit)


def _branches(refs, block, s: ConvStatic, compute) -> None:
    """Call compute(mixed) for a block; for a mixed block, first fill the scratch memory that it needs."""
    if refs.blocks is None:
        compute(False)
        return
    mixed = refs.blocks[0, block] > 0

    @pl.when(mixed)
    def _():
        _spread_reach(refs)
        if refs.rows is not None:
            _add_rows(refs, block, s)
        compute(True)

    pl.when(jnp.logical_not(mixed))(functools.partial(compute, False))


def _strips(s: ConvStatic):
    """Return the strips of a block as (first row, rows)."""
    return [(at, min(_STRIP, s.config.tokens - at)) for at in range(0, s.config.tokens, _STRIP)]


def _load_weight(refs: ConvRefs, n: int, s: ConvStatic) -> list[jax.Array]:
    """Return the W rows [1, 128] of the weight of a plane of 128 channels."""
    return [refs.weight[i : i + 1, _lanes(n)] for i in range(s.W)]


def _convolve(refs: ConvRefs, n: int, weight: list[jax.Array], at: int, rows: int, mixed: bool, s: ConvStatic):
    """Return the taps of a strip of a plane, the input of the activation, and the age of its tokens or None."""
    age = refs.wide[0, at : at + rows] if mixed else None
    begin = config.HALO + at
    taps = tile.masked([refs.window[n, begin - j : begin - j + rows] for j in range(s.W)], age)
    pre = tile.convolve(taps, weight, refs.bias[:, _lanes(n)])
    if mixed and refs.rows is not None:
        pre = pre + refs.added[n, at : at + rows]
    return taps, pre, age


def _fwd_kernel(refs: ConvRefs, *, s: ConvStatic):
    """Write y of a block; its last tokens stay in the window for the next block."""
    block = pl.program_id(1) * jnp.int32(s.blocks) + pl.program_id(2)

    @pl.when(pl.program_id(2) == 0)
    def _():
        refs.window[:, : config.HALO] = jnp.zeros_like(refs.window[:, : config.HALO])

    @pl.when(pl.program_id(2) > 0)
    def _():
        refs.window[:, : config.HALO] = refs.window[:, s.config.tokens :]

    _fill(refs, s)

    def compute(mixed):
        for n in _planes(s):
            weight = _load_weight(refs, n, s)
            for at, rows in _strips(s):
                _, pre, age = _convolve(refs, n, weight, at, rows, mixed, s)
                y = activations.activate(pre, s.activation)
                if age is not None:
                    y = jnp.where(age >= 0.0, y, 0.0)
                refs.y[at : at + rows, _lanes(n)] = y.astype(refs.y.dtype)

    _branches(refs, block, s, compute)


def _bwd_kernel(refs: ConvRefs, *, s: ConvStatic):
    """Write dx of a block, the last block first, and add to the gradients of weight and bias.

    A token's gradient comes also from the W - 1 tokens after it. So `dpre` of the first tokens of a block stays in
    scratch memory for the block before it.
    """
    grid_step = pl.program_id(2)
    place = jnp.int32(s.blocks - 1) - grid_step
    block = pl.program_id(1) * jnp.int32(s.blocks) + place
    tokens = s.config.tokens

    @pl.when((pl.program_id(1) == 0) & (grid_step == 0))
    def _():
        layout.clear(refs.dweight, refs.drows)

    @pl.when(grid_step == 0)
    def _():
        refs.dpre[:, tokens:] = jnp.zeros_like(refs.dpre[:, tokens:])

    @pl.when(grid_step > 0)
    def _():
        refs.dpre[:, tokens:] = refs.dpre[:, : config.HALO]

    for n in _planes(s):
        before = refs.before[:, _lanes(n)].astype(jnp.float32)[_BEFORE - config.HALO :]  # [8, 128]
        # Nothing is before the first block.
        refs.window[n, : config.HALO] = jnp.where(place > 0, before, 0.0)
    _fill(refs, s)

    def compute(mixed):
        for n in _planes(s):
            weight = _load_weight(refs, n, s)
            sums = [jnp.zeros((8, packed.LANES), jnp.float32)] * (s.W + 1)
            for at, rows in _strips(s):
                taps, pre, age = _convolve(refs, n, weight, at, rows, mixed, s)
                dy = refs.dy[at : at + rows, _lanes(n)].astype(jnp.float32)
                d = tile.gradient(pre, dy, s.activation, age)  # [rows, 128]
                refs.dpre[n, at : at + rows] = d
                products = [d * tap for tap in reversed(taps)] + [d]
                sums = [total + tile.fold(x) for total, x in zip(sums, products, strict=True)]
            for i, total in enumerate(sums):
                refs.dweight[i, :, _lanes(n)] += total
            for at, rows in _strips(s):
                ahead = [refs.dpre[n, at + j : at + j + rows] for j in range(s.W)]
                ahead = tile.masked(ahead, refs.wide[1, at : at + rows] if mixed else None)
                refs.dx[at : at + rows, _lanes(n)] = tile.convolve(ahead, weight).astype(refs.dx.dtype)
        if mixed and refs.rows is not None:

            def visit(row, source):
                for n in _planes(s):
                    refs.drows[source, :, _lanes(n)] = refs.dpre[n, pl.ds(row, 1)]

            _first_rows(refs, block, s, visit)

    _branches(refs, block, s, compute)


def launch(x: ConvOperands, s: ConvStatic) -> dict[str, jax.Array]:
    """Run the forward kernel, or with dy the backward one.

    Returns:
      A dict. Forward: y, shaped and typed as x. Backward: dx, shaped and typed as x; dweight, float32 [W + 1, 8, D],
      the gradients of weight and bias, to be summed over the second axis; and drows, the gradient of `rows`, if there
      are rows.
    """
    (B, T, D), (tokens, channels), count = x.x.shape, (s.config.tokens, s.config.channels), s.blocks
    backward = x.dy is not None
    # Blocks of tokens come in order; in the backward the last one comes first.
    place = lambda i: jnp.int32(count - 1) - i if backward else i
    block = pl.BlockSpec((None, tokens, channels), lambda j, b, i, *_: (b, place(i), j))
    before = lambda i: jnp.maximum(place(i) * jnp.int32(tokens // _BEFORE) - jnp.int32(1), jnp.int32(0))
    rows = None if x.rows is None else windows.along((x.rows.shape[0], 1, channels), None, None, 0)
    planes = channels // packed.LANES
    scratch: dict[str, Any] = {"window": (planes, config.HALO + tokens, packed.LANES)}
    if x.reach is not None:
        scratch["wide"] = 2, tokens, packed.LANES
    if x.rows is not None:
        scratch["added"] = planes, tokens, packed.LANES
    outputs: dict[str, tuple] = {"y": (block, x.x.shape, x.x.dtype)}
    if backward:
        sums = windows.along((s.W + 1, 8, channels), None, None, 0)
        outputs = {"dx": (block, x.x.shape, x.x.dtype), "dweight": (sums, (s.W + 1, 8, D), jnp.float32)}
        scratch["dpre"] = planes, tokens + config.HALO, packed.LANES
        if x.rows is not None:
            outputs["drows"] = rows, x.rows.shape, jnp.float32
    padded = chunking.pad_tokens(x.x, max(T, _BEFORE)) if backward else None
    return launcher.launch(
        functools.partial(_bwd_kernel if backward else _fwd_kernel, s=s),
        ConvRefs,
        name=f"causal_conv1d_{'bwd' if backward else 'fwd'}_w{s.W}",
        # Channels are independent. Rows of the batch are independent, too, but the backward adds up over them. Tokens
        # are sequential.
        grid=(-(-D // channels), B, count),
        dimension_semantics=("parallel", "arbitrary" if backward else "parallel", "arbitrary"),
        tables={"blocks": x.blocks, "sequences": x.sequences},
        inputs={
            "x": (x.x, block),
            "before": (padded, pl.BlockSpec((None, _BEFORE, channels), lambda j, b, i, *_: (b, before(i), j))),
            "reach": (x.reach, pl.BlockSpec((None, None, 2, tokens), lambda j, b, i, *_: (b, place(i), 0, 0))),
            "weight": (x.weight, windows.along((s.W, channels), None, 0)),
            "bias": (x.bias, windows.along((1, channels), None, 0)),
            "rows": (x.rows, rows),
            "dy": (x.dy, block),
        },
        outputs=outputs,
        scratch=scratch,
        in_bounds=False,
        cost_estimate=config.cost(B=B, T=T, D=D, W=s.W, itemsize=x.x.dtype.itemsize, backward=backward),
    )
