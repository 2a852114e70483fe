"""The definitions of operators that run another operator, token by token in float64, with JAX's gradients.

They share no code with the operators that they judge, and do not know into which tokens these take a token apart.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared import trees
from chunkwise.shared.testing import conv_norm_oracle, inputs

# A state of arrays [HV, ...]: one array [HV, K, V], or a tuple.
State = Any
# From the state and the arrays of a token, heads first, to the next state and the output [HV, V].
Step = Callable[[State, dict[str, jax.Array], float], tuple[State, jax.Array]]


class TokenRule(NamedTuple):
    """An operator: the step of a token, the state before the first token, and what it reads of an initial state.

    `queries` and `values` are the names of two of its inputs. Inputs without tokens are inputs of every token.
    """

    step: Step
    empty: Callable[[int, int, int], State] = lambda HV, K, V: jnp.zeros((HV, K, V))
    read: Callable[[State], State] = lambda state: state
    queries: str = "q"
    values: str = "v"


class Composition(NamedTuple):
    """An operator that runs another one, for code that treats all operators alike.

    Attributes:
      chunk, recurrent: its functions for users.
      runs: the operator whose kernels run, by its name without a prefix.
      definition: its definition in float64.
      inputs: from B, T, H, HV, K, V to seeded inputs by name.
      tokens: how many tokens of the operator that runs a token is.
      static: static arguments that the inputs go with.
      scale: its default scale; None for K ** -0.5.
      implementations: those of `chunk`, the best for a TPU last.
      gradients: the least tolerance of gradients by type, for an operator that amplifies their rounding.
      smooth: from the inputs and the options of the reference to the outputs that have a derivative, a bool array; None
        where all have one.
      values: what `check_inputs` knows of its arrays by name: "log decay", or the least and the largest number. It is
        empty where `check_inputs` has a part for the operator.
    """

    chunk: Callable
    recurrent: Callable
    runs: str
    definition: TokenRule
    inputs: Callable[..., dict[str, Any]]
    tokens: int = 1
    static: tuple[tuple[str, Any], ...] = ()
    scale: float | None = None
    implementations: tuple[str, ...] = ("xla", "staged", "fused")
    gradients: tuple[tuple[str, float], ...] = ()
    smooth: Callable[..., np.ndarray] | None = None
    values: tuple[tuple[str, Any], ...] = ()

    def reference(self, x: dict[str, Any], **options) -> tuple[np.ndarray, Any, dict[str, Any]]:
        """Return `reference` of the definition with the scale of the operator."""
        told: dict[str, Any] = {"scale": self.scale, **options}
        return reference(self.definition, x, **told)


def read(S: jax.Array, key: jax.Array) -> jax.Array:
    """Return what keys [HV, K] read from states [HV, K, V]: [HV, V]."""
    return jnp.einsum("hkv,hk->hv", S, key)


def write(key: jax.Array, value: jax.Array) -> jax.Array:
    """Return keys [..., K] times values [..., V]: [..., K, V]."""
    return key[..., :, None] * value[..., None, :]


def delta_rule(S: jax.Array, token: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    """Write what the value has and the state has not, of a key."""
    S = S + token["beta"][:, None, None] * write(token["k"], token["v"] - read(S, token["k"]))
    return S, scale * read(S, token["q"])


def gated_delta_product(S: jax.Array, token: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    """Decay the state once, and take a step of the delta rule for each of the n keys [n, HV, K]."""
    S, (HV, _, V) = jnp.exp(token["g"])[:, None, None] * S, S.shape
    steps = (token[name].reshape(-1, HV, *rest) for name, rest in (("k", S.shape[1:2]), ("v", (V,)), ("beta", ())))
    for k, v, beta in zip(*steps, strict=True):
        S = S + beta[:, None, None] * write(k, v - read(S, k))
    return S, scale * read(S, token["q"])


def dplr_delta_rule(S: jax.Array, token: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    """Multiply the state by a diagonal matrix plus one of rank 1, which is no decay of it, and add k v^T."""
    S = jnp.exp(token["gk"])[:, :, None] * S + write(token["b"], read(S, token["a"])) + write(token["k"], token["v"])
    return S, scale * read(S, token["q"])


def mamba2(
    S: jax.Array, token: dict[str, jax.Array], scale: float, dt_limit: tuple[float, float] = (0.0, math.inf)
) -> tuple[jax.Array, jax.Array]:
    """Decay the state and write by a step size, which softplus makes; add a skip, and gate the output."""
    del scale
    dt = jnp.clip(jax.nn.softplus(token["dt"] + token["dt_bias"]), *dt_limit)
    S = jnp.exp(token["A"] * dt)[:, None, None] * S + jnp.einsum("h,hk,hv->hkv", dt, token["B"], token["x"])
    o = jnp.einsum("hkv,hk->hv", S, token["C"]) + token["D"] * token["x"]
    return S, o * jax.nn.silu(token["z"])


Fixed = Callable[[jax.Array], jax.Array]


def mlstm(
    state: State, token: dict[str, jax.Array], scale: float, eps: float = 1e-6, fixed: Fixed = jax.lax.stop_gradient
) -> tuple[State, jax.Array]:
    """Decay C and n, and write; by the function `fixed` the stabilisers have no gradient."""
    (C, n, m), sums, least = _mlstm(state, token, scale, fixed)
    divisor = jnp.maximum(jnp.abs(sums), least) + eps
    return (C, n, m), scale * jnp.einsum("hkv,hk->hv", C, token["q"]) / divisor[:, None]


def _mlstm(state: State, token: dict[str, jax.Array], scale: float, fixed: Fixed) -> tuple[State, jax.Array, jax.Array]:
    """Return the next state, and the two numbers [HV] of which the larger one divides."""
    (C, n, m), log_f = state, jax.nn.log_sigmoid(token["f"])
    new = fixed(jnp.maximum(log_f + m, token["i"]))
    share = lambda y: jnp.where(jnp.isneginf(y), 0.0, jnp.exp(y - jnp.where(jnp.isneginf(new), 0.0, new)))
    decay, weight = share(log_f + m), share(token["i"])
    C = decay[:, None, None] * C + jnp.einsum("h,hk,hv->hkv", weight, token["k"], token["v"])
    n = decay[:, None] * n + weight[:, None] * token["k"]
    return (C, n, new), scale * jnp.einsum("hk,hk->h", n, token["q"]), jnp.exp(-new)


def has_mlstm_gradient(x: dict[str, Any], **options) -> np.ndarray:
    """Return where the output [B, T, HV, V] has a derivative that no rounding to bfloat16 changes.

    The larger one of two numbers divides, and where they are equal, the derivative jumps. `options` are those of
    `reference`.
    """

    def compare(state, token, scale):
        state, sums, least = _mlstm(state, token, scale, jax.lax.stop_gradient)
        return state, jnp.broadcast_to((jnp.abs(sums) / least)[:, None], token["v"].shape)

    ratio, _, _ = reference(MLSTM._replace(step=compare), x, **options)
    return np.abs(ratio - 1.0) > 2.0**-6


def read_mlstm_states(state: State, fixed: Fixed = jax.lax.stop_gradient) -> State:
    """Return the states with fixed stabilisers: a state is C e^m, so the gradient of m is that of the size of C, n."""
    C, n, m = state
    change = jnp.where(jnp.isneginf(m), 1.0, jnp.exp(jnp.where(jnp.isneginf(m), 0.0, m - fixed(m))))
    return C * change[..., None, None], n * change[..., None], fixed(m)


DELTA_RULE = TokenRule(delta_rule)
GATED_DELTA_PRODUCT = TokenRule(gated_delta_product)
DPLR_DELTA_RULE = TokenRule(dplr_delta_rule)
MAMBA2 = TokenRule(mamba2, queries="C", values="x")
MLSTM = TokenRule(
    mlstm, lambda HV, K, V: (jnp.zeros((HV, K, V)), jnp.zeros((HV, K)), jnp.full(HV, -jnp.inf)), read_mlstm_states
)


def reference(
    definition: TokenRule,
    x: dict[str, Any],
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens=None,
    segment_ids=None,
    do=None,
    dht=None,
) -> tuple[np.ndarray, Any, dict[str, Any]]:
    """Return o, the final states, and the gradients of sum(o * do) + sum(states * dht) by name, in float64.

    Without cotangents there are no gradients.

    Args:
      definition: a definition of this module.
      x: the inputs by name, of any types: q [B, T, H, K] and the tensors of the operator, whose T may be a multiple of
        that of the queries; initial_state, arrays [N, HV, ...], if there is one.
      scale, use_qk_l2norm_in_kernel, cu_seqlens, segment_ids: as in the operator.
      do, dht: the cotangents; one that is None counts as zeros.
    """
    wide = functools.partial(jax.tree.map, functools.partial(np.asarray, dtype=np.float64))
    x, named = wide(x), x.keys()
    (B, T, _, K), (HV, V) = x[definition.queries].shape, x[definition.values].shape[2:]
    begins, valid, ends = conv_norm_oracle.token_places(B, T, cu_seqlens, segment_ids)
    empty = wide(definition.empty(HV, K, V))
    x = {"initial_state": jax.tree.map(lambda y: np.stack([y] * len(ends)), empty)} | x
    inside = lambda y: np.where(
        np.repeat(valid, y.shape[1] // T, 1).reshape(*y.shape[:2], *(1,) * (y.ndim - 2)), y, 0.0
    )
    x = {name: y if name in inputs.NOT_TOKENS else inside(y) for name, y in x.items()}
    scale = K**-0.5 if scale is None else float(scale)
    with jax.enable_x64(True):
        x = jax.tree.map(jnp.asarray, x)
        run = functools.partial(_run, definition, scale, use_qk_l2norm_in_kernel)
        if do is None and dht is None:
            return *wide(run(x, begins, valid, ends)), {}
        do = np.zeros((B, T, HV, V)) if do is None else inside(np.asarray(do, np.float64))
        results, pull = jax.vjp(lambda x: run(x, begins, valid, ends), x)
        dht = jax.tree.map(jnp.zeros_like, results[1]) if dht is None else wide(dht)
        (gradients,) = pull((jnp.asarray(do), jax.tree.map(jnp.asarray, dht)))
        return *wide(results), wide({name: gradients[name] for name in named})


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(definition: TokenRule, scale: float, normalise: bool, x: dict[str, Any], begins, valid, ends):
    """Return o and the final states; heads of keys are repeated for their value heads."""
    (B, T), K, (HV, V) = begins.shape, x[definition.queries].shape[3], x[definition.values].shape[2:]
    first, empty = definition.read(x["initial_state"]), definition.empty(HV, K, V)
    kind = jax.tree.structure(x["initial_state"])
    x = {name: y for name, y in x.items() if name != "initial_state"}
    x = {name: jnp.broadcast_to(y, (B, T, *y.shape)) if name in inputs.NOT_TOKENS else y for name, y in x.items()}
    if normalise:
        unit = lambda y: y / jnp.sqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)
        x = x | {name: unit(x[name]) for name in ("q", "k")}
    x = {name: jnp.repeat(y, HV // y.shape[2], axis=2) for name, y in x.items()}
    # The arrays with n entries for a token have [n, HV, ...] in a token.
    x = {name: y if y.shape[1] == T else y.reshape(B, T, -1, *y.shape[2:]) for name, y in x.items()}
    states = jax.tree.map(lambda y, none: jnp.concatenate([y, none[None]]), first, empty)
    where = lambda which, *trees: jax.tree.map(functools.partial(jnp.where, which), *trees)

    def one(S, token):
        begin, exists, arrays = token
        S = where(begin >= 0, trees.at(states, begin), S)
        after, o = definition.step(S, arrays, scale)
        S = where(exists, after, S)
        return S, (jnp.where(exists, o, 0.0), S)

    row = lambda begins, valid, x: jax.lax.scan(one, empty, (begins, valid, x))[1]
    o, after = jax.vmap(row)(begins, valid, x)
    at = lambda y, none: jnp.where(jnp.expand_dims(ends[:, 0] >= 0, range(1, none.ndim)), y[tuple(ends.T)], none)
    last = map(at, jax.tree.leaves(after), jax.tree.leaves(first))
    return o, jax.tree.unflatten(kind, last)
