"""Cutting a batch of tokens into chunks, fixed or packed, inside jit.

Three ways to cut:

- `Chunking` restarts the chunks at every sequence. Every chunk holds rows of one sequence, padded with zeros, which
  leaves all results exact. The stage kernels read such chunks.
- `StreamMasks` keeps the chunks aligned to the token stream and says which rows of a chunk belong together. Its
  cost follows the number of tokens, whatever the number of sequences.
- `VarlenTiles` cuts the aligned chunks once more at the ends of sequences. The tokens are not copied, and every
  sequence has a boundary where its state can go in and out.

`cu_seqlens` is a traced int32 array [N + 1]: sequence n holds the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1.
Tokens from cu_seqlens[N] on are padding: they belong to no sequence and their results are zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import tiles


def num_chunks(T: int, chunk_size: int, num_sequences: int | None = None) -> int:
    """Return how many chunks T tokens take: ceil(T / C), or the static bound T // C + N of a packed batch."""
    if num_sequences is None:
        return (T + chunk_size - 1) // chunk_size  # in this form JAX knows that it is at least 1 for an open T
    return T // chunk_size + num_sequences


def pad_tokens(x: jax.Array, T: int) -> jax.Array:
    """Return x [B, t, ...] with zero rows appended up to T tokens."""
    missing = T - x.shape[1]
    return x if missing == 0 else jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def select_tokens(tokens: jax.Array | None, x: jax.Array, others: float = 0.0) -> jax.Array:
    """Return x [B, T, ...] where `tokens`, bool [T] or [B, T], is True, and the number `others` elsewhere.

    None is for all tokens.
    """
    if tokens is None:
        return x
    return jnp.where(tokens.reshape(-1, x.shape[1], *(1,) * (x.ndim - 2)), x, jnp.full((), others, x.dtype))


def valid_tokens(cu_seqlens: jax.Array | None, segment_ids: jax.Array | None, T: int) -> jax.Array | None:
    """Return which tokens are not padding, bool [1, T] or [B, T]; None if there can be no padding.

    As in `rising`, a boundary that is less than an earlier one counts as that one.
    """
    if segment_ids is not None:
        return segment_ids >= 0
    return None if cu_seqlens is None else (jnp.arange(T, dtype=jnp.int32) < jnp.max(cu_seqlens))[None]


def zero_padding(x: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """Return x [B, T, ...] with zeros for tokens of no sequence, whatever they held; x itself if not packed."""
    return select_tokens(valid_tokens(cu_seqlens, None, x.shape[1]), x)


def rising(boundaries: jax.Array, T: int) -> jax.Array:
    """Return int32 [N + 1] boundaries that rise within T tokens, whatever the given ones hold.

    Boundaries that rise stay as they are. A boundary that is less than an earlier one becomes that one, and a boundary
    past the end becomes T.
    """
    index = jnp.arange(boundaries.shape[0], dtype=jnp.int32)
    upto = index[None] <= index[:, None]
    return jnp.max(jnp.where(upto, jnp.clip(boundaries, 0, T)[None], jnp.int32(0)), axis=1)


def _owner_of(index: jax.Array, ends: jax.Array) -> jax.Array:
    """Return int32 the number of the first entry of the rising `ends` that exceeds `index`; len(ends) if none does."""
    # If there are few, a TPU compares each with each seven times faster than it searches.
    method = "compare_all" if ends.shape[0] <= 128 else "scan"
    return jnp.searchsorted(ends, index, side="right", method=method).astype(jnp.int32)


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """Return int32 values [..., n] at the places `index` [m], zeros past the end.

    It compares every place with every index, which is faster on a TPU than a gather.
    """
    places = jnp.arange(values.shape[-1], dtype=jnp.int32)[None] == index[:, None]  # [m, n]
    places = places.reshape(*(1,) * (values.ndim - 1), *places.shape)
    return jnp.sum(jnp.where(places, values[..., None, :], jnp.int32(0)), axis=-1, dtype=jnp.int32)


def put(values: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    """Return int32 values [n] with `new` [m] in the places `index` [m]; no place is named twice.

    It compares every place with every index, as `take` does.
    """
    places = jnp.arange(values.shape[0], dtype=jnp.int32)[:, None] == index[None]  # [n, m]
    placed = jnp.sum(jnp.where(places, new[None], jnp.int32(0)), axis=1, dtype=jnp.int32)
    return jnp.where(jnp.any(places, axis=1), placed, values)


def token_owners(T: int, cu_seqlens: jax.Array) -> jax.Array:
    """Return int32 [T], the sequence of every token of a stream; N for a token of no sequence."""
    return _owner_of(jnp.arange(T, dtype=jnp.int32), cu_seqlens[1:])


class Chunking:
    """How [B, T, ...] tokens are cut into NC chunks of C rows, chunks restarting at every sequence.

    Chunks are ordered by sequence, then by time. A batch of B rows is B sequences of T tokens.

    Attributes:
      B, T, C: batch, tokens and chunk size; static.
      N: number of sequences; static.
      NC: number of chunks, B * ceil(T / C), or T // C + N when packed; static. Unused chunks come last.
      sequence: int32 [NC], the sequence of each chunk. Unused chunks repeat the last used one.
      first, last: bool [NC], whether the chunk is the first or the last of its sequence.
      length: int32 [NC], valid rows of the chunk; 0 for an unused one.
      empty: bool [N], whether a sequence holds no token.
      final_chunk: int32 [N], the last chunk of each sequence; meaningless for an empty one.
    """

    def __init__(self, B: int, T: int, chunk_size: int, cu_seqlens: jax.Array | None = None):
        self.B, self.T, self.C = B, T, chunk_size
        self.packed = cu_seqlens is not None
        if cu_seqlens is None:
            self.N, per_row = B, num_chunks(T, chunk_size)
            self.NC = B * per_row
            chunk = jnp.arange(self.NC, dtype=jnp.int32)
            self.sequence = jnp.repeat(jnp.arange(B, dtype=jnp.int32), per_row)
            local = chunk - self.sequence * per_row
            self.first, self.last = local == 0, local == per_row - 1
            self.length = jnp.minimum(T - local * chunk_size, chunk_size)
            self.empty = jnp.zeros((B,), bool)
            self.final_chunk = jnp.arange(1, B + 1, dtype=jnp.int32) * per_row - 1
            return
        self.N = cu_seqlens.shape[0] - 1
        self.NC = num_chunks(T, chunk_size, self.N)
        lengths = jnp.diff(cu_seqlens)
        counts = (lengths + chunk_size - 1) // chunk_size
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        chunk = jnp.arange(self.NC, dtype=jnp.int32)
        used = chunk < ends[-1]
        sequence = _owner_of(jnp.minimum(chunk, jnp.maximum(ends[-1] - 1, 0)), ends)
        self.sequence = jnp.minimum(sequence, self.N - 1)
        local = chunk - (ends - counts)[self.sequence]
        self.first = used & (local == 0)
        self.last = used & (local == counts[self.sequence] - 1)
        rows_left = lengths[self.sequence] - local * chunk_size
        self.length = jnp.where(used, jnp.clip(rows_left, 0, chunk_size), 0)
        self.empty = lengths == 0
        self.final_chunk = jnp.maximum(ends - 1, 0)
        # The token of every row, T where the row is padding, and the row of every token, out of range for padding.
        row = jnp.arange(chunk_size, dtype=jnp.int32)[None]
        start = cu_seqlens[self.sequence] + local * chunk_size
        self._token = jnp.where(row < self.length[:, None], start[:, None] + row, T).reshape(-1)
        final = start + self.length - 1
        last_repeated = jnp.minimum(start[:, None] + row, final[:, None])
        self._token_or_last = jnp.where(used[:, None], last_repeated, T).reshape(-1)
        token = jnp.arange(T, dtype=jnp.int32)
        owner = token_owners(T, cu_seqlens)
        inside = jnp.minimum(owner, self.N - 1)
        position = (ends - counts)[inside] * chunk_size + token - cu_seqlens[inside]
        self._row = jnp.where(owner < self.N, position, self.NC * chunk_size)

    def split(self, x: jax.Array) -> jax.Array:
        """Return tokens [B, T, H, ...] as chunks [NC, H, C, ...], padded with zeros."""
        return self._as_chunks(self.spread(x))

    def split_rows(self, x: jax.Array) -> jax.Array:
        """Return a value per token [B, T, H] as rows [NC, H, 1, C] of float32, padded with zeros."""
        return self.split(x.astype(jnp.float32))[:, :, None]

    def split_cumulative(self, g_cum: jax.Array) -> jax.Array:
        """Return cumulative gates [B, T, H, ...] as float32 chunks [NC, H, C, ...], the last valid row repeated.

        A padded token has gate 0, so it has the cumulative gate of the last valid one. Zeros would make the
        difference to the rows before it positive and its exponential overflow.
        """
        g_cum = g_cum.astype(jnp.float32)
        if self.packed:
            return self._as_chunks(g_cum[0].at[self._token_or_last].get(mode="fill", fill_value=0)[None])
        missing = self.NC // self.B * self.C - self.T
        return self._as_chunks(jnp.pad(g_cum, [(0, 0), (0, missing)] + [(0, 0)] * (g_cum.ndim - 2), mode="edge"))

    def split_gates(self, g_cum: jax.Array | None, heads: int) -> jax.Array:
        """Return cumulative gates as the kernels take them, float32.

        Per head, [B, T, H] becomes rows [NC, H, 1, C], zeros for None; per channel, [B, T, H, K] becomes
        [NC, H, C, K].
        """
        if g_cum is None:
            return jnp.zeros((self.NC, heads, 1, self.C), jnp.float32)
        g = self.split_cumulative(g_cum)
        return g if g_cum.ndim == 4 else g[:, :, None]

    def gamma_rows(self, g_gamma: jax.Array) -> jax.Array:
        """Return the cumulative gates of a constant gate [H] as rows [NC, H, 1, C]; padded rows repeat the last."""
        count = jnp.minimum(jnp.arange(1, self.C + 1, dtype=jnp.int32)[None], self.length[:, None])
        return tiles.clip_gate(g_gamma)[None, :, None, None] * count[:, None, None, :].astype(jnp.float32)

    def _as_chunks(self, rows: jax.Array) -> jax.Array:
        return jnp.moveaxis(rows.reshape(self.NC, self.C, *rows.shape[2:]), 1, 2)

    def merge(self, x: jax.Array) -> jax.Array:
        """Return chunks [NC, H, C, ...] as tokens [B, T, H, ...]; the inverse of `split`."""
        rows = jnp.moveaxis(x, 2, 1)
        return self.gather(rows.reshape(self.B, self.NC // self.B * self.C, *rows.shape[2:]))

    def spread(self, x: jax.Array) -> jax.Array:
        """Return tokens [B, T, ...] as rows of chunks [B, NC // B * C, ...], every sequence padded with zeros."""
        if self.packed:
            return x[0].at[self._token].get(mode="fill", fill_value=0)[None]
        return pad_tokens(x, self.NC // self.B * self.C)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return [B, NC // B * C, ...] in token order [B, T, ...]; the inverse of `spread`."""
        if self.packed:
            return x[0].at[self._row].get(mode="fill", fill_value=0)[None]
        return x[:, : self.T]

    def per_batch(self, x: jax.Array) -> jax.Array:
        """Return a value per chunk [NC, ...] as [B, NT, ...]."""
        return x.reshape(self.B, self.NC // self.B, *x.shape[1:])


class StreamMasks(NamedTuple):
    """Which rows of stream-aligned chunks belong to one sequence; C rows a chunk, NT chunks, B = 1.

    Attributes:
      same: bool [NT, C, C], rows i and j belong to one sequence.
      carried: bool [NT, C], the row belongs to the sequence that was open when the chunk began.
      ending: bool [NT, C], the row belongs to the sequence that is open when the chunk ends.
      through: bool [NT], the chunk lies inside one sequence, so the carried state survives it.
      valid: bool [NT, C], the row belongs to a sequence at all.
    """

    same: jax.Array
    carried: jax.Array
    ending: jax.Array
    through: jax.Array
    valid: jax.Array


def stream_masks(T: int, chunk_size: int, cu_seqlens: jax.Array) -> StreamMasks:
    """Build the masks of a packed stream of T tokens, cut every `chunk_size` tokens."""
    NT = num_chunks(T, chunk_size)
    owner = token_owners(NT * chunk_size, cu_seqlens).reshape(NT, chunk_size)
    final = owner[:, -1]
    opening = jnp.concatenate([owner[:1, 0], final[:-1]])
    return StreamMasks(
        same=owner[:, :, None] == owner[:, None, :],
        carried=owner == opening[:, None],
        ending=owner == final[:, None],
        through=opening == final,
        valid=owner < cu_seqlens.shape[0] - 1,
    )


class VarlenTiles(NamedTuple):
    """The pieces into which the ends of sequences cut the chunks of a packed stream: S = NT + N of them, B = 1.

    Pieces are in order, every chunk has at least one, and the rows of a piece belong to one sequence. Unused pieces,
    and pieces of padding, have no rows. An empty sequence has one piece, which has no rows either.

    Attributes:
      sequence: int32 [S].
      first, last: bool [S], whether the piece is the first or the last one of its sequence.
      chunk: int32 [S].
      begin, end: int32 [S], the rows of the chunk that belong to the piece.
      opens, closes: bool [S], whether the piece is the first or the last one of its chunk.
    """

    sequence: jax.Array
    first: jax.Array
    last: jax.Array
    chunk: jax.Array
    begin: jax.Array
    end: jax.Array
    opens: jax.Array
    closes: jax.Array


def varlen_tiles(T: int, chunk_size: int, cu_seqlens: jax.Array) -> VarlenTiles:
    """Cut a packed stream of T tokens every `chunk_size` tokens and at the end of every sequence.

    Whatever the boundaries hold, all pieces lie within the stream, because kernels read the rows that the pieces name.
    """
    cu_seqlens = rising(cu_seqlens, T)
    return cut_sequences(T, chunk_size, cu_seqlens[:-1], cu_seqlens[1:])[0]


def cut_sequences(
    T: int, chunk_size: int, start: jax.Array, end: jax.Array, cuts: tuple[jax.Array, jax.Array] | None = None
) -> tuple[VarlenTiles, jax.Array]:
    """Cut the sequences of a stream of T tokens every `chunk_size` tokens, at their ends, and at further `cuts`.

    Nothing is sorted: the place of an end among all ends is found by counting the ends before it.

    Args:
      T: tokens; static.
      chunk_size: static.
      start, end: int32 [N], the tokens of every sequence, rising from 0 to T at most; sequence n + 1 starts where n
        ends. A caller whose boundaries may be wrong passes them through `rising` first.
      cuts: int32 [M] the tokens of further cuts, rising, and int32 [M] their sequences, N for a cut that is not made.

    Returns:
      The NT + N + M pieces, and int32 [N + M] the pieces that end at the ends of the sequences and at the cuts. Where
      several end at one token, only one of them has rows.
    """
    N, NT = start.shape[0], num_chunks(T, chunk_size)
    rank, at = jnp.arange(N, dtype=jnp.int32), end
    if cuts is not None:
        token, owner = cuts
        before = jnp.sum(owner[None] <= rank[:, None], axis=1, dtype=jnp.int32)
        of = jnp.arange(token.shape[0], dtype=jnp.int32)
        rank, at = jnp.concatenate([rank + before, of + owner]), jnp.concatenate([end, token])
    # An end of a sequence, or a cut, at the end of a chunk adds no piece; `tied` marks the first such end of a chunk.
    earlier = rank[None] < rank[:, None]
    tied = (at > 0) & (at % chunk_size == 0) & ~jnp.any(earlier & (at[None] == at[:, None]), axis=1)
    # The place of every end among all ends. The number of ends of chunks before it is a quotient.
    tied_before = jnp.sum(tied[None] & (at[None] < at[:, None]), axis=1, dtype=jnp.int32)
    place = rank + jnp.maximum(at - 1, 0) // chunk_size - tied_before
    # A piece ends at the last of the ends whose place is not behind the piece. Pieces -2 and -1 end at token 0.
    S = NT + at.shape[0]
    piece = jnp.arange(-2, S, dtype=jnp.int32)
    found = place[None] <= piece[:, None]  # [S + 2, N + M]
    lone = piece + 1 - jnp.sum(found, axis=1, dtype=jnp.int32)
    whole = jnp.clip(lone + jnp.sum(found & tied[None], axis=1, dtype=jnp.int32), 0, NT)  # chunks that end
    stop = jnp.maximum(whole * chunk_size, jnp.max(jnp.where(found, at[None], 0), axis=1))
    owner = jnp.sum(found[1:-1, :N], axis=1, dtype=jnp.int32)
    begin, stop, whole = stop[1:-1], stop[2:], jnp.minimum(whole, NT - 1)
    exists, sequence = owner < N, jnp.minimum(owner, N - 1)
    first_token, end_token = take(jnp.stack([start, end]), sequence)
    # Tokens before the first sequence belong to none.
    begin = jnp.maximum(begin, first_token)
    has_rows = exists & (begin < stop)
    # The piece of an empty sequence is the piece that ends at the end of the sequence.
    empty = jnp.any((place[None, :N] == piece[2:, None]) & (start == end)[None], axis=1)
    chunk = whole[1:-1]
    made = VarlenTiles(
        sequence=sequence,
        first=(has_rows & (begin == first_token)) | empty,
        last=(has_rows & (stop == end_token)) | empty,
        chunk=chunk,
        begin=begin - chunk * chunk_size,
        end=jnp.where(has_rows, stop, begin) - chunk * chunk_size,
        opens=(chunk != whole[:-2]) | (piece[2:] == 0),
        closes=(chunk != whole[2:]) | (piece[2:] == S - 1),
    )
    return made, place
