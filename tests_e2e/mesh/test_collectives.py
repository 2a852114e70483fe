"""What crosses devices, read from compiled programs: nothing in the forward, in the backward the sums that must be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.testing import tpu
from tests.compiled import traffic
from tests_e2e.mesh.meshes import P, collectives, cotangents_of, inputs_of, make_mesh, run_of, spec_of

needs_libtpu = pytest.mark.skipif(not tpu.has_libtpu(), reason="the TPU compiler is libtpu")
THOROUGH = dict(
    # A delta rule, chunk by chunk and token by token, stands for the others; v6e for the other generations.
    test_nothing_crosses_devices=lambda name, implementation: (
        "gated_delta_rule" not in name or implementation != "fused"
    ),
    test_shared_key_heads_are_summed=lambda name, implementation: name == "chunk_gla" or implementation != "xla",
    test_value_channels_sum_what_they_share=lambda implementation: implementation != "xla",
    test_nothing_crosses_tpus=lambda topology, name, implementation: (
        topology != "v6e:2x2" or "gated_delta_rule" not in name or implementation != "fused"
    ),
    test_tokens_over_tpus=lambda topology, name, backward: topology != "v6e:2x2" or name == "chunk_gla" or backward,
)


def program(name: str, implementation: str, mesh, spec, x: dict, backward: bool, key_heads=None) -> str:
    """Return the compiled text of an operator, or of its gradient alone, that is divided over a mesh."""
    divided = run_of(name, implementation, sharding=NamedSharding(mesh, spec))
    cotangents = cotangents_of(run_of(name, implementation), x, {})

    def described(arrays):
        place = lambda n, y: NamedSharding(mesh, spec_of(n, y.ndim, spec, key_heads=key_heads))
        return {n: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=place(n, y)) for n, y in arrays.items()}

    def gradients(x, cotangents):
        return jax.vjp(lambda x: divided(x, {}), x)[1](cotangents)[0]

    x, cotangents = described(x), described(cotangents)
    places = lambda arrays: jax.tree.map(lambda y: y.sharding, arrays)
    # Gradients lie as their arguments do.
    if backward:
        return jax.jit(gradients, out_shardings=places(x)).trace(x, cotangents).lower().compile().as_text()
    return jax.jit(lambda x: divided(x, {}), out_shardings=places(cotangents)).trace(x).lower().compile().as_text()


ALL = [(x.name, implementation) for x in OPERATORS.values() for implementation in x.implementations]
SPEC = P("a", None, "b")


def sizes(name: str) -> dict:
    return inputs_of(name, B=2, T=2 if name.startswith("recurrent") else 16, H=2, HV=4)


@pytest.mark.parametrize(("name", "implementation"), ALL)
def test_nothing_crosses_devices(name, implementation):
    """Rows and heads divided, an axis unused, key heads divided like value heads: neither forward nor backward."""
    mesh = make_mesh((2, 2, 2), "automatic")
    for backward in (False, True):
        text = program(name, implementation, mesh, SPEC, sizes(name), backward, key_heads="b")
        assert collectives(text) == []


IMPLEMENTATIONS = ["xla", "staged", "fused"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_gla"])
def test_shared_key_heads_are_summed(name, implementation):
    """Where several devices read one key head: q and k in one sum each, or one for both, and nothing else."""
    mesh, x = make_mesh((4,), "automatic"), sizes(name)
    assert collectives(program(name, implementation, mesh, P(None, None, "a"), x, False)) == []
    found = collectives(program(name, implementation, mesh, P(None, None, "a"), x, True))
    assert set(found) == {"all-reduce"}
    assert len(found) <= 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_value_channels_sum_what_they_share(implementation):
    name, mesh, spec = "chunk_gated_delta_rule", make_mesh((4,), "automatic"), P(None, None, None, "a")
    assert collectives(program(name, implementation, mesh, spec, sizes(name), False)) == []
    assert set(collectives(program(name, implementation, mesh, spec, sizes(name), True))) == {"all-reduce"}


@functools.cache
def tpu_mesh(topology: str) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def tpu_sizes(name: str, B: int = 1, **sizes) -> dict:
    x = inputs_of(name, B=B, H=2, HV=4, K=128, V=128, **sizes)
    return {n: y.astype(jnp.bfloat16) if n in ("q", "k", "v") else y for n, y in x.items()}


TOPOLOGIES = pytest.mark.parametrize("topology", ["v6e:2x2", "v5p:2x2x1"])


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.parametrize(("name", "implementation"), ALL)
@TOPOLOGIES
def test_nothing_crosses_tpus(topology, name, implementation):
    x = tpu_sizes(name, B=2, T=2 if name.startswith("recurrent") else 64)
    for backward in (False, True):
        text = program(name, implementation, tpu_mesh(topology), SPEC, x, backward, key_heads="b")
        assert collectives(text) == []
        kernels = text.count("tpu_custom_call")
        assert kernels == 0 if implementation == "xla" or (backward and name.startswith("recurrent")) else kernels > 0


@needs_libtpu
@pytest.mark.tpu
@TOPOLOGIES
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_gla"])
def test_tokens_over_tpus(name, backward, topology):
    """Every device gives and gets the maps of some heads, and their states: nothing that depends on its tokens."""
    sent = {}
    for T in (256, 512):
        x = tpu_sizes(name, T=T, states=0)
        text = program(name, "fused", tpu_mesh(topology), P(None, ("a", "b")), x, backward)
        sent[T] = sorted(collectives(text))
        assert "tpu_custom_call" in text
        # D (K + V) K HV float32 are what an all-gather of the maps would bring to a device.
        assert sum(size for _, size in traffic(text, devices=4)) <= (1 + backward) * 4 * (128 + 128) * 128 * 4 * 4
    assert sent[256] == sent[512]
    # M, N and the states before the devices, and the same going back. The final states, which one device has, are
    # summed, and so is their cotangent.
    assert set(sent[256]) <= {"all-reduce", "all-to-all"}
    # A decay is its own transpose, so XLA exchanges it once for both ways.
    once = backward and name == "chunk_gla"
    assert sent[256].count("all-to-all") == 3 * (1 + backward) - once
