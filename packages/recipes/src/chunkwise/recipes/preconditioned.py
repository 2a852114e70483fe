"""Preconditioned delta rules: the delta rule with two keys, which writes k times what a sum of squared keys makes."""

import functools
import math
import numbers
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import chunk_gla
from chunkwise.recipes import sequences
from chunkwise.shared.call import checks, forms, shapes, signature
from chunkwise.shared.testing import inputs
from chunkwise.shared.testing.definitions import Composition, TokenRule, read, write
from chunkwise.two_keys.operator import define_rule


class PrecondState(NamedTuple):
    """The state of N sequences.

    Attributes:
      S: [N, HV, K, V] float32.
      A: [N, H, K] float32, the decayed sum of squared keys.
    """

    S: jax.Array
    A: jax.Array


# The tensors are checked by the names and the ranks of the two functions.
OPERATOR = define_rule("precond_delta_rule", lambda x, options: None)


def _run(form: str, gate: str, named: dict[str, Any]) -> tuple[jax.Array, Any]:
    of_keys = dict.fromkeys(("g_atk", "beta_atk"), "B T H")
    dims: Any = dict(q="B T H K", k="B T H K", v="B T HV V", g=gate, beta="B T HV", **of_keys)
    sizes = shapes.check_arrays(named, **dims)
    checks.check_heads(sizes["H"], sizes["HV"])
    center, x, eps = named["log_atk_scale"], named["x"], named["eps"]
    if not isinstance(center, numbers.Real):
        shapes.check_arrays(named, sizes, log_atk_scale="H")
    for name, least in (("x", 1), ("eps", 0)):
        right = isinstance(named[name], numbers.Real) and float(named[name]) > least
        checks.check(right, f"`{name}` must be a number above {least}; got {checks.shown(named[name])}.")
    tokens = sequences.find(sizes, named)
    initial, N = named["initial_state"], tokens.rows.shape[0]
    shapes.check_parts(initial, PrecondState, sizes | {"N": N}, S="N HV K V", A="N H K")
    k, g, beta = (tokens.select(jnp.asarray(named[name], jnp.float32)) for name in ("k", "g_atk", "beta_atk"))
    S, A = (None, None) if initial is None else initial
    decay = jnp.exp(g)[..., None]
    A = tokens.accumulate(decay, beta[..., None] * k * k, None if A is None else jnp.asarray(A, jnp.float32))
    # The log of the sum, from its center, is squashed to between -1 and 1.
    center = (
        float(center) if isinstance(center, numbers.Real) else jnp.asarray(center, jnp.float32)[None, None, :, None]
    )
    r: jax.Array = jnp.log(A + float(eps)) - center
    preconditioned = k * jnp.exp(-math.log(x) * r / (1 + jnp.abs(r)))
    written = preconditioned.astype(named["k"].dtype)
    arguments = {name: y for name, y in named.items() if name not in ("x", "eps")}
    x, *options = signature.to_records(arguments | dict(k=written, p=named["k"], initial_state=S))
    o, S = getattr(OPERATOR, form)(x._replace(slots=() if form == "recurrent" else None), *options)
    return o, None if S is None else PrecondState(S, tokens.at_end(A, 0.0 if initial is None else initial[1]))


@signature.public_function_by_name(functools.partial(_run, "chunk", "B T HV"), "chunk", chunk_gla)
def chunk_precond_gated_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, g_atk: jax.Array, g: jax.Array, beta_atk: jax.Array, beta: jax.Array,
    scale: float | None = None, initial_state: PrecondState | None = None, output_final_state: bool = False, *,
    log_atk_scale: float | jax.Array = -0.2, x: float = 1.5, eps: float = 1e-6, **options: Unpack[forms.Whole],
) -> tuple[jax.Array, PrecondState | None]:  # fmt: skip
    """The preconditioned gated delta rule over whole sequences, chunk by chunk, differentiable.

        r_t = log(A_t + eps) - log_atk_scale,  A_t = e^g_atk_t A_{t-1} + beta_atk_t k_t^2
        S_t = e^g_t S_{t-1} + beta_t (x^(-r_t / (1 + |r_t|)) * k_t) (v_t - e^g_t S_{t-1}^T k_t)^T
        o_t = scale S_t^T q_t

    The final_state is a `PrecondState`, whose S has the shape above.

    Args:
      q, k: queries and keys [B, T, H, K], of unit length. Without it the recurrence may diverge.
      g_atk: log decay of the sum of squared keys [B, T, H] in nats, at most 0.
      g: log decay [B, T, HV] in nats, at most 0, of any strength.
      beta_atk: weights of the squared keys [B, T, H], from 0 to 1.
      initial_state: the `PrecondState` before every sequence; None for no tokens before.
      log_atk_scale: the log of a sum that changes no key: a number, or an array [H].
      x: by what a key is divided and multiplied at most, a number above 1; static.
      eps: is added to the sums, a number above 0; static.

    Accuracy: as `chunk_gated_delta_rule`.
    Cost: as `chunk_gdn2`, and a scan of the sums.
    Source: Tumma, Loo and Rus, Preconditioned DeltaNet (2026); flash-linear-attention has these arguments.
    """
    ...


@signature.public_function_by_name(
    functools.partial(_run, "recurrent", "B T HV"), "recurrent", chunk_precond_gated_delta_rule
)
def recurrent_precond_gated_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, g_atk: jax.Array, g: jax.Array, beta_atk: jax.Array, beta: jax.Array,
    scale: float | None = None, initial_state: PrecondState | None = None, output_final_state: bool = False, *,
    log_atk_scale: float | jax.Array = -0.2, x: float = 1.5, eps: float = 1e-6, **options: Unpack[forms.FewTokens],
) -> tuple[jax.Array, PrecondState | None]:  # fmt: skip
    """The preconditioned gated delta rule token by token, the decode path.

    Accuracy: as `recurrent_gated_delta_rule`.
    Cost: as `recurrent_gated_delta_rule`.
    """
    ...


@signature.public_function_by_name(
    functools.partial(_run, "chunk", "B T HV K"), "chunk", chunk_precond_gated_delta_rule
)
def chunk_precond_kda(
    q: jax.Array, k: jax.Array, v: jax.Array, g_atk: jax.Array, g: jax.Array, beta_atk: jax.Array, beta: jax.Array,
    scale: float | None = None, initial_state: PrecondState | None = None, output_final_state: bool = False, *,
    log_atk_scale: float | jax.Array = -0.2, x: float = 1.5, eps: float = 1e-6, **options: Unpack[forms.Whole],
) -> tuple[jax.Array, PrecondState | None]:  # fmt: skip
    """Preconditioned Kimi delta attention over whole sequences, chunk by chunk, differentiable.

    The final_state is a `PrecondState`, whose S has the shape above; g is a diagonal matrix in the equation.

    Args:
      q, k: queries and keys [B, T, H, K], of unit length. Without it the recurrence may diverge.
      g: log decay per channel [B, T, HV, K] in nats, at most 0, of any strength.

    Accuracy: as `chunk_kda`.
    Cost: as `chunk_gdn2`, and a scan of the sums.
    Source: Tumma, Loo and Rus, Preconditioned DeltaNet (2026); flash-linear-attention has these arguments.
    """
    ...


@signature.public_function_by_name(functools.partial(_run, "recurrent", "B T HV K"), "recurrent", chunk_precond_kda)
def recurrent_precond_kda(
    q: jax.Array, k: jax.Array, v: jax.Array, g_atk: jax.Array, g: jax.Array, beta_atk: jax.Array, beta: jax.Array,
    scale: float | None = None, initial_state: PrecondState | None = None, output_final_state: bool = False, *,
    log_atk_scale: float | jax.Array = -0.2, x: float = 1.5, eps: float = 1e-6, **options: Unpack[forms.FewTokens],
) -> tuple[jax.Array, PrecondState | None]:  # fmt: skip
    """Preconditioned Kimi delta attention token by token, the decode path.

    Accuracy: as `recurrent_kda`.
    Cost: as `recurrent_kda`.
    """
    ...


def _step(state: Any, token: dict[str, jax.Array], scale: float) -> tuple[Any, jax.Array]:
    S, A = state
    k, decay = token["k"], jnp.exp(token["g"])
    A = jnp.exp(token["g_atk"])[:, None] * A + token["beta_atk"][:, None] * k**2
    r = jnp.log(A + 1e-6) - token["log_atk_scale"][:, None]
    S = decay.reshape(*decay.shape, *(1,) * (3 - decay.ndim)) * S
    S = S + token["beta"][:, None, None] * write(k * 1.5 ** (-r / (1 + jnp.abs(r))), token["v"] - read(S, k))
    return PrecondState(S, A), scale * read(S, token["q"])


def _inputs(B=1, T=64, H=1, HV=None, K=64, V=64, *, seed=0, num_states=0, **options) -> dict[str, Any]:
    H = HV or H
    x: dict[str, Any] = inputs.make_inputs(B, T, H, H, K, V, seed=seed, num_states=num_states, **options)
    draw = lambda n, *shape: jax.random.normal(jax.random.key(seed + n), shape)
    x["g_atk"], x["beta_atk"] = jax.nn.log_sigmoid(draw(1, B, T, H)), jax.nn.sigmoid(draw(2, B, T, H))
    x["log_atk_scale"] = -jnp.linspace(0.2, 1.0, H)
    if num_states:
        S = x["initial_state"]
        x["initial_state"] = PrecondState(S, jnp.abs(S[..., 0]))
    return x


_RULE = TokenRule(_step, lambda HV, K, V: PrecondState(jnp.zeros((HV, K, V)), jnp.zeros((HV, K))))
_VALUES = ("g", "log decay"), ("g_atk", "log decay"), ("beta", (0, 1)), ("beta_atk", (0, 1))
BY_HEAD = Composition(
    chunk_precond_gated_delta_rule, recurrent_precond_gated_delta_rule, "comba", _RULE, _inputs,
    implementations=("xla", "fused"), values=_VALUES,
)  # fmt: skip
BY_CHANNEL = Composition(
    chunk_precond_kda, recurrent_precond_kda, "kda", _RULE, functools.partial(_inputs, per_channel=True),
    implementations=("xla", "fused"), values=_VALUES,
)  # fmt: skip
