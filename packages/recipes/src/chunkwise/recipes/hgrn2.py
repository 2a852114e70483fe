"""HGRN2: gated linear attention whose keys are what the gates forget."""

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
    sizes = shapes.check_arrays(named, q="B T H K", v="B T H V", g="B T H K")
    tokens = sequences.find(sizes, named)
    g = tokens.select(jnp.asarray(named["g"], jnp.float32))
    return run(k=-jnp.expm1(g).astype(named["q"].dtype), **named | dict(g=g))


@signature.public_function_by_name(functools.partial(_run, chunk_gla), "chunk", chunk_gla)
def chunk_hgrn2(
    q: jax.Array, v: jax.Array, g: jax.Array, scale: float | None = None, initial_state: jax.Array | None = None,
    output_final_state: bool = False, **options: Unpack[forms.Whole],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """HGRN2 over whole sequences, chunk by chunk, differentiable.

        S_t = Diag(e^g_t) S_{t-1} + (1 - e^g_t) v_t^T
        o_t = scale S_t^T q_t

    Args:
      q: queries [B, T, H, K].
      v: values [B, T, H, V].
      g: log of the forget gates per channel [B, T, H, K] in nats, at most 0, of any strength.

    Accuracy: as `chunk_gla`.
    Cost: as `chunk_gla`, and one pass that makes the keys.
    Source: Qin et al., HGRN2 (2024).
    """
    ...


@signature.public_function_by_name(functools.partial(_run, recurrent_gla), "recurrent", chunk_hgrn2)
def recurrent_hgrn2(
    q: jax.Array, v: jax.Array, g: jax.Array, scale: float | None = None, initial_state: jax.Array | None = None,
    output_final_state: bool = False, **options: Unpack[forms.FewTokens],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """HGRN2 token by token, the decode path.

    Accuracy: as `recurrent_gla`.
    Cost: as `recurrent_gla`.
    """
    ...


def _step(S: jax.Array, token: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    forget = jnp.exp(token["g"])
    S = forget[:, :, None] * S + write(1 - forget, token["v"])
    return S, scale * read(S, token["q"])


def _inputs(B=1, T=64, H=1, HV=None, K=64, V=64, **options) -> dict[str, jax.Array]:
    x = inputs.make_inputs(B, T, HV or H, HV or H, K, V, per_channel=True, **options)
    return {name: y for name, y in x.items() if name not in ("k", "beta")}


RECIPE = Composition(chunk_hgrn2, recurrent_hgrn2, "gla", TokenRule(_step), _inputs, values=(("g", "log decay"),))
