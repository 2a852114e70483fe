"""The operands, the static description and the Refs of KDA's kernels."""

import dataclasses
from typing import NamedTuple

import jax

from chunkwise.shared.kernels import gate_activation
from chunkwise.shared.kernels.spans import lanes, operands


@dataclasses.dataclass(frozen=True)
class KdaOperands(operands.Operands):
    """The arrays that a launch reads; None for an array that it does not have.

    Attributes:
      e: erase keys, laid out as k; None where k erases, or k and b.
      b: erase gates [B, T, HV * K], which multiply erase keys.
      w: write gates [B, T, HV * V], which multiply values.
      law: A_log and dt_bias of every gate, float32.
      scores: of all spans, the scores of queries, and below them the scores of keys, float32, p heads side by side.
    """

    e: jax.Array | None = None
    b: jax.Array | None = None
    w: jax.Array | None = None
    law: jax.Array | None = None
    scores: jax.Array = operands.ABSENT


jax.tree_util.register_dataclass(KdaOperands)


@dataclasses.dataclass(frozen=True)
class KdaStatic(operands.FusedStatic):
    """The static description of a launch.

    Attributes:
      gate_law: the law of raw gates, or None.
      base: rows of the diagonal blocks that one product covers.
      bounded: whether a promise keeps gates weak enough for base blocks in all rows.
      erase_before_decay: whether erase keys read the state before the decay of their token.
      m: heads whose channels lie side by side in a tile; a pack of p heads has p / m tiles.
    """

    gate_law: gate_activation.Law | None = None
    base: int = 1
    bounded: bool = False
    erase_before_decay: bool = False
    m: int = 1

    @property
    def keys(self) -> lanes.Lanes:
        """The tiles of queries, keys and gates."""
        return lanes.Lanes(self.m, self.K)

    @property
    def values(self) -> lanes.Lanes:
        """The tiles of values."""
        return lanes.Lanes(self.m, self.V)

    @property
    def order_size(self) -> tuple[int, int, int]:
        """The sizes by which `tuning.find_order` knows a launch: heads of a grid step, rows, and lanes of a head."""
        return self.config.heads, self.C, self.keys.size // self.m

    def tiles(self, heads: slice) -> slice:
        """Return the tiles of some heads."""
        return slice(heads.start // self.m, heads.stop // self.m)

    @property
    def may_forget(self) -> bool:
        """Whether there may be rows that base blocks cannot have."""
        return self.base > 1 and not self.bounded


class KdaRefs(NamedTuple):
    """The Refs of the kernels of both directions; None for a Ref that a launch lacks.

    heads are the value heads of a grid step, n their packs, t their tiles and keys their key heads. The lanes of tiles
    of keys and of values are KL and VL, of which m K and m V have channels. In the forward, a Ref "of prev" is
    of the chunk that the state goes through, and the others are of the chunk that is prepared; a backward has one
    chunk. Of several chunks a grid step, a Ref has the tokens of all, or an entry for each: see `loads.of_chunks`.
    """

    # Of both directions.
    table: jax.Ref  # of `chunk_spans`
    q: jax.Ref  # [C, keys K]
    k: jax.Ref  # [C, keys K]
    v: jax.Ref  # [C, heads V] of prev; in the backward only with w
    g: jax.Ref  # [C, heads K], or [heads, C] for gates per head
    beta: jax.Ref  # [heads, C]
    e: jax.Ref  # [C, keys K]
    b: jax.Ref  # [C, heads K]
    w: jax.Ref  # [C, heads V] of prev
    levels: jax.Ref  # int32 [C, 2 C], `tile.table_of`; in the backward [2 C, C], `tile_bwd.pair_table`
    exact_levels: jax.Ref  # the same without base blocks
    owner: jax.Ref  # int32 [1, 1, C]
    law: jax.Ref  # [2, t KL]
    A_inv: jax.Ref  # [n, C, p C] of prev
    scores: jax.Ref  # [n, 2 C, p C]
    h: jax.Ref  # [t, V, m K] of prev
    v_new_over_beta: jax.Ref  # [C, heads V] of prev
    decays: jax.Ref  # of `loads.store_block_decays`
    continuing: jax.Ref  # float32 [C, 128], `tile.continuing`

    # Of the forward. What a grid step leaves for the next one is of prev.
    initial_state: jax.Ref  # [t, V, m K]
    pool: jax.Ref  # [heads, K, V], not padded
    o: jax.Ref  # [C, heads V] of prev
    ht: jax.Ref  # [t, V, m K]
    A_inv_out: jax.Ref  # [n, C, p C] of prev
    scores_out: jax.Ref  # [n, 2 C, p C]
    pool_out: jax.Ref  # [heads, K, V], not padded
    state: jax.Ref  # float32 [t, V, m K]; the Ref ht, if the final states are requested
    readers: jax.Ref  # rows that read the state before prev, [t, 2 C or C, KL]
    ends: jax.Ref  # parts of rows that write the state after prev, [t, parts C, KL]
    through: jax.Ref  # float32 [t, 1, KL], the decay over prev
    A: jax.Ref  # float32 [n, C, p C]; below the diagonal, A_inv is the inverse of I + A
    blocks: jax.Ref  # float32 [n, rows, p C], the part of A_inv that takes no products
    P: jax.Ref  # parts of the scores of queries times beta, [n, C, parts p C]
    inverses: jax.Ref  # float32 [n, C, p C], A_inv of three stages
    nonfinite_rows: jax.Ref  # float32 [1, C, 1], rows of prev that are not finite, without a look at v
    owner_prev: jax.Ref  # int32 [1, 1, C]; of several chunks an operand

    # Of `kernel_map`, which has one head a tile, a state float32 [heads, KL, VL + KL], and ends float32 [heads, C, KL].
    M: jax.Ref  # [heads, K, K], transposed
    scores_prev: jax.Ref  # float32 [heads, C, 2 C], not transposed
    beta_prev: jax.Ref  # float32 [n, 1, p C]
    u: jax.Ref  # float32 [heads, C, VL] of prev
    erase_new: jax.Ref  # parts of w, by which the new values of prev read the state, [heads, 2 C, KL]

    # Of the backward.
    do: jax.Ref  # [C, heads V]
    dht: jax.Ref  # [t, V, m K]
    dq: jax.Ref  # [C, keys K]
    dk: jax.Ref  # [C, keys K]
    dv: jax.Ref  # [C, heads V]
    dg: jax.Ref  # [C, heads K] or [heads, C]
    dbeta: jax.Ref  # [heads, C]
    de: jax.Ref  # [C, keys K]
    db: jax.Ref  # [C, heads K]
    dw: jax.Ref  # [C, heads V]
    dh0: jax.Ref  # [t, V, m K]
    dlaw: jax.Ref  # [2, t KL]
    dstate: jax.Ref  # float32 [t, V, m K]; the Ref dh0, if that is requested
    exact_decays: jax.Ref  # as decays, of a pack, without base blocks
    # Of `gradients_beyond_base`, float32.
    tensors: jax.Ref  # [t, 3 C, KL]
    d_scores: jax.Ref  # [n, 2 C, p C]
    beyond: jax.Ref  # [t, 4 C, KL]
