"""What the tests of serving steps share: the operators, and random tokens of a stream by name."""

import numpy as np

from chunkwise import pipeline
from chunkwise.pipeline.operators import OPERATORS as ENTRIES

H, HV, K, V = 2, 4, 24, 40
# Those of other kernels are thorough tests here: see conftest.py.
NAMES = ("gated_delta_rule", "kda", "simple_gla", "gdn2", "comba")
OPERATORS = {name: getattr(pipeline, f"ragged_{name}") for name in NAMES}
PER_CHANNEL = {name for name in NAMES if ENTRIES[f"recurrent_{name}"].per_channel}


def make_tokens(
    operator: str, rng: np.random.Generator, T: int, used: int, sizes=(K, V), heads=(H, HV)
) -> dict[str, np.ndarray]:
    """Return the tensors [1, T, ...] of an operator, NaN after the tokens that are used."""
    (K, V), (H, HV), entry = sizes, heads, ENTRIES[f"recurrent_{operator}"]
    normal = lambda *shape: rng.standard_normal((1, T, *shape)).astype(np.float32)
    sigmoid = lambda *shape: 1 / (1 + np.exp(-normal(*shape)))
    tokens = dict(q=normal(H, K), k=normal(H, K), v=normal(HV, V))
    tokens["k"] /= np.linalg.norm(tokens["k"], axis=-1, keepdims=True)
    tokens["g"] = -np.abs(normal(HV, K) if entry.per_channel else normal(HV))
    if entry.erase == "gate":
        tokens |= dict(b=sigmoid(HV, K), w=sigmoid(HV, V))
    elif entry.delta:
        tokens |= dict(beta=sigmoid(HV))
    if entry.erase == "key":
        tokens["p"] = tokens["k"] + normal(H, K) * np.float32(0.25 * K**-0.5)
    for x in tokens.values():
        x[:, used:] = np.nan
    return tokens
