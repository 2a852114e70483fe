"""Forward in one launch: the layout both directions share, kernel body, launcher.

Operands stay in the user's layout, seen flat as [B, T, H * D]: a head is a slice of lanes. Time is the last, sequential
axis of the grid and the state lives in VMEM across it. A packed batch keeps its chunks aligned to the token stream.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gla import tiles
from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import clip_gate, dot, pallas_call, to_column


class Operands(NamedTuple):
    """What the launches read.

    Attributes:
      q, k: [B, T, H * K], one type; K is a multiple of 128.
      v: [B, T, H * V], of the same type; V is a multiple of 128.
      g: gates in nats, float32: rows [B, NT, H, 1, C], channels [B, T, H * K], or None.
      gamma: constant gates [H, 1, C], or None.
      scale: float32 [1].
      initial_state: [N, H, V, K] float32, or None for zeros.
      tables: None, or of a packed batch: cu_seqlens [N + 1], the sequence of the first and of the last token of every
        chunk [NT], and that of every token [NT, 1, C]; int32.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array | None
    gamma: jax.Array | None
    scale: jax.Array
    initial_state: jax.Array | None
    tables: tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None


@dataclass(frozen=True)
class Shape:
    """Static sizes of a launch; heads and steps are those of one grid step."""

    B: int
    T: int
    H: int
    K: int
    V: int
    C: int
    heads: int
    steps: int
    per_channel: bool
    # Packed sequences with states of their own: every sequence of a chunk is visited by a loop.
    visit: bool
    # Every chunk has the same decays: constant gates, whole chunks, one sequence.
    constant: bool
    # Parts of computed tiles in bfloat16 products: two where a gradient of constant gates is to be had.
    parts: int

    @property
    def NT(self) -> int:
        """Chunks a batch row."""
        return -(-self.T // self.C)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Batch rows, blocks of heads, and time."""
        return self.B, self.H // self.heads, self.NT // self.steps

    def chunks(self, step) -> jax.Array:
        """Return the chunks of a grid step: always `steps`, but XLA cannot tell.

        It would inline a loop of one trip into other code when it interprets the kernel, and round that differently.
        """
        return jnp.minimum(self.steps, self.NT - step * self.steps)

    def tokens(self, D: int, time) -> pl.BlockSpec:
        """Return the spec of the tokens of a grid step in [B, T, H * D]; `time` maps the last grid index."""
        block = (None, self.steps * self.C, self.heads * D)
        return pl.BlockSpec(block, lambda b, h, t, *_: (b, time(t), h))

    def rows(self, time) -> pl.BlockSpec:
        """Return the spec of values per token [B, NT, H, 1, C]."""
        block = (None, self.steps, self.heads, 1, self.C)
        return pl.BlockSpec(block, lambda b, h, t, *_: (b, time(t), h, 0, 0))

    def owners(self, time) -> pl.BlockSpec:
        """Return the spec of the sequence of every token [NT, 1, C]."""
        return pl.BlockSpec((self.steps, 1, self.C), lambda b, h, t, *_: (time(t), 0, 0))

    def state(self) -> pl.BlockSpec:
        """Return the spec of the states of sequences: a block of [B, H, V, K], or all of them where a loop visits."""
        if self.visit:
            return pl.BlockSpec(memory_space=pl.ANY)
        return pl.BlockSpec((None, self.heads, self.V, self.K), lambda b, h, t, *_: (b, h, 0, 0))

    def kept(self, time) -> pl.BlockSpec:
        """Return the spec of the state before every grid step [B, NT / steps, H, V, K]."""
        block = (None, None, self.heads, self.V, self.K)
        return pl.BlockSpec(block, lambda b, h, t, *_: (b, time(t), h, 0, 0))

    def gates(self, time) -> pl.BlockSpec:
        """Return the spec of the gates, as rows or by channel."""
        return self.tokens(self.K, time) if self.per_channel else self.rows(time)

    def launch(self, kernel, x: Operands, *more, time, in_specs=(), queries=True, **call):
        """Launch `kernel` on x and `more` operands, whose specs are `in_specs`; `time` maps the last grid index.

        Without `queries` the kernel does not read q, of which it gets one block: it must stay an operand, so that vmap
        over q alone gives every result its axis.
        """
        *tables, owner = x.tables or (None,)
        body = functools.partial(kernel, s=self)
        specs = [
            self.tokens(self.K, time) if queries else pl.BlockSpec((None, 16, 128), lambda *_: (0, 0, 0)),
            self.tokens(self.K, time),
            self.tokens(self.V, time),
            None if x.g is None else self.gates(time),
            None if x.gamma is None else pl.BlockSpec((self.heads, 1, self.C), lambda b, h, t, *_: (h, 0, 0)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            None if x.initial_state is None else self.state(),
            None if x.tables is None else self.owners(time),
            *in_specs,
        ]

        def run(*operands):
            return pallas_call(
                body if tables else functools.partial(body, None, None, None),
                *operands, num_scalar_prefetch=len(tables), grid=self.grid,
                # Batch rows and blocks of heads are independent; time carries the state.
                dimension_semantics=("parallel", "parallel", "arbitrary"), in_specs=specs, **call,
            )  # fmt: skip

        # Pallas has no batch axis for states that a kernel copies from HBM by itself.
        run = jax.custom_batching.sequential_vmap(run) if self.visit else run
        return run(*tables, *x[:-1], owner, *more)


class Inputs(NamedTuple):
    """The Refs that both kernels begin with; a table or an operand that is absent is None, which Any stands for."""

    bounds: Any
    first: Any
    last: Any
    q: jax.Ref
    k: jax.Ref
    v: jax.Ref
    g: Any
    gamma: Any
    scale: jax.Ref
    initial_state: Any
    owner: Any


class Chunk:
    """Chunk i of a grid step, some or all of its heads, inside a kernel.

    Attributes:
      q, k, v: tiles [heads, C, D]; q only if `queries`.
      same: bool [1, C, C], pairs of one sequence; None where all tokens are of one.
      decays: as `tiles.Decays`.
    """

    def __init__(self, s: Shape, refs: Inputs, step, i, decays: tiles.Decays | None, heads: slice, queries=True):
        self.s, self.refs, self.i, self.index, self.heads = s, refs, i, step * s.steps + i, heads
        self.same = None
        if refs.owner is not None:
            self.row = refs.owner[i][None]
            self.column = to_column(self.row.astype(jnp.float32)).astype(jnp.int32)
            self.same = self.row == self.column
            self.last = refs.last[self.index]
            self.open = jnp.where(self.index == 0, -1, refs.last[jnp.maximum(self.index - 1, 0)])
        self.k, self.v = self.load(refs.k, s.K), self.load(refs.v, s.V)
        if queries:
            self.q = self.load(refs.q, s.K)
        if decays is None:
            self.g = self._gates()
            decays = tiles.decays(self.g, refs.scale[0], self.same)
        self.decays = decays

    def _rows(self):
        return pl.ds(pl.multiple_of(self.i * self.s.C, self.s.C), self.s.C)

    def load(self, ref, D: int) -> jax.Array:
        """Return tokens as a tile [heads, C, D]; padding, which may hold anything, becomes zeros."""
        rows = self._rows()
        x = jnp.stack([ref[rows, h * D : (h + 1) * D] for h in range(self.heads.start, self.heads.stop)])
        if self.same is None and self.s.T % self.s.C == 0:
            return x
        return self._inside(x.astype(jnp.float32), 1).astype(x.dtype)

    def store(self, ref, x: jax.Array):
        """Write a tile [heads, C, D] to the tokens of the chunk."""
        D = x.shape[2]
        for h in range(self.heads.start, self.heads.stop):
            ref[self._rows(), h * D : (h + 1) * D] = x[h - self.heads.start].astype(ref.dtype)

    def _inside(self, x: jax.Array, axis: int) -> jax.Array:
        """Return x with zeros for tokens past the end of the batch or of the last sequence; `axis` walks the tokens."""
        if self.same is not None:
            owner = self.column if axis == 1 else self.row
            return jnp.where(owner < self.refs.bounds.shape[0] - 1, x, 0.0)
        if self.s.T % self.s.C == 0:
            return x
        shape = [1, 1, 1]
        shape[axis] = self.s.C
        position = lax.broadcasted_iota(jnp.int32, tuple(shape), axis)
        return jnp.where(position < self.s.T - self.index * self.s.C, x, 0.0)

    def _gates(self) -> jax.Array:
        s, refs = self.s, self.refs
        if s.per_channel:
            constant = (
                0.0 if refs.gamma is None else self._inside(refs.gamma[self.heads, :, :1] + jnp.zeros((1, s.C, 1)), 1)
            )
            return clip_gate(self.load(refs.g, s.K)) + constant
        g = jnp.zeros((self.heads.stop - self.heads.start, 1, s.C), jnp.float32)
        g = g if refs.g is None else g + refs.g[self.i, self.heads]
        g = g if refs.gamma is None else g + refs.gamma[self.heads]
        return self._inside(g, 2)

    def of(self, n, x: jax.Array) -> jax.Array:
        """Return x, shaped like the gates, with zeros for the tokens of other sequences than n."""
        return jnp.where((self.column if self.s.per_channel else self.row) == n, x, 0.0)

    # Without tables the chunk lies inside one sequence. With them, the state before the chunk acts on the tokens of the
    # sequence that is open there, the state after it belongs to the last one, and the first passes into the second if
    # the two are one. Where a loop visits every sequence, n says which one.

    def from_start(self, n=None) -> jax.Array:
        """Return the decay from the state before the chunk, or at the start of sequence n, to each of its tokens."""
        x = self.decays.from_start
        return x if self.same is None else jnp.where(self.column == (self.open if n is None else n), x, 0.0)

    def to_end(self, n=None) -> jax.Array:
        """Return the decay from each token of the last sequence, or of n, to the state after the chunk."""
        x = self.decays.to_end
        return x if self.same is None else jnp.where(self.column == (self.last if n is None else n), x, 0.0)

    def through(self, n=None) -> jax.Array:
        """Return the decay of the carried state over the chunk, or of that of sequence n over its tokens."""
        if n is not None:
            axis = 1 if self.s.per_channel else 2
            return jnp.exp(jnp.sum(self.of(n, self.g), axis=axis, keepdims=True))
        x = self.decays.through
        return x if self.same is None else jnp.where(self.open == self.last, x, 0.0)

    def sequences(self) -> tuple[jax.Array, jax.Array]:
        """Return the range of the sequences that have tokens in the chunk, empty ones between them included."""
        return self.refs.first[self.index], jnp.minimum(self.last + 1, self.refs.bounds.shape[0] - 1)

    def starts(self, n) -> jax.Array:
        """Return whether sequence n starts in the chunk or later."""
        return self.refs.bounds[n] >= self.index * self.s.C

    def ends(self, n) -> jax.Array:
        """Return whether sequence n ends in the chunk or before."""
        return self.refs.bounds[n + 1] <= (self.index + 1) * self.s.C


def constant_decays(s: Shape, refs: Inputs) -> tiles.Decays:
    """Return the decays of every chunk where `constant` says that they are the same for all."""
    # The maximum of equal lanes: a reduction leaves its result in every lane, a slice is broadcast at every use.
    gamma = jnp.zeros((s.heads, 1, s.C), jnp.float32) if refs.gamma is None else refs.gamma[...]
    gamma = jnp.max(gamma, axis=2, keepdims=True)
    return tiles.constant_decays(gamma, refs.scale[0], s.C)


def fetch_state(states_ref, n, block, target_ref):
    """Copy the states of sequence n and a block of heads from HBM, or set them to zero."""
    if states_ref is None:
        target_ref[...] = jnp.zeros(target_ref.shape, target_ref.dtype)
    else:
        pltpu.sync_copy(states_ref.at[n, pl.ds(block * target_ref.shape[0], target_ref.shape[0])], target_ref)


def put_state(source_ref, states_ref, n, block):
    """Copy the states of a block of heads to sequence n in HBM."""
    if states_ref is not None:
        pltpu.sync_copy(source_ref, states_ref.at[n, pl.ds(block * source_ref.shape[0], source_ref.shape[0])])


def _gla_fwd_kernel(*refs, s: Shape):
    x, (o_ref, final_ref, kept_ref, S_ref) = Inputs(*refs[:11]), refs[11:]
    block, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _():
        whole = not s.visit and x.initial_state is not None
        S_ref[...] = x.initial_state[...] if whole else jnp.zeros(S_ref.shape, S_ref.dtype)

    if kept_ref is not None:
        kept_ref[...] = S_ref[...]
    constant = constant_decays(s, x) if s.constant else None

    def chunk(i, _):
        c = Chunk(s, x, step, i, constant, slice(0, s.heads), queries=o_ref is not None)
        own = None
        if o_ref is not None:
            P = tiles.scores(c.q, c.k, c.decays, c.same)
            own = dot(P.astype(c.v.dtype), c.v)

        def state_pass(o, n=None):
            S = S_ref[...]
            S_ref[...] = tiles.next_state(S, c.k, c.v, c.to_end(n), c.through(n), s.parts)
            return None if o is None else o + tiles.read_state(c.q, S, c.from_start(n))

        def visit(n, o):
            pl.when(c.starts(n))(lambda: fetch_state(x.initial_state, n, block, S_ref))
            o = state_pass(o, n)
            pl.when(c.ends(n))(lambda: put_state(S_ref, final_ref, n, block))
            return o

        o = lax.fori_loop(*c.sequences(), visit, own) if s.visit else state_pass(own)
        if o is not None:
            c.store(o_ref, o)

    lax.fori_loop(0, s.chunks(step), chunk, None)
    if final_ref is not None and not s.visit:

        @pl.when(step == s.grid[2] - 1)
        def _():
            final_ref[...] = S_ref[...]


def launch(s: Shape, x: Operands, output: bool, final: bool, keep: bool):
    """Return (o [B, T, H * V], final state [N, H, V, K], states before the grid steps); None for what is not wanted."""
    NG, state = s.NT // s.steps, (s.H, s.V, s.K)
    N = x.tables[0].shape[0] - 1 if x.tables else s.B
    inputs = [y for y in x[:-1] if y is not None]
    time, tokens = lambda t: t, s.B * s.NT * s.C * s.H
    return s.launch(
        _gla_fwd_kernel, x, time=time, queries=output,
        name=f"fused_chunk_gla_{'fwd' if output else 'states'}_c{s.C}" + ("_varlen" if x.tables else ""),
        out_specs=(
            s.tokens(s.V, time) if output else None, s.state() if final else None, s.kept(time) if keep else None
        ),
        out_shape=(
            out_struct(x.v.shape, x.v.dtype, *inputs) if output else None,
            out_struct((N, *state), jnp.float32, *inputs) if final else None,
            out_struct((s.B, NG, *state), jnp.float32, *inputs) if keep else None,
        ),
        scratch_shapes=[pltpu.VMEM((s.heads, s.V, s.K), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * (s.K * s.V + output * (s.C * (s.K + s.V) + s.K * s.V)),
            transcendentals=tokens * (s.C if output else 2),
            bytes_accessed=sum(y.size * y.dtype.itemsize for y in ([*inputs, x.v] if output else inputs[1:])),
        ),
    )  # fmt: skip
