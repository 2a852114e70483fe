"""What tokens that are split over devices cost, counted in compiled programs: nothing is made twice."""

import jax
import pytest
from jax.sharding import NamedSharding

from chunkwise.pipeline.operators import CHUNKED, OPERATORS
from chunkwise.shared.testing.compare import with_gradients
from tests.compiled import product_flops
from tests_e2e.mesh.meshes import P, cotangents_of, inputs_of, make_mesh, run_of

NAMES = [operator.name for operator in CHUNKED]
QUICK = {2: ("chunk_simple_gla", "chunk_kda"), 4: ("chunk_gated_delta_rule",)}
THOROUGH = dict(test_products=lambda name, devices: name not in QUICK[devices])
T, HV, K, V, C = 64, 2, 16, 24, 32


def flops(name: str, devices: int, backward: bool) -> int:
    """Return what the products of a device cost that has T tokens."""
    x = inputs_of(name, B=1, T=devices * T, H=HV, HV=HV, K=K, V=V, states=0)
    mesh = make_mesh((devices,), "automatic")
    run = run_of(name, "xla", chunk_size=C, sharding=NamedSharding(mesh, P(None, "a")))
    program = jax.jit(with_gradients(run) if backward else run)
    return product_flops(program.lower(x, {}, *[cotangents_of(run, x, {})] * backward).compile().as_text())


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_products(name, devices):
    """Two devices add a pass of the state without queries, and its gradient; more devices take the identity with it.

    The pass is over V channels, and with the identity over V + K. An inverse made twice, or a gradient of anything but
    the state, would add products.
    """
    alone, split = ([flops(name, n, backward) for backward in (False, True)] for n in (1, devices))
    forward, both = (y - x for x, y in zip(alone, split, strict=True))
    delta = OPERATORS[name].delta
    # A product of queries and keys that no loop holds serves both gradients.
    scores = 2 * C * K if name == "chunk_gated_delta_rule" else 0
    identity, maps = 0, 0
    if devices > 2:
        # Two heads are too few to be shared by four devices: maps are joined in pairs, and then N in fours.
        identity, maps = K, HV * delta * 2 * K * K * (K + V + V)
    assert forward == T * HV * delta * (4 * K + 2 * C) * (V + identity) + maps
    assert both - forward == T * HV * delta * (6 * K * V + 4 * C * V + scores) + maps
