"""Inputs on which other implementations failed, each with the report, and our errors against float64.

A case is a function from an implementation and the type of the tensors to pairs of our results and the expected
results: from the token recurrence in float64, or from the same tokens without the part of the input that made others
fail.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.pipeline import (
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    chunk_simple_gla,
    ragged_gated_delta_rule,
)
from chunkwise.shared.testing.compare import error
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference

IMPLEMENTATIONS, TYPES = ("xla", "fused"), ("float32", "bfloat16")


@dataclass(frozen=True)
class Report:
    """A report about another implementation.

    Attributes:
      input: the input, in a few words.
      broke: the fault there.
      repository, number: the repository and number of the issue or pull request.
      run: from an implementation and a type to pairs of our arrays and expected arrays.
    """

    input: str
    broke: str
    repository: str
    number: int
    run: Callable[[str, str], Iterator[tuple]]

    @property
    def link(self) -> str:
        """The report, as a link of Markdown."""
        return f"[{self.repository.split('/')[1]} #{self.number}](https://github.com/{self.repository}/issues/{self.number})"

    def error(self, implementation: str, dtype: str) -> float:
        """Return the largest error of an array."""
        return max(error(ours, wanted) for ours, wanted in self.run(implementation, dtype))


REPORTS: dict[str, Report] = {}


def report(name: str, input: str, broke: str, repository: str, number: int) -> Callable:
    """Return a decorator that makes a report from a function."""

    def add(run):
        REPORTS[name] = Report(input, broke, repository, number, run)
        return run

    return add


def _whole(operator: Callable, x: dict, implementation: str, **options) -> Iterator[tuple]:
    """Yield outputs and final states beside the token recurrence of the same arrays."""
    o, state = operator(**x, output_final_state=True, implementation=implementation, **options)
    options.pop("chunk_size", None)
    yield from zip((o, state), reference(**x, **options), strict=True)


@report("near-collinear keys", "keys 1e-3 apart, no decay, step size 1", "unstable, large outputs",
        "fla-org/flash-linear-attention", 389)  # fmt: skip
def _near_collinear(implementation, dtype):
    x, rng = make_inputs(T=256, gate="zero", beta=1.0, dtype=jnp.dtype(dtype)), np.random.default_rng(1)
    k = rng.standard_normal((1, 1, 1, 64)) + 1e-3 * rng.standard_normal((1, 256, 1, 64))
    x["k"] = jnp.asarray(k / np.linalg.norm(k, axis=-1, keepdims=True), x["k"].dtype)
    yield from _whole(chunk_gated_delta_rule, x, implementation)


@report("rounded unit keys", "a repeated key that rounding makes longer than 1, step size 2",
        "the inverse becomes unstable", "fla-org/flash-linear-attention", 806)  # fmt: skip
def _rounded_keys(implementation, dtype):
    x = make_inputs(T=256, K=7, V=7, gate="zero", beta=2.0, dtype=jnp.dtype(dtype))
    x |= {name: jnp.ones_like(x[name]) for name in "qk"}
    yield from _whole(chunk_gated_delta_rule, x, implementation, use_qk_l2norm_in_kernel=True)


@report("tiny decays", "decays of 6.5e-12 a token and channel", "0 times infinity, NaN", "pytorch/executorch", 21417)
def _tiny_decays(implementation, dtype):
    x = make_inputs(T=128, per_channel=True, erase="gate", dtype=jnp.dtype(dtype))
    x["g"] = jnp.where(jnp.arange(128)[None, :, None, None] % 3 == 1, np.log(6.5e-12), x["g"]).astype(jnp.float32)
    yield from _whole(chunk_gdn2, x, implementation)


@report("strong gates over a pack's boundary", "documents of 63 and 65 tokens, gates of -5 nats",
        "exp of a positive number, the whole output NaN", "sgl-project/sglang-jax", 1587)  # fmt: skip
def _packed_boundary(implementation, dtype):
    x, ends = make_inputs(T=128, per_channel=True, dtype=jnp.dtype(dtype)), (0, 63, 128)
    x["g"] = jnp.full_like(x["g"], -5.0)
    o, states = chunk_kda(
        **x, cu_seqlens=jnp.array(ends, jnp.int32), output_final_state=True, implementation=implementation
    )
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        want, state = reference(**{name: y[:, begin:end] for name, y in x.items()})
        yield from ((o[:, begin:end], want), (states[n : n + 1], state))


@report("large decay rates", "Mamba-2 with gates down to -80 nats a token", "a sum of gates rounds up, infinity",
        "vllm-project/vllm", 37501)  # fmt: skip
def _large_rates(implementation, dtype):
    x = make_inputs(T=256, gate="logsigmoid*100", dtype=jnp.dtype(dtype))
    del x["beta"]
    yield from _whole(chunk_simple_gla, x, implementation)


@report("resets", "a gate of -inf between values of 2^14 and 2^-13", "the state goes on into the next document",
        "pytorch/torchtitan", 3984)  # fmt: skip
def _resets(implementation, dtype):
    x = make_inputs(T=96, gate="zero", beta=0.5, per_channel=True, dtype=jnp.dtype(dtype))
    size = jnp.where(jnp.arange(96) < 40, 2.0**14, 2.0**-13).astype(x["v"].dtype)
    x |= {"v": x["v"] * size[None, :, None, None], "g": x["g"].at[:, 40].set(-jnp.inf)}
    o, _ = chunk_kda(**x, implementation=implementation)
    after = {name: y[:, 40:] for name, y in x.items()}
    yield o[:, 40:], reference(**after | {"g": jnp.zeros_like(after["g"])})[0]


@report("empty sequences", "boundaries 0, 0, 40, 40, 100, 100", "illegal memory access, NaN",
        "fla-org/flash-linear-attention", 103)  # fmt: skip
def _empty_sequences(implementation, dtype):
    x, ends = make_inputs(T=100, num_states=5, dtype=jnp.dtype(dtype)), (0, 0, 40, 40, 100, 100)
    start = x.pop("initial_state")
    o, states = chunk_gated_delta_rule(
        **x, initial_state=start, cu_seqlens=jnp.array(ends, jnp.int32), output_final_state=True,
        implementation=implementation,
    )  # fmt: skip
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            yield states[n], start[n]
            continue
        part = {name: y[:, begin:end] for name, y in x.items()}
        want, state = reference(**part, initial_state=start[n : n + 1])
        yield from ((o[:, begin:end], want), (states[n : n + 1], state))


@report("reused slots", "a new request in a slot that holds the state of an old one, here NaN",
        "the old state leaks", "vllm-project/tpu-inference", 2416)  # fmt: skip
def _reused_slots(implementation, dtype):
    x = make_inputs(T=72, dtype=jnp.dtype(dtype))
    i = lambda *n: jnp.array(n, jnp.int32)
    # A decode that continues from a state of zeros, and a new request of 71 tokens.
    pool = jnp.full((3, 1, 64, 64), jnp.nan).at[0].set(0.0)
    o, pool = ragged_gated_delta_rule(
        **x, states=pool, cu_seqlens=i(0, 1, 72), state_indices=i(0, 1), num_decodes=i(1)[0],
        has_initial_state=jnp.array([True, False]), implementation=implementation,
    )  # fmt: skip
    want, state = reference(**{name: y[:, 1:] for name, y in x.items()})
    yield from ((o[:, 1:], want), (pool[1:2], state))


@report("few requests in a wide step", "one decode in the arrays of 16", "the decode hangs",
        "vllm-project/tpu-inference", 3356)  # fmt: skip
def _wide_step(implementation, dtype):
    x = make_inputs(T=16, num_states=1, dtype=jnp.dtype(dtype))
    start, i = x.pop("initial_state"), lambda *n: jnp.array(n, jnp.int32)
    pool = jnp.zeros((17, 1, 64, 64)).at[3].set(start[0])
    o, pool = ragged_gated_delta_rule(
        **x, states=pool, cu_seqlens=i(0, *[1] * 16), state_indices=i(3, *[-1] * 15), num_decodes=i(1)[0],
        num_sequences=i(1)[0], implementation=implementation,
    )  # fmt: skip
    want, state = reference(**{name: y[:, :1] for name, y in x.items()}, initial_state=start)
    yield from ((o[:, :1], want), (pool[3:4], state))


@report("A_log that overflows", "A_log = 100 and a bias of -200: the decay is 1", "infinity times 0, NaN",
        "ohdearquant/lattice", 314)  # fmt: skip
def _large_A_log(implementation, dtype):
    x = make_inputs(T=64, gate="zero", dtype=jnp.dtype(dtype))
    o, _ = chunk_gated_delta_rule(
        **x, use_gate_in_kernel=True, A_log=jnp.array([100.0]), dt_bias=jnp.array([-200.0]),
        implementation=implementation,
    )  # fmt: skip
    yield o, reference(**x)[0]


@report("a saturated bounded gate", "KDA, A_log = 100, gates bounded by -7", "0 times infinity in the backward",
        "fla-org/flash-linear-attention", 1007)  # fmt: skip
def _saturated_gate(implementation, dtype):
    x = make_inputs(T=64, per_channel=True, dtype=jnp.dtype(dtype))
    raw = jnp.where(x["g"] < -0.7, -1.0, 1.0)

    def run(raw, v):
        o, _ = chunk_kda(
            **x | {"g": raw, "v": v}, use_gate_in_kernel=True, A_log=jnp.array([100.0]), lower_bound=-7.0,
            implementation=implementation,
        )  # fmt: skip
        return jnp.sum(o.astype(jnp.float32)), o

    (draw, _), o = jax.grad(run, (0, 1), has_aux=True)(raw, x["v"])
    yield o, reference(**x | {"g": jnp.where(raw > 0, -7.0, 0.0)})[0]
    # The sigmoid is flat there, so the gradient is zero.
    yield draw, np.zeros(raw.shape)


def measure(name: str) -> list[dict]:
    """Return the rows of a case: the largest error under each implementation, in each type."""
    one = REPORTS[name]
    return [{"form": f"{x}, {dtype}", "error": one.error(x, dtype)} for x in IMPLEMENTATIONS for dtype in TYPES]
