"""The gated DeltaNet layer of Qwen3-Next and Qwen3.5 in JAX: copy it, and load the weights of a checkpoint into it.

    q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))      channel by channel over the last W tokens
    g       = -exp(A_log) softplus(W_a x + dt_bias)
    beta    = sigmoid(W_b x)
    o       = gated delta rule(q, k, v, g, beta), with q and k of unit length
    y       = W_out (rms_norm(o) silu(W_z x))

One function trains, prefills and decodes:

    y, cache = gated_delta_net(prompt, weights)
    y, cache = gated_delta_net(token, weights, cache)

Under jit, donate the cache of a decode step: its state is then updated in place.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.pipeline import chunk_gated_delta_rule, recurrent_gated_delta_rule


class Weights(NamedTuple):
    """The weights of a layer; D is the size of the model, W the width of the convolution, the others the operator's.

    Attributes:
      q, k, v, z: projections [D, H, K], [D, H, K], [D, HV, V], [D, HV, V].
      a, b: projections [D, HV].
      conv: of q, k and v, [W, H, K], [W, H, K], [W, HV, V], the oldest token first.
      A_log, dt_bias: [HV].
      norm: [V].
      out: [HV, V, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array
    a: jax.Array
    b: jax.Array
    conv: tuple[jax.Array, jax.Array, jax.Array]
    A_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: jax.Array


class Cache(NamedTuple):
    """What the tokens so far leave to the next one.

    Attributes:
      conv: the last W inputs of each convolution, [B, W, H, K], [B, W, H, K], [B, W, HV, V].
      state: the state of the gated delta rule [B, HV, K, V], float32.
    """

    conv: tuple[jax.Array, jax.Array, jax.Array]
    state: jax.Array


def gated_delta_net(x, w: Weights, cache: Cache | None = None, *, eps=1e-6, implementation=None):
    """Run the layer over tokens that continue a cache, or that start their sequences.

    Args:
      x: hidden states [B, T, D].
      w: weights.
      cache: of the tokens before; None for none.
      eps: of the norm.
      implementation: of the operator; "staged" has no decode step, and decodes with the default.

    Returns:
      y [B, T, D], and the cache after the last token.
    """
    B, T, _ = x.shape
    earlier = [jnp.zeros((B, *c.shape), x.dtype) for c in w.conv] if cache is None else cache.conv
    state = None if cache is None else cache.state
    inputs = [jnp.einsum("btd,dhk->bthk", x, projection) for projection in (w.q, w.k, w.v)]
    windows = [jnp.concatenate(pair, axis=1) for pair in zip(earlier, inputs, strict=True)]
    q, k, v = (short_convolution(*pair) for pair in zip(windows, w.conv, strict=True))
    g = -jnp.exp(w.A_log) * jax.nn.softplus((x @ w.a).astype(jnp.float32) + w.dt_bias)
    beta = jax.nn.sigmoid(x @ w.b)

    operator = chunk_gated_delta_rule
    if T == 1:
        operator = recurrent_gated_delta_rule
        implementation = None if implementation == "staged" else implementation
    o, state = operator(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        implementation=implementation,
    )  # fmt: skip

    z = jnp.einsum("btd,dhv->bthv", x, w.z)
    y = (rms_norm(o, w.norm, eps) * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
    return jnp.einsum("bthv,hvd->btd", y, w.out), Cache(tuple(c[:, T:] for c in windows), state)


def short_convolution(x, weight):
    """Return silu of the convolution of x [B, W + T, heads, D] with weight [W, heads, D] at its last T tokens."""
    W, T = weight.shape[0], x.shape[1] - weight.shape[0]
    return jax.nn.silu(sum(weight[i] * x[:, i + 1 : i + 1 + T] for i in range(W)))


def rms_norm(x, weight, eps):
    """Return weight * x / RMS(x) as float32; like the models, it rounds to the type of x before the weight."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (weight * y.astype(x.dtype)).astype(jnp.float32)


def load_weights(named, H: int, HV: int, K: int, V: int) -> Weights:
    """Return the weights of a layer from arrays by their names in a checkpoint, those that follow "linear_attn.".

    Qwen3.5 keeps q, k and v in one matrix, head after head; Qwen3-Next keeps q, k, v and z of a key head together,
    and likewise b and a.
    """
    n = {name.removesuffix(".weight"): jnp.asarray(x) for name, x in named.items()}
    parts = [H * K, 2 * H * K]
    if "in_proj_qkvz" in n:
        group, D = HV // H, n["in_proj_qkvz"].shape[1]
        q, k, v, z = jnp.split(n["in_proj_qkvz"].reshape(H, -1, D), [K, 2 * K, 2 * K + group * V], axis=1)
        b, a = jnp.split(n["in_proj_ba"].reshape(H, -1, D), 2, axis=1)
    else:
        q, k, v = jnp.split(n["in_proj_qkv"], parts)
        z, b, a = (n[f"in_proj_{name}"] for name in "zba")

    def heads(x, *sizes):
        """Return x [rows, columns] or [H, rows / H, columns] as [columns, *sizes]."""
        return x.reshape(-1, x.shape[-1]).T.reshape(-1, *sizes)

    conv_q, conv_k, conv_v = jnp.split(n["conv1d"][:, 0], parts)
    return Weights(
        q=heads(q, H, K), k=heads(k, H, K), v=heads(v, HV, V), z=heads(z, HV, V), a=heads(a, HV), b=heads(b, HV),
        conv=(heads(conv_q, H, K), heads(conv_k, H, K), heads(conv_v, HV, V)),
        A_log=n["A_log"], dt_bias=n["dt_bias"], norm=n["norm"], out=n["out_proj"].T.reshape(HV, V, -1),
    )  # fmt: skip
