"""mLSTM token by token, in the type of its arguments."""

import jax
import jax.numpy as jnp

from chunkwise.mlstm import MlstmState
from chunkwise.shared.testing import definitions


def definition(x, cu_seqlens=None, segment_ids=None, eps=1e-6, fixed=jax.lax.stop_gradient):
    """Return o and the final states, token by token; by the function `fixed` the stabilisers have no gradient."""
    (B, T, H, K), (HV, V), scale = x["q"].shape, x["v"].shape[2:], x["q"].shape[3] ** -0.5
    begins, valid, ends = definitions.sequences(B, T, cu_seqlens, segment_ids)
    empty = jnp.zeros((1, HV, K, V)), jnp.zeros((1, HV, K)), jnp.full((1, HV), -jnp.inf)
    before = x.get("initial_state") or [jnp.repeat(y, len(ends), axis=0) for y in empty]
    # The state is C e^m. If the stabilisers are numbers, so is the first one, and its gradient is that of the state.
    change = jnp.where(jnp.isneginf(before[2]), 1.0, jnp.exp(before[2] - fixed(before[2])))
    before = before[0] * change[..., None, None], before[1] * change[..., None], fixed(before[2])
    states = tuple(jnp.concatenate(pair) for pair in zip(before, empty, strict=True))
    q, k = (jnp.repeat(x[name], HV // H, axis=2) for name in ("q", "k"))
    finite = lambda m: jnp.where(jnp.isneginf(m), 0.0, m)

    def step(state, token):
        begin, exists, q, k, v, i, log_f = token
        old = C, n, m = tuple(jnp.where(begin >= 0, y[begin], x) for x, y in zip(state, states, strict=True))
        new = fixed(jnp.maximum(log_f + m, i))
        decay, weight = (jnp.where(jnp.isneginf(y), 0.0, jnp.exp(finite(y) - finite(new))) for y in (log_f + m, i))
        C = decay[:, None, None] * C + weight[:, None, None] * k[:, :, None] * v[:, None]
        n = decay[:, None] * n + weight[:, None] * k
        divisor = jnp.maximum(jnp.abs(scale * jnp.sum(n * q, axis=1)), jnp.exp(-new)) + eps
        o = scale * jnp.einsum("hkv,hk->hv", C, q) / divisor[:, None]
        state = tuple(jnp.where(exists, x, y) for x, y in zip((C, n, new), old, strict=True))
        return state, (jnp.where(exists, o, 0.0), state)

    tokens = begins, valid, q, k, x["v"], x["i"], jax.nn.log_sigmoid(x["f"])
    row = lambda *tokens: jax.lax.scan(step, tuple(y[-1] for y in states), tokens)[1]
    o, after = jax.vmap(row)(*map(jnp.asarray, tokens))
    last = [[y[n] if end is None else z[end] for y, z in zip(states, after, strict=True)] for n, end in enumerate(ends)]
    return o, MlstmState(*(jnp.stack(y) for y in zip(*last, strict=True)))
