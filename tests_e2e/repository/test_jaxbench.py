"""Our files for JAXBench compute what its tasks say, here by formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jaxbench import mamba2_ssd, retnet_retention
from chunkwise.shared.testing.compare import assert_close


def divided(q, k, v, log_decay, divisor):
    """Return outputs whose scores are divided; `log_decay` [B, H, S] is of a token."""
    q, k, v, total = (np.asarray(x, np.float64) for x in (q, k, v, jnp.cumsum(log_decay, axis=-1)))
    decay = np.tril(np.exp(np.minimum(total[..., :, None] - total[..., None, :], 0)))
    scores = np.einsum("bhid,bhjd->bhij", q, k) * decay
    return scores / np.maximum(divisor(scores), 1) @ v


def test_retention():
    S = 2 * retnet_retention.BLOCK
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 3, S, 16), jnp.bfloat16)
    gates = np.log(1 - 2.0 ** (-5 - np.arange(3)))
    want = divided(q, k, v, np.tile(gates[None, :, None], (1, 1, S)), lambda x: np.abs(x).sum(-1, keepdims=True))
    assert_close("o", jax.jit(retnet_retention.workload)(q, k, v), want, 5e-3)


def test_mamba2():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 3, 200, 16), jnp.bfloat16)
    A_log = 0.5 * jax.random.normal(jax.random.key(1), (2, 3, 200)) - 4
    gates = jnp.log(jax.nn.sigmoid(A_log) + 1e-8)
    want = divided(q, k, v, gates, lambda x: np.abs(x.sum(-1, keepdims=True)))
    assert_close("o", jax.jit(mamba2_ssd.workload)(q, k, v, A_log), want, 5e-3)
