"""The kernels of the stages and of the parts of a layer around its operator, against definitions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import causal_conv1d, chunk_h, chunk_o, cumsum, kkt, norm_gated, solve_tril, wy_fast
from chunkwise.pipeline import stages
from chunkwise.shared.testing import cases, compare, stage_oracle
from tests.gradients import numeric_gradients

C = 16
STAGES = {stage.name: stage for stage in (*stages.STAGES, *stages.PARTS)}
# Tiles so small that every axis of a grid has several steps.
TILES = {
    "chunk_local_cumsum": cumsum.Config(1, 2),
    "chunk_scaled_dot_kkt": kkt.Config(1),
    "solve_tril": solve_tril.Config(2),
    "recompute_w_u": wy_fast.Config(1),
    "chunk_gated_delta_rule_fwd_h": chunk_h.Config(1),
    "chunk_fwd_h": chunk_h.Config(1),
    "chunk_fwd_o": chunk_o.Config(1),
    "causal_conv1d": causal_conv1d.Config(C, 128),
    "rms_norm_gated": norm_gated.Config(16, 1, 16),
}
# Tails of chunks and of blocks, and in the pack empty sequences and padding.
BATCHES = {"rows": dict(B=2, T=19), "pack": dict(T=40, lengths=(1, 0, 17, 18, 0))}
# Those that carry a state, and those around an operator.
QUICK = "chunk_gated_delta_rule_fwd_h", "chunk_fwd_h", "causal_conv1d", "rms_norm_gated"
THOROUGH = dict(
    test_values=lambda stage, batch: batch != "pack" or stage not in QUICK,
    test_gradients=lambda stage, batch: batch != "pack" or stage != "chunk_local_cumsum",
)

each_stage = pytest.mark.parametrize("stage", STAGES)
each_batch = pytest.mark.parametrize(("batch", "cores"), [("rows", 2), ("pack", 1)])


@each_stage
@each_batch
def test_values(stage, batch, cores):
    stage, case = STAGES[stage], cases.Case(**BATCHES[batch], H=1, HV=2, K=6, V=5, chunk_size=C)
    x = stage.inputs(case)
    options = dict(cu_seqlens=case.cu_seqlens, implementation="pallas", config=TILES[stage.name])
    got = stage.run(x, C, **options)
    for name, want in stage.define(x, C, case.cu_seqlens).items():
        compare.assert_close(name, got[name], want, compare.STAGE_TOLERANCE)


@each_stage
@each_batch
def test_gradients(stage, batch, cores):
    stage, case = STAGES[stage], cases.Case(**BATCHES[batch], H=1, HV=2, K=3, V=2, chunk_size=C)
    given = stage.inputs(case)
    x = {name: given[name] for name in stage.reads}
    options = dict(cu_seqlens=case.cu_seqlens, implementation="pallas", config=TILES[stage.name])
    results, pull = jax.vjp(lambda x: stage.run(x, C, **options), x)
    rng = np.random.default_rng(1)
    cotangents = {name: rng.standard_normal(y.shape) for name, y in results.items()}
    (gradients,) = pull({name: jnp.asarray(y, results[name].dtype) for name, y in cotangents.items()})
    definition = lambda **x: [stage.define(x, C, case.cu_seqlens)[name] for name in results]
    finite = {name: jnp.nan_to_num(y) for name, y in x.items()}
    for name, want in numeric_gradients(definition, finite, list(cotangents.values())).items():
        compare.assert_close(f"d{name}", gradients[name], want, compare.GRADIENT_TOLERANCE["float32"])


def test_sums_from_the_end():
    case = cases.Case(**BATCHES["pack"], HV=2, chunk_size=C)
    cut = dict(chunk_size=C, cu_seqlens=case.cu_seqlens, reverse=True)
    g = case.arguments()["g"]
    G = cumsum.chunk_local_cumsum(g, **cut, implementation="pallas", config=TILES["chunk_local_cumsum"])
    compare.assert_close("G", G, stage_oracle.cumsum(g, **cut), compare.STAGE_TOLERANCE)
