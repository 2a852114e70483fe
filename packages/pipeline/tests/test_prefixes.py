"""Kept prefixes and speculation in one program, in all orders, against the float64 recurrence over a dict of states."""

import itertools

import jax
import numpy as np
import pytest

from chunkwise.pipeline import make_pool, read_states, write_states
from chunkwise.shared.testing.compare import assert_close
from tests.engine import Oracle
from tests.ragged_suite import OPERATORS, PER_CHANNEL, make_tokens, token_of

H, HV, K, V, W, T, BLOCK, SLOTS = 1, 2, 8, 8, 3, 20, 16, 10
ORDERS = sorted(set(itertools.permutations(["hit", "hit", "draft", "rejection", "eviction"])))
TOLERANCE = 2e-6
READ, WRITE = jax.jit(read_states), jax.jit(write_states)
# The other operators share the steps, and compile programs of their own.
THOROUGH = dict(test_all_orders=lambda name: name != "simple_gla")


class Engine:
    """Two requests and a prefix; what a free slot holds is NaN, and a slot that became free last is taken first.

    Attributes:
      pool, oracle: what a program and the recurrence hold.
      slots: of each request, one for every token that it decodes, or one with a ring.
      kept: how many tokens of its last decode each request keeps.
      prefix: the slot of the prefix, or None, and its state outside of the pool.
    """

    def __init__(self, name: str, replay: int):
        self.name, self.replay, self.rng = name, replay, np.random.default_rng(0)
        self.pool = make_pool(SLOTS, HV, K, V, replay=replay, H=H, per_channel=name in PER_CHANNEL)
        self.oracle = Oracle(token_of(name), BLOCK, np.zeros((SLOTS, HV, K, V)))
        self.free, self.slots, self.kept, self.traces = [*range(SLOTS)], [[], []], [1, 1], 0
        options = dict(chunk_size=BLOCK, block_size=BLOCK, implementation="xla", decode_tokens=W if replay else None)

        @jax.jit
        def run(tokens, pool, schedule):
            self.traces += 1
            return OPERATORS[name](**tokens, states=pool, **schedule, **options)

        self.run = run
        prompts = [(r, BLOCK if r else 2, self.take(r), False) for r in (0, 1)]
        self.prefix, self.outside = self.free.pop(), (None, None)
        self.step([], prompts, block=self.prefix)

    def take(self, r: int) -> int:
        """Give new slots to a request, and return a negative slot, from which it starts with zeros."""
        self.release(self.slots[r])
        self.slots[r] = [self.free.pop() for _ in range(1 if self.replay else W)]
        return -1

    def release(self, slots: list[int]) -> None:
        self.pool, self.free = jax.tree.map(np.array, self.pool), self.free + slots
        for x in jax.tree.leaves(self.pool):
            x[slots] = np.nan if np.issubdtype(x.dtype, np.floating) else 7

    def state(self, r: int) -> int:
        """Return the slot of the state of a request after the tokens that it keeps."""
        return self.slots[r][0 if self.replay else self.kept[r] - 1]

    def step(self, decodes, prefills, block: int = -1) -> None:
        """Run a step of (request, tokens, slot to read, whether it has a state), and compare all outputs."""
        rows = [*decodes, *prefills]
        slots = [self.slots[r] for r, *_ in rows]
        int32 = lambda *x: np.array(x, np.int32)
        schedule = dict(
            cu_seqlens=int32(*np.cumsum([0, *(length for _, length, *_ in rows)])),
            state_indices=int32(*slots)[:, 0] if self.replay else int32(*slots),
            has_initial_state=np.array([has for *_, has in rows]), read_indices=int32(*(x[2] for x in rows)),
            num_accepted_tokens=int32(*(self.kept[r] for r, *_ in rows)),
            num_decodes=np.int32(len(decodes)), num_sequences=np.int32(2),
            block_state_indices=int32(*([block] if length == BLOCK else [-1] for _, length, *_ in rows)),
        )  # fmt: skip
        tokens = make_tokens(self.name, self.rng, T, schedule["cu_seqlens"][-1], (K, V), (H, HV))
        want, _ = (self.oracle.run_ringed if self.replay else self.oracle.run)(tokens, schedule)
        o, self.pool = self.run(tokens, self.pool, schedule)
        assert_close("o", o[0, : len(want)], want, TOLERANCE)

    def decode(self, keep: int, other: int) -> None:
        """Request 0 guesses and keeps some of its tokens, while request 1 decodes one."""
        self.step([(0, W, self.state(0), True), (1, 1, self.state(1), True)], [])
        self.kept = [keep, 1]

    def hit(self, prefill: bool) -> None:
        """Request 1 ends, and a new one starts from the prefix, which comes back if it is outside."""
        self.take(1)
        if self.prefix is None:
            self.prefix = self.free.pop()
            state, exact = self.outside
            self.pool = WRITE(self.pool, np.array([self.prefix], np.int32), state)
            self.oracle.states[self.prefix], self.oracle.drafts[self.prefix] = exact, []
        running, new = (0, 1, self.state(0), True), (1, 2, self.prefix, True)
        self.step([running] if prefill else [running, new], [new] if prefill else [])
        # The requests change places, so that guesses follow a hit.
        self.kept = [1, 1 if prefill else 2][::-1]
        self.slots.reverse()

    def evict(self) -> None:
        """Move the prefix out, and let its slot hold anything."""
        if self.prefix is not None:
            state, exact = READ(self.pool, np.array([self.prefix], np.int32)), self.oracle.states[self.prefix]
            assert_close("prefix", state[0], exact, TOLERANCE)
            self.outside, _ = (state, exact), self.release([self.prefix])
            self.prefix = None


@pytest.mark.parametrize("replay", [0, 8])
@pytest.mark.parametrize("name", OPERATORS)
def test_all_orders(name, replay):
    """A hit, guesses that are kept, guesses that are rejected, an eviction, and a hit again, over one pool."""
    engine = Engine(name, replay)
    for i, order in enumerate(ORDERS):
        for event in order:
            if event == "hit":
                engine.hit(prefill=i % 2 == 0)
            elif event == "eviction":
                engine.evict()
            else:
                engine.decode(W if event == "draft" else 1 + i % 2, 1)
    assert engine.traces == 1
