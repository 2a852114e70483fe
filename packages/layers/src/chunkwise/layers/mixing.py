"""The mixer of a delta layer, between its projections: convolutions, operator and gated norm.

They run one after the other. If every sequence has one token, which follows a cache or the state in a slot, one launch
does all of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.layers import config, norm, running
from chunkwise.shared import compat
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.serving.mixer import Mixer, decode, static_of, takes_mixer
from chunkwise.shared.serving.mixer_tile import OutputNorm
from chunkwise.shared.serving.state_pool import StatePool


def delta_rule(run: running.Run, x: jax.Array) -> Callable[..., running.Mixed]:
    """Return the function that mixes the tokens x [B, T, D]; it has the arguments of `one_after_the_other`."""
    if isinstance(run, running.Serving):
        return over_step
    return over_token if run.continues_by_one(x) else one_after_the_other


def one_after_the_other(
    run: running.Run, config: config.LayerConfig, operators: running.Operators, projected, conv, g, beta, z, weight,
    *, A_log, dt_bias, activation: str, eps: float, **gates,
) -> running.Mixed:  # fmt: skip
    """Return the normed output of a delta rule [B, T, HV, V], and the cache after its tokens.

    Args:
      run: says over which tokens to run.
      config: sizes of the layer.
      operators: the rule in its three forms.
      projected: queries, keys and values before the convolution, [B, T, channels].
      conv: the weights of the convolutions.
      g, beta, z: raw gates [B, T, HV] or [B, T, HV K], raw step sizes, and gates of the output [B, T, HV V].
      weight: the weight of the norm.
      A_log, dt_bias: the arguments of the gates' law.
      activation, eps: the arguments of the norm.
      **gates: further arguments of the operator about its gates.
    """
    heads = config.H, config.H, config.HV
    pairs = list(map(run.convolve, range(3), projected, conv, (None,) * 3, heads))
    q, k, v = (running.by_head(y, count) for (y, _), count in zip(pairs, heads, strict=True))
    o, state = run.operate(
        operators, q, k, v, running.by_head(g, config.HV) if config.per_channel else g, beta,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True, **gates,
    )  # fmt: skip
    kept: Any = tuple(after for _, after in pairs)
    return norm.norm_heads(run, o, z, weight, activation=activation, eps=eps), running.Cache(kept, state)


def over_step(
    run: running.Serving, config: config.LayerConfig, operators: running.Operators, *arrays, **options: Any
) -> running.Mixed:
    """Do the same as `one_after_the_other` for a serving step."""
    others = lambda: one_after_the_other(run, config, operators, *arrays, **options)
    return run.mix(_mixer(config, *arrays, **options), others)


def over_token(
    run: running.Sequences, config: config.LayerConfig, operators: running.Operators, *arrays, A_log, dt_bias,
    **options: Any,
) -> running.Mixed:  # fmt: skip
    """Do the same as `one_after_the_other` for one token of each row, which follows a cache."""
    before: Any = run.cache
    B, tree = arrays[0][0].shape[0], (before, arrays, A_log, dt_bias)
    mixer = _mixer(config, *arrays, A_log=A_log, dt_bias=dt_bias, **options)

    def others(cache, arrays, A_log, dt_bias):
        after = dataclasses.replace(run, cache=cache)
        return one_after_the_other(after, config, operators, *arrays, A_log=A_log, dt_bias=dt_bias, **options)

    def together(tokens, cache, *_):
        rows = lambda n: jnp.arange(n, dtype=jnp.int32)
        slots = Slots(rows(B), num_decodes=jnp.int32(B))
        o, conv, pool = decode(Mixer(mixer.static, *tokens), cache.conv, StatePool(cache.state), rows(B + 1), slots)
        return o.reshape(B, 1, config.HV, config.V), running.Cache(conv, pool.states)

    slots = Slots(jax.ShapeDtypeStruct((B,), jnp.int32))
    if not takes_mixer(mixer, (before.conv, StatePool(before.state)), slots, run.implementation):
        return others(*tree)
    # The gradient is taken from the other form, because one token is not worth a backward kernel. `mixer` is made of
    # the other arguments, which get it.
    mixed = jax.custom_vjp(together)
    mixed.defvjp(
        lambda tokens, *tree: (together(tokens, *tree), tree),
        lambda tree, cotangents: (None, *jax.vjp(others, *tree)[1](cotangents)),
    )
    leaves, structure = jax.tree.flatten((mixer[1:], *tree))
    return mixed(*structure.unflatten(compat.vary_alike(*leaves)))


def _mixer(
    config: config.LayerConfig, projected, conv, g, beta, z, weight, *, A_log, dt_bias, activation: str, eps: float,
    **gates: Any,
) -> Mixer:  # fmt: skip
    """Return the mixer of all tokens, one row after the other."""
    rows = lambda x: x.reshape(-1, x.shape[2])
    activations = GateActivation(True, use_beta_sigmoid_in_kernel=True, **gates)
    static = static_of(config.H, config.HV, config.K, config.V, activations, OutputNorm(activation, eps))
    tokens = tuple(map(rows, projected)), rows(g), rows(beta), rows(z)
    return Mixer(static, *tokens, tuple(conv), (), A_log, dt_bias, weight)
