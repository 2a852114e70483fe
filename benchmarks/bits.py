"""A fingerprint of every operator on a fixed set of small cases, to show that a change keeps all results to the bit.

`python -m benchmarks bits --json before.json` writes the fingerprints, and after a change `python -m benchmarks bits
--against before.json` names every result whose bits differ. The file also runs by itself (`python benchmarks/bits.py`),
with any version of the packages on the path.

The cases are outputs, final states and gradients under every implementation: rows, packed batches with states and
without, segments, raw gates, a sequence with NaN, decoding, and serving steps. Results depend on the machine and on the
release of JAX, so both files must come from one machine.
"""

import argparse
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise import pipeline

H, HV, K, V = 1, 2, 24, 40
KERNELS = ("staged", "fused")
DELTA_RULES = ("gated_delta_rule", "kda")
PER_CHANNEL = ("gla", "kda")
LENGTHS = (5, 0, 19, 9)  # and padding after them


def inputs(operator: str, B: int, T: int, dtype=jnp.float32) -> dict[str, jax.Array]:
    """Return the tensors of an operator, seeded."""
    normal = np.random.default_rng(7).standard_normal
    q, k, v = (normal((B, T, heads, size)) for heads, size in ((H, K), (H, K), (HV, V)))
    gate = np.minimum(normal((B, T, HV, K) if operator in PER_CHANNEL else (B, T, HV)), -0.01)
    gate[:, 3::7] = -30.0
    x = {name: jnp.asarray(y / np.sqrt(K), dtype) for name, y in dict(q=q, k=k, v=v).items()}
    x["g"] = jnp.asarray(gate, jnp.float32)
    if operator in DELTA_RULES:
        x["beta"] = jnp.asarray(1.9 / (1.0 + np.exp(normal((B, T, HV)))), jnp.float32)
    return x


def cases(operator: str, implementation: str) -> Iterator[tuple[str, dict, dict]]:
    """Yield the name of a case, its differentiable arguments and its other arguments."""
    bounds = jnp.asarray(np.cumsum((0, *LENGTHS)), jnp.int32)
    states = jnp.asarray(np.random.default_rng(8).standard_normal((len(LENGTHS), HV, K, V)), jnp.float32)
    x = inputs(operator, 2, 37)
    yield "rows", x | {"initial_state": states[:2]}, {"output_final_state": True}
    yield "bfloat16", inputs(operator, 1, 37, jnp.bfloat16), {}
    x = inputs(operator, 1, 37)
    spoilt = x | {"k": x["k"].at[0, 7].set(jnp.nan)}
    packed = {"cu_seqlens": bounds}
    yield "pack with states", spoilt | {"initial_state": states}, packed | {"output_final_state": True}
    yield "pack", spoilt, packed
    ids = jnp.asarray(np.repeat([[0, 1, 2, -1, 4]], [6, 9, 3, 4, 15], axis=1), jnp.int32)
    yield "segments", spoilt | {"initial_state": states[:1]}, {"segment_ids": ids, "output_final_state": True}
    if operator in DELTA_RULES:
        raw = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
        A_log = jnp.asarray(np.linspace(-1.0, 1.0, HV), jnp.float32)
        yield "raw gates", x | {"A_log": A_log}, raw
    if operator == "simple_gla":
        gamma = jnp.asarray(np.linspace(-0.5, -0.01, HV), jnp.float32)
        yield "constant gates", {n: y for n, y in x.items() if n != "g"} | {"g_gamma": gamma}, {"chunk_size": 16}


def with_gradients(function: Callable, x: dict, others: dict, implementation: str) -> Callable[[dict], dict]:
    """Return a function of the differentiable arguments to all results and gradients, by name."""

    def run(x):
        o, state = function(**x, **others, implementation=implementation)
        return {"o": o} if state is None else {"o": o, "final_state": state}

    def both(x):
        results, pull = jax.vjp(run, x)
        weights = jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape), results)
        (gradients,) = pull(jax.tree.map(lambda w, y: w.astype(y.dtype), weights, results))
        return results | {f"d{name}": y for name, y in gradients.items()}

    return both


def step(function: Callable, operator: str, implementation: str) -> tuple[Callable[[dict], dict], dict]:
    """Return a serving step of two decodes and a prefill over a pool, and its arguments."""
    x = inputs(operator, 1, 37)
    x["states"] = jnp.asarray(np.random.default_rng(9).standard_normal((6, HV, K, V)), jnp.float32)
    fixed = dict(
        cu_seqlens=jnp.asarray([0, 1, 3, 33], jnp.int32),
        state_indices=jnp.asarray([[4, 1], [2, 5], [0, -1]], jnp.int32),
        num_decodes=jnp.int32(2),
        has_initial_state=jnp.asarray([True, True, False]),
        implementation=implementation,
    )

    def run(x):
        o, pool = function(**x, **fixed)
        return {"o": o, "pool": pool}

    return run, x


def programs() -> Iterator[tuple[str, str, Callable[[dict], dict], dict]]:
    """Yield the name, the implementation, the function and the arguments of every program."""
    for operator in ("simple_gla", "gla", "gated_delta_rule", "kda"):
        chunk, recurrent = (getattr(pipeline, f"{kind}_{operator}") for kind in ("chunk", "recurrent"))
        for implementation in ("xla", *KERNELS):
            for name, x, others in cases(operator, implementation):
                others = {"chunk_size": 16} | others
                run = with_gradients(chunk, x, others, implementation)
                yield f"chunk_{operator}, {implementation}, {name}", implementation, run, x
            ragged = getattr(pipeline, f"ragged_{operator}", None)
            if ragged is not None:
                yield f"ragged_{operator}, {implementation}", implementation, *step(ragged, operator, implementation)
        for implementation in ("xla", "fused"):
            for name, x, others in cases(operator, implementation):
                if set(x) | set(others) <= set(inspect.signature(recurrent).parameters):
                    run = with_gradients(recurrent, x, others, implementation)
                    yield f"recurrent_{operator}, {implementation}, {name}", implementation, run, x


def fingerprints(only: str = "", before: dict[str, str] | None = None) -> dict[str, str]:
    """Return a digest of every result, by the names of the program and the result; print differences at once."""
    found = {}
    for name, implementation, run, x in programs():
        if only not in name:
            continue
        # Nobody runs interpreted kernels for speed, so they are compiled without optimisation, in half the time.
        jax.config.update("jax_disable_most_optimizations", implementation in KERNELS)
        for result, y in sorted(jax.jit(run)(x).items()):
            y = np.asarray(y)
            # All NaNs count as equal.
            y = np.where(np.isnan(y), np.full((), np.nan, y.dtype), y)
            key = f"{name}: {result}"
            found[key] = hashlib.sha256(y.tobytes()).hexdigest()[:16]
            if before is not None and before.get(key) != found[key]:
                print(f"differs: {key}" if key in before else f"not in the other file: {key}", flush=True)
        jax.clear_caches()
        print(name, file=sys.stderr, flush=True)
    jax.config.update("jax_disable_most_optimizations", False)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", type=Path, help="write the fingerprints here")
    parser.add_argument("--against", type=Path, help="compare with these; exit code 1 if a result differs")
    parser.add_argument("--only", default="", help="programs whose name contains this")


def main(options: argparse.Namespace) -> int:
    """Write or compare the fingerprints; return 1 if a result differs."""
    only, before = options.only, json.loads(options.against.read_text()) if options.against else None
    found = fingerprints(only, before)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if before is None:
        print(f"{len(found)} results")
        return 0
    missing = [name for name in before if only in name and name not in found]
    same = sum(before.get(name) == digest for name, digest in found.items())
    print(f"{same} of {len(found)} results are the same to the bit; {len(missing)} of the other file are missing.")
    return int(same < len(found) or bool(missing))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add_options(parser)
    sys.exit(main(parser.parse_args()))
