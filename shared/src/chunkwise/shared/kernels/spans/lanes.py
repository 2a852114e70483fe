"""Tiles of whole registers that hold heads of any width, several of them side by side if they are narrow.

A register has 128 lanes. A head of 80 channels takes one register and a head of 192 channels takes two, with zeros in
the lanes behind its channels. Two heads of 64 channels lie side by side in one register, as they lie in memory, and are
never taken apart: where a product must not mix them, one operand has both heads below one another, each with zeros in
the lanes of the other one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import packed
from chunkwise.shared.kernels.spans import layout


class Lanes(NamedTuple):
    """How tiles [tiles, rows, size] hold heads: `heads` of them side by side, each of `width` channels.

    With one head a tile, most functions return their argument.
    """

    heads: int
    width: int

    @property
    def used(self) -> int:
        """The lanes of the heads of a tile."""
        return self.heads * self.width

    @property
    def size(self) -> int:
        """The lanes of a tile."""
        return packed.pad_lanes(self.used)

    def pad(self, x: jax.Array) -> jax.Array:
        """Return x [..., used] with zeros behind, [..., size]."""
        return packed.whole(x, x.ndim - 1)

    def cut(self, x: jax.Array) -> jax.Array:
        """Return x [..., size] without the zeros behind its heads, [..., used]."""
        return x if x.shape[-1] == self.used else x[..., : self.used]

    def load(self, ref, which: slice = slice(None), valid: jax.Array | None = None) -> jax.Array:
        """Load some tiles [tiles, C, size] of a flat block: see `layout.load_heads`."""
        return self.pad(layout.load_heads(ref, self.used, which, valid))

    def store(self, ref, x: jax.Array, valid: jax.Array | None = None, first: int = 0) -> None:
        """Store tiles [tiles, C, size] in a flat block, from tile `first` on: see `layout.store_heads`."""
        layout.store_heads(ref, self.cut(x), valid, first)

    def spread(self, x: jax.Array) -> jax.Array:
        """Return flat tokens [C, tiles used] with whole tiles, [C, tiles size]."""
        if self.used == self.size:
            return x
        each = range(0, x.shape[1], self.used)
        return jnp.concatenate([self.pad(x[:, i : i + self.used]) for i in each], axis=1)

    def parts(self, x: jax.Array, otherwise: float = 0.0) -> list[jax.Array]:
        """Return x [..., size] for every head of a tile, with `otherwise` in the lanes of the other heads."""
        if self.heads == 1:
            return [x]
        return [jnp.where(self._is_of(j, x.ndim), x, jnp.asarray(otherwise, x.dtype)) for j in range(self.heads)]

    def apart(self, x: jax.Array) -> jax.Array:
        """Return tiles [tiles, rows, size] head by head, [heads, rows, size], with zeros in lanes of other heads."""
        return x if self.heads == 1 else jnp.stack([y for each in x for y in self.parts(each)])

    def together(self, x: jax.Array) -> jax.Array:
        """Return the tiles of heads [heads, rows, size], of each head its lanes; columns [heads, rows, 1] fill them."""
        if self.heads == 1:
            return x
        first, *others = packed.pack_members(x, self.heads)
        for j, y in enumerate(others, 1):
            first = jnp.where(self._is_of(j, 3), y, first)
        return first

    def below(self, x: jax.Array) -> jax.Array:
        """Return tiles [tiles, rows, size] with their heads `apart` below one another, [tiles, heads rows, size]."""
        return self.apart(x).reshape(x.shape[0], -1, x.shape[2])

    def beside(self, x: jax.Array) -> jax.Array:
        """Return [tiles, heads rows, size] with the rows of each head in its lanes, [tiles, rows, size]."""
        return x if self.heads == 1 else self.together(x.reshape(x.shape[0] * self.heads, -1, x.shape[2]))

    def sums(self, x: jax.Array) -> jax.Array:
        """Return the sums over the channels of every head of tiles [tiles, rows, size], [heads, rows, 1]."""
        return jnp.sum(self.apart(x), axis=-1, keepdims=True)

    def open_state(self, S: jax.Array, rows: int) -> jax.Array:
        """Return states [tiles, V, used] as operands of products, [tiles, rows, size].

        Of several heads the states are block-diagonal: V rows of each, and zeros in the lanes of others.
        """
        return packed.whole(self.below(self.pad(S)), 1, rows)

    def close_state(self, S: jax.Array, V: int) -> jax.Array:
        """Return states [tiles, rows, size] as they are kept, [tiles, V, used]: the inverse of `open_state`."""
        S = S if S.shape[1] == self.heads * V else S[:, : self.heads * V]
        return self.cut(self.beside(S))

    def _is_of(self, j: int, ndim: int) -> jax.Array:
        """Return which lanes are of head j."""
        lane = lax.broadcasted_iota(jnp.int32, (1,) * (ndim - 1) + (self.size,), ndim - 1)
        after, before = lane >= jnp.int32(j * self.width), lane < jnp.int32((j + 1) * self.width)
        return before if j == 0 else after if j == self.heads - 1 else after & before


def pack_states(x: jax.Array, heads: int) -> jax.Array:
    """Return states [N, HV, V, K] with some heads side by side, [N, HV / heads, V, heads K]."""
    N, HV, V, K = x.shape
    return x if heads == 1 else jnp.swapaxes(x.reshape(N, -1, heads, V, K), 2, 3).reshape(N, -1, V, heads * K)


def unpack_states(x: jax.Array, heads: int) -> jax.Array:
    """Return states [N, HV / heads, V, heads K] as [N, HV, V, K]: the inverse of `pack_states`."""
    N, n, V, K = x.shape
    return x if heads == 1 else jnp.swapaxes(x.reshape(N, n, V, heads, -1), 2, 3).reshape(N, n * heads, V, -1)
