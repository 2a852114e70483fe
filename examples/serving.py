"""A small serving engine: continuous batching over gated DeltaNet layers, by one compiled step.

    python -m pip install ./packages/layers
    python examples/serving.py
    python examples/serving.py --states int8 --ring 16            # a third of the bytes of bfloat16

Requests arrive over time, and a step computes at most `budget` tokens. Requests that generate come first, with one
token each. The rest of the budget goes to prompts, as many tokens of them as fit: a long prompt takes several steps,
and holds nobody up.

A layer remembers a request by a state of fixed size, whatever the length of its text. So memory is simple: a pool of
states, and a slot of it for every request. The compiled step updates the pools in place. Which request does what is
data, so that no mixture of requests compiles anything anew.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from chunkwise.layers import (
    Cache,
    GatedDeltaNetConfig,
    GatedDeltaNetWeights,
    Step,
    empty_pool,
    init_gated_delta_net,
    ragged_gated_delta_net,
)
from chunkwise.pipeline import pool_formats

VOCABULARY = 97
CONFIG = GatedDeltaNetConfig(D=32, H=2, HV=4, K=16, V=16)


class Model(NamedTuple):
    """A language model of nothing but gated DeltaNet layers: embedding [vocabulary, D] and head [D, vocabulary]."""

    embedding: jax.Array
    layers: tuple[GatedDeltaNetWeights, ...]
    head: jax.Array


def rms_norm(x):
    """Return x with an RMS of 1 in its last dimension."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def run_model(model: Model, pools: tuple[Cache, ...], tokens, step: Step):
    """Return logits for what follows each of the tokens [1, T], and the pools of all layers after the step."""
    x, after = model.embedding[tokens], []
    for w, pool in zip(model.layers, pools, strict=True):
        y, pool = ragged_gated_delta_net(rms_norm(x), w, CONFIG, pool, step)
        x, after = x + y, [*after, pool]
    return rms_norm(x) @ model.head, tuple(after)


@dataclass
class Request:
    """A prompt, how many tokens are wanted after it, and the step before which it arrives; then what came of it."""

    id: int
    prompt: list[int]
    wanted: int
    arrival: int = 0
    slot: int | None = None
    generated: list[int] = field(default_factory=list)
    # How many tokens of the text the state has seen, and in how many steps.
    computed: int = 0
    steps: int = 0

    def rest(self) -> list[int]:
        """Return the tokens that the state has not seen: what is left of the prompt, or the last generated one."""
        return (self.prompt + self.generated)[self.computed :]


class Engine:
    """Gives slots to requests and packs steps, for as many requests at once as the pools have slots.

    Args:
      model: weights.
      pools: of all layers; the engine takes them over.
      budget: tokens of a step, at least as many as there are slots.
      run: what runs the model, as `run_model` does.
    """

    def __init__(self, model, pools: tuple[Cache, ...], budget: int, run=run_model):
        self.model, self.budget, self.N = model, budget, pools[0].state.shape[0]
        self.free, self.running, self.steps, self.traces = list(range(self.N)), [], 0, 0

        def compute(pools, model, tokens, step):
            self.traces += 1  # Python comes here when JAX traces the step, and never again.
            logits, pools = run(model, pools, tokens, step)
            return jnp.argmax(logits[0], axis=1), pools

        # The pools are donated and laid out as kernels take them, so the step writes into them.
        rows = pool_formats(pools)
        self.pools = jax.device_put(pools, rows)
        self.compiled = jax.jit(compute, donate_argnums=0, out_shardings=(None, rows))
        # A step without requests changes no slot, but it compiles the program before the first request comes.
        self.compute([])

    def compute(self, parts: list[tuple[Request, list[int]]]) -> list[int]:
        """Run a step over some tokens of some requests, and return the token that follows those of each request."""
        n, N, ends = len(parts), self.N, np.cumsum([0, *(len(part) for _, part in parts)])
        tokens = np.zeros((1, self.budget), np.int32)
        tokens[0, : ends[-1]] = [token for _, part in parts for token in part]
        # The shapes are always those of a full step. Sequences that do not exist are empty, and have no slot.
        step = Step(
            cu_seqlens=np.full(N + 1, ends[-1], np.int32), state_indices=np.full(N, -1, np.int32),
            has_initial_state=np.zeros(N, bool), num_decodes=np.int32(sum(bool(r.generated) for r, _ in parts)),
        )  # fmt: skip
        step.cu_seqlens[: n + 1] = ends
        step.state_indices[:n] = [request.slot for request, _ in parts]
        # A new request starts from zeros. Nobody needs to clear what its slot still holds.
        step.has_initial_state[:n] = [request.computed > 0 for request, _ in parts]
        following, self.pools = self.compiled(self.pools, self.model, tokens, step)
        return np.asarray(following)[ends[1:] - 1].tolist()

    def step(self, waiting: list[Request]) -> None:
        """Admit requests that wait, as long as slots are free; run a step; let go of requests that are done."""
        while self.free and waiting and waiting[0].arrival <= self.steps:
            request = waiting.pop(0)
            if not request.prompt:
                raise ValueError(f"`prompt` must have a token; got none in request {request.id}, which is dropped.")
            request.slot = self.free.pop()
            self.running.append(request)

        # The operator wants those that decode first; the sort keeps the order of the others.
        self.running.sort(key=lambda request: not request.generated)
        parts, room = [], self.budget
        for request in self.running:
            if part := request.rest()[:room]:
                parts.append((request, part))
                room -= len(part)

        for (request, part), token in zip(parts, self.compute(parts), strict=True):
            request.computed += len(part)
            request.steps += 1
            # In the middle of a prompt the next token is known.
            if request.rest():
                continue
            if len(request.generated) < request.wanted:
                request.generated.append(token)
            if len(request.generated) >= request.wanted:
                self.running.remove(request)
                self.free.append(request.slot)
        self.steps += 1

    def serve(self, requests: list[Request]) -> None:
        """Run steps until all requests are done."""
        waiting = sorted(requests, key=lambda request: request.arrival)
        while waiting or self.running:
            self.step(waiting)


def random_model(layers: int = 2) -> Model:
    """Return a model of random weights."""
    first, last, *keys = jax.random.split(jax.random.key(0), 2 + layers)
    embedding = jax.random.normal(first, (VOCABULARY, CONFIG.D))
    head = jax.random.normal(last, (CONFIG.D, VOCABULARY)) * CONFIG.D**-0.5
    return Model(embedding, tuple(init_gated_delta_net(key, CONFIG) for key in keys), head)


def empty_pools(model: Model, slots: int, states: str = "float32", ring: int = 0) -> tuple[Cache, ...]:
    """Return a pool for every layer, with states of a type, and a ring of some tokens for every slot."""
    return tuple(empty_pool(CONFIG, slots, state_dtype=states, replay=ring) for _ in model.layers)


def main(arguments: list[str]) -> tuple[Model, list[Request]]:
    """Serve eight random requests with three slots and 24 tokens a step, and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    types = ("float32", "bfloat16", "float16", "int8")
    parser.add_argument("--states", choices=types, default="float32", help="type of the states (%(default)s)")
    parser.add_argument("--ring", type=int, default=0, help="tokens that a slot holds beside its state (%(default)s)")
    o = parser.parse_args(arguments)
    model, rng, console = random_model(), np.random.default_rng(1), Console()
    # Two requests arrive in every third step.
    sizes = enumerate(rng.integers([2, 4], [60, 24], (8, 2)).tolist())
    requests = [
        Request(i, rng.integers(VOCABULARY, size=size).tolist(), wanted, i // 2 * 3) for i, (size, wanted) in sizes
    ]
    engine = Engine(model, empty_pools(model, 3, o.states, o.ring), budget=24)
    start = time.perf_counter()
    engine.serve(requests)
    seconds = time.perf_counter() - start
    assert engine.traces == 1, "every mixture of requests must run the program that was compiled first"

    table = Table("request", "arrival", "prompt tokens", "generated tokens", "slot", "steps")
    for r in requests:
        table.add_row(*(str(x) for x in (r.id, r.arrival, len(r.prompt), len(r.generated), r.slot, r.steps)))
    console.print(table)
    read, written = sum(len(r.prompt) for r in requests), sum(len(r.generated) for r in requests)
    console.print(f"{engine.steps} steps of one compiled program took {seconds:.2f} s:")
    console.print(f"{read / seconds:,.0f} prompt tokens/s and {written / seconds:,.0f} generated tokens/s")
    return model, requests


if __name__ == "__main__":
    main(sys.argv[1:])
