"""SGLang-JAX's whole engine with chunkwise in it, beside itself: `nox -s host-sglang-jax`.

Each run is a process of its own with a tiny random model, which answers four batches of six requests greedily.
"""

import functools

import pytest

from tests_e2e.hosts.host import run_whole

RUNS = {
    "Qwen3.5, float32, prefixes kept": dict(model="qwen3_5", prefixes=True),
    "Qwen3.5, float32, two devices": dict(model="qwen3_5", devices=2),
    "Qwen3.5, bfloat16, prefixes kept": dict(model="qwen3_5", prefixes=True, dtype="bfloat16"),
    "Kimi-Linear, float32, prefixes kept": dict(model="kimi_linear", prefixes=True),
    "Kimi-Linear, float32, two devices": dict(model="kimi_linear", devices=2),
    "Kimi-Linear, bfloat16, prefixes kept": dict(model="kimi_linear", prefixes=True, dtype="bfloat16"),
    "Ling 2.5, float32": dict(model="ling"),
    "Ling 2.5, float32, two devices": dict(model="ling", devices=2),
}
OPERATORS = {"qwen3_5": "ragged_gated_delta_rule", "kimi_linear": "ragged_kda", "ling": "ragged_simple_gla"}


@functools.cache
def run(ours, **options):
    """Return what the engine answers. Its pools of inputs of convolutions are bfloat16 unless it is told otherwise."""
    types = {"SGLANG_JAX_CONV_STATE_DTYPE": "float32"} if options.get("dtype") != "bfloat16" else {}
    # Its prefills of the other models are kernels for TPUs.
    interpreted = {"PALLAS_INTERPRET": "1"} if options["model"] != "qwen3_5" and not ours else {}
    return run_whole("sglang_jax_engine", options | dict(ours=ours), **types, **interpreted)


def agreement(theirs, ours):
    """Return how much of the answers is the same, up to the first other token of each answer."""
    pairs = [pair for part in theirs["runs"] for pair in zip(theirs["runs"][part], ours["runs"][part], strict=True)]
    found = dict(requests=len(pairs), same_requests=0, tokens=0, same_tokens=0, logprobs=0.0)
    for a, b in pairs:
        same = next((n for n, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y), None)
        found["same_requests"] += same is None
        same = len(a["tokens"]) if same is None else same
        found["tokens"] += len(a["tokens"])
        found["same_tokens"] += same
        gaps = [abs(x - y) for x, y in zip(a["logprobs"][:same], b["logprobs"][:same], strict=True)]
        found["logprobs"] = max(found["logprobs"], *gaps, 0.0)
    return found


def cached(found):
    """Return how many tokens of prompts were found in the cache."""
    return sum(request["cached"] for part in found["runs"].values() for request in part)


@pytest.mark.parametrize("name", RUNS)
def test_the_engine(name, record):
    options = RUNS[name]
    theirs, ours = run(False, **options), run(True, **options)
    seconds = {who: x["seconds"]["others"]["processor"] for who, x in (("theirs", theirs), ("ours", ours))}
    row = agreement(theirs, ours) | dict(cached=cached(ours), seconds=seconds)
    operator, rounds = OPERATORS[options["model"]], options.get("dtype") == "bfloat16"
    assert not theirs["calls"]
    assert set(ours["calls"]) == {f"{operator}, prefill", f"{operator}, decode"}
    assert (cached(ours) > 0) == bool(options.get("prefixes"))
    # The second turns of equal answers find the same in the cache.
    assert rounds or cached(ours) == cached(theirs)
    if rounds:
        # Of two engines that round, neither is right: ours is as near to the engine in float32 as theirs is.
        exact = run(False, **options | {"dtype": "float32"})
        near = {who: agreement(exact, x) for who, x in (("theirs", theirs), ("ours", ours))}
        record("sglang-jax", name, host="SGLang-JAX", **row, **{"from float32": near})
        assert near["ours"]["same_tokens"] > 0.8 * near["theirs"]["same_tokens"]
        return
    record("sglang-jax", name, host="SGLang-JAX", **row)
    assert row["logprobs"] < 1e-4
    assert row["same_tokens"] == row["tokens"]


def test_the_engine_calls_all_that_is_replaced():
    found = [run(True, **options) for name, options in RUNS.items() if name.endswith(("32", "32, prefixes kept"))]
    called = {name for each in found for name in each["places"]}
    # That name is what a process of a scheduler runs: see `test_processes`.
    assert called == {name for name in found[0]["replaced"] if not name.endswith(".run_scheduler_process")}


def test_processes():
    """With SGLang-JAX's default processes ours runs as well: its own default prefill refuses CPUs."""
    threads, processes = (run(True, model="qwen3_5", processes=x) for x in (False, True))
    found = agreement(threads, processes)
    assert found["same_tokens"] == found["tokens"]
