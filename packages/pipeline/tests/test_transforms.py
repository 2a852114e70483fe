"""Under jit, grad, vmap, remat, shard_map, eval_shape and export."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.pipeline import chunk_gated_delta_rule, chunk_simple_gla
from chunkwise.pipeline.operators import COMPOSED, OPERATORS
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import NOT_TOKENS, make_inputs
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.tpu import text_for_tpu

CU_SEQLENS = jnp.array([0, 1, 30, 30, 65], jnp.int32)
# Under a transform the arithmetic is the same; only the order of some sums may differ.
SAME = 1e-6
# What the packages test of "fused", and of plain JAX, is done here for the chain of stages.
THOROUGH = dict(
    test_new_boundaries_do_not_retrace=lambda implementation, states: implementation == "xla" and states,
    # One of each way through the chunks, and of the recurrences.
    test_export_with_open_sizes=lambda name, packed: (
        packed
        or name
        not in ("chunk_gated_delta_rule", "chunk_gla", "chunk_kda", "recurrent_kda", "chunk_mlstm", "chunk_mamba3")
    ),
    test_traced_boundaries_that_fall=lambda implementation: implementation != "xla",
    test_kernels_are_differentiated_once_in_reverse=lambda name: "gated_delta_rule" not in name,
)


@pytest.mark.parametrize(("implementation", "states"), [("xla", False), ("xla", True), ("staged", True)])
def test_new_boundaries_do_not_retrace(implementation, states):
    inputs, options = make_inputs(1, 64, 1, 1, 16, 16), dict(chunk_size=16, implementation=implementation)
    traces = []

    @jax.jit
    def run(x, cu_seqlens):
        traces.append(None)
        return chunk_gated_delta_rule(**x, cu_seqlens=cu_seqlens, output_final_state=states, **options)

    with jax.transfer_guard_device_to_host("disallow_explicit"):
        results = [run(inputs, cu) for cu in jnp.array([[0, 10, 64], [0, 64, 64], [0, 0, 33]], jnp.int32)]
    assert len(traces) == 1
    o, _ = results[2]
    expected, _ = reference(**inputs, cu_seqlens=[0, 0, 33])
    assert_close("o", o, expected, TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", ["xla", "staged", "fused"])
def test_traced_boundaries_that_fall(implementation):
    """No program can refuse them: a boundary below the one before it acts as that one, in all implementations."""
    x = OPERATORS["chunk_simple_gla"].source.inputs(1, 6, 1, 1, 8, 8, num_states=2)
    function = functools.partial(chunk_simple_gla, **x, output_final_state=True, implementation=implementation)
    run = jax.jit(lambda cu: function(cu_seqlens=cu))
    found, want = (run(jnp.array([0, 5, last], jnp.int32)) for last in (3, 5))
    jax.tree.map(np.testing.assert_array_equal, found, want)


KERNELS = [(name, "fused") for name in OPERATORS] + [(x.name, "staged") for x in OPERATORS.values() if x.chunked]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("name", "implementation"), KERNELS)
def test_kernels_are_differentiated_once_in_reverse(name, implementation, jitted):
    """Any other derivative is a sentence that names the function and what has one."""
    operator = OPERATORS[name]
    inputs = operator.source.inputs(1, 3, 1, 1, 8, 8, num_states=1)
    transform = jax.jit if jitted else lambda f: f
    loss = transform(lambda x: jnp.sum(operator.function(**x, implementation=implementation)[0] ** 2))
    squares = lambda x: sum(jnp.sum(y**2) for y in jax.tree.leaves(jax.grad(loss)(x)))
    advice = f'under "{implementation}"; use implementation="xla".'
    assert jax.eval_shape(jax.grad(loss), inputs)["v"].shape == inputs["v"].shape
    for f in (loss, jax.jit(loss)):
        with pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative {advice}"):
            jax.jvp(f, (inputs,), (inputs,))
    with pytest.raises(NotImplementedError, match=f"{name} can be differentiated only once {advice}"):
        jax.eval_shape(jax.grad(squares), inputs)
    with pytest.raises(NotImplementedError, match=f"{name} can be differentiated only once {advice}"):
        jax.eval_shape(lambda x: jax.jvp(jax.grad(loss), (x,), (x,)), inputs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPERATORS | COMPOSED)
def test_export_with_open_sizes(name, packed):
    """Plain JAX exports without the numbers of rows and tokens; a program of one chunk is right too."""
    entry = (OPERATORS | COMPOSED)[name]
    function = functools.partial(entry.function, **entry.static, output_final_state=True, implementation="xla")
    run = jax.jit(lambda x, *cu: function(**x, cu_seqlens=cu[0] if cu else None))
    b, t = jax.export.symbolic_shape("b, t")
    rows = 1 if packed else 2

    def batch(T):
        cu = [jnp.array([0, 3, T, T], jnp.int32)] if packed else []
        return entry.source.inputs(rows, T, 1, 2, 8, 8, num_states=3 if packed else rows), *cu

    def opened(name, y):
        of_rows = name == "initial_state" and not packed
        sizes = (rows if packed else b,) if of_rows or name not in NOT_TOKENS else ()
        # The keys of Gated DeltaProduct have several tokens for a token.
        sizes += () if name in NOT_TOKENS else (t * (y.shape[1] // 20),)
        return jax.ShapeDtypeStruct((*sizes, *y.shape[len(sizes) :]), y.dtype)

    x, *cu = batch(20)
    shapes = {name: jax.tree.map(functools.partial(opened, name), y) for name, y in x.items()}
    exported = jax.export.export(run)(shapes, *cu)
    for T in (20, 70):
        got, want = map(jax.tree.leaves, (exported.call(*batch(T)), run(*batch(T))))
        for y, z in zip(got, want, strict=True):
            assert_close(f"T = {T}", y, z, SAME)


@pytest.mark.parametrize(("name", "implementation"), KERNELS)
def test_kernels_know_their_sizes(name, implementation):
    x = OPERATORS[name].source.inputs(1, 20, 1, 1, 8, 8)
    (b,) = jax.export.symbolic_shape("b")
    x = {key: jax.ShapeDtypeStruct((b, *y.shape[1:]) if y.ndim > 1 else y.shape, y.dtype) for key, y in x.items()}
    run = jax.jit(lambda x: OPERATORS[name].function(**x, implementation=implementation))
    message = f'"{implementation}" must know the sizes of arrays when the program is built; got `q` of shape (b, 20,'
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        jax.export.export(run)(x)


def test_staged_exports_its_kernels_for_tpu():
    inputs = make_inputs(1, 70, 1, 1, 16, 16)
    run = jax.jit(lambda x: chunk_gated_delta_rule(**x, implementation="staged")[0])
    text = jax.export.export(run, platforms=["tpu"])(inputs).mlir_module()
    for kernel in ("local_cumsum", "scaled_dot_kkt", "solve_tril", "recompute_w_u", "gated_delta_rule_fwd_h", "fwd_o"):
        assert kernel in text


@pytest.mark.parametrize("implementation", ["staged", "fused"])
@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule"])
def test_gradient_passes_the_check_of_shard_map(name, implementation):
    """Lowered for a TPU: the check of varying axes acts on compiled kernels; a sum for a replicated gate."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    inputs = make_inputs(2, 20, 1, 1, 8, 8, num_states=2)
    if name == "simple_gla":
        del inputs["beta"], inputs["g"]
        inputs["g_gamma"] = jnp.array([-0.1])
    specs = {x: PartitionSpec() if x == "g_gamma" else PartitionSpec("data") for x in inputs}
    operator = OPERATORS[f"chunk_{name}"].function
    loss = lambda x: sum(jnp.sum(y) for y in operator(**x, output_final_state=True, implementation=implementation))
    text = text_for_tpu(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs,), out_specs=specs), inputs)
    # Two stages of the chain read the gate.
    sums = 0 if name != "simple_gla" else 1 if implementation == "fused" else 2
    assert text.count("stablehlo.all_reduce") == sums


@pytest.mark.parametrize(("name", "K"), [("chunk_gla", 2048), ("chunk_gated_delta_rule", 320)])
def test_none_takes_the_stages_where_fused_kernels_do_not_fit(monkeypatch, name, K):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    operator = OPERATORS[name]
    inputs = jax.eval_shape(lambda: operator.source.inputs(1, 64, 1, 1, K, K))
    text = text_for_tpu(lambda x: operator.function(**x)[0], inputs)
    assert "chunk_fwd_o" in text
    assert "fused" not in text


@pytest.mark.parametrize("name", ["recurrent_kda", "recurrent_gated_delta_rule", "recurrent_simple_gla"])
def test_none_decodes_many_tokens_without_the_kernel(monkeypatch, name):
    """The kernel keeps all tokens in fast memory; asked for by name, it says that they are too many."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    operator = OPERATORS[name]
    # To draw so many numbers takes seconds.
    one = operator.source.inputs(1, 1, 16, 16, 128, 128)
    wide = lambda y: jax.ShapeDtypeStruct((1, 2**15, *y.shape[2:]) if y.ndim > 1 else y.shape, y.dtype)
    inputs = jax.tree.map(wide, one)
    run = functools.partial(operator.function, output_final_state=True)
    assert "tpu_custom_call" not in text_for_tpu(lambda x: run(**x), inputs)
    with pytest.raises(NotImplementedError, match="takes a few tokens per sequence"):
        text_for_tpu(lambda x: run(**x, implementation="fused"), inputs)
