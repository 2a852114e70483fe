"""Every kernel on this machine's own backend, compiled, against float64: `chunkwise check`."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise import pipeline
from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared import testing
from chunkwise.shared.testing import Case, reference
from chunkwise.shared.testing import stage_oracle as exact
from chunkwise.solve_tril import solve_tril
from chunkwise.wy_fast import recompute_w_u

# Sizes and, packed, lengths: a tail in the last chunk, empty sequences, padding. Small where compiling or interpreting
# costs more than running.
ON_TPU = Case(T=200, H=2, HV=4, K=128, V=128), (1, 0, 77, 0, 114)
ELSEWHERE = Case(T=100, HV=2, K=64, V=64, chunk_size=32), (1, 0, 37, 0, 56)
INTERPRETED = Case(T=20, HV=2, K=8, V=16, chunk_size=16), (1, 0, 17, 0)
DTYPES = ("float32", "bfloat16")
GATE_LIKE = ("g", "g_gamma", "beta")


@dataclass(frozen=True)
class Row:
    """One line of the table; without a result, `error` is infinite and `message` says what was raised."""

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


@dataclass(frozen=True)
class Operator:
    """An operator of the pipeline: what it takes, and what it comes in, the TPU's choice last.

    Attributes:
      name: its name in `chunkwise.pipeline`.
      delta: it takes beta, and fewer key heads than value heads.
      gates: "head", "channel" or "constant", which is a gate per head and a constant one.
      implementations: what it comes in.
    """

    name: str
    delta: bool
    gates: str
    implementations: tuple[str, ...] = ("xla", "staged", "fused")

    @property
    def chunked(self) -> bool:
        """Whether it goes chunk by chunk, not token by token."""
        return self.name.startswith("chunk_")


@dataclass(frozen=True)
class Stage:
    """A stage of the chain: how to run it and its definition, both of the arguments of a Case by name.

    Attributes:
      name: its name in its package.
      run: of arguments x, further keywords of the stage, and the chunk size.
      definition: of arguments x, cu_seqlens and the chunk size, in float64.
      results: the names of its results, as `chunkwise.shared.testing.Case` gives them.
    """

    name: str
    run: Callable
    definition: Callable
    results: tuple[str, ...]
    implementations: tuple[str, ...] = ("xla", "pallas")


OPERATORS = (
    Operator("chunk_gated_delta_rule", True, "head"),
    Operator("chunk_kda", True, "channel"),
    Operator("chunk_gla", False, "channel"),
    Operator("chunk_simple_gla", False, "constant"),
    Operator("recurrent_gated_delta_rule", True, "head", ("xla", "fused")),
    Operator("recurrent_kda", True, "channel", ("xla", "fused")),
    Operator("recurrent_gla", False, "channel", ("xla",)),
    Operator("recurrent_simple_gla", False, "constant", ("xla",)),
)

STAGES = (
    Stage(
        "chunk_local_cumsum",
        lambda x, C, **o: chunk_local_cumsum(x["g"], C, **o),
        lambda x, cu, C: exact.cumsum(x["g"], C, cu),
        ("g_cum",),
    ),
    Stage(
        "chunk_scaled_dot_kkt",
        lambda x, C, **o: chunk_scaled_dot_kkt(x["k"], x["beta"], x["g_cum"], chunk_size=C, **o),
        lambda x, cu, C: exact.kkt(x["k"], x["beta"], x["g_cum"], C, cu),
        ("A",),
    ),
    Stage(
        "solve_tril",
        lambda x, C, **o: solve_tril(x["A"], **o),
        lambda x, cu, C: exact.inverse(x["A"], cu),
        ("A_inv",),
    ),
    Stage(
        "recompute_w_u",
        lambda x, C, **o: recompute_w_u(x["k"], x["v"], x["beta"], x["A_inv"], x["g_cum"], **o),
        lambda x, cu, C: exact.w_u(x["k"], x["v"], x["beta"], x["A_inv"], x["g_cum"], cu),
        ("w", "u"),
    ),
    Stage(
        "chunk_gated_delta_rule_fwd_h",
        lambda x, C, **o: chunk_gated_delta_rule_fwd_h(
            x["k"], x["w"], x["u"], x["g_cum"], x["initial_state"], True, chunk_size=C, **o
        ),
        lambda x, cu, C: exact.states(x["k"], x["w"], x["u"], x["g_cum"], x["initial_state"], C, cu),
        ("h", "v_new", "final_state"),
    ),
    Stage(
        "chunk_fwd_h",
        lambda x, C, **o: chunk_fwd_h(
            x["k"], x["v"], x["g_cum"], initial_state=x["initial_state"], output_final_state=True, chunk_size=C, **o
        ),
        lambda x, cu, C: exact.states(x["k"], None, x["v"], x["g_cum"], x["initial_state"], C, cu)[::2],
        ("h", "final_state"),
    ),
    Stage(
        "chunk_fwd_o",
        lambda x, C, **o: chunk_fwd_o(x["q"], x["k"], x["v_new"], x["h"], x["g_cum"], chunk_size=C, **o),
        lambda x, cu, C: exact.output(x["q"], x["k"], x["v_new"], x["h"], x["g_cum"], None, C, cu),
        ("o",),
    ),
)


def cases(base: Case, lengths: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """Yield (label, case) in both types, fixed and packed."""
    sizes = vars(base)
    for dtype in DTYPES:
        yield "fixed", Case(**sizes | {"dtype": dtype, "B": 2})
        yield "packed", Case(**sizes | {"dtype": dtype, "lengths": lengths, "gate": "spikes"})


def operator_inputs(operator: Operator, case: Case, states: bool) -> dict[str, jax.Array]:
    """Return the differentiable inputs of an operator."""
    H = case.H if operator.delta else case.HV
    N = 0 if not states else case.B if case.lengths is None else len(case.lengths)
    x = testing.make_inputs(
        case.B, case.T, H, case.HV, case.K, case.V, dtype=jnp.dtype(case.dtype), gate=case.gate,
        per_channel=operator.gates == "channel", num_states=N,
    )  # fmt: skip
    if not operator.delta:
        del x["beta"]
    if operator.gates == "constant":
        x["g_gamma"] = -jnp.geomspace(0.01, 1.0, case.HV, dtype=jnp.float32)
    return x


_arguments = functools.cache(Case.arguments)


@functools.cache
def _oracle(delta: bool, gates: str, case: Case, states: bool):
    """Return cotangents of the results, and what float64 makes of them and of the inputs."""
    x = operator_inputs(Operator("", delta, gates), case, states)
    rng = np.random.default_rng(1)
    do = jnp.asarray(rng.standard_normal(x["v"].shape), case.dtype)
    dht = jnp.asarray(rng.standard_normal(x["initial_state"].shape), jnp.float32) if states else None
    o, state, *rest = reference(**x, cu_seqlens=case.cu_seqlens, do=do, dht=dht)
    (gradients,) = rest
    cotangents, results = {"o": do}, {"o": o}
    if states:
        cotangents, results = cotangents | {"final_state": dht}, results | {"final_state": state}
    return cotangents, results, {f"d{name}": dx for name, dx in gradients.items()}


def tolerance(name: str, dtype: str) -> float:
    """Return the tolerance of a result or, named with a leading d, a gradient of an operator."""
    if name in ("o", "final_state"):
        return testing.TOLERANCE[dtype]
    kind = testing.GATE_GRADIENT_TOLERANCE if name[1:] in GATE_LIKE else testing.GRADIENT_TOLERANCE
    return kind[dtype]


@dataclass(frozen=True)
class Program:
    """A line to come: a function that is being compiled, and the results, a dict, that are expected of it."""

    label: tuple[str, str, str, str]
    compiling: Future
    args: tuple
    expected: dict
    tolerances: dict

    @staticmethod
    def start(pool: Executor, label: tuple, fn: Callable, args: tuple, expected: dict, tolerances: dict) -> "Program":
        """Compile fn for args in the pool: that is what the time of a check goes into, and it leaves Python free."""
        compiling = pool.submit(lambda: jax.jit(fn).lower(*args).compile())
        return Program(label, compiling, args, expected, tolerances)

    def measure(self) -> Row:
        """Run it and compare its results with those expected; report whatever was raised."""
        try:
            compiled = self.compiling.result()
            results = jax.block_until_ready(compiled(*self.args))
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(compiled(*self.args))
                seconds.append(time.perf_counter() - start)
        except Exception as problem:  # whatever it is, the other kernels are still to be checked
            text = str(problem).strip().splitlines()
            return Row(*self.label, message=f"{type(problem).__name__}: {text[0] if text else ''}")
        errors = {name: testing.error(results[name], want) for name, want in self.expected.items()}
        # The nearest to its tolerance, or the furthest past it.
        worst = max(errors, key=lambda name: errors[name] / self.tolerances[name])
        return Row(*self.label, worst, errors[worst], self.tolerances[worst], statistics.median(seconds))


def check_operator(
    operator: Operator, implementation: str, label: str, case: Case, pool: Executor, states: bool = True
) -> Iterator[Program]:
    """Yield the programs of one implementation of an operator: forward, then forward and gradients."""
    cotangents, forward, gradients = _oracle(operator.delta, operator.gates, case, states)
    options = {"chunk_size": case.chunk_size} if operator.chunked else {}

    def run(x, cu_seqlens):
        function = getattr(pipeline, operator.name)
        o, state = function(
            **x, output_final_state=states, cu_seqlens=cu_seqlens, implementation=implementation, **options
        )
        return {"o": o, "final_state": state} if states else {"o": o}

    inputs = testing.spoil_padding(operator_inputs(operator, case, states), case.cu_seqlens), case.cu_seqlens
    programs: list[tuple[str, Callable, tuple, dict]] = [
        (", gradients", testing.with_gradients(run), (*inputs, cotangents), forward | gradients)
    ]
    # Plain JAX computes the same with gradients or without; kernels keep more where there are gradients to come.
    if implementation != "xla" and states:
        programs.insert(0, ("", run, inputs, forward))
    for suffix, fn, args, expected in programs:
        limits = {name: tolerance(name, case.dtype) for name in expected}
        of = operator.name, implementation, case.dtype, label + suffix
        yield Program.start(pool, of, fn, args, expected, limits)


def check_stage(stage: Stage, implementation: str, label: str, case: Case, pool: Executor) -> Iterator[Program]:
    """Yield the program of one implementation of a stage, given the rounded results of the stages before it."""
    x = _arguments(case)
    results = stage.definition(x, case.cu_seqlens, case.chunk_size)
    expected = dict(zip(stage.results, results if isinstance(results, tuple) else (results,), strict=True))

    def run(x, cu_seqlens):
        results = stage.run(x, case.chunk_size, cu_seqlens=cu_seqlens, implementation=implementation)
        results = [y for y in (results if isinstance(results, tuple) else (results,)) if y is not None]
        return dict(zip(stage.results, results, strict=True))

    # Results of stages are float32, but for the output, which is in the type of the inputs.
    rounded = stage.results == ("o",) and case.dtype != "float32"
    limit = testing.TOLERANCE[case.dtype] if rounded else testing.STAGE_TOLERANCE
    limits = dict.fromkeys(stage.results, limit)
    of = stage.name, implementation, case.dtype, label
    yield Program.start(pool, of, run, (x, case.cu_seqlens), expected, limits)


def plan(interpret: bool) -> list[functools.partial[Iterator[Program]]]:
    """Return the checks of this machine: plain JAX, and Pallas kernels on a TPU or, if `interpret`, interpreted.

    Each is a function of the pool that compiles its programs.
    """
    on_tpu = jax.default_backend() == "tpu"
    compiled = ON_TPU if on_tpu else ELSEWHERE
    checks: list[functools.partial[Iterator[Program]]] = []
    for check, kernels in ((check_stage, STAGES), (check_operator, OPERATORS)):
        for kernel in kernels:
            for implementation in kernel.implementations:
                if not (implementation == "xla" or on_tpu or interpret):
                    continue
                for label, case in cases(*(compiled if on_tpu or implementation == "xla" else INTERPRETED)):
                    checks.append(functools.partial(check, kernel, implementation, label, case))
                    # As in training: without states, chunks go across the sequences of a pack.
                    if case.lengths and isinstance(kernel, Operator) and kernel.chunked:
                        checks.append(
                            functools.partial(check_operator, kernel, implementation, "stream", case, states=False)
                        )
    return checks
