"""A small serving engine: continuous batching over gated DeltaNet layers, by one compiled step.

    python examples/serving.py

Requests arrive over time, and a step computes at most `budget` tokens. Requests that generate come first, with one
token each. The rest of the budget goes to prompts, as many tokens of them as fit: a long prompt takes several steps,
and holds nobody up.

A layer remembers a request by a state of fixed size, whatever the length of its text. So memory is simple: a pool of
states, and a slot of it for every request. The compiled step updates the pools in place. Which request does what is
data, so that no mixture of requests compiles anything anew.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from chunkwise.causal_conv1d import causal_conv1d_update
from chunkwise.norm_gated import rms_norm_gated
from chunkwise.pipeline import ragged_gated_delta_rule
from gated_delta_net import Weights, convolve_heads


class Pool(NamedTuple):
    """The last inputs of a layer's convolution [slots, W - 1, channels], and its states [slots, HV, K, V]."""

    conv: jax.Array
    states: jax.Array


class Model(NamedTuple):
    """A language model of nothing but gated DeltaNet layers: embedding [vocabulary, D] and head [D, vocabulary]."""

    embedding: jax.Array
    layers: tuple[Weights, ...]
    head: jax.Array


def serving_layer(x, w: Weights, pool: Pool, slots: dict):
    """Run a layer over the tokens of a step, as `gated_delta_net` does over those of one text.

    Args:
      x: hidden states [1, T, D], those of all requests one after another.
      w: weights.
      pool: of this layer.
      slots: which tokens belong to which request, and where its state is: arguments of the operator by name. The
        convolution takes the same.

    Returns:
      y [1, T, D], and the pool after the step.
    """
    (q, k, v), conv = convolve_heads(
        x, (w.q, w.k, w.v), lambda inputs: causal_conv1d_update(inputs, pool.conv, w.conv, **slots)
    )
    o, states = ragged_gated_delta_rule(
        q, k, v, x @ w.a, x @ w.b, pool.states, **slots, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        A_log=w.A_log, dt_bias=w.dt_bias, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    y = rms_norm_gated(o, jnp.einsum("btd,dhv->bthv", x, w.z), w.norm, eps=1e-6)
    return jnp.einsum("bthv,hvd->btd", y, w.out), Pool(conv, states)


def rms_norm(x):
    """Return x with an RMS of 1 in its last dimension."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def run_model(model: Model, pools: tuple[Pool, ...], tokens, slots: dict):
    """Return logits for what follows each of the tokens [1, T], and the pools of all layers after the step."""
    x, after = model.embedding[tokens], []
    for w, pool in zip(model.layers, pools, strict=True):
        y, pool = serving_layer(rms_norm(x), w, pool, slots)
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

    def __init__(self, model, pools: tuple[Pool, ...], budget: int, run=run_model):
        self.model, self.pools, self.budget, self.N = model, pools, budget, len(pools[0].states)
        self.free, self.running, self.steps, self.traces = list(range(self.N)), [], 0, 0

        def step(pools, model, tokens, slots):
            self.traces += 1  # Python comes here when JAX traces the step, and never again.
            logits, pools = run(model, pools, tokens, slots)
            return jnp.argmax(logits[0], axis=1), pools

        # The pools are donated, so the step writes into them.
        self.compiled = jax.jit(step, donate_argnums=0)
        # A step without requests changes no slot, but it compiles the program before the first request comes.
        self.compute([])

    def compute(self, parts: list[tuple[Request, list[int]]]) -> list[int]:
        """Run a step over some tokens of some requests, and return the token that follows those of each request."""
        n, N, ends = len(parts), self.N, np.cumsum([0, *(len(part) for _, part in parts)])
        tokens = np.zeros((1, self.budget), np.int32)
        tokens[0, : ends[-1]] = [token for _, part in parts for token in part]
        # The shapes are always those of a full step. Sequences that do not exist are empty, and have no slot.
        slots = dict(
            cu_seqlens=np.full(N + 1, ends[-1], np.int32), state_indices=np.full(N, -1, np.int32),
            has_initial_state=np.zeros(N, bool), num_decodes=np.int32(sum(bool(r.generated) for r, _ in parts)),
        )  # fmt: skip
        slots["cu_seqlens"][: n + 1] = ends
        slots["state_indices"][:n] = [request.slot for request, _ in parts]
        # A new request starts from zeros. Nobody needs to clear what its slot still holds.
        slots["has_initial_state"][:n] = [request.computed > 0 for request, _ in parts]
        following, self.pools = self.compiled(self.pools, self.model, tokens, slots)
        return np.asarray(following)[ends[1:] - 1].tolist()

    def step(self, waiting: list[Request]) -> None:
        """Admit requests that wait, as long as slots are free; run a step; let go of requests that are done."""
        while self.free and waiting and waiting[0].arrival <= self.steps:
            request = waiting.pop(0)
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
            if not request.rest():
                request.generated.append(token)
            if len(request.generated) == request.wanted:
                self.running.remove(request)
                self.free.append(request.slot)
        self.steps += 1

    def serve(self, requests: list[Request]) -> None:
        """Run steps until all requests are done."""
        waiting = sorted(requests, key=lambda request: request.arrival)
        while waiting or self.running:
            self.step(waiting)


def random_model(vocabulary=97, layers=2, D=32, H=2, HV=4, K=16, V=16, W=4) -> Model:
    """Return a model of random weights."""
    normal = lambda *shape, rows=D: jnp.asarray(rng.standard_normal(shape) * rows**-0.5, jnp.float32)
    rng = np.random.default_rng(0)
    weights = tuple(
        Weights(
            q=normal(D, H, K), k=normal(D, H, K), v=normal(D, HV, V), z=normal(D, HV, V), a=normal(D, HV),
            b=normal(D, HV), conv=normal(2 * H * K + HV * V, W, rows=W), A_log=normal(HV), dt_bias=normal(HV),
            norm=jnp.ones(V), out=normal(HV, V, D, rows=HV * V),
        )
        for _ in range(layers)
    )  # fmt: skip
    return Model(normal(vocabulary, D, rows=1), weights, normal(D, vocabulary))


def empty_pools(layers, slots: int) -> tuple[Pool, ...]:
    """Return a pool for every layer, in float32."""
    sizes = [(w.conv.shape[1] - 1, w.conv.shape[0], w.v.shape[1], w.k.shape[2], w.v.shape[2]) for w in layers]
    return tuple(Pool(jnp.zeros((slots, *size[:2])), jnp.zeros((slots, *size[2:]))) for size in sizes)


def main() -> tuple[Model, list[Request]]:
    """Serve eight random requests with three slots and 24 tokens a step, and print what was done."""
    model, rng, console = random_model(), np.random.default_rng(1), Console()
    # Two requests arrive in every third step.
    sizes = enumerate(rng.integers([2, 4], [60, 24], (8, 2)).tolist())
    requests = [Request(i, rng.integers(97, size=size).tolist(), wanted, i // 2 * 3) for i, (size, wanted) in sizes]
    engine = Engine(model, empty_pools(model.layers, slots=3), budget=24)
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
    main()
