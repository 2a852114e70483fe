"""The orders of products that packages have for their kernels, whose results are those of the plain order."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared import tuning
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation import implementations
from chunkwise.shared.testing.inputs import make_inputs

IN_TURN = "m" + "xp" * 5 + "amm" * 4
# The kernels of packages, their plain orders, and the tokens of a launch in which they run.
KERNELS = {
    ("kda", "fwd"): ("pm" * 8, 130),
    ("kda", "summary"): ("pm" * 8, 130),
    ("kda", "map of two"): ("x" * 5 + "p" * 7 + "a" * 16 + "m" * 16, 512),
    ("fused_gdn", "map"): ("m" + "xpm" * 8 + "p" + "a" * 4, 130),
    ("fused_gdn", "map of two"): (IN_TURN + IN_TURN.upper(), 512),
    ("fused_gdn", "precomputed"): ("pm" * 8, 130),
}
THOROUGH = dict(test_orders_change_no_bit=True)


@pytest.mark.parametrize(("package", "kernel"), KERNELS)
def test_orders_change_no_bit(package, kernel):
    (plain, T), HV = KERNELS[package, kernel], 16 if package == "kda" else 32
    H = 1 if kernel == "map of two" else 16  # all stages may share a key head
    dtype = jnp.bfloat16 if (package, kernel) == ("kda", "map of two") else jnp.float32
    K = 72 if dtype == jnp.bfloat16 else 8
    x = Arguments(**make_inputs(1, T, H, HV, K, K, per_channel=package == "kda", dtype=dtype))
    fused = importlib.import_module(f"chunkwise.{package}.operator").OPERATOR.implementations["fused"]

    def run(x):
        options = Options(True, chunk_size=64)
        plan = implementations.plan(fused, x, options)
        found = implementations.map_states(plan, x)
        if kernel == "map of two":
            return found
        return found, implementations.run(plan, x), implementations.run(plan, x, found[1])

    def results(order):
        jax.clear_caches()
        with tuning.injected_orders(f"chunkwise.{package}", **{kernel: order}):
            return jax.tree.leaves(jax.jit(run)(x))

    wanted, stored = results(plain), tuning._orders(f"chunkwise.{package}")[kernel]
    for order in stored[tuning.order_key(HV, 64, 128)].values():
        for found, want in zip(results(order), wanted, strict=True):
            np.testing.assert_array_equal(found, want)
