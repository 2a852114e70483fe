"""GLA and simple GLA in plain JAX: the mathematics of their chunks, for `chunkwise.shared.plain.chunks`.

A gate per head multiplies rows of values and outputs, never keys and queries: so all value heads of a key head share
the products of their keys and queries, and no copy of those is made for every value head.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.fused_gla import channels
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import gating, matmul, tiles
from chunkwise.shared.plain import chunks, state_scan

# Tokens of a block: gates are added up inside of blocks, and over whole blocks.
_BLOCK = 16


def make_form(x: chunks.Tokens, options: arguments.Options, passes: int | None) -> chunks.Form:
    """Return the chunk form of tokens with gates per head or per channel."""
    # Operands are float32, because JAX would round the gradient of a bfloat16 operand, which goes to the scores and the
    # states.
    x = x._replace(k=x.k.astype(jnp.float32), q=None if x.q is None else x.q.astype(jnp.float32))
    return _with_channel_gates(x) if gating.per_channel(x.g[0]) else _with_head_gates(x, passes)


def _with_channel_gates(x: chunks.Tokens) -> chunks.Form:
    same = None if x.masks is None else jnp.repeat(x.masks.same, x.v.shape[1], axis=0)
    decays = channels.decays(x.flat(x.g), 1.0, same)
    from_start, to_end, through = x.within_sequence(*map(x.by_head, decays[1:4]))
    k, through = x.of_value_heads(x.k), jnp.swapaxes(through, 2, 3)
    if x.q is None:
        return chunks.Form(through, k * to_end, None, None)
    q = x.of_value_heads(x.q)
    scores = x.by_head(channels.scores(x.flat(q), x.flat(k), decays, same))
    return chunks.Form(through, k * to_end, q * from_start, scores)


def _with_head_gates(x: chunks.Tokens, passes: int | None) -> chunks.Form:
    n, HV, C, _ = x.v.shape
    between, *sums = map(x.by_head, gate_sums(x.g.reshape(n * HV, C)))
    from_start, to_end, through = x.within_sequence(*map(jnp.exp, sums))
    if x.q is None:
        return chunks.Form(through, x.k, None, None, to_end=to_end)
    pairs = tiles.lower(C) if x.masks is None else tiles.lower(C) & x.masks.same[:, None]
    scores = x.of_value_heads(state_scan.dot_nt(x.q, x.k, passes)) * jnp.where(pairs, jnp.exp(between), 0.0)
    return chunks.Form(through, x.k, x.q, scores, from_start=from_start, to_end=to_end)


def gate_sums(g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return sums of gates g [N, C] over spans of tokens, without a difference of two sums.

    Returns:
      [N, C, C], over the tokens after j up to i, where i >= j; [N, C, 1], over the tokens up to i, and over those after
      i; and [N, 1, 1], over all.
    """
    N, C = g.shape
    b = math.gcd(C, _BLOCK)
    n = C // b
    inside = g.reshape(N, n, b)
    up_to, after, near = _sums(inside, up_to=True)
    before, behind, middle = _sums(up_to[..., -1], up_to=False)
    # Indices are the block and the token of i, and then those of j.
    far = up_to[..., None, None] + middle[:, :, None, :, None] + after[:, None, None]
    same = (tiles.row_index(n) == tiles.column_index(n))[:, :, None, :, None]
    between = jnp.where(same, near[:, :, :, None], far)
    from_start, to_end = (y.reshape(N, C, 1) for y in (before[..., None] + up_to, after + behind[..., None]))
    return between.reshape(N, C, C), from_start, to_end, from_start[:, -1:]


def _sums(g: jax.Array, up_to: bool) -> list[jax.Array]:
    """Return sums of g [..., m] before i, after i, and [..., m, m] between j and i; with `up_to` before and at i."""
    m = g.shape[-1]
    # A constant, because a GPU would make it anew in a launch of its own.
    t = np.arange(m)
    i, j = t[:, None, None], t[:, None]
    end = i + up_to
    spans = np.concatenate([t < end, t > i, ((t > j) & (t < end)).reshape(m * m, 1, m)])[:, 0]
    made = matmul.dot_nt(g.reshape(1, -1, m), jnp.asarray(spans[None], jnp.float32)).reshape(*g.shape[:-1], -1)
    before, after, between = jnp.split(made, [m, 2 * m], axis=-1)
    return [before, after, between.reshape(*g.shape, m)]


RULE = chunks.Rule(make_form, delta=False)
