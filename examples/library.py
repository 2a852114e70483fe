"""The text that examples/train.py reads, what other models need for it, and a picture of both."""

import bz2
import json
import lzma
import math
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


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


def draw(losses: np.ndarray, bits: dict[str, float], path: Path) -> None:
    """Draw the loss of every step, in nats, and the bits of all models as lines."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes, training = figure.subplots(), losses / math.log(2)
    axes.plot(np.arange(len(losses)) + 1, training, color="0.8", linewidth=0.8, label="a batch of training")
    window = max(len(losses) // 20, 1)
    mean = np.convolve(training, np.ones(window) / window, "valid")
    axes.plot(np.arange(window, len(losses) + 1), mean, color="0.2", label=f"mean of {window} batches")
    for i, (name, value) in enumerate(bits.items()):
        axes.axhline(value, color=f"C{i}", linewidth=1, label=f"{value:.2f} {name}, files held out")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(1.5, 6))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def report(
    output: Path, losses: np.ndarray, loss: float, train: np.ndarray, text: np.ndarray, sample: bytes
) -> dict[str, Any]:
    """Print and write what came of a model.

    Args:
      output: a folder, for results.json and curve.png.
      losses: of the steps, in nats per byte.
      loss: of the text.
      train: the bytes that the model has seen.
      text: the bytes that it is measured on.
      sample: what it has written.
    """
    bits = {"this model": float(loss) / math.log(2)} | compare(train, text)
    draw(losses, bits, output / "curve.png")
    results = dict(bits_per_byte=bits, losses=losses.tolist(), sample=sample.decode(errors="replace"))
    (output / "results.json").write_text(json.dumps(results, indent=1))
    console, table = Console(), Table("model", "bits per byte", title=f"{len(text):,} bytes of files held out")
    for name, value in bits.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    console.print(Panel(Text(results["sample"].lstrip("\0")), title="a sample"))
    return results
