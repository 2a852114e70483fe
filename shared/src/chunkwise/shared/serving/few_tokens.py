"""Decodes of all operators: a few tokens of each sequence, one token at a time, by a kernel or in plain JAX.

The states are an array with a state for each sequence, or lie in slots of a pool, which is updated in place.
"""

import functools

import jax
import jax.numpy as jnp

from chunkwise.shared import compat
from chunkwise.shared.call import arguments, checks
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.kernels import chunking, launcher, tiles
from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.plain import recurrence
from chunkwise.shared.serving import slot_rows
from chunkwise.shared.serving.decode import choose, launch, records
from chunkwise.shared.serving.decode.records import DecodeStatic
from chunkwise.shared.serving.state_pool import StatePool


def check_states(x: Arguments) -> None:
    """Check the states of N sequences, and the slots of the sequences if the states are a pool."""
    slots, (HV, V), K = x.slots or Slots(), x.v.shape[2:], x.q.shape[3]
    pooled = slots.state_indices is not None
    checks.check(
        x.initial_state is not None or not pooled,
        "`state_indices` must come with the pool as `initial_state`; got None.",
    )
    shape, wanted = tuple(getattr(x.initial_state, "shape", (0,))), (x.num_states, HV, K, V)
    checks.check(
        pooled or shape[0] == wanted[0] or shape[1:] != wanted[1:],
        f"`initial_state` must have shape [N, HV, K, V] = {wanted}; got {shape}: a pool of slots comes with "
        f"`state_indices`.",
    )
    checks.check_initial_state(x.initial_state, (None if pooled else x.num_states, HV, K, V))
    checks.check_slots(slots.state_indices, slots.has_initial_state, x.num_states)
    if pooled:
        checks.check_slot_values(slots.state_indices, "initial_state", x.initial_state.shape[0])


def scan_tokens(
    q, k, v, g, beta, scale, initial_state, cu_seqlens, normalise: bool, p=None, every: bool = False,
    erase_before_decay: bool = False, echo=None,
):  # fmt: skip
    """Return (o, states) of the recurrence in float32, o in the type of v; beta is None without the delta rule.

    p are erase keys of every value head, which `normalise` does not scale; None for k. With `every` the results are the
    states after every token, and also the values that the tokens wrote: see `recurrence`, and for `echo`, too.
    """
    # Padding may hold anything, and its gradient is zero.
    q, k, v, g, beta, p, echo = jax.tree.map(
        functools.partial(chunking.zero_padding, cu_seqlens=cu_seqlens), (q, k, v, g, beta, p, echo)
    )
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if normalise:
        q, k = tiles.l2norm(q), tiles.l2norm(k)
    q, k, echo = jax.tree.map(lambda x: jnp.repeat(x, v.shape[2] // x.shape[2], axis=2), (q, k, echo))
    x = q, k, v, g, beta, scale, initial_state
    if cu_seqlens is None:
        o, *more = recurrence.recurrence(*x, jnp.float32, p, every, erase_before_decay, echo)
    else:
        o, *more = recurrence.packed_recurrence(*x, cu_seqlens, jnp.float32, p, erase_before_decay, echo)
    return o.astype(v.dtype), *more


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 4))
def run_tokens(
    name: str, implementation: str, strict: bool, x: Arguments, options: Options, precomputed: None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Run a few tokens of every sequence; the function of an `Implementation`.

    Args:
      name: the name of the kernel.
      implementation: "fused" for a kernel, "xla" for plain JAX.
      strict: whether it is an error if no kernel takes the tokens; otherwise they go in plain JAX.
      x: prepared arguments: gates g per head [B, T, HV] or per channel [B, T, HV, K], and g_gamma, which is added to g;
        both are None for no decay, and beta is None without the delta rule. With slots.state_indices, x.initial_state
        is a pool [slots, HV, K, V].
      options: the options of the operator.
      precomputed: always None.

    Returns:
      o [B, T, HV, V] and the states after the tokens, None unless options.output_final_state: the pool in its type, in
      which slots without a sequence keep every bit; without a pool [N, HV, K, V] float32.
    """
    one = x.cu_seqlens is None and x.q.shape[1] == 1
    static = records.static_of_rule(name, 1, one, x, options)
    pool, slots, scale = x.initial_state, x.slots or Slots(), x.scale
    x = x._replace(scale=None, slots=None)
    if pool is None:
        pool = compat.varying_zeros((x.num_states, *x.v.shape[2:3], x.q.shape[3], x.v.shape[3]), *x[:6], x.p, x.echo)
    if slots.state_indices is None:
        pool = pool.astype(jnp.float32)
    x, slots = _within_arrays(x, slots, pool.shape[0])
    x = arguments.one_gate(x)._replace(initial_state=None)
    if choose.by_kernel(implementation, x, StatePool(pool), _all_slots(x, slots), static, strict=strict):
        leaves, structure = jax.tree.flatten((x, pool, slots))
        o, states = _fused(static, *structure.unflatten(compat.vary_alike(*leaves)))
    else:
        o, states = _plain(static, x, pool, slots)
    return launcher.scaled(o, scale), states if options.output_final_state else None


def _within_arrays(x: Arguments, slots: Slots, count: int) -> tuple[Arguments, Slots]:
    """Return arguments with boundaries within the tokens, and slots that exist in a pool of `count` slots or are -1.

    A compiled program cannot refuse values of its arrays, and a kernel that read past the end of an array would halt
    its core.
    """
    if x.cu_seqlens is not None:
        x = x._replace(cu_seqlens=chunking.rising(x.cu_seqlens, x.v.shape[1]))
    if slots.state_indices is not None:
        slots = slots._replace(state_indices=pools.existing(slots.state_indices, count))
    return x, slots


def _all_slots(x: Arguments, slots: Slots) -> Slots:
    """Return the slots of decodes alone; without a pool sequence n has slot n."""
    slot = jnp.arange(x.num_states, dtype=jnp.int32) if slots.state_indices is None else slots.state_indices
    return Slots(slot, slots.has_initial_state, num_decodes=x.num_states)


def _plain(static: DecodeStatic, x: Arguments, pool: jax.Array, slots: Slots):
    """Return o and the states, or o and the pool, in plain JAX."""
    states = slot_rows.read_states(pool, slots).astype(jnp.float32)
    o, states = scan_tokens(
        x.q, x.k, x.v, arguments.total_gate(x), x.beta, static.scale, states, x.cu_seqlens, static.normalise, x.p,
        erase_before_decay=static.erase_before_decay, echo=x.echo,
    )  # fmt: skip
    return o, slot_rows.write_states(pool, slots, states)


def _forward(static: DecodeStatic, x: Arguments, pool: jax.Array, slots: Slots):
    """Return o and the states, or o and the pool, by the kernel."""
    B, T = x.q.shape[:2]
    starts = jnp.arange(B + 1, dtype=jnp.int32) * jnp.int32(T) if x.cu_seqlens is None else x.cu_seqlens
    o, _, after = launch.launch(records.of_rule(static, x), (), StatePool(pool), starts, _all_slots(x, slots))
    return o.reshape(x.v.shape), after.states


def _backward(static: DecodeStatic, inputs, cotangents):
    x, pool, slots = inputs
    plain = lambda y, pool: _plain(static, y._replace(cu_seqlens=x.cu_seqlens), pool, slots)
    pull = jax.vjp(plain, x._replace(cu_seqlens=None), pool)[1]
    return *pull(cotangents), None


# The gradient comes from the plain form, because a few tokens are not worth a kernel.
_fused = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_fused.defvjp(lambda static, *inputs: (_forward(static, *inputs), inputs), _backward)
