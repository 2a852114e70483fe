"""`chunkwise demo`: a use of chunked linear attention, shown on the text of Python's standard library.

Two states store the same lines, one by the delta rule and one by plain linear attention, and the lines are read back.
Then the gated delta rule runs over text, chunk by chunk and token by token, and both results are compared with float64.
"""

import ast
import importlib.util
import platform
import statistics
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.markup import escape

from chunkwise.command import demo_picture, tables
from chunkwise.command.demo_records import Recall, Run
from chunkwise.pipeline.operators import chunk_gated_delta_rule, chunk_simple_gla, recurrent_gated_delta_rule
from chunkwise.shared.testing import compare, oracle

# Recall: a line has WIDTH characters of 8 bits, so that a value has 256 channels, and a key has KEY channels.
WIDTH, KEY = 32, 128
# How many lines are stored. A library may have fewer lines; then all of them are the last count.
COUNTS = (4, 8, 16, 32, 64, 128, 256)
# How many lines are stored in the run that is shown and judged.
SHOWN = 32
# Speed and accuracy: heads and channels, and the tokens of a run.
H, HV, K, V = 2, 4, 128, 128
LENGTHS = (256, 1024, 4096)
LIMIT = compare.TOLERANCE["float32"]


def library() -> list[Path]:
    """Return the modules of the standard library, without packages and their tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    if not (paths := sorted(folder.glob("*.py"))):
        raise SystemExit(f"The standard library must lie in a folder; got {folder}.")
    return paths


def read_facts(count: int) -> dict[str, str]:
    """Return the first lines of the docstrings of functions and classes, by name, in a fixed random order.

    They are `count` lines, or all lines of the library if it has fewer.
    """
    facts = {}
    for path in library():
        for node in ast.parse(path.read_bytes()).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            line = (ast.get_docstring(node) or "").split("\n")[0]
            if line.isascii() and 8 <= len(line) <= WIDTH:
                facts[f"{path.stem}.{node.name}"] = line.ljust(WIDTH)
    if not (names := sorted(facts)):
        raise SystemExit(f"The standard library must have docstrings; got none in {library()[0].parent}.")
    return {names[i]: facts[names[i]] for i in np.random.default_rng(0).permutation(len(names))[:count]}


def key_of(name: str) -> np.ndarray:
    """Return a unit vector for a name; the vectors of names that share letters are not orthogonal."""
    text = f"^{name}$"
    grams = [text[i : i + 3] for i in range(len(text) - 2)]

    def noise(text: str) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(text.encode())).standard_normal(KEY)

    key = noise(text) + sum(noise(gram) for gram in grams) / len(grams) ** 0.5 / 2
    return key / np.linalg.norm(key)


def bits_of(line: str) -> np.ndarray:
    """Return the bits of a line as numbers -1 and 1."""
    return 2.0 * np.unpackbits(np.frombuffer(line.encode(), np.uint8)) - 1.0


def line_of(bits: np.ndarray) -> str:
    """Return the line whose bits are the signs of numbers; a byte that is no character becomes a question mark."""
    return "".join(chr(x) if 32 <= x < 127 else "?" for x in np.packbits(bits > 0))


def recall(facts: dict[str, str], counts: tuple[int, ...]) -> list[Recall]:
    """Store the first lines of `facts`, for every count so many, and read them back from both states.

    Counts above the number of lines become that number. A sequence first stores a wrong line for every name, which is
    the line of another name, and then twice the right line. Then it reads with tokens that change nothing, because
    their step size, or their value, is 0. The sequences of all counts are packed into one row.
    """
    counts = tuple(dict.fromkeys(min(count, len(facts)) for count in counts))
    keys, values, steps = [], [], []
    for count in counts:
        names, lines = list(facts)[:count], np.stack([bits_of(line) for line in list(facts.values())[:count]])
        keys += [np.stack([key_of(name) for name in names])] * 4
        values += [np.roll(lines, 1, axis=0), lines, lines, 0 * lines]
        steps += [np.ones(3 * count), np.zeros(count)]
    k, v, beta = (jnp.asarray(np.concatenate(x)[None, :, None], jnp.float32) for x in (keys, values, steps))
    ends = np.cumsum([0, *(4 * count for count in counts)])
    options = {"scale": 1.0, "cu_seqlens": jnp.asarray(ends, jnp.int32)}
    # The gates are 0, so no state decays.
    g = jnp.zeros(v.shape[:3], jnp.float32)
    read = {
        "delta rule": chunk_gated_delta_rule(k, k, v, g, beta, **options)[0],
        "linear attention": chunk_simple_gla(k, k, v, **options)[0],
    }
    results = []
    for count, end in zip(counts, ends[1:], strict=True):
        answers = {state: [line_of(x) for x in np.asarray(o)[0, end - count : end, 0]] for state, o in read.items()}
        results.append(Recall(dict(list(facts.items())[:count]), answers))
    return results


def embed(tokens: int) -> dict[str, jax.Array]:
    """Return q, k, v, g and beta for some bytes of the standard library, one token for every byte.

    A byte's features are a fixed random vector, mixed with the vectors of the three bytes before it, as the short
    convolution of a layer would. Text repeats itself, and so do the keys.
    """
    text = np.empty(0, np.uint8)
    for path in library():
        if len(text) < tokens:
            text = np.concatenate([text, np.frombuffer(path.read_bytes(), np.uint8)])
    text, rng = text[:tokens], np.random.default_rng(1)

    def features(*shape: int) -> np.ndarray:
        x = rng.standard_normal((256, *shape))[text]
        lags = [0.5**lag * np.pad(x, [(lag, 0)] + [(0, 0)] * len(shape))[:tokens] for lag in range(4)]
        return np.sum(lags, axis=0)[None]

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    # Heads decay by 0.005 nats a token to 2 nats a token.
    rate = np.geomspace(0.005, 2.0, HV)
    arrays = {
        "q": unit(features(H, K)),
        "k": unit(features(H, K)),
        "v": features(HV, V),
        "g": -rate * np.logaddexp(0.0, features(HV)),
        "beta": 1 / (1 + np.exp(-features(HV))),
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}


def race(lengths: tuple[int, ...]) -> Iterator[Run]:
    """Run the gated delta rule over text, chunk by chunk and token by token, and compare both with float64."""
    x = embed(max(lengths))
    expected, _ = oracle.reference(**x)
    ways = {
        "chunk by chunk": chunk_gated_delta_rule,
        "token by token": lambda **x: recurrent_gated_delta_rule(**x, implementation="xla"),
    }
    for tokens in lengths:
        part = {name: value[:, :tokens] for name, value in x.items()}
        for way, fn in ways.items():
            o, seconds = timed(jax.jit(lambda x, fn=fn: fn(**x)[0]), part)
            yield Run(way, tokens, seconds, compare.error(o, expected[:, :tokens]))


def timed(fn: Callable, x: dict[str, jax.Array]) -> tuple[jax.Array, float]:
    """Return the result of a compiled function and the median time of three calls, or of one that takes a second."""
    result, seconds = jax.block_until_ready(fn(x)), []
    while len(seconds) < 3 and sum(seconds) < 1:
        start = time.perf_counter()
        jax.block_until_ready(fn(x))
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def judge(shown: Recall, runs: list[Run]) -> tuple[bool, str]:
    """Return whether the results are right, and a sentence that says so."""
    delta, plain = (shown.right_lines(state) for state in shown.answers)
    chunked, stepwise = runs[-2:]
    worst = max(run.error for run in runs)
    good = delta > plain and worst <= LIMIT
    return good, (
        f"of {len(shown.facts)} lines the delta rule gives back {delta} and plain linear attention {plain}; at "
        f"{chunked.tokens:,} tokens, chunks are {chunked.rate / stepwise.rate:.1f} times as fast as single tokens; and "
        f"the largest error against float64 is {worst:.0e}, where {LIMIT:.0e} is allowed. So the gated delta rule "
        + ("works on this machine." if good else "does NOT work as it should on this machine.")
    )


def capacity(recalls: list[Recall]) -> str:
    """Return a sentence that says how many lines one state holds."""
    held = [(recall.right_lines("delta rule"), len(recall.facts)) for recall in recalls]
    counts = ", ".join(f"{right} of {stored}" for right, stored in held)
    return (
        f"A state whose keys have {KEY} channels held at most {max(right for right, _ in held)} whole lines: the delta "
        f"rule gives back {counts}."
    )


def print_recall(console: Console, shown: Recall, lines: int = 8) -> None:
    """Print some lines as they were stored and as they were read back."""
    table = tables.make_table(console, ("name", "its last line", *(f"read back, {state}" for state in shown.answers)))
    for name, line, *answers in list(zip(shown.facts, shown.facts.values(), *shown.answers.values(), strict=True))[
        :lines
    ]:
        marked = (f"[{'green' if answer == line else 'red'}]{escape(answer)}[/]" for answer in answers)
        table.add_row(escape(name), escape(line), *marked)
    console.print(table)


def print_runs(console: Console, runs: list[Run]) -> None:
    """Print how fast and how exact the runs were."""
    table = tables.make_table(console, ("gated delta rule",), ("tokens", "time, ms", "tokens/s", "error"))
    for run in runs:
        colour = "green" if run.error <= LIMIT else "bold red"
        numbers = f"{run.tokens:,}", f"{1e3 * run.seconds:.1f}", f"{run.rate:,.0f}", f"[{colour}]{run.error:.1e}[/]"
        table.add_row(run.way, *numbers)
    console.print(table)


def run(output: Path, console: Console, counts: tuple[int, ...] = COUNTS, lengths: tuple[int, ...] = LENGTHS) -> int:
    """Run the demo; return 1 if an error is above the limit or the delta rule recalls no more."""
    started = time.perf_counter()
    console.print(
        f"The text: the standard library of Python {platform.python_version()}. "
        f"The machine: {jax.devices()[0].device_kind}, jax {jax.__version__}.\n"
    )
    with tables.make_progress(console) as progress:
        task = progress.add_task("", total=3 + 2 * len(lengths))

        def say(text: str) -> None:
            tables.announce(text, progress, task)
            progress.advance(task)

        say("reading the library")
        facts = read_facts(max(counts))
        say("storing lines, asking for them")
        recalls = recall(facts, counts)
        shown = next((x for x in recalls if len(x.facts) == SHOWN), recalls[-1])
        console.print(
            f"1. Recall. {len(shown.facts)} names are told a wrong line first, then twice their own, and are asked "
            f"for it. Keys have {KEY} channels."
        )
        print_recall(console, shown)
        console.print(capacity(recalls))
        say(f"{max(lengths):,} tokens in float64")
        runs = []
        for one in race(lengths):
            runs.append(one)
            say(f"{one.tokens:,} tokens, {one.way}")
        console.print(
            f"\n2. Speed and accuracy. The gated delta rule over bytes of the library, forward: H = {H}, HV = {HV}, "
            f"K = V = {K}, float32."
        )
        print_runs(console, runs)
    picture = output / "demo.png"
    if has_matplotlib := importlib.util.find_spec("matplotlib") is not None:
        demo_picture.draw(recalls, shown, runs, LIMIT, picture)
    good, sentence = judge(shown, runs)
    console.print(
        "Time: median of up to 3 runs, without compilation. Error: RMS against float64 over RMS.\n\n"
        f"Judgement: {sentence}\n"
        + (f"The picture is {picture}. " if has_matplotlib else "There is no picture, because matplotlib is missing. ")
        + f"{time.perf_counter() - started:.0f} seconds in all."
    )
    return int(not good)
