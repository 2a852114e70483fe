"""The layers of Kimi-Linear, Ling 3.0 and Mamba-2 in JAX, as examples/gated_delta_net.py has that of Qwen3-Next.

    y, cache = kimi_delta_attention(x, weights, cache)
    y, cache = mamba2_mixer(x, weights, cache)

They train, prefill and decode. What they share with the gated DeltaNet comes from the example. transformers calls
Ling 3.0 bailing_hybrid.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.norm_gated import rms_norm_gated
from chunkwise.pipeline import chunk_kda, chunk_simple_gla, recurrent_kda, recurrent_simple_gla
from gated_delta_net import AROUND, DECODE, Cache, arrays, heads, short_convolution


class KimiWeights(NamedTuple):
    """The weights of Kimi delta attention; D is the size of the model, R a rank, the others are the operator's.

    Attributes:
      q, k, v: projections [D, H, K], [D, H, K], [D, HV, V].
      f, z: those of the decay and of the norm's gate, as factors: ([D, HV, K],) and ([D, HV, V],) in Ling 3.0,
        ([D, R], [R, HV, K]) and ([D, R], [R, HV, V]) in Kimi-Linear.
      b: projection [D, HV].
      conv: of the channels of q, k and v, one after another, [2 H K + HV V, W], the oldest token first.
      A_log, dt_bias: [HV], [HV, K].
      norm: [V].
      out: [HV, V, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    f: tuple[jax.Array, ...]
    z: tuple[jax.Array, ...]
    b: jax.Array
    conv: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: jax.Array


def kimi_delta_attention(
    x, w: KimiWeights, cache: Cache | None = None, *, eps=1e-5, lower_bound=None, implementation=None
):  # fmt: skip
    """Run Kimi delta attention over tokens that continue a cache, or that start their sequences.

        q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))
        g       = -exp(A_log) softplus(W_f x + dt_bias), or lower_bound sigmoid(exp(A_log) (W_f x + dt_bias))
        beta    = sigmoid(W_b x)
        o       = KDA(q, k, v, g, beta), with q and k of unit length
        y       = W_out (rms_norm(o) sigmoid(W_z x))

    Args:
      x: hidden states [B, T, D].
      w: weights.
      cache: of the tokens before; None for none.
      eps: of the norm.
      lower_bound: of the decay, for the second law: -5 in Ling 3.0; None in Kimi-Linear.
      implementation: of the operator.

    Returns:
      y [B, T, D], and the cache after the last token.
    """
    T, cache, around = x.shape[1], cache or Cache(), AROUND[implementation]
    (q, k, v), conv = short_convolution(x, (w.q, w.k, w.v), w.conv, None, cache.conv, around)
    operator, chosen = chunk_kda, implementation
    if T == 1:
        operator, chosen = recurrent_kda, DECODE[implementation]
    o, state = operator(
        q, k, v, project(x, w.f), x @ w.b, initial_state=cache.state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=w.A_log, dt_bias=w.dt_bias,
        lower_bound=lower_bound, use_beta_sigmoid_in_kernel=True, implementation=chosen,
    )  # fmt: skip
    y = rms_norm_gated(o, project(x, w.z), w.norm, activation="sigmoid", eps=eps, implementation=around)
    return jnp.einsum("bthv,hvd->btd", y, w.out), Cache(conv, state)


def project(x, factors):
    """Return x [B, T, D] times the factors of a projection, whose last one makes heads: [B, T, heads, size]."""
    for factor in factors[:-1]:
        x = x @ factor
    return jnp.einsum("btr,rhk->bthk", x, factors[-1])


def load_kimi_delta_attention(named) -> KimiWeights:
    """Return the weights of a layer from arrays by their names in transformers, those that follow "self_attn."."""
    n = {name.removeprefix("forget_gate."): x for name, x in arrays(named).items()}
    H, K = n["A_log"].size, n["o_norm"].size  # of keys and of values
    names = ("f_a_proj", "f_b_proj"), ("g_a_proj", "g_b_proj")
    if "f_proj" in n:
        names = ("f_proj",), ("g_proj",)
    f, z = ((*(n[name].T for name in factors[:-1]), heads(n[factors[-1]], H, K)) for factors in names)
    return KimiWeights(
        q=heads(n["q_proj"], H, K), k=heads(n["k_proj"], H, K), v=heads(n["v_proj"], H, K), b=heads(n["b_proj"], H),
        f=f, z=z, conv=n["conv1d"][:, 0], A_log=n["A_log"].reshape(H), dt_bias=n["dt_bias"].reshape(H, K),
        norm=n["o_norm"], out=n["o_proj"].T.reshape(H, K, -1),
    )  # fmt: skip


class Mamba2Weights(NamedTuple):
    """The weights of Mamba-2's mixer; M is the size of the model, P that of a head, N that of its state.

    Attributes:
      z, x, B, C: projections [M, HV, P], [M, HV, P], [M, H, N], [M, H, N]; H are the groups, HV the heads.
      dt: projection [M, HV].
      conv, bias: of the channels of x, B and C, one after another, [HV P + 2 H N, W], the oldest token first, and
        [HV P + 2 H N] or None.
      A_log, dt_bias, D: [HV].
      norm: [HV P].
      out: [HV P, M].
    """

    z: jax.Array
    x: jax.Array
    B: jax.Array
    C: jax.Array
    dt: jax.Array
    conv: jax.Array
    bias: jax.Array | None
    A_log: jax.Array
    dt_bias: jax.Array
    D: jax.Array
    norm: jax.Array
    out: jax.Array


def mamba2_mixer(x, w: Mamba2Weights, cache: Cache | None = None, *, eps=1e-5, implementation=None):
    """Run Mamba-2's mixer over tokens that continue a cache, or that start their sequences.

        v, k, q = silu(conv(W_x x)), silu(conv(W_B x)), silu(conv(W_C x))
        dt      = softplus(W_dt x + dt_bias)
        o       = simple GLA(q, k, dt v, g = -exp(A_log) dt) + D v
        y       = W_out rms_norm(o silu(W_z x))                                 the norm is by group of heads

    Neither has dt limits, nor do the projections have a bias: these are the defaults of transformers.

    Args:
      x: hidden states [B, T, M].
      w: weights.
      cache: of the tokens before, its state [B, HV, N, P]; None for none.
      eps: of the norm.
      implementation: of the operator.

    Returns:
      y [B, T, M], and the cache after the last token.
    """
    T, cache, around = x.shape[1], cache or Cache(), AROUND[implementation]
    (v, k, q), conv = short_convolution(x, (w.x, w.B, w.C), w.conv, w.bias, cache.conv, around)
    dt = jax.nn.softplus((x @ w.dt).astype(jnp.float32) + w.dt_bias)
    operator, chosen = chunk_simple_gla, implementation
    if T == 1:
        operator, chosen = recurrent_simple_gla, DECODE[implementation]
    o, state = operator(
        q, k, dt[..., None] * v, -jnp.exp(w.A_log) * dt, scale=1.0, initial_state=cache.state, output_final_state=True,
        implementation=chosen,
    )  # fmt: skip
    o = o + w.D[:, None] * v
    z = jnp.einsum("btm,mhp->bthp", x, w.z)
    o, z = (y.reshape(*x.shape[:2], k.shape[2], -1) for y in (o, z))
    # The weight differs from group to group, so it is not the norm's, which has one for all.
    ones = jnp.ones(o.shape[3], jnp.float32)
    y = rms_norm_gated(o, z, ones, norm_before_gate=False, eps=eps, implementation=around)
    return (w.norm * y.reshape(*x.shape[:2], -1)).astype(x.dtype) @ w.out, Cache(conv, state)


def load_mamba2_mixer(named, groups: int) -> Mamba2Weights:
    """Return the weights of a mixer from arrays by their names in transformers, those that follow "mixer."."""
    n = arrays(named)
    HV, inner, channels = n["A_log"].size, n["norm"].size, n["conv1d"].shape[0]
    state = (channels - inner) // 2
    ends = itertools.accumulate([inner, inner, state, state])
    z, x, B, C, dt = jnp.split(n["in_proj"], list(ends))
    P, N = inner // HV, state // groups
    return Mamba2Weights(
        z=heads(z, HV, P), x=heads(x, HV, P), B=heads(B, groups, N), C=heads(C, groups, N), dt=heads(dt, HV),
        conv=n["conv1d"][:, 0], bias=n.get("conv1d.bias"), A_log=n["A_log"], dt_bias=n["dt_bias"], D=n["D"],
        norm=n["norm"], out=n["out_proj"].T,
    )  # fmt: skip
