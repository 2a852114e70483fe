"""A random serving engine, and what its steps must do: token by token in float64, over a dict of states by slot."""

import dataclasses
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import numpy as np

# Tokens of a prefill in one step: none, a few, about a chunk, and blocks of chunks.
PREFILLS = (0, 1, 3, 40, 64, 70, 130)


def linear_attention(S: np.ndarray, **x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Do what a token of linear attention does, as `Oracle` calls it: return the state after it and its output.

    Args:
      S: the state [HV, K, V].
      **x: q, k, v, g of a token; of a delta rule beta too, and p beside it, or b and w in its place.
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
    """Return what a token of a causal convolution does, as `Oracle` calls it.

    It takes the last W - 1 inputs [W - 1, D] and the next one, x [D], for weight [D, W] and bias [D], and returns the
    last inputs after it and its output.
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
        """Take what a token does, the tokens of a block, and the pool [slots, ...] to start from.

        `token` takes a state, and a token of every tensor by name, and returns the state after it and the output.
        """
        self.token, self.block_size = token, block_size
        self.states = {slot: state.astype(np.float64) for slot, state in enumerate(pool)}
        self.drafts: dict[int, list[np.ndarray]] = {}

    def run_ringed(self, tokens, schedule) -> tuple[np.ndarray, set[int]]:
        """Run a step over a pool with a ring: a decode has one slot, and a later step says how many tokens count."""
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
        """Run a step on the dict; return the outputs of its tokens [t, ...] and the slots that it wrote.

        Args:
          tokens: the tensors of the stream by name, each [1, T, ...].
          schedule: its other arguments by name, with everything but `read_indices`.
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


# Numbers that are no count, no boundary and no slot.
_EXTREMES = (np.iinfo(np.int32).min, -(2**30), -1, 2**30, np.iinfo(np.int32).max)


def make_wrong(random: Random, schedule: dict[str, Any], slots: int, T: int) -> dict[str, Any]:
    """Return the arguments of a step that mean what the right ones of `schedule` do, and are wrong.

    A slot past the end means none, as a boundary that falls means an empty sequence, one past the end the last token,
    and a count that is too large or too small the nearest one that is not.
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
        # The rubbish that comes after the sequences is no boundary.
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
    """Return the arguments of a step of N sequences, W tokens of a decode and M blocks, which hold anything at all."""

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
    """Return in a line what there is of a step, without the rubbish, and which slots became free before it."""
    rows = {"tokens": np.diff(schedule["cu_seqlens"])}
    rows |= {name: x for name, x in schedule.items() if np.ndim(x) and name != "cu_seqlens"}
    some = [f"{name} {x[: schedule['num_sequences']].tolist()}" for name, x in rows.items()]
    return ", ".join([f"freed {list(freed)}", f"decodes {schedule['num_decodes']}", *some])


@dataclasses.dataclass(eq=False)
class Request:
    """A sequence of the engine.

    Attributes:
      slots: its slots, as many as the tokens that it decodes in a step; over a ring one.
      most: the tokens that it decodes in a step.
      prompt: the tokens of its prompt that are still to come.
      accepted: one more than the column of its state.
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
    """An engine that does something else in every step; it knows slots and lengths, and no tokens.

    Sequences arrive, start from zeros or from the state of another, prefill their prompts in pieces, decode, speculate,
    are rolled back to what was accepted, get another prompt, wait for some steps, and end. Then their slots are free.

    Attributes:
      random: where it draws from. The least draws make an engine that does nothing: hypothesis shrinks to that.
      T, N, W: the most tokens and sequences of a step, and the most tokens of a decode.
      num_slots: slots of the pool.
      block_size: tokens of a block whose state may be kept.
      shares: whether sequences start from one another's states, by read_indices; else each starts from its last state,
        by num_accepted_tokens.
      ringed: whether the pool has a ring, so that a sequence has one slot.
      free: the slots that nobody has.
      live: the sequences.
      prefixes: slots of states that are kept for others to start from.
      done: what it has done so far, by name.
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
        # Whole numbers, which hypothesis draws evenly.
        return self.random.randrange(100) >= 100 - round(100 * p)

    def _take(self) -> int:
        return self.free.pop(self.random.randrange(len(self.free)))

    def step(self) -> tuple[list[int], dict[str, Any]]:
        """Return the slots that became free since the last step, and the arguments of this one by name.

        What does not exist holds rubbish. The engine goes on as if some of the guesses had been wrong.
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
                length = min(x.prompt, self.random.choice(PREFILLS))
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
        """Return the arguments of a step of these (sequence, tokens, whether they are guesses), and do it."""
        random, N, blocks = self.random, self.N, self.T // self.block_size
        # One draw for all that is not read.
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
        # What was accepted counts from the next step on.
        self.accepted |= given
        indices = indices[:, 0].copy() if self.ringed else indices
        return dict(
            cu_seqlens=boundaries, state_indices=indices, has_initial_state=has, num_decodes=len(decodes),
            num_sequences=len(decodes) + len(prefills), num_accepted_tokens=accepted, block_state_indices=kept,
        ) | (dict(read_indices=read) if self.shares else {})  # fmt: skip
