"""Kimi delta attention token by token for many sequences in one launch: kernel body and launcher."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.kda.config import Config
from chunkwise.shared import l2norm, out_struct, pallas_call, recurrence, repeat_heads, to_column


def _token_tile(S, q, k, v, g, beta, scale):
    """Advance states S [h, K, V] by a token: q, k, g [h, K], v [h, V], beta [h, 1]; return (S, o [h, V])."""

    def column(x):
        return to_column(x[:, None])

    k = column(k)
    S = jnp.exp(column(g)) * S
    # Sums, not products: a matrix unit may round float32 operands, and a token is bound by memory anyway.
    v = beta * (v - jnp.sum(S * k, axis=1))
    S = S + k * v[:, None]
    return S, scale * jnp.sum(S * column(q), axis=1)


def _decode_kernel(q_ref, k_ref, v_ref, g_ref, beta_ref, h0_ref, o_ref, ht_ref, *, scale, normalise):
    heads = v_ref.shape[1]

    def token(t, S):
        q, k, v, g, beta = (ref[t].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref, g_ref, beta_ref))
        q, k = (l2norm(q), l2norm(k)) if normalise else (q, k)
        q, k = (repeat_heads(x, heads) for x in (q, k))
        S, o = _token_tile(S, q, k, v, g, beta, scale)
        o_ref[t] = o.astype(o_ref.dtype)
        return S

    ht_ref[...] = lax.fori_loop(0, v_ref.shape[0], token, h0_ref[...])


def launch(q, k, v, g, beta, initial_state, *, scale, normalise, config: Config):
    """Run the kernel: q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K], beta [B, T, HV, 1], states [B, HV, K, V].

    Returns:
      o [B, T, HV, V] and the states, in the memory of the initial ones.
    """
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    heads, group = config.decode_heads, HV // H
    own, per_key_block = max(heads // group, 1), max(group // heads, 1)

    # Heads are cut in an axis of their own, so that a block is whole in its last two.
    def tokens(size, D, index=lambda h: h):
        return pl.BlockSpec((None, T, None, size, D), lambda b, h: (b, 0, index(h), 0, 0))

    def blocks(x, size):
        return x.reshape(B, T, -1, size, x.shape[-1])

    key = tokens(own, K, lambda h: lax.div(h, jnp.int32(per_key_block)))
    state = pl.BlockSpec((None, heads, K, V), lambda b, h: (b, h, 0, 0))
    operands = blocks(q, own), blocks(k, own), blocks(v, heads), blocks(g, heads), blocks(beta, heads), initial_state
    o, state = pallas_call(
        functools.partial(_decode_kernel, scale=scale, normalise=normalise),
        *operands,
        name=f"recurrent_kda_fwd_t{T}",
        # Sequences and blocks of heads are independent; the tokens of a sequence run inside a step.
        grid=(B, HV // heads),
        dimension_semantics=("parallel", "parallel"),
        in_specs=[key, key, tokens(heads, V), tokens(heads, K), tokens(heads, 1), state],
        out_specs=[tokens(heads, V), state],
        out_shape=[
            out_struct((B, T, HV // heads, heads, V), v.dtype, *operands),
            out_struct(initial_state.shape, jnp.float32, *operands),
        ],
        input_output_aliases={5: 1},
        cost_estimate=pl.CostEstimate(
            flops=7 * B * T * HV * K * V,
            transcendentals=B * T * HV * K,
            bytes_accessed=sum(x.nbytes for x in operands) + initial_state.nbytes + v.nbytes,
        ),
    )
    return o.reshape(v.shape), state


def plain(q, k, v, g, beta, initial_state, scale, normalise):
    """Return the same in plain JAX: (o [B, T, HV, V], states [B, HV, K, V])."""
    q, k = (x.astype(jnp.float32) for x in (q, k))
    q, k = (l2norm(q), l2norm(k)) if normalise else (q, k)
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    o, state = recurrence(q, k, v, g, beta, scale, initial_state, jnp.float32)
    return o.astype(v.dtype), state


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _decode(q, k, v, g, beta, initial_state, scale, normalise, config):
    return launch(
        q, k, v, g, beta[..., None], initial_state.astype(jnp.float32), scale=scale, normalise=normalise, config=config
    )


def _forward(*arguments):
    return _decode(*arguments), arguments[:6]


def _backward(scale, normalise, config, operands, cotangents):
    """Token by token, in plain JAX: decoding is seldom differentiated."""
    return jax.vjp(lambda *x: plain(*x, scale, normalise), *operands)[1](cotangents)


_decode.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def decode(q, k, v, g, beta, initial_state, scale: float, normalise: bool, config: Config):
    """Return (o, states [B, HV, K, V]) of a batch of sequences; the states start at zero without initial ones."""
    if initial_state is None:
        initial_state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    return _decode(q, k, v, g, beta, initial_state, scale, normalise, config)
