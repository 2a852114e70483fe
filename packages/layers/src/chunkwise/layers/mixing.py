"""The mixer of a delta layer, between its projections: convolutions, operator and gated norm.

One follows the other; in a serving step of decodes alone one launch does them all.
"""

import jax

from chunkwise.layers import config, norm, running
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.serving.mixer import Mixer
from chunkwise.shared.serving.mixer_tile import OutputNorm


def delta_rule(
    run: running.Run, config: config.LayerConfig, operators: running.Operators, projected, conv, g, beta, z, weight,
    *, A_log, dt_bias, activation: str, eps: float, **gates,
) -> tuple[jax.Array, running.Cache]:  # fmt: skip
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
    activations = GateActivation(True, use_beta_sigmoid_in_kernel=True, **gates)

    def one_after_the_other() -> tuple[jax.Array, running.Cache]:
        (q, k, v), inputs = running.convolve_heads(run, config, projected, conv)
        by_head = running.by_head(g, config.HV) if config.per_channel else g
        o, state = run.operate(
            operators, q, k, v, by_head, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log,
            dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, **gates,
        )  # fmt: skip
        return norm.norm_heads(run, o, z, weight, activation=activation, eps=eps), running.Cache(inputs, state)

    def mixer() -> Mixer:
        return Mixer(
            config.H, config.HV, config.K, config.V, tuple(x[0] for x in projected), g[0], beta[0], tuple(conv), (),
            A_log, dt_bias, activations, z[0], weight, OutputNorm(activation, eps),
        )  # fmt: skip

    return run.mix(mixer, one_after_the_other)
