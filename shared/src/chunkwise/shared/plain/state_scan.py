"""The states before all chunks, for GPUs, where all other work of the chunks is done at once.

A GPU waits for the launch of every operation, so few large operations are best. All products that do not read a state
are batched over chunks and heads; the rest is one short scan

    S' = through S + k_end^T (u - w S) + added

which goes from chunk to chunk, with two products for each. Where so few heads would leave the machine idle, the chunks
are cut into segments, and the maps of chunks, S -> M S + N, are composed for all segments side by side; then the states
go from segment to segment, and at last from chunk to chunk in all segments at once.

The derivative is the same scan of other numbers, so JAX never differentiates through the steps: forward mode is one
more scan, and the backward is one scan of the transposes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from chunkwise.shared import trees
from chunkwise.shared.call.arguments import ABSENT
from chunkwise.shared.kernels import matmul

# The name of results that the backward does not compute again.
KEPT = "kept"
# At most so many heads leave a large GPU idle, which has 132 multiprocessors; then maps of segments are composed.
FEW_HEADS = 32
# The number of segments, side by side; it divides the number of chunks.
SEGMENTS = 16


def dot(a: jax.Array, b: jax.Array, passes: int | None) -> jax.Array:
    """Return the products a b of matrices [..., h, m, n], of three bfloat16 passes where `passes` is 3; see `matmul`.

    Where b has r times as many heads as a, each head of a multiplies r heads of b next to one another.
    """
    return _batched(matmul.dot, a, b, passes)


def dot_nt(a: jax.Array, b: jax.Array, passes: int | None) -> jax.Array:
    """Return the products a b^T, as `dot` does."""
    return _batched(matmul.dot_nt, a, b, passes)


def dot_tn(a: jax.Array, b: jax.Array, passes: int | None) -> jax.Array:
    """Return the products a^T b, as `dot` does."""
    return _batched(matmul.dot_tn, a, b, passes)


def _batched(product: Callable, a: jax.Array, b: jax.Array, passes: int | None) -> jax.Array:
    if (h := a.shape[-3]) != (heads := b.shape[-3]):
        # The r heads are columns of one matrix.
        b = jnp.moveaxis(b.reshape(*b.shape[:-3], h, heads // h, *b.shape[-2:]), -3, -2)
        made = _batched(product, a, b.reshape(*b.shape[:-2], -1), passes)
        made = jnp.moveaxis(made.reshape(*made.shape[:-1], *b.shape[-2:]), -2, -3)
        return made.reshape(*made.shape[:-4], heads, *made.shape[-2:])
    made = product(*(y.reshape(-1, *y.shape[-2:]) for y in (a, b)), passes=passes)
    return made.reshape(*a.shape[:-2], *made.shape[-2:])


class Chunks(NamedTuple):
    """How n chunks of h heads change states S [h, K, V]: to through S + k_end^T (u - w S) + added.

    Attributes:
      through: decays over whole chunks [n, h, 1, 1] or, per channel, [n, h, K, 1].
      k_end: keys decayed to the ends of their chunks, [n, h, C, K].
      u: the new values, [n, h, C, V]; if new values read the state, the values for a state of zeros.
      w: the keys by which new values read the state, [n, h, C, K]; None where new values read no state.
      first: bool [n], whether a sequence begins with the chunk; None if none begins.
      initial: [n, h, K, V], the initial state of that sequence; None for zeros.
      added: [n, h, K, V], in place of k_end and u where new values read no state; or None.
    """

    through: jax.Array
    k_end: jax.Array
    u: jax.Array
    w: Any
    first: jax.Array | None
    initial: jax.Array | None
    added: jax.Array | None = None

    @property
    def by_maps(self) -> bool:
        """Whether the maps of segments are composed."""
        return self.w is not None and in_segments(*self.through.shape[:2])


def select_states(first: jax.Array | None, initial: jax.Array | None, S: jax.Array) -> jax.Array:
    """Return the states that chunks start from: S [n, h, K, V], or the initial state where a sequence begins."""
    return S if first is None else jnp.where(first[..., None, None, None], 0.0 if initial is None else initial, S)


def in_segments(n: int, h: int) -> bool:
    """Return whether maps of segments are composed for n chunks of h heads, if new values read the state."""
    return h <= FEW_HEADS and n >= 2 * SEGMENTS


def states_before(x: Chunks, start: jax.Array, passes: int | None) -> tuple[jax.Array, jax.Array]:
    """Return the states that come into all chunks [n, h, K, V], and the state after the last one.

    The state before a chunk with which a sequence begins is returned as the earlier sequence left it.

    Args:
      x: the chunks.
      start: [h, K, V].
      passes: of products; see `dot`.
    """
    if x.w is None:
        x = x._replace(k_end=ABSENT, u=ABSENT, added=dot_tn(x.k_end, x.u, passes))
    return _states(passes, x, start)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _states(passes, x: Chunks, start):
    return (_by_maps if x.by_maps else _one_by_one)(passes, x, start)


@_states.defjvp
def _states_jvp(passes, primals, tangents):
    (x, _), (dx, dstart) = primals, tangents
    states, last = _states(passes, *primals)
    if not x.by_maps:
        # To find the states again one by one would be too many launches.
        states = checkpoint_name(states, KEPT)
    S, du = select_states(x.first, x.initial, states), dx.u
    changed = dx.through * S
    if x.w is not None:
        changed += dot_tn(dx.k_end, x.u - dot(x.w, S, passes), passes)
        du = du - dot(dx.w, S, passes)
    changed = changed if dx.added is None else changed + dx.added
    return (states, last), _states(passes, x._replace(u=du, initial=dx.initial, added=changed), dstart)


def _one_by_one(passes: int | None, x: Chunks, start):
    def pass_chunk(S, x: Chunks):
        here = select_states(x.first, x.initial, S)
        after = x.through * here
        if x.w is not None:
            after += dot_tn(x.k_end, x.u - dot(x.w, here, passes), passes)
        return after if x.added is None else after + x.added, S

    # XLA fuses the work of four steps, apart from products, into one launch. `jax.export` may leave their number open.
    unroll = 4 if isinstance(x.through.shape[0], int) else 1
    last, states = lax.scan(pass_chunk, start, x, unroll=unroll)
    return states, last


def _by_maps(passes: int | None, x: Chunks, start):
    n, K = x.u.shape[0], x.w.shape[-1]
    M = x.through * jnp.eye(K, dtype=jnp.float32) - dot_tn(x.k_end, x.w, passes)
    N = dot_tn(x.k_end, x.u, passes)
    N = N if x.added is None else N + x.added
    # [L, segments, ...]: entry t has chunk t of every segment. The loops are in Python, because a loop of XLA would
    # copy what it reads.
    M, N, first, initial = jax.tree.map(
        lambda y: jnp.moveaxis(y.reshape(SEGMENTS, -1, *y.shape[1:]), 1, 0), (M, N, x.first, x.initial)
    )
    at = functools.partial(trees.at, (first, initial))
    L, passing = n // SEGMENTS, None if first is None else ~jnp.any(first, axis=0)

    # A segment takes a state S to P S + Q; if a sequence begins in the segment, its result is Q.
    P, Q = M[0], N[0]
    if first is not None:
        Q = dot(M[0], select_states(*at(0), jnp.zeros_like(Q)), passes) + Q
    for t in range(1, L):
        if first is not None:
            P = jnp.where(first[t][:, None, None, None], 0.0, P)
            Q = select_states(*at(t), Q)
        P, Q = dot(M[t], P, passes), dot(M[t], Q, passes) + N[t]

    starts = [start]
    for s in range(SEGMENTS - 1):
        reached = dot(P[s], starts[-1], passes)
        starts.append(Q[s] + (reached if passing is None else jnp.where(passing[s], reached, 0.0)))

    S, states = jnp.stack(starts), []
    for t in range(L):
        states.append(S)
        S = dot(M[t], select_states(*at(t), S), passes) + N[t]
    return jnp.stack(states, axis=1).reshape(n, *start.shape), S[-1]
