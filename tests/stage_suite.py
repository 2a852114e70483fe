"""The tests that all stages have. They need pytest.

A package describes its stage in a `StageSpec` and derives its class of tests from `StageTests`, or from those classes
of tests here that fit. Its own tests are about what other stages lack.

    class TestStage(stages.StageTests):
        stage = stages.StageSpec(chunk_scaled_dot_kkt, ("k", "beta", "g_cum"), ("A",), stage_oracle.kkt)
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.shared import chips
from chunkwise.shared.testing import cases, compare, inputs, tpu
from tests import documents, gradients, poison, stage_cases, transforms

Arrays = dict[str, jax.Array]

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])
on_tpu = pytest.mark.skipif(not tpu.has_libtpu(), reason="needs libtpu")
# A packed batch has more chunks for the same kernel: only its tables are new, and they compile longer than the kernel.
TPU_SIZES = ((64, 128, False), (64, 256, False), (128, 128, False), (128, 256, False), (128, 256, True))


# The arguments beside a wrong one.
WRONG = cases.Case(B=2, T=64, H=2, HV=4, K=8, V=6, chunk_size=64)


def small(**sizes) -> cases.Case:
    """Return a small case with a tail, of these sizes."""
    return cases.Case(**dict(T=20, HV=2, K=3, V=2, chunk_size=16) | sizes)


@dataclasses.dataclass(frozen=True)
class CostSpec:
    """A cost that a docstring states.

    Attributes:
      options: options of the function of cost, and sizes where they differ from others.
      documented: sizes of the stated formula, where they differ from the sizes of the function of cost.
      backward: flops of the gradient over flops of the stage; None if it depends on sizes.
      function: the function with the docstring; None for the function of the stage.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    documented: Mapping[str, int] = dataclasses.field(default_factory=dict)
    backward: int | None = None
    function: Callable | None = None


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """A stage as its tests call it, with arrays by the names of its parameters.

    Attributes:
      function: the public function.
      arguments: names of the arrays; an array `g_cum` may hold gates per channel.
      results: names of the results, in order.
      definition: the stage in float64, with the same names of arrays.
      renamed: names of arguments in `inputs`, where they differ.
      inputs: the arrays of a case, by name.
      shared: further arrays, which all sequences share, by name.
      options: further arguments of every call.
      split: the arrays, or "cu_seqlens", of which each device has a part in the test of `shard_map`.
      visible: whether NaN in the first token of any argument shows in results of its sequence.
      gradient_sizes: sizes of a batch and of a pack for finite differences.
      configs: tile sizes that must give the same bits.
      launches: names of the forward and of the backward kernel; None for the name of the function with "_fwd", "_bwd".
      tpu_sizes: (chunk size, K = V, whether sequences are packed) to compile for.
      tpu_types: types of arguments to compile for, where a bfloat16 case has others.
      costs: what docstrings state.
      wrong: arguments that are wrong beside those of `WRONG`, and the errors about them.
    """

    function: Callable
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    definition: Callable | None = None
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    inputs: Callable[[cases.Case], Mapping[str, jax.Array]] = cases.Case.arguments
    shared: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    split: tuple[str, ...] = ("k",)
    visible: bool = True
    gradient_sizes: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, dict(lengths=(1, 0, 17)))
    configs: tuple[Any, ...] = ()
    launches: tuple[str, str] | None = None
    tpu_sizes: tuple[tuple[int, int, bool], ...] = TPU_SIZES
    tpu_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    costs: tuple[CostSpec, ...] = (CostSpec(),)
    wrong: tuple[tuple[Mapping[str, Any], str], ...] = ()

    def arrays(self, case: cases.Case, *, per_channel: bool = False, padding: float = np.nan) -> Arrays:
        """Return the arrays of a case by name, with a number in the padding."""
        x = dict(self.inputs(case)) | (dict(g_cum=case.channel_gates()) if per_channel else {})
        x = {name: x[self.renamed.get(name, name)] for name in self.arguments}
        return {name: jnp.where(jnp.isnan(y), padding, y) for name, y in x.items()} | self.shared

    def specs(self, case: cases.Case) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and types of the arrays of a case, by name."""
        types = self.tpu_types if case.dtype == "bfloat16" else {}
        x = self.arrays(case)
        return {name: inputs.spec(*y.shape, dtype=jnp.dtype(types.get(name, y.dtype))) for name, y in x.items()}

    def run(self, implementation: str | None, chunk_size: int | None = 16, cu_seqlens=None, **options) -> Callable:
        """Return the stage as a function from arrays by name to results by name."""
        options |= _accepted(self.function, chunk_size=chunk_size, cu_seqlens=cu_seqlens)

        def run(x):
            results = self.function(**x, **self.options, **options, implementation=implementation)
            return self._named(results)

        return run

    def define(self, chunk_size: int = 16, cu_seqlens=None) -> Callable:
        """Return the definition as a function from arrays by name to results by name."""
        assert self.definition is not None
        definition = self.definition
        options = _accepted(definition, **self.options, chunk_size=chunk_size, cu_seqlens=cu_seqlens)
        return lambda x: self._named(definition(**x, **options))

    def launch(self, chunk_size: int, backward: bool = False) -> str:
        """Return the name of a kernel for chunks of a size."""
        name = self.function.__name__
        return (self.launches or (f"{name}_fwd_c{{}}", f"{name}_bwd_c{{}}"))[backward].format(chunk_size)

    def _named(self, results) -> dict[str, Any]:
        return dict(zip(self.results, results if isinstance(results, tuple) else (results,), strict=True))


def _accepted(function: Callable, **options) -> dict[str, Any]:
    """Return the options that a function has parameters for."""
    return {name: x for name, x in options.items() if name in inspect.signature(function).parameters}


def _total(results: Mapping[str, jax.Array]) -> jax.Array:
    return sum((jnp.sum(y) for y in results.values()), jnp.float32(0))


def assert_defined(stage: StageSpec, case: cases.Case, implementation: str, x: Arrays) -> Arrays:
    """Fail unless a stage gives float32 results close to its definition, and zeros in the padding; return them."""
    cut = dict(chunk_size=case.chunk_size, cu_seqlens=case.cu_seqlens)
    got, want = stage.run(implementation, **cut)(x), stage.define(**cut)(x)
    for name, y in got.items():
        check = compare.assert_close if name in poison.STATES | poison.CHUNKS else case.assert_close
        check(name, y, want[name], compare.STAGE_TOLERANCE)
        assert y.dtype == jnp.float32, f"{name} is {y.dtype}"
    return got


def assert_gradients(stage: StageSpec, case: cases.Case, implementation: str) -> None:
    """Fail unless the gradients of a stage on a case are finite differences of its definition."""
    cut = dict(chunk_size=case.chunk_size, cu_seqlens=case.cu_seqlens)
    run, definition = stage.run(implementation, **cut), stage.define(**cut)
    # Padding of ones, not of zeros: its gradients are zeros whatever it holds.
    gradients.assert_gradients(lambda **x: run(x), lambda **x: definition(x), stage.arrays(case, padding=1.0))


def assert_isolated(stage: StageSpec, case: cases.Case, implementation: str, *, per_channel: bool = False) -> None:
    """Fail unless a sequence that is not finite leaves every bit of the others as it was; the chunks are of 16."""
    x = stage.arrays(case, per_channel=per_channel, padding=0.0)
    run = lambda x, cu_seqlens: stage.run(implementation, 16, cu_seqlens)(x)
    poison.assert_isolated(run, x, case.cu_seqlens, chunk_size=16, shared=tuple(stage.shared), visible=stage.visible)


class OfStage:
    """Tests of one stage, which a package sets."""

    stage: ClassVar[StageSpec]

    def pytest_generate_tests(self, metafunc):
        """Give a test the tile sizes, the sizes to compile for, or the wrong arguments of its stage."""
        for name, values in dict(
            config=self.stage.configs,
            sizes=self.stage.configs[:1],
            tpu_sizes=self.stage.tpu_sizes,
            wrong=self.stage.wrong,
        ).items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)


class ReferenceTests(OfStage):
    """Values and gradients against the definition in float64."""

    THOROUGH: ClassVar = dict(
        # Plain JAX has a pack; the kernels have rows of float32, and a pack of bfloat16 with gates that forget.
        test_definition=lambda case, implementation: (
            case not in (stage_cases.CASES[6:7] if implementation == "xla" else stage_cases.CASES[1::6])
        ),
        test_gradients=lambda packed, implementation: not packed or implementation == "xla",
    )

    @both
    @pytest.mark.parametrize("case", stage_cases.CASES, ids=str)
    def test_definition(self, case, implementation):
        x = self.stage.arrays(case)
        self.check(case, x, assert_defined(self.stage, case, implementation, x))

    def check(self, case: cases.Case, x: Arrays, results: Arrays) -> None:
        """Check what else holds of the results of a stage."""

    @both
    @pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
    def test_gradients(self, packed, implementation):
        assert_gradients(self.stage, small(**self.stage.gradient_sizes[packed]), implementation)


class IsolationTests(OfStage):
    """What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

    # The chunks are cut by the same code, and a pack has all that rows have.
    THOROUGH: ClassVar = dict(test_isolated=lambda implementation, case: implementation == "xla" or not case.lengths)

    @both
    @pytest.mark.parametrize("case", stage_cases.ISOLATION_CASES, ids=str)
    def test_isolated(self, case, implementation):
        assert_isolated(self.stage, case, implementation)


class GateTests(OfStage):
    """Gates per channel, and none, for stages with gates per head, `g_cum`."""

    THOROUGH: ClassVar = dict(
        test_isolated_with_gates_per_channel=lambda implementation, case: implementation == "xla" or not case.lengths,
        test_strong_gates_per_channel=lambda implementation: implementation == "xla",
    )

    @both
    def test_strong_gates_per_channel(self, implementation):
        case = cases.Case(T=40, HV=2, K=6, V=4, chunk_size=16, lengths=(3, 0, 33))
        assert_defined(self.stage, case, implementation, self.stage.arrays(case, per_channel=True))

    @both
    def test_without_gate(self, implementation):
        x = self.stage.arrays(small(K=8, V=4))
        ungated = {name: y for name, y in x.items() if name != "g_cum"}
        got = self.stage.run(implementation)(ungated)
        for name, want in self.stage.define()(x | dict(g_cum=jnp.zeros_like(x["g_cum"]))).items():
            compare.assert_close(name, got[name], want, compare.STAGE_TOLERANCE)

    @both
    @pytest.mark.parametrize("case", stage_cases.ISOLATION_CASES, ids=str)
    def test_isolated_with_gates_per_channel(self, case, implementation):
        """Strong gates would hide the first key of a sequence: all that reads it is decayed to zero."""
        assert_isolated(self.stage, case, implementation, per_channel=True)


def trace_second_derivative(stage: StageSpec, implementation: str) -> None:
    """Trace the gradient of the squares of a gradient of a stage, which computes nothing."""
    squares = lambda x: _total({name: y**2 for name, y in x.items()})
    once = jax.grad(lambda x: squares(stage.run(implementation)(x)))
    jax.eval_shape(jax.grad(lambda x: squares(once(x))), stage.arrays(small(), padding=1.0))


class TransformTests(OfStage):
    """Under jit, vmap, remat, export, shard_map, 64 bits and strict promotion."""

    THOROUGH: ClassVar = dict(
        # The pipeline runs the chain of all stages in these modes.
        test_64_bits_and_strict_promotion=True,
        # vmap adds a dimension to the grid of a kernel; the others change nothing in it.
        test_transform=lambda implementation, transform: implementation == "xla" or transform != "vmap",
    )

    @both
    @pytest.mark.parametrize("transform", transforms.TRANSFORMS)
    def test_transform(self, transform, implementation):
        shared, run = self.stage.shared, self.stage.run(implementation)
        x = {name: y for name, y in self.stage.arrays(small(B=2)).items() if name not in shared}
        transforms.assert_transform(transform, lambda x: run(x | shared), (x,))

    @both
    def test_64_bits_and_strict_promotion(self, implementation):
        case = small(lengths=(1, 0, 17))
        x = self.stage.arrays(case, padding=1.0)
        run = self.stage.run(implementation, cu_seqlens=case.cu_seqlens)
        gradient = jax.jit(jax.grad(lambda x: _total(run(x))))
        want = gradient(x)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            got = gradient(x)
        for name, d in got.items():
            assert d.dtype == jnp.float32, f"d{name} is {d.dtype}"
            compare.assert_close(f"d{name}", d, want[name], 1e-6)

    def test_forward_mode(self):
        """Plain JAX has one; that of a kernel is a sentence with the name of the function."""
        x = self.stage.arrays(small(), padding=1.0)
        forward = lambda implementation: jax.jvp(jax.jit(self.stage.run(implementation)), (x,), (x,))
        assert jax.eval_shape(lambda: forward("xla"))[1].keys() == set(self.stage.results)
        name = self.stage.function.__name__
        with pytest.raises(NotImplementedError, match=f'{name} has no forward-mode derivative under "pallas"; use'):
            forward("pallas")

    def test_second_derivative(self):
        """Plain JAX has one; that of a kernel is a sentence."""
        trace_second_derivative(self.stage, "xla")
        with pytest.raises(NotImplementedError, match=r'the kernel .* has no derivative: .* use implementation="xla"'):
            trace_second_derivative(self.stage, "pallas")

    def test_gradient_passes_the_check_of_shard_map(self):
        """Lowered for a TPU, whose kernels have the check of varying axes; a replicated operand's gradient is a sum."""
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        packed = "cu_seqlens" in self.stage.split
        case = small(lengths=(1, 0, 19)) if packed else small(B=2)
        args = (self.stage.arrays(case), *([case.cu_seqlens] if packed else []))
        specs = {name: PartitionSpec(*("data",) * (name in self.stage.split)) for name in args[0]}
        loss = lambda x, cu_seqlens=None: _total(self.stage.run("pallas", cu_seqlens=cu_seqlens)(x))
        in_specs = (specs, PartitionSpec("data"))[: len(args)]
        gradient = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=in_specs, out_specs=specs)
        assert "stablehlo.all_reduce" in tpu.text_for_tpu(gradient, *args)


class PackTests(OfStage):
    """Wrong boundaries of packed sequences; the tests of isolation have traced ones."""

    def test_wrong_boundaries(self):
        run, x = self.stage.run, self.stage.specs(small())
        with pytest.raises(ValueError, match=re.escape("`cu_seqlens` must rise from 0 to at most T = 20; got [0, 21]")):
            run(None, cu_seqlens=jnp.array([0, 21], jnp.int32))(x)
        with pytest.raises(ValueError, match="`cu_seqlens` must come with a batch of 1; got B = 2"):
            run(None, cu_seqlens=inputs.spec(2, dtype=jnp.int32))(self.stage.specs(small(B=2)))


class ErrorTests(OfStage):
    """Errors of arguments that all stages have; arrays are shapes only, so nothing can have been computed."""

    def test_unknown_implementation(self):
        message = "`implementation` must be None or one of ('pallas', 'xla'); got 'gpu'."
        with pytest.raises(ValueError, match=re.escape(message)):
            self.stage.run("gpu")(self.stage.specs(small()))

    def test_tile_sizes(self, sizes):
        """They ask for the kernel, which would leave a part of its results out where they did not fit."""
        x = self.stage.specs(small())
        of = lambda size: dataclasses.replace(sizes, **dict.fromkeys(vars(sizes), size))
        for wrong, message in (
            (1, f"`config` must be None or a {self.stage.function.__module__.rpartition('.')[0]}.Config; got 1."),
            (of(0), "must be a whole number above 0; got 0."),
            (of(7), "must divide"),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                jax.eval_shape(self.stage.run(None, config=wrong), x)
        with pytest.raises(NotImplementedError, match=re.escape(f'"xla" does not read `config`; got {sizes}.')):
            self.stage.run("xla", config=sizes)(x)

    def test_value_error(self, wrong):
        arguments, message = wrong
        with pytest.raises(ValueError, match=re.escape(message)):
            self.stage.function(**self.stage.specs(WRONG) | arguments)


class ChunkSizeTests(OfStage):
    """Errors of the chunk size, for stages that take one."""

    @pytest.mark.parametrize("chunk_size", [48, 64.0], ids=repr)
    def test_wrong_chunk_size(self, chunk_size):
        message = f"`chunk_size` must be one of (16, 32, 64, 128); got {chunk_size!r}."
        with pytest.raises(ValueError, match=re.escape(message)):
            self.stage.run(None, chunk_size)(self.stage.specs(small()))


class KernelTests(OfStage):
    """How the kernels are launched."""

    # One head a step differs the most from the choice of the stage.
    THOROUGH: ClassVar = dict(test_every_config_gives_the_same_bits=lambda config: 1 not in dataclasses.astuple(config))

    def test_every_config_gives_the_same_bits(self, config):
        x = self.stage.arrays(small(T=36, H=2, HV=8, K=16, V=8))
        got, want = self.stage.run("pallas", config=config)(x), self.stage.run("pallas")(x)
        for name, y in want.items():
            np.testing.assert_array_equal(got[name], y, name)


class TpuTests(OfStage):
    """The kernels compile for every TPU generation: the interpreter does not enforce their rules."""

    # A pack takes the most of a kernel.
    THOROUGH: ClassVar = dict(
        test_compiles=lambda tpu_sizes: not tpu_sizes[2],
        # Interpreted kernels run with 64 bits too.
        test_gradient_compiles_under_x64=True,
    )

    @pytest.mark.tpu
    @on_tpu
    @pytest.mark.parametrize("chip", chips.CHIPS)
    def test_compiles(self, tpu_sizes, chip):
        C, K, packed = tpu_sizes
        compiled = tpu.compile_for(*_program(self.stage, C, K, packed), chip=chip)
        text = compiled.as_text()
        assert "tpu_custom_call" in text
        assert self.stage.launch(C) in text

    @pytest.mark.tpu
    @on_tpu
    def test_gradient_compiles_under_x64(self):
        """Under x64 a Python number in an index map, or as a rotation, would be an int64, which no TPU kernel takes."""
        run, x, cu_seqlens = _program(self.stage, 64, 128, packed=True)

        def gradients(x, cu_seqlens):
            results, pull = jax.vjp(lambda x: run(x, cu_seqlens), x)
            return results, pull(results)

        with jax.enable_x64(True):
            text = tpu.compile_for(gradients, x, cu_seqlens).as_text()
        for backward in (False, True):
            assert self.stage.launch(64, backward) in text


def _program(stage: StageSpec, chunk_size: int, K: int, packed: bool) -> tuple[Callable, dict, Any]:
    """Return a stage as a function of arrays and cu_seqlens, and both for 300 tokens, in three sequences if packed."""
    sizes = dict(T=300, H=2, HV=4, K=K, V=K, chunk_size=chunk_size, dtype="bfloat16")
    case = cases.Case(**sizes, lengths=(100, 90, 110) if packed else None)
    run = lambda x, cu_seqlens: stage.run("pallas", chunk_size, cu_seqlens)(x)
    return run, stage.specs(case), inputs.spec(4, dtype=jnp.int32) if packed else None


class CostTests(OfStage):
    """The documentation states the flops of the package's one function of cost, which every launch uses."""

    @pytest.mark.parametrize("C", [16, 64, 128])
    def test_documented_flops(self, C):
        package = self.stage.function.__module__.rpartition(".")[0]
        cost = importlib.import_module(f"{package}.config").cost
        sizes = _accepted(cost, B=2, T=384, H=3, HV=6, K=96, V=80, C=C)
        for spec in self.stage.costs:
            forward = cost(**sizes | spec.options).flops
            function = spec.function or self.stage.function
            assert forward == documents.documented_flops(function, **sizes | spec.documented)
            if spec.backward is not None:
                assert cost(**sizes | spec.options, backward=True).flops == spec.backward * forward


class StageTests(
    ReferenceTests, IsolationTests, TransformTests, PackTests, ErrorTests, KernelTests, TpuTests, CostTests
):
    """Everything that holds of all stages."""
