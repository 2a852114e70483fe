"""The text that examples/train.py reads, what other models need for it, and a picture of both.

This file is a library, and named for what it reads: Python's standard library.
"""

import bz2
import json
import lzma
import math
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

# What a training leaves in its folder.
FILES = {
    "curve.png": "the picture of bits per byte over the steps",
    "curve-dark.png": "the same for a dark page",
    "results.json": "the loss of every step, all measurements, and the sample",
    "checkpoints": "the last two checkpoints, from which the program goes on when it is called again",
}


def read_library(held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of all files to train on, and so many of those held out; checksums of names tell them apart.

    A byte of 0, which no file has, is before each file.
    """
    library, streams = Path(sysconfig.get_path("stdlib")), ([], [])
    files = [path.relative_to(library) for path in library.rglob("*.py")]
    sums = {path: zlib.crc32(path.as_posix().encode()) for path in files}
    for path in sorted(files, key=sums.get):
        if not {"site-packages", "test", "tests"} & set(path.parts):
            streams[sums[path] % 16 == 0].append(b"\0" + (library / path).read_bytes())
    train, held = (np.frombuffer(b"".join(stream), np.uint8) for stream in streams)
    return train, held[: held_out + 1]


def entropy(text: np.ndarray) -> float:
    """Return the bits per byte of a model that knows how often each byte occurs, and nothing of its context."""
    p = np.bincount(text) / len(text)
    return float(-np.sum(p * np.log2(np.where(p > 0, p, 1))))


def context_model(train: np.ndarray, text: np.ndarray, order: int) -> float:
    """Return the bits per byte of a text by how often bytes followed their last ones in the training bytes.

    Every context trusts its counts as far as Witten and Bell do, and the shorter context for the rest::

        p_n(x | context) = (count(context x) + kinds(context) p_{n-1}(x | context)) / (count(context) + kinds(context))

    with kinds(context) the number of different bytes that followed.
    """
    train, text = (x.astype(np.int64) for x in (train, text))
    p = np.full(len(text), 1 / 256)
    for n in range(order + 1):
        # The codes of a byte with the n before it; a text starts with zeros before it.
        seen, asked = (sum(np.pad(x, (j, 0))[: len(x)] << 8 * j for j in range(n + 1)) for x in (train, text))
        codes, counts = np.unique(seen, return_counts=True)
        contexts, first, kinds = np.unique(codes >> 8, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        count = _look_up(codes, counts, asked)
        total, kind = (_look_up(contexts, x, asked >> 8) for x in (totals, kinds))
        p = np.where(total > 0, (count + kind * p) / np.maximum(total + kind, 1), p)
    return float(-np.mean(np.log2(p)))


def _look_up(keys, values, wanted):
    """Return the values of sorted keys, and 0 for what is not a key."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def compressed(train: np.ndarray, text: np.ndarray) -> dict[str, float]:
    """Return the bits per byte that compressors need for a text, alone and after the training bytes."""
    train, text, needed = train.tobytes(), text.tobytes(), {}
    for name, compress in {"bz2": bz2.compress, "lzma": lambda x: lzma.compress(x, preset=9)}.items():
        after = len(compress(train + text)) - len(compress(train))
        needed |= {name: 8 * len(compress(text)) / len(text), f"{name} after training bytes": 8 * after / len(text)}
    return needed


def compare(train: np.ndarray, text: np.ndarray) -> dict[str, float]:
    """Return the bits per byte of a text under other models; `train` is what ours has seen."""
    return {"order 0": entropy(text), "order 3": context_model(train, text, 3)} | compressed(train, text)


def draw(results: dict[str, Any], path: Path, dark: bool = False) -> None:
    """Draw what `report` writes: bits per byte over the steps of training, and those of other models as lines."""
    with style.context("dark_background" if dark else "default"):
        figure = _figure(results, *("0.3", "0.65") if dark else ("0.85", "0.4"))
        figure.savefig(path, dpi=120, transparent=dark)


def _figure(results: dict[str, Any], steps_color: str, mean_color: str) -> Figure:
    training, window = np.array(results["losses"]) / math.log(2), max(len(results["losses"]) // 20, 1)
    figure, steps = Figure(figsize=(9, 5), layout="constrained"), np.arange(len(training)) + 1
    axes, mean = figure.subplots(), np.convolve(training, np.ones(window) / window, "valid")
    axes.plot(steps, training, color=steps_color, linewidth=0.8)
    axes.plot(steps[window - 1 :], mean, color=mean_color)
    axes.plot(*zip(*results["held_out"], strict=True), "o-", color="C0")
    axes.set_title("A model of the bytes of Python's standard library, on files held out", loc="left")
    axes.set(xlabel="steps of training", ylabel="bits per byte", xlim=(0, 1.01 * len(training)), ylim=(1, 6))
    # A label stands beside the end of its line, and above the label before it.
    ends, y = [(mean[-1], mean_color, f"in training, mean of {window} steps")], -math.inf
    for i, (name, bits) in enumerate(results["bits_per_byte"].items()):
        ends.append((bits, f"C{i}", name))
        if i:
            axes.axhline(bits, color=f"C{i}", linewidth=1, linestyle="--")
    for bits, color, name in sorted(ends):
        y = max(bits, y + 0.17)
        axes.annotate(f"{bits:.2f} {name}", (1.02, y), xycoords=("axes fraction", "data"), color=color, va="center")
    return figure


def report(
    output: Path, losses: np.ndarray, measured: dict[int, float], train: np.ndarray, text: np.ndarray, sample: bytes
) -> None:
    """Print and write what came of a model.

    Args:
      output: a folder, for results.json, curve.png and curve-dark.png.
      losses: of the steps, in nats per byte.
      measured: the loss over the text by the number of steps before it, in nats per byte.
      train: the bytes that the model has seen.
      text: the bytes that it is measured on.
      sample: what it has written.
    """
    held_out = [(step, loss / math.log(2)) for step, loss in measured.items()]
    bits = {"this model": held_out[-1][1]} | compare(train, text)
    results = dict(
        bits_per_byte=bits, held_out=held_out, losses=losses.tolist(), sample=sample.decode(errors="replace")
    )
    draw(results, output / "curve.png")
    draw(results, output / "curve-dark.png", dark=True)
    (output / "results.json").write_text(json.dumps(results, indent=1))
    console, table = Console(), Table("model", "bits per byte", title=f"{len(text):,} bytes of files held out")
    for name, value in bits.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    console.print(Panel(Text(results["sample"].lstrip("\0")), title="a sample"))
    for name, what in FILES.items():
        console.print(f"{output / name}: {what}", soft_wrap=True)
