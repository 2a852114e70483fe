"""RWKV-6: gated linear attention that reads the state before a token, and the token by itself with weights u.

A token of gated linear attention is read after it is written. So the tokens of gated linear attention are one later,
and the last token of a sequence is written apart.
"""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import chunk_gla, recurrent_gla
from chunkwise.recipes import sequences
from chunkwise.shared.call import forms, shapes, signature
from chunkwise.shared.testing import inputs
from chunkwise.shared.testing.definitions import Composition, TokenRule, read, write


def _run(run, named: dict[str, Any]) -> tuple[jax.Array, Any]:
    sizes = shapes.check_arrays(named, r="B T H K", k="B T H K", v="B T H V", w="B T H K", u="H K")
    tokens = sequences.find(sizes, named)
    r, k, v, w = (tokens.select(jnp.asarray(named[name])) for name in ("r", "k", "v", "w"))
    options = {name: y for name, y in named.items() if name not in ("r", "w", "u")}
    late = dict(q=r, k=tokens.before(k), v=tokens.before(v), g=tokens.before(w))
    o, S = run(**options | late)
    r, k, w, wide = (y.astype(jnp.float32) for y in (r, k, w, v))
    scale = sizes["K"] ** -0.5 if named["scale"] is None else jnp.asarray(named["scale"], jnp.float32)
    weights = jnp.sum(r * jnp.asarray(named["u"], jnp.float32)[None, None] * k, axis=3, keepdims=True)
    o = (o.astype(jnp.float32) + scale * weights * wide).astype(v.dtype)
    if S is not None:
        S = jnp.exp(tokens.at_end(w, 0.0))[..., None] * S + write(tokens.at_end(k, 0.0), tokens.at_end(wide, 0.0))
    return o, S


@signature.public_function_by_name(functools.partial(_run, chunk_gla), "chunk", chunk_gla)
def chunk_rwkv6(
    r: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array, u: jax.Array, scale: float | None = 1.0,
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.Whole],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """RWKV-6 over whole sequences, chunk by chunk, differentiable; and RWKV-5, whose w is the same for all tokens.

        o_t = scale (S_{t-1} + (u * k_t) v_t^T)^T r_t
        S_t = Diag(e^w_t) S_{t-1} + k_t v_t^T

    Here o reads the state before its update.

    Args:
      r: receptances, the queries [B, T, H, K].
      k: keys [B, T, H, K].
      v: values [B, T, H, V].
      w: log decay per channel [B, T, H, K] in nats, at most 0, of any strength.
      u: weights [H, K] with which a token reads itself.

    Accuracy: as `chunk_gla`.
    Cost: as `chunk_gla`, one copy of k, v and w, and one pass over the output.
    Source: Peng et al., Eagle and Finch (2024).
    """
    ...


@signature.public_function_by_name(functools.partial(_run, recurrent_gla), "recurrent", chunk_rwkv6)
def recurrent_rwkv6(
    r: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array, u: jax.Array, scale: float | None = 1.0,
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.FewTokens],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """RWKV-6 token by token, the decode path; here o reads the state before its update.

    Accuracy: as `recurrent_gla`.
    Cost: as `recurrent_gla`, and one more pass over the states.
    """
    ...


def _step(S: jax.Array, token: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    seen = S + write(token["u"] * token["k"], token["v"])
    S = jnp.exp(token["w"])[:, :, None] * S + write(token["k"], token["v"])
    return S, scale * read(seen, token["r"])


def _inputs(B=1, T=64, H=1, HV=None, K=64, V=64, **options) -> dict[str, jax.Array]:
    x = inputs.make_inputs(B, T, HV or H, HV or H, K, V, per_channel=True, **options)
    u = jnp.linspace(-1.0, 1.0, (HV or H) * K).reshape(-1, K)
    names = {"q": "r", "g": "w"}
    return {names.get(name, name): y for name, y in x.items() if name != "beta"} | dict(u=u)


RECIPE = Composition(
    chunk_rwkv6, recurrent_rwkv6, "gla", TokenRule(_step, queries="r"), _inputs, scale=1.0, values=(("w", "log decay"),)
)
