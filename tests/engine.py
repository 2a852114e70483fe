"""A random serving engine, and the oracle of its steps: token by token in float64, over a dict of states by slot."""

import dataclasses
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import numpy as np

# Tokens of a prefill in one step: none, a few, about a chunk of 16 tokens, and about blocks of 32 tokens.
PREFILLS = (0, 1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130)
# The sequences of a step: two decodes, one of them of two guesses, and three prefills, of which the first is empty. The
# last entry is of no sequence.
SEQUENCES = dict(
    state_indices=np.array([[4, -1], [2, 3], [9, 0], [5, 0], [-1, 7], [99, 99]], np.int32),
    has_initial_state=np.array([True, True, True, False, True, False]),
    num_decodes=2,
    num_sequences=5,
    num_accepted_tokens=np.array([1, 2, 1, 1, 2, 77], np.int32),
)


def linear_attention(S: np.ndarray, **x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the state after a token of linear attention, and the token's output; a `token` function of `Oracle`.

    Args:
      S: the state [HV, K, V].
      **x: q, k, v and g of a token; for a delta rule also beta, or beta and p, or b and w.
    """
    HV, K, V = S.shape
    decay = np.exp(x["g"])
    S = S * (decay[:, :, None] if decay.ndim == 2 else decay[:, None, None])
    q, k, p = (np.repeat(y, HV // y.shape[0], axis=0) for y in (x["q"], x["k"], x.get("p", x["k"])))
    v = x["v"]
    if "b" in x:
        v = x["w"] * v - np.einsum("hkv,hk->hv", S, x["b"] * p)
    elif "beta" in x:
        v = x["beta"][:, None] * (v - np.einsum("hkv,hk->hv", S, p))
    S = S + k[:, :, None] * v[:, None]
    return S, K**-0.5 * np.einsum("hkv,hk->hv", S, q)


def convolution(weight: np.ndarray, bias: np.ndarray) -> Callable:
    """Return a `token` function of `Oracle` for a causal convolution.

    The function takes as its state the last W - 1 inputs [W - 1, D], and the next input x [D]; it returns the new state
    and the output. The weight is [D, W], the bias [D].
    """

    def token(S, x):
        window = np.concatenate([S, x[None]])
        return window[1:], np.sum(window * weight.T, axis=0) + bias

    return token


class Oracle:
    """An operator token by token in float64, over a dict of states by slot.

    Attributes:
      states: the state of every slot.
      drafts: over a pool with a ring, the states after the tokens of the last decode of a slot.
    """

    def __init__(self, token: Callable, block_size: int, pool: np.ndarray):
        """Start from a pool [slots, ...]; `block_size` is the number of tokens of a block.

        `token` takes a state, and by name a token of every tensor, and returns the state after the token and its
        output.
        """
        self.token, self.block_size = token, block_size
        self.states = {slot: state.astype(np.float64) for slot, state in enumerate(pool)}
        self.drafts: dict[int, list[np.ndarray]] = {}

    def run_ringed(self, tokens, schedule) -> tuple[np.ndarray, set[int]]:
        """Run a step over a pool with a ring: a decode has one slot, and a later step accepts some of its tokens."""
        before, drafts, written, outputs = dict(self.states), dict(self.drafts), set(), []

        def write(slot: int, states: list[np.ndarray], decode: bool):
            if slot >= 0:
                self.states[slot], self.drafts[slot] = states[-1], states if decode else []
                written.add(slot)

        for n in range(schedule["num_sequences"]):
            begin, end = schedule["cu_seqlens"][n : n + 2]
            target, states = int(schedule["state_indices"][n]), []
            source = int(schedule["read_indices"][n]) if "read_indices" in schedule else target
            S = np.zeros_like(before[0])
            if source >= 0 and schedule["has_initial_state"][n]:
                S = before[source]
                if drafts.get(source):
                    S = drafts[source][schedule["num_accepted_tokens"][n] - 1]
            for t in range(begin, end):
                S, o = self.token(S, **{name: x[0, t].astype(np.float64) for name, x in tokens.items()})
                outputs.append(o)
                states.append(S)
            decode = n < schedule["num_decodes"]
            if states:
                write(target, states, decode)
            if not decode:
                for m, slot in enumerate(schedule["block_state_indices"][n]):
                    if (m + 1) * self.block_size <= len(states):
                        write(int(slot), states[: (m + 1) * self.block_size], False)
        return np.array(outputs), written

    def run(self, tokens, schedule) -> tuple[np.ndarray, set[int]]:
        """Run a step on the dict; return the outputs of the step's tokens [t, ...] and the slots that it wrote.

        Args:
          tokens: the tensors of the stream by name, each [1, T, ...].
          schedule: the other arguments of the step by name, all of them; only `read_indices` may be missing.
        """
        before, written, outputs = dict(self.states), set(), []
        for n in range(schedule["num_sequences"]):
            begin, end = schedule["cu_seqlens"][n : n + 2]
            row, decode = schedule["state_indices"][n], n < schedule["num_decodes"]
            slot = schedule["read_indices"][n] if "read_indices" in schedule else None
            if slot is None:
                slot = row[schedule["num_accepted_tokens"][n] - 1]
            S = np.zeros_like(before[0])
            if slot >= 0 and schedule["has_initial_state"][n]:
                S = before[int(slot)]
            for t in range(end - begin):
                S, o = self.token(S, **{name: x[0, begin + t].astype(np.float64) for name, x in tokens.items()})
                outputs.append(o)
                block, rest = divmod(t + 1, self.block_size)
                full = rest == 0 and block <= schedule["block_state_indices"].shape[1]
                to = [row[t]] if decode else [row[0]] if t == end - begin - 1 else []
                to += [schedule["block_state_indices"][n, block - 1]] if full and not decode else []
                for target in to:
                    if target >= 0:
                        self.states[int(target)] = S
                        written.add(int(target))
        return np.array(outputs), written


# Numbers that cannot be a count, a boundary or a slot.
_EXTREMES = (np.iinfo(np.int32).min, -(2**30), -1, 2**30, np.iinfo(np.int32).max)


def make_wrong(random: Random, schedule: dict[str, Any], slots: int, T: int) -> dict[str, Any]:
    """Return wrong arguments of a step that have the same meaning as the right ones of `schedule`.

    A slot past the end means no slot, a boundary that falls an empty sequence, a boundary past the end the last token,
    and a count that is too large or too small the nearest possible count.
    """
    given: dict[str, Any] = {name: np.array(x) for name, x in schedule.items()}
    N, W = given["state_indices"].shape
    sequences, decodes = schedule["num_sequences"], schedule["num_decodes"]
    past = lambda: random.choice((-1, slots, slots + 3, *_EXTREMES))
    read = "read_indices" in given
    for name in ("state_indices", "block_state_indices", *(["read_indices"] if read else [])):
        flat = given[name].reshape(-1)
        flat[flat < 0] = [past() for _ in range(int(np.sum(flat < 0)))]
    for n in range(N):
        if read or not schedule["has_initial_state"][n]:
            given["num_accepted_tokens"][n] = random.choice((0, W + 1, *_EXTREMES))
            given["has_initial_state"][n] |= not read
        # Only boundaries of sequences that exist are made wrong.
        if n < sequences and schedule["cu_seqlens"][n + 1] == schedule["cu_seqlens"][n] < T:
            given["cu_seqlens"][n + 1] = random.choice((schedule["cu_seqlens"][n], *_EXTREMES[:3]))
        elif n < sequences and schedule["cu_seqlens"][n + 1] == T:
            given["cu_seqlens"][n + 1] = random.choice((T, T + 1, *_EXTREMES[3:]))
    beyond = lambda count: random.choice((count, count + 1, _EXTREMES[-1]))
    below = lambda: random.choice((0, *_EXTREMES[:3]))
    given["num_decodes"] = np.int32(beyond(decodes) if decodes == sequences else decodes or below())
    given["num_sequences"] = np.int32(beyond(N) if sequences == N else sequences or below())
    return given


def make_rubbish(random: Random, N: int, W: int, M: int, slots: int, T: int, with_reads: bool) -> dict[str, Any]:
    """Return arguments of a step with N sequences, W tokens of a decode and M blocks, that hold anything at all."""

    def draw(*shape, most: int):
        one = lambda: random.choice((random.randint(-2, most + 2), random.randint(0, most), random.choice(_EXTREMES)))
        return np.array([one() for _ in range(int(np.prod(shape)))], np.int32).reshape(shape)

    schedule = dict(
        cu_seqlens=draw(N + 1, most=T),
        state_indices=draw(N, W, most=slots - 1),
        has_initial_state=draw(N, most=1) > 0,
        num_decodes=draw(most=N),
        num_sequences=draw(most=N),
        num_accepted_tokens=draw(N, most=W),
        block_state_indices=draw(N, M, most=slots - 1),
    )
    return schedule | (dict(read_indices=draw(N, most=slots - 1)) if with_reads else {})


def describe(schedule: dict[str, Any], freed: Iterable[int] = ()) -> str:
    """Return a line that describes a step without its rubbish, and the slots that became free before it."""
    rows = {"tokens": np.diff(schedule["cu_seqlens"])}
    rows |= {name: x for name, x in schedule.items() if np.ndim(x) and name != "cu_seqlens"}
    some = [f"{name} {x[: schedule['num_sequences']].tolist()}" for name, x in rows.items()]
    return ", ".join([f"freed {list(freed)}", f"decodes {schedule['num_decodes']}", *some])


@dataclasses.dataclass(eq=False)
class Request:
    """A sequence of the engine.

    Attributes:
      slots: the slots of the sequence, one for every token that it decodes in a step; with a ring only one.
      most: how many tokens it decodes in a step.
      prompt: how many tokens of its prompt are still to come.
      accepted: one more than the column of `slots` that has its state.
      started: whether it has a state.
    """

    slots: list[int]
    most: int
    prompt: int
    accepted: int = 1
    started: bool = False

    @property
    def state(self) -> int:
        """The slot of its state."""
        return self.slots[min(self.accepted, len(self.slots)) - 1]


@dataclasses.dataclass
class Engine:
    """An engine that takes random decisions in every step; it knows slots and lengths, but no tokens.

    Sequences arrive, start from zeros or from the state of another sequence, prefill their prompts in pieces, decode,
    speculate, are rolled back to the accepted tokens, get another prompt, wait for some steps, and end. Then their
    slots are free.

    Attributes:
      random: the source of its decisions. With the smallest numbers the engine does nothing, because hypothesis shrinks
        towards these.
      T, N, W: the most tokens and sequences of a step, and the most tokens of a decode.
      num_slots: slots of the pool.
      block_size: tokens of a block whose state may be kept.
      shares: whether sequences may start from the states of others, by read_indices; otherwise each starts from its
        last state, by num_accepted_tokens.
      ringed: whether the pool has a ring, so that a sequence has one slot.
      free: the slots that no sequence has.
      live: the sequences that have not ended.
      prefixes: slots of states that are kept for other sequences to start from.
      done: the names of the things that it has done so far.
    """

    random: Random
    T: int
    N: int
    W: int
    num_slots: int
    block_size: int
    shares: bool
    ringed: bool = False
    free: list[int] = dataclasses.field(init=False)
    live: list[Request] = dataclasses.field(default_factory=list)
    prefixes: list[int] = dataclasses.field(default_factory=list)
    done: set[str] = dataclasses.field(default_factory=set)
    # How many tokens of the last decode of a slot were accepted.
    accepted: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.free = list(range(self.num_slots))

    def _chance(self, p: float) -> bool:
        # A whole number, because hypothesis draws whole numbers evenly.
        return self.random.randrange(100) >= 100 - round(100 * p)

    def _take(self) -> int:
        return self.free.pop(self.random.randrange(len(self.free)))

    def step(self) -> tuple[list[int], dict[str, Any]]:
        """Return the slots that became free since the last step, and the arguments of this one by name.

        Entries of sequences that do not exist hold rubbish. The engine decides at random how many guesses are accepted.
        """
        freed = self._end()
        while len(self.live) < self.N + 2 and len(self.free) >= self.W and self._chance(0.7):
            most = self.random.choice((1, self.W))
            slots = [self._take() for _ in range(1 if self.ringed else most)]
            self.live.append(Request(slots, most, prompt=self.random.choice((1, 2, 60, 128, 200))))
        running = [x for x in self.live if self._chance(0.8)][: self.N]
        left, decodes, prefills = self.T, [], []
        for x in running:
            if x.prompt == 0 and self._chance(0.15):
                x.prompt = self.random.choice((1, 3, 70))
            guessed = x.prompt == 0
            length = self.random.randint(0 if self._chance(0.1) else 1, x.most)
            if not guessed and (x.prompt > x.most or self._chance(0.5)):
                # Some prefills end with the stream.
                length = min(x.prompt, self.random.choice((*PREFILLS, max(left - 1, 0), left)))
            length = min(length, left) if guessed else min(length, left, x.prompt)
            left -= length
            token_by_token = guessed or (length <= x.most and self._chance(0.5))
            (decodes if token_by_token else prefills).append((x, length, guessed))
        return freed, self._arguments(decodes, prefills, [x for x in self.live if x not in running])

    def _end(self) -> list[int]:
        """End some sequences and forget some prefixes; return the slots that are free now."""
        freed = []
        for x in [x for x in self.live if x.started and self._chance(0.15)]:
            self.live.remove(x)
            kept = [x.state] if self.shares and self._chance(0.5) else []
            self.prefixes += kept
            freed += [slot for slot in x.slots if slot not in kept]
        for slot in [slot for slot in self.prefixes if self._chance(0.2)]:
            self.prefixes.remove(slot)
            freed.append(slot)
        self.free += freed
        self.done |= {"slots freed"} if freed else set()
        return freed

    def _arguments(self, decodes, prefills, waiting: list[Request]) -> dict[str, Any]:
        """Return the arguments of a step of these (sequence, tokens, whether they are guesses); update the engine."""
        random, N, blocks = self.random, self.N, self.T // self.block_size
        # One draw for all numbers that nobody reads.
        rng = np.random.default_rng(random.getrandbits(16))
        rubbish = lambda *shape: rng.integers(-5, 400, shape, np.int32)
        indices, kept, boundaries = rubbish(N, self.W), rubbish(N, blocks), rubbish(N + 1)
        accepted = rng.integers(1, self.W, N, np.int32, endpoint=True)
        has, read = rubbish(N) % 2 == 0, rubbish(N)
        # States that no sequence of this step writes.
        others = self.prefixes + [x.state for x in waiting if x.started]
        boundaries[0], started_from, given = 0, [], {}
        for n, (x, length, guessed) in enumerate([*decodes, *prefills]):
            boundaries[n + 1] = boundaries[n] + length
            indices[n] = x.slots + [-1] * (self.W - len(x.slots))
            has[n] = x.started
            read[n] = x.state
            accepted[n] = accepted[n] if self.shares else x.accepted
            if not x.started and self.shares:
                read[n] = random.choice(others) if others and self._chance(0.6) else random.choice((-1, read[n]))
                has[n] = read[n] in others or read[n] < 0
                started_from += [read[n]] if read[n] in others and length else []
            if self.ringed:
                accepted[n] = self.accepted.get(int(read[n]), accepted[n])
            prefill = n >= len(decodes)
            for i in range(blocks):
                kept[n, i] = self._take() if prefill and self.shares and self.free and self._chance(0.4) else -1
            full = kept[n, : length // self.block_size if prefill else 0]
            self.free += [int(slot) for slot in kept[n, len(full) :] if slot >= 0]
            self.prefixes += [int(slot) for slot in full if slot >= 0]
            self.done |= {"block kept"} if (full >= 0).any() else set()
            if length:
                self.done |= {"prompt in pieces"} if prefill and x.started else set()
                self.done |= {f"{'prefill' if prefill else 'decode'} from a later column"} if x.accepted > 1 else set()
                x.accepted = 1 if prefill else random.randint(1, length) if guessed else length
                given |= {x.slots[0]: x.accepted}
                self.done |= {"rolled back"} if guessed and not prefill and x.accepted < length else set()
                x.started, x.prompt = True, x.prompt if guessed else x.prompt - length
        self.done |= {"prefix shared"} if len(started_from) > len(set(started_from)) else set()
        self.done |= {"waited"} if any(x.started for x in waiting) else set()
        # The accepted tokens count from the next step on.
        self.accepted |= given
        indices = indices[:, 0].copy() if self.ringed else indices
        return dict(
            cu_seqlens=boundaries, state_indices=indices, has_initial_state=has, num_decodes=len(decodes),
            num_sequences=len(decodes) + len(prefills), num_accepted_tokens=accepted, block_state_indices=kept,
        ) | (dict(read_indices=read) if self.shares else {})  # fmt: skip
