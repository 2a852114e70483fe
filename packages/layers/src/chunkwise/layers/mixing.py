"""The mixer of a delta layer, between its projections: convolutions, operator and gated norm.

One follows the other; in a serving step of decodes alone one launch does them all.
"""

from collections.abc import Callable
from typing import Any

import jax

from chunkwise.layers import config, norm, running
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.serving.mixer import Mixer
from chunkwise.shared.serving.mixer_tile import OutputNorm


def delta_rule(run: running.Run) -> Callable[..., running.Mixed]:
    """Return the function that mixes these tokens; its arguments are those of `one_after_the_other`."""
    return over_step if isinstance(run, running.Serving) else one_after_the_other


def one_after_the_other(
    run: running.Run, config: config.LayerConfig, operators: running.Operators, projected, conv, g, beta, z, weight,
    *, A_log, dt_bias, activation: str, eps: float, **gates,
) -> running.Mixed:  # fmt: skip
    """Return the normed output of a delta rule [B, T, HV, V], and what its tokens leave in the cache.

    Args:
      run: over which tokens.
      config: sizes of the layer.
      operators: the rule in its three forms.
      projected: queries, keys and values before the convolution, [B, T, channels].
      conv: the weights of the convolutions.
      g, beta, z: raw gates [B, T, HV] or [B, T, HV K], raw step sizes, and gates of the output [B, T, HV V].
      weight: of the norm.
      A_log, dt_bias: of the law of the gates.
      activation, eps: of the norm.
      **gates: what else the operator takes of its gates.
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
    run: running.Serving, config: config.LayerConfig, operators: running.Operators, projected, conv, g, beta, z, weight,
    *, A_log, dt_bias, activation: str, eps: float, **gates: Any,
) -> tuple[jax.Array, running.Cache]:  # fmt: skip
    """Do as `one_after_the_other` for a serving step."""
    options: dict[str, Any] = dict(A_log=A_log, dt_bias=dt_bias, activation=activation, eps=eps, **gates)
    mixer = Mixer(
        config.H, config.HV, config.K, config.V, tuple(x[0] for x in projected), g[0], beta[0], tuple(conv), (), A_log,
        dt_bias, GateActivation(True, use_beta_sigmoid_in_kernel=True, **gates), z[0], weight,
        OutputNorm(activation, eps),
    )  # fmt: skip
    others = lambda: one_after_the_other(
        run, config, operators, projected, conv, g, beta, z, weight, **options
    )  # fmt: skip
    return run.mix(mixer, others)
