"""The bytes that a layer keeps for its backward under policies of `jax.checkpoint`, from JAX and the TPU compiler."""

import math

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from benchmarks import tpu
from chunkwise.command.models import Layer
from chunkwise.layers import GatedDeltaNetConfig, gated_delta_net, init_gated_delta_net, offload_policy, remat_policy
from chunkwise.shared.testing import tpu as compiler

# Policies by name; None for no `jax.checkpoint`.
POLICIES = {
    "no checkpoint": None,
    "remat_policy": remat_policy,
    "offload_policy": offload_policy(),
    "products alone": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "inputs alone": jax.checkpoint_policies.nothing_saveable,
}


def _layer(case: Layer, policy: str):
    """Return a gated DeltaNet layer with a residual in bfloat16, under a policy, the shapes of its weights, and D.

    D is as wide as all queries together, as in Qwen3-Next.
    """
    config = GatedDeltaNetConfig(D=case.H * case.K, H=case.H, HV=case.HV, K=case.K, V=case.V)
    weights = jax.eval_shape(lambda: init_gated_delta_net(jax.random.key(0), config, jnp.bfloat16))

    def layer(x, weights):
        return x + gated_delta_net(x, weights, config, implementation="fused")[0]

    save = POLICIES[policy]
    return (layer if save is None else jax.checkpoint(layer, policy=save)), weights, config.D


def kept_bytes(case: Layer, policy: str, T: int) -> tuple[int, int]:
    """Return the bytes that the backward of a layer of T tokens needs: on the device, with weights, and on the host."""
    layer, weights, D = _layer(case, policy)
    x = ShapeDtypeStruct((1, T, D), jnp.bfloat16)
    kept = jax.make_jaxpr(lambda x, w: jax.vjp(layer, x, w)[1])(x, weights).out_avals
    sizes = [(math.prod(y.shape) * y.dtype.itemsize, y.memory_space == jax.memory.Space.Host) for y in kept]
    return tuple(sum(size for size, on_host in sizes if on_host == host) for host in (False, True))


def estimate(case: Layer, policy: str, chip: str, T: int) -> dict:
    """Compile the gradients of layers in a `jax.lax.scan` for `chip`; call in a fresh process only."""
    compiler.setup()
    layer, weights, D = _layer(case, policy)
    x = ShapeDtypeStruct((1, T, D), jnp.bfloat16)

    def program(count: int):
        stacked = jax.tree.map(lambda w: ShapeDtypeStruct((count, *w.shape), w.dtype), weights)

        def gradients(x, stacked, dy):
            run = lambda x, stacked: jax.lax.scan(lambda x, w: (layer(x, w), None), x, stacked)[0]
            return jax.vjp(run, x, stacked)[1](dy)

        return compiler.compile_for(gradients, x, stacked, x, chip=chip, auto_layout=True)

    few, more = program(2), program(4)
    temporaries, on_host = (
        [getattr(p.memory_analysis(), name) for p in (few, more)]
        for name in ("temp_size_in_bytes", "host_temp_size_in_bytes")
    )
    kept = [kept_bytes(case, policy, n) for n in (T, 2 * T)]
    return {
        # Weights do not grow with the tokens.
        "kept_bytes_a_token": (kept[1][0] - kept[0][0]) / T,
        "kept_on_host_bytes_a_token": (kept[1][1] - kept[0][1]) / T,
        "grown_bytes_a_token": (temporaries[1] - temporaries[0]) / 2 / T,
        "grown_on_host_bytes_a_token": (on_host[1] - on_host[0]) / 2 / T,
        "kernels": len(compiler.launches(more.as_text())),
    }


def measure(case: Layer, policy: str, chip: str, T: int, timeout: float) -> dict:
    """Run `estimate` in a new process; if the compiler gave no result, the row has `failed` set."""
    code = f"from benchmarks.remat import Layer, estimate; estimate({case!r}, {policy!r}, {chip!r}, {T})"
    return tpu.first_result([code], timeout)
