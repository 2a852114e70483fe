"""The kernels as one differentiable function of the user's tensors."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from chunkwise.fused_gla import kernel, kernel_bwd
from chunkwise.shared.kernels import clip_gate, largest_divisor, operand_dtype, pad_lanes, unless_unread


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def fused(C, config, final, q, k, v, g, gamma, scale, initial_state, cu_seqlens):
    """Return (o [B, T, H, V], final_state [N, H, K, V] or None); the arguments are those of the operator."""
    args = q, k, v, g, gamma, scale, initial_state, cu_seqlens
    return _forward(C, config, final, 1, True, False, *args)[1]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """Whether anybody asks for the gradient of g, and of gamma, which models often hold fixed."""

    g: bool
    gamma: bool

    @property
    def parts(self) -> int:
        """Return the bfloat16 parts of computed tiles; see `tiles`."""
        return 2 if self.gamma else 1


def _fwd(C, config, final, *args):
    wanted = Wanted(*(x is not None and x.perturbed for x in args[3:5]))
    args = jax.tree.map(lambda x: x.value, args)
    # Under rematerialisation nobody reads the output again, nor in a program of gradients only.
    forward = functools.partial(_forward, C, config, final, wanted.parts)
    whole, states = functools.partial(forward, True, True), lambda *args: forward(False, True, *args)[0]
    kept, out = unless_unread(whole, states, *args)
    return out, (args, kept, wanted)


def _forward(C, config, final, parts, output, keep, *args):
    """Return the kept states and (o, final state); each only if `keep`, or if `output`."""
    q, _, v, *_, cu_seqlens = args
    s, x = _prepare(C, config.heads, config.num_steps, parts, final, *args)
    o, state, kept = kernel.launch(s, x, output, output and final, keep)
    if not output:
        return kept, None
    o = _heads(o, s.H, v.shape[3])
    if final:
        state = _nonempty(jnp.swapaxes(state, 2, 3)[:, :, : q.shape[3], : v.shape[3]], args[6], cu_seqlens)
    return kept, (o.astype(v.dtype), state)


def _bwd(C, config, final, residuals, cotangents):
    args, kept, wanted = residuals
    q, k, v, g, gamma, _, initial_state, cu_seqlens = args
    do, dfinal = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    do, K, V = jnp.zeros(v.shape, v.dtype) if do is None else do, q.shape[3], v.shape[3]
    s, x = _prepare(C, config.heads_bwd, config.num_steps, wanted.parts, final, *args)
    do, dstate = _flat(do.astype(x.v.dtype)), None if dfinal is None else _state(dfinal, s)
    dq, dk, dv, dg, dinitial = kernel_bwd.launch(s, x, do, dstate, kept, wanted.g or wanted.gamma)
    dq, dk, dv = _heads(dq, s.H, K), _heads(dk, s.H, K), _heads(dv, s.H, V)
    dgamma = None
    if dg is not None and s.constant:
        dgamma, dg = jnp.sum(dg, axis=(0, 2, 3)).astype(gamma.dtype), None
    elif dg is not None:
        dg = _heads(dg, s.H, K) if s.per_channel else jnp.moveaxis(dg[:, :, :, 0], 2, 3).reshape(s.B, -1, s.H)[:, : s.T]
        if wanted.gamma:
            dgamma = jnp.sum(dg, axis=(0, 1, 3) if s.per_channel else (0, 1)).astype(gamma.dtype)
        dg = None if g is None else dg.astype(g.dtype)
    if initial_state is not None:
        dinitial = jnp.swapaxes(dinitial, 2, 3)[:, :, :K, :V]
        dinitial = _nonempty(dinitial, dfinal, cu_seqlens).astype(initial_state.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dg, dgamma, None, dinitial, None


fused.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _prepare(C, heads, num_steps, parts, final, q, k, v, g, gamma, scale, initial_state, cu_seqlens):
    """Return the static sizes and the operands in the layouts of the launches."""
    (B, T, H, K), V = q.shape, v.shape[3]
    per_channel = g is not None and g.ndim == 4
    NT = -(-T // C)
    s = kernel.Shape(
        B, T, H, pad_lanes(K), pad_lanes(V), C, heads, largest_divisor(NT, num_steps), per_channel,
        visit=cu_seqlens is not None and (final or initial_state is not None),
        constant=g is None and cu_seqlens is None and T % C == 0,
        parts=parts,
    )  # fmt: skip
    dtype = operand_dtype(q.dtype, k.dtype, v.dtype)
    q, k, v = (_flat(x.astype(dtype)) for x in (q, k, v))
    if g is not None:
        # Gates per channel are clipped where a kernel loads them: a pass over them in HBM would cost time.
        g = _flat(g.astype(jnp.float32)) if per_channel else _rows(clip_gate(g), NT, C)
    if gamma is not None:
        gamma = jnp.broadcast_to(clip_gate(gamma)[:, None, None], (H, 1, C))
    state = None if initial_state is None else _state(initial_state, s)
    return s, kernel.Operands(q, k, v, g, gamma, scale, state, _tables(cu_seqlens, NT, C))


def _flat(x: jax.Array) -> jax.Array:
    """Return [B, T, H, D] as [B, T, H * D] with every head padded to whole vectors of lanes."""
    B, T, _, D = x.shape
    return jnp.pad(x, [(0, 0)] * 3 + [(0, pad_lanes(D) - D)]).reshape(B, T, -1)


def _heads(x: jax.Array, H: int, D: int) -> jax.Array:
    """The inverse of `_flat`."""
    return x.reshape(*x.shape[:2], H, -1)[..., :D]


def _rows(g: jax.Array, NT: int, C: int) -> jax.Array:
    """Return a value per token [B, T, H] as rows [B, NT, H, 1, C], padded with zeros."""
    B, T, H = g.shape
    g = jnp.pad(g, [(0, 0), (0, NT * C - T), (0, 0)]).reshape(B, NT, C, H)
    return jnp.swapaxes(g, 2, 3)[:, :, :, None]


def _state(x: jax.Array, s: kernel.Shape) -> jax.Array:
    """Return states [N, H, K, V] as float32 [N, H, V, K], padded."""
    x = jnp.swapaxes(x.astype(jnp.float32), 2, 3)
    return jnp.pad(x, [(0, 0), (0, 0), (0, s.V - x.shape[2]), (0, s.K - x.shape[3])])


def _tables(cu_seqlens, NT: int, C: int):
    """Return cu_seqlens and the sequence of the first, the last and every token of the chunks; N for no sequence."""
    if cu_seqlens is None:
        return None
    token = jnp.arange(NT * C, dtype=jnp.int32)
    owner = jnp.searchsorted(cu_seqlens[1:], token, side="right").astype(jnp.int32).reshape(NT, 1, C)
    return cu_seqlens, owner[:, 0, 0], owner[:, 0, -1], owner


def _nonempty(x, passed, cu_seqlens):
    """Return x with the entries of empty sequences, which no kernel writes, set to `passed`, or zeros for None."""
    if cu_seqlens is None:
        return x
    empty = (jnp.diff(cu_seqlens) == 0)[:, None, None, None]
    return jnp.where(empty, 0.0 if passed is None else passed.astype(jnp.float32), x)
