"""The Refs of the kernels of the gated delta rule."""

from typing import NamedTuple

import jax


class GdnRefs(NamedTuple):
    """The Refs of the kernels of both directions; None for a Ref that a launch lacks.

    heads are the value heads of a grid step, n their packs and keys their key heads. The first stage of a forward
    prepares a chunk, and the last one takes the state through it; a second one between them makes the inverse, or the
    second one is the last. A Ref is of the chunk of the first stage, if its comment names no other; a backward has one
    stage. Of several chunks a grid step, a Ref has the tokens, packs and key heads of all, or an entry for each: see
    `loads.of_chunks`.
    """

    # Of both directions.
    table: jax.Ref  # of `chunk_spans`
    q: jax.Ref  # [C, keys K]
    k: jax.Ref  # [C, keys K]
    v: jax.Ref  # [C, heads V] of the last stage; of `kernel_map` of the second
    g: jax.Ref  # [C, heads]
    beta: jax.Ref  # [C, heads]
    owner: jax.Ref  # int32 [1, 1, p C]
    A_inv: jax.Ref  # [n, C, p C] of the second stage; of `few_heads` of the first
    h: jax.Ref  # [heads, K, V] of the last stage
    v_new_over_beta: jax.Ref  # [C, heads V] of the last stage

    # Of the forward.
    initial_state: jax.Ref  # [heads, K, V]
    pool: jax.Ref  # [heads, K, V], not padded
    unread_q: jax.Ref  # an operand that is not read
    unread_v: jax.Ref  # an operand that is not read
    o: jax.Ref  # [C, heads V] of the last stage
    ht: jax.Ref  # [heads, K, V]
    A_inv_out: jax.Ref  # [n, C, p C] of the second stage
    pool_out: jax.Ref  # [heads, K, V], not padded
    M: jax.Ref  # [heads, K, K]
    state: jax.Ref  # float32 [heads, K, V], or with M [heads, K, lanes of V + K]; the Ref ht, if that is requested
    # What the first stage leaves for the second.
    start: jax.Ref  # float32 [n, C, p C], decays from the start of the chunk; of `kernel_map` [n, 1, p C]
    end: jax.Ref  # float32 [n, C, p C], decays to its end, times beta
    keys: jax.Ref  # [keys, C, K]
    queries: jax.Ref  # [keys, C, K]
    scores: jax.Ref  # parts of P, [n, C, parts p C]
    A: jax.Ref  # float32 [n, C, p C]; below the diagonal, A_inv is the inverse of I + A
    blocks: jax.Ref  # float32 [n, rows, p C], the part of A_inv that takes no products
    g_late: jax.Ref  # float32 [C, heads] of the chunk that the next grid step prepares first, whose keys are in `keys`
    beta_late: jax.Ref  # float32 [C, heads] of the same chunk
    # Rows of k, g and beta of the second stage that are not finite, float32 [1, C, 1]; in `few_heads`, of every
    # stage but the first, [stages - 1, chunks, C, 1].
    nonfinite_rows: jax.Ref
    owner_prev: jax.Ref  # int32 [1, 1, p C] of the last stage; of `few_heads` an operand

    # Of three stages, what the second one leaves for the last.
    start_prev: jax.Ref  # as start
    keys_prev: jax.Ref  # as keys
    queries_prev: jax.Ref  # as queries
    left: jax.Ref  # parts of L of `few_heads`, [n, rows of L, parts p C]

    # Of `kernel_map`.
    last: jax.Ref  # float32 [n, 1, p C] of the second stage, the decay over the chunk
    last_prev: jax.Ref  # as last, of the last stage
    u: jax.Ref  # float32 [heads, C, V] of the last stage
    w: jax.Ref  # [heads, C, K] of the last stage
    nonfinite_prev: jax.Ref  # float32 [1, C, 1], rows of the last stage that are not finite
    owner_second: jax.Ref  # int32 [1, 1, p C] of the second stage

    # Of the backward.
    do: jax.Ref  # [C, heads V]
    dht: jax.Ref  # [heads, K, V]
    dq: jax.Ref  # [C, keys K]
    dk: jax.Ref  # [C, keys K]
    dv: jax.Ref  # [C, heads V]
    dg: jax.Ref  # [C, heads]
    dbeta: jax.Ref  # [C, heads]
    dh0: jax.Ref  # [heads, K, V]
    dstate: jax.Ref  # float32 [heads, K, V]; the Ref dh0, if that is requested
