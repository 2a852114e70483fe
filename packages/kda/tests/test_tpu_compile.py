"""The kernels compile for every TPU generation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from chunkwise.kda import fused_chunk_kda, recurrent_kda
from chunkwise.shared.testing import spec
from chunkwise.shared.tpu import CHIPS, compile_for, has_libtpu

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")]
chips = pytest.mark.parametrize("chip", CHIPS)


def specs(B, T, H, HV, K, V, dtype):
    return (
        spec(B, T, H, K, dtype=dtype),
        spec(B, T, H, K, dtype=dtype),
        spec(B, T, HV, V, dtype=dtype),
        spec(B, T, HV, K),
        spec(B, T, HV),
    )


@chips
@pytest.mark.parametrize(
    ("C", "K", "dtype", "packed", "bound"),
    [
        (64, 128, jnp.bfloat16, False, None),
        (64, 128, jnp.bfloat16, True, -5.0),
        (64, 256, jnp.float32, False, None),
        (128, 128, jnp.bfloat16, False, None),
    ],
)
def test_forward_compiles(C, K, dtype, packed, bound, chip):
    cu_seqlens = spec(4, dtype=jnp.int32) if packed else None

    def run(*x):
        return fused_chunk_kda(*x[:5], cu_seqlens=x[5], chunk_size=C, gate_lower_bound=bound, implementation="pallas")[
            0
        ]

    text = compile_for(run, *specs(1, 300, 1, 2, K, K, dtype), cu_seqlens, chip=chip).as_text()
    assert f"fused_chunk_kda_fwd_c{C}" in text


@chips
@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_backward_compiles(packed, chip):
    cu_seqlens = spec(4, dtype=jnp.int32) if packed else None

    def run(*x):
        def loss(*y):
            return fused_chunk_kda(*y, cu_seqlens=x[5], implementation="pallas")[0].astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(*x[:5])

    text = compile_for(run, *specs(1, 300, 1, 2, 128, 128, jnp.bfloat16), cu_seqlens, chip=chip).as_text()
    assert "fused_chunk_kda_bwd_c64" in text


@chips
@pytest.mark.parametrize(("K", "V", "T"), [(128, 128, 1), (60, 100, 2), (256, 256, 1)])
def test_decode_compiles(K, V, T, chip):
    def run(state, *x):
        return recurrent_kda(*x, initial_state=state, output_final_state=True, implementation="pallas")

    text = compile_for(run, spec(8, 4, K, V), *specs(8, T, 2, 4, K, V, jnp.bfloat16), chip=chip).as_text()
    assert f"recurrent_kda_fwd_t{T}" in text


def test_compiles_under_shard_map():
    """Batch rows over the chips of a topology, forward and backward, with the default check of varying axes."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS["v6e"])
    mesh = Mesh(np.array(topology.devices), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")

    def run(*x):
        loss = lambda *x: fused_chunk_kda(*x, chunk_size=16, implementation="pallas")[0].astype(jnp.float32).sum()
        return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(*x)

    tensors = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, rows))
        for x in specs(4, 64, 1, 2, 64, 64, jnp.bfloat16)
    ]
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(rows,) * 5, out_specs=(rows,) * 5)
    assert "fused_chunk_kda_bwd_c16" in jax.jit(sharded).trace(*tensors).lower().compile().as_text()
