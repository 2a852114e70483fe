"""The gated DeltaNet layer of Qwen3-Next, Qwen3.5 and OLMo-hybrid in JAX: copy it, and load a checkpoint into it.

    q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))      channel by channel over the last W tokens
    g       = -exp(A_log) softplus(W_a x + dt_bias)
    beta    = sigmoid(W_b x), in OLMo-hybrid twice that
    o       = gated delta rule(q, k, v, g, beta), with q and k of unit length
    y       = W_out (rms_norm(o) silu(W_z x))

One function trains, prefills and decodes:

    y, cache = gated_delta_net(prompt, weights)
    y, cache = gated_delta_net(token, weights, cache)

Under jit, donate the cache of a decode step: its state is then updated in place.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.causal_conv1d import causal_conv1d, causal_conv1d_update
from chunkwise.norm_gated import rms_norm_gated
from chunkwise.pipeline import chunk_gated_delta_rule, recurrent_gated_delta_rule

# What the packages around the operator call its implementations; and its decode step, which has no stages.
AROUND = {None: None, "xla": "xla", "staged": "pallas", "fused": "pallas"}
DECODE = {None: None, "xla": "xla", "staged": None, "fused": "fused"}


class Weights(NamedTuple):
    """The weights of a layer; D is the size of the model, W the width of the convolution, the others the operator's.

    Attributes:
      q, k, v, z: projections [D, H, K], [D, H, K], [D, HV, V], [D, HV, V].
      a, b: projections [D, HV].
      conv: of the channels of q, k and v, one after another, [2 H K + HV V, W], the oldest token first.
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
    conv: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: jax.Array


class Cache(NamedTuple):
    """What the tokens so far leave to the next one; None before the first.

    Attributes:
      conv: the last W - 1 inputs of the convolution [B, W - 1, channels].
      state: the state of the operator [B, HV, K, V], float32.
    """

    conv: jax.Array | None = None
    state: jax.Array | None = None


def gated_delta_net(
    x, w: Weights, cache: Cache | None = None, *, eps=1e-6, allow_neg_eigval=False, implementation=None
):  # fmt: skip
    """Run the layer over tokens that continue a cache, or that start their sequences.

    Args:
      x: hidden states [B, T, D].
      w: weights.
      cache: of the tokens before; None for none.
      eps: of the norm.
      allow_neg_eigval: whether beta goes up to 2.
      implementation: of the operator; "staged" has no decode step, and decodes with the default.

    Returns:
      y [B, T, D], and the cache after the last token.
    """
    T, cache, around = x.shape[1], cache or Cache(), AROUND[implementation]
    (q, k, v), conv = short_convolution(x, (w.q, w.k, w.v), w.conv, None, cache.conv, around)
    operator, chosen = chunk_gated_delta_rule, implementation
    if T == 1:
        operator, chosen = recurrent_gated_delta_rule, DECODE[implementation]
    o, state = operator(
        q, k, v, x @ w.a, x @ w.b, initial_state=cache.state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, A_log=w.A_log, dt_bias=w.dt_bias, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval, implementation=chosen,
    )  # fmt: skip
    z = jnp.einsum("btd,dhv->bthv", x, w.z)
    y = rms_norm_gated(o, z, w.norm, eps=eps, implementation=around)
    return jnp.einsum("bthv,hvd->btd", y, w.out), Cache(conv, state)


def short_convolution(x, projections, weight, bias, state, implementation):
    """Return silu of the convolution of the projections [D, heads, size] of x, an array for each, and its last inputs.

    The channels of all projections, one after another, are one convolution.
    """

    def convolve(inputs):
        if x.shape[1] == 1 and state is not None:
            return causal_conv1d_update(inputs, state, weight, bias)
        return causal_conv1d(inputs, weight, bias, state, True, implementation=implementation)

    return convolve_heads(x, projections, convolve)


def convolve_heads(x, projections, convolve):
    """Return what `convolve` makes of all projections of x at once, an array for each, and its state."""
    (B, T, D), ends = x.shape, list(itertools.accumulate(w.size // w.shape[0] for w in projections))
    y, state = convolve(jnp.concatenate([x @ w.reshape(D, -1) for w in projections], axis=2))
    parts = zip(jnp.split(y, ends[:-1], axis=2), projections, strict=True)
    return [part.reshape(B, T, *w.shape[1:]) for part, w in parts], state


def load_weights(named, H: int, HV: int, K: int, V: int) -> Weights:
    """Return the weights of a layer from arrays by their names in transformers, those that follow "linear_attn.".

    Qwen3-Next keeps q, k, v and z of a key head together, and likewise b and a; Qwen3.5 keeps q, k and v in one matrix,
    head after head; OLMo-hybrid has a matrix for each.
    """
    n = arrays(named)
    if "in_proj_qkvz" in n:
        group, D = HV // H, n["in_proj_qkvz"].shape[1]
        q, k, v, z = jnp.split(n["in_proj_qkvz"].reshape(H, -1, D), [K, 2 * K, 2 * K + group * V], axis=1)
        b, a = jnp.split(n["in_proj_ba"].reshape(H, -1, D), 2, axis=1)
    elif "in_proj_qkv" in n:
        q, k, v = jnp.split(n["in_proj_qkv"], [H * K, 2 * H * K])
        z, b, a = (n[f"in_proj_{name}"] for name in "zba")
    else:
        q, k, v, z, b, a = (n[f"{name}_proj"] for name in "qkvgba")
        n |= {"norm": n["o_norm"], "out_proj": n["o_proj"]}
    return Weights(
        q=heads(q, H, K), k=heads(k, H, K), v=heads(v, HV, V), z=heads(z, HV, V), a=heads(a, HV), b=heads(b, HV),
        conv=n["conv1d"][:, 0], A_log=n["A_log"], dt_bias=n["dt_bias"], norm=n["norm"],
        out=n["out_proj"].T.reshape(HV, V, -1),
    )  # fmt: skip


def arrays(named) -> dict[str, jax.Array]:
    """Return named arrays as JAX's, without the ending ".weight" of their names."""
    return {name.removesuffix(".weight"): jnp.asarray(x) for name, x in named.items()}


def heads(matrix, *sizes):
    """Return a matrix [rows, columns] or [H, rows / H, columns], whose rows are heads, as [columns, *sizes]."""
    return matrix.reshape(-1, matrix.shape[-1]).T.reshape(-1, *sizes)
