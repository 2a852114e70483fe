"""`chunkwise check`: every kernel, compiled for the backend of this machine, is compared with float64."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.command import tables
from chunkwise.pipeline import operators, stages
from chunkwise.shared.testing import cases, compare, inputs

# Sizes, and the lengths of a packed batch: with a last chunk that is not full, empty sequences and padding. Sizes are
# small where compiling or interpreting costs more than running.
ON_TPU = cases.Case(T=200, H=2, HV=4, K=128, V=128), (1, 0, 77, 0, 114)
ELSEWHERE = cases.Case(T=100, HV=2, K=64, V=64, chunk_size=32), (1, 0, 37, 0, 56)
INTERPRETED = cases.Case(T=20, HV=2, K=8, V=16, chunk_size=16), (1, 0, 17, 0)
DTYPES = ("float32", "bfloat16")


class Row(NamedTuple):
    """One line of the table; if an exception was raised, `error` is infinite and `message` describes the exception."""

    kernel: str
    implementation: str
    dtype: str
    case: str
    worst: str = ""
    error: float = math.inf
    tolerance: float = 0.0
    seconds: float = math.nan
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return not self.message and self.error <= self.tolerance


class Program(NamedTuple):
    """A line to come: a function that is being compiled, and a function that returns its expected results.

    Attributes:
      label: kernel, implementation, type and case.
      compiling: the future of the compiled function.
      args: the arguments of the function.
      expected: returns the exact results by name; a second call is quick.
      tolerance: returns the tolerance of a result by its name.
    """

    label: tuple[str, str, str, str]
    compiling: Future
    args: tuple
    expected: Callable[[], dict]
    tolerance: Callable[[str], float]

    def measure(self) -> Row:
        """Run the function and compare its results with the expected ones; report any exception."""
        try:
            compiled = self.compiling.result()
            results = jax.block_until_ready(compiled(*self.args))
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(compiled(*self.args))
                seconds.append(time.perf_counter() - start)
        except Exception as problem:  # after any exception the other kernels are still to be checked
            return Row(*self.label, message=tables.first_line(problem))
        results, exact = (compare.by_part(x) for x in (results, self.expected()))
        errors = {name: compare.error(results[name], want) for name, want in exact.items()}
        # The result with the largest ratio of error to tolerance.
        worst = max(errors, key=lambda name: errors[name] / self.tolerance(name))
        return Row(*self.label, worst, errors[worst], self.tolerance(worst), statistics.median(seconds))


def _compile(pool: Executor, fn: Callable, args: tuple) -> Future:
    """Compile fn for args in the pool, because compiling takes most of the time of a check and needs no Python."""
    return pool.submit(lambda: jax.jit(fn).lower(*args).compile())


class Check(NamedTuple):
    """A kernel in one implementation on one batch.

    Attributes:
      kernel: the operator or stage.
      implementation: one of its implementations.
      label: names the batch: "fixed", "packed" or "stream".
      case: the batch.
      states: whether an operator gets and returns states.
      forward: whether to run the forward alone, too, which makes no residuals.
    """

    kernel: operators.Entry | stages.Stage
    implementation: str
    label: str
    case: cases.Case
    states: bool = True
    forward: bool = True

    def start(self, pool: Executor) -> Iterator[Program]:
        """Yield the programs of the check, which the pool is compiling."""
        if isinstance(self.kernel, stages.Stage):
            return _start_stage(self, self.kernel, pool)
        return _start_operator(self, self.kernel, pool)


def _start_operator(check: Check, operator: operators.Entry, pool: Executor) -> Iterator[Program]:
    """Yield the programs of an operator: the forward alone, and the forward with gradients."""
    case = check.case
    options = dict(operator.static) | ({"chunk_size": case.chunk_size} if operator.chunked else {})

    def run(x, cu_seqlens):
        o, state = operator.function(
            **x, output_final_state=check.states, cu_seqlens=cu_seqlens, implementation=check.implementation,
            **options,
        )  # fmt: skip
        return {"o": o, "final_state": state} if check.states else {"o": o}

    x = _inputs(operator.source, case, check.states)
    operands = inputs.poison_padding(x, case.cu_seqlens), case.cu_seqlens
    cotangents = _cotangents(operator.source, case, check.states)
    programs: list[tuple[str, Callable, tuple]] = [
        (", gradients", compare.with_gradients(run), (*operands, cotangents))
    ]
    # In plain JAX the forward alone computes the same as with gradients.
    if check.implementation != "xla" and check.states and check.forward:
        programs.insert(0, ("", run, operands))
    for suffix, fn, args in programs:
        label = operator.name, check.implementation, case.dtype, check.label + suffix
        exact = functools.partial(_exact, operator.source, case, check.states)
        expected = exact if suffix else lambda exact=exact: {n: exact()[n] for n in ("o", "final_state")}
        limit = functools.partial(operator.source.tolerance, dtype=case.dtype)
        yield Program(label, _compile(pool, fn, args), args, expected, limit)


def _start_stage(check: Check, stage: stages.Stage, pool: Executor) -> Iterator[Program]:
    """Yield the program of a stage, on the rounded results of the stages before it."""
    case = check.case
    x = _arguments(stage.inputs, case)

    def run(x, cu_seqlens):
        return stage.run(x, case.chunk_size, cu_seqlens, implementation=check.implementation)

    rounded = stage.rounds and case.dtype != "float32"
    limit = compare.TOLERANCE[case.dtype] if rounded else compare.STAGE_TOLERANCE
    args = {name: x[name] for name in stage.reads}, case.cu_seqlens
    yield Program(
        (stage.name, check.implementation, case.dtype, check.label),
        _compile(pool, run, args),
        args,
        functools.partial(stage.define, x, case.chunk_size, case.cu_seqlens),
        lambda name: limit,
    )


@functools.cache
def _arguments(inputs: Callable[[cases.Case], dict], case: cases.Case) -> dict[str, jax.Array]:
    """Return the arguments that `Stage.inputs` makes of a case, the same for all stages of one chain."""
    return inputs(case)


@functools.cache
def _inputs(source: operators.Source, case: cases.Case, states: bool) -> dict[str, Any]:
    """Return the inputs of an operator, the same arrays for all operators that take the same arguments."""
    N = case.B if case.lengths is None else len(case.lengths)
    return source.inputs(
        case.B, case.T, case.H, case.HV, case.K, case.V, dtype=jnp.dtype(case.dtype),
        gate=case.gate, num_states=N if states else 0,
    )  # fmt: skip


@functools.cache
def _cotangents(source: operators.Source, case: cases.Case, states: bool) -> dict[str, Any]:
    """Return seeded cotangents of the results: zeros for outputs without a derivative."""
    x, rng = _inputs(source, case, states), np.random.default_rng(1)
    do = rng.standard_normal((case.B, case.T, case.HV, case.V))
    if source.smooth is not None:
        do = np.where(source.smooth(x, cu_seqlens=case.cu_seqlens), do, 0.0)
    do = jnp.asarray(do, case.dtype)
    if not states:
        return {"o": do}
    draw = lambda y: jnp.asarray(rng.standard_normal(y.shape), jnp.float32)
    return {"o": do, "final_state": jax.tree.map(draw, x["initial_state"])}


@functools.cache
def _exact(source: operators.Source, case: cases.Case, states: bool) -> dict[str, Any]:
    """Return the results of an operator and all gradients in float64."""
    x = _inputs(source, case, states)
    cotangents = _cotangents(source, case, states)
    do, dht = cotangents["o"], cotangents.get("final_state")
    o, state, *rest = source.reference(x, cu_seqlens=case.cu_seqlens, do=do, dht=dht)
    (gradients,) = rest
    return {"o": o} | ({"final_state": state} if states else {}) | {f"d{name}": dx for name, dx in gradients.items()}


def _cases(base: cases.Case, lengths: tuple[int, ...], quick: bool) -> Iterator[tuple[str, cases.Case]]:
    """Yield (label, case) for both types, fixed and packed; if `quick`, only packed and in the first type."""
    sizes = vars(base)
    for dtype in DTYPES[:1] if quick else DTYPES:
        if not quick:
            yield "fixed", cases.Case(**sizes | {"dtype": dtype, "B": 2})
        yield "packed", cases.Case(**sizes | {"dtype": dtype, "lengths": lengths, "gate": "spikes"})


def plan(interpret: bool, quick: bool = False) -> list[Check]:
    """Return the checks of this machine, the quickest first.

    Args:
      interpret: off TPU, include Pallas kernels, interpreted.
      quick: check every kernel in every implementation on one batch only, off TPU a small one.
    """
    on_tpu = jax.default_backend() == "tpu"
    compiled = ON_TPU if on_tpu else ELSEWHERE
    checks = []
    for kernel in (*stages.STAGES, *stages.PARTS, *(operators.OPERATORS | operators.COMPOSED).values()):
        for implementation in kernel.implementations:
            if not (implementation == "xla" or on_tpu or interpret):
                continue
            # Small programs compile faster.
            small = not on_tpu and (quick or implementation != "xla")
            for label, case in _cases(*(INTERPRETED if small else compiled), quick):
                checks.append(Check(kernel, implementation, label, case, forward=not quick))
                # As in training, where no states go in or out, so that chunks go across the sequences of a pack.
                if case.lengths and isinstance(kernel, operators.Entry) and kernel.chunked and not quick:
                    checks.append(Check(kernel, implementation, "stream", case, states=False))
    # Plain JAX compiles fastest. The tables list kernels that compile faster first.
    return sorted(checks, key=lambda check: check.implementation != "xla")
