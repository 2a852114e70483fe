"""The gated delta rule over real text: `python -m chunkwise.pipeline.demo`.

Takes text files of the running Python's standard library, packs their bytes as sequences of different lengths, makes
q, k, v, g and beta from them by a fixed random embedding, and runs the chain stage by stage and as one operator. Every
result is checked against float64. Needs `chunkwise-pipeline[demo]`.
"""

import argparse
import functools
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from chunkwise.chunk_h import chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.pipeline.operators import chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.pipeline.tables import make_console, make_progress, make_table
from chunkwise.shared.testing import stage_oracle as exact
from chunkwise.shared.testing.compare import TOLERANCE, error
from chunkwise.shared.testing.oracle import reference
from chunkwise.solve_tril import solve_tril
from chunkwise.wy_fast import recompute_w_u

H, HV, K, V, C = 2, 4, 128, 128, 64
LONGEST = 6000
LIMIT = TOLERANCE["float32"]


class Row(NamedTuple):
    """One line of the table: what ran, its output shape, seconds a run, useful flops and RMS error."""

    stage: str
    shape: tuple[int, ...]
    seconds: float
    flops: float
    error: float


def read_documents(size: int) -> list[np.ndarray]:
    """Return `size` bytes of the standard library's shorter text files, an array a file, in a fixed random order."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = sorted(
        path for depth in ("*", "*/*") for suffix in (".py", ".txt") for path in library.glob(depth + suffix)
    )
    files = [path for path in texts if path.parent.name != "site-packages" and path.stat().st_size <= LONGEST]
    if not files:
        raise SystemExit(f"The standard library must lie in a folder; got {library}.")
    documents: list[np.ndarray] = []
    for index in np.random.default_rng(0).permutation(len(files)):
        room = size - sum(map(len, documents))
        if room == 0:
            break
        documents.append(np.frombuffer(files[index].read_bytes()[:room], np.uint8))
    return documents


def embed(documents: list[np.ndarray]) -> dict[str, jax.Array]:
    """Return q, k, v, g, beta and cu_seqlens of the packed documents.

    A token's features are a fixed random vector per byte, mixed with those of the three bytes before it in the same
    document, as the short convolution of a model would. Text repeats itself, so its keys do too.
    """
    rng = np.random.default_rng(1)

    def features(*shape: int) -> np.ndarray:
        table = rng.standard_normal((256, *shape))
        mixed = []
        for document in documents:
            x = table[document]
            mixed.append(sum(0.5**lag * np.pad(x, [(lag, 0)] + [(0, 0)] * len(shape))[: len(x)] for lag in range(4)))
        return np.concatenate(mixed)[None]

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    # Heads forget at rates from one in two hundred tokens to two a token.
    rate = np.geomspace(0.005, 2.0, HV)
    arrays = {
        "q": unit(features(H, K)),
        "k": unit(features(H, K)),
        "v": features(HV, V),
        "g": -rate * np.logaddexp(0.0, features(HV)),
        "beta": 1 / (1 + np.exp(-features(HV))),
    }
    boundaries = np.cumsum([0, *map(len, documents)], dtype=np.int32)
    return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()} | {"cu_seqlens": jnp.asarray(boundaries)}


def first_tokens(x: dict[str, jax.Array], size: int) -> dict[str, jax.Array]:
    """Return the first `size` tokens of a pack; the last sequence is cut short."""
    ends = np.asarray(x["cu_seqlens"])
    boundaries = np.append(ends[ends < size], np.int32(size))
    tokens = {name: value[:, :size] for name, value in x.items() if name != "cu_seqlens"}
    return tokens | {"cu_seqlens": jnp.asarray(boundaries)}


def stages(x: dict[str, jax.Array]) -> Iterator[Row]:
    """Run the chain stage by stage in plain JAX; each stage is checked on the very arguments it was given."""
    q, k, v, g, beta, cu = (x[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens"))
    T, run = q.shape[1], {"implementation": "xla"}

    g_cum, row = measure("chunk_local_cumsum", T * HV, chunk_local_cumsum, g, C, cu_seqlens=cu, **run)
    yield row(exact.cumsum(g, C, cu))
    A, row = measure("chunk_scaled_dot_kkt", 2 * T * H * C * K, chunk_scaled_dot_kkt, k, beta, g_cum, cu, C, **run)
    yield row(exact.kkt(k, beta, g_cum, C, cu))
    A_inv, row = measure("solve_tril", T * HV * C * C / 3, solve_tril, A, cu, **run)
    yield row(exact.inverse(A, cu))
    (w, u), row = measure("recompute_w_u", 2 * T * HV * C * (K + V), recompute_w_u, k, v, beta, A_inv, g_cum, cu, **run)
    yield row(exact.w_u(k, v, beta, A_inv, g_cum, cu))
    (h, v_new, _), row = measure(
        "chunk_gated_delta_rule_fwd_h", 4 * T * HV * K * V,
        chunk_gated_delta_rule_fwd_h, k, w, u, g_cum, None, True, cu, C, **run,
    )  # fmt: skip
    yield row(exact.states(k, w, u, g_cum, None, C, cu))
    flops = 2 * T * (H * C * K + HV * C * V + HV * K * V)
    _, row = measure("chunk_fwd_o", flops, chunk_fwd_o, q, k, v_new, h, g_cum, None, None, cu, C, **run)
    yield row(exact.output(q, k, v_new, h, g_cum, None, C, cu))


def operators(x: dict[str, jax.Array], slice_size: int, flops_per_token: float) -> Iterator[Row]:
    """Run the whole operator against the token recurrence: plain JAX, the chain of kernels, and token by token."""
    T, part = x["q"].shape[1], first_tokens(x, slice_size)
    chain = functools.partial(chunk_gated_delta_rule, output_final_state=True, chunk_size=C)
    tokens = functools.partial(recurrent_gated_delta_rule, output_final_state=True)

    _, row = measure("chunk_gated_delta_rule, xla", T * flops_per_token, chain, **x, implementation="xla")
    yield row(reference(**x))
    expected = reference(**part)
    kernels = "staged" if jax.default_backend() == "tpu" else "staged, interpreted"
    _, row = measure(
        f"{kernels}, {slice_size} tokens",
        slice_size * flops_per_token,
        chain,
        **part,
        implementation="staged",
    )
    yield row(expected)
    _, row = measure(f"token by token, {slice_size} tokens", slice_size * 6 * HV * K * V, tokens, **part)
    yield row(expected)


def measure(stage: str, flops: float, fn: Callable, *args, **kwargs):
    """Run `fn`, compiled before, and return its result and a function from the exact result to the Row."""
    result = jax.block_until_ready(fn(*args, **kwargs))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args, **kwargs))
        seconds.append(time.perf_counter() - start)

    def row(expected) -> Row:
        got, want = jax.tree.leaves(result), jax.tree.leaves(expected)
        worst = max(error(a, b) for a, b in zip(got, want, strict=True))
        return Row(stage, got[0].shape, statistics.median(seconds), flops, worst)

    return result, row


def as_table(rows: list[Row], console: Console) -> Table:
    """Return the rows as a table."""
    table = make_table(console, ("stage", "shape"), ("time, ms", "GFLOP/s", "error"))
    for row in rows:
        colour = "green" if row.error <= LIMIT else "bold red"
        shape = " x ".join(map(str, row.shape))
        rate = f"{row.flops / row.seconds / 1e9:.2f}"
        table.add_row(row.stage, shape, f"{1e3 * row.seconds:.1f}", rate, f"[{colour}]{row.error:.1e}[/]")
    return table


def plot(rows: list[Row], path: Path) -> None:
    """Draw error and time of every row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [row.stage for row in rows][::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    left.plot([row.error for row in rows][::-1], names, "o")
    left.grid(axis="y", alpha=0.3)
    left.axvline(LIMIT, color="tab:red", linestyle="--", label=f"limit {LIMIT:.0e}")
    left.set(xscale="log", xlabel="RMS error over RMS, against float64")
    left.legend()
    right.barh(names, [1e3 * row.seconds for row in rows][::-1], color="tab:orange")
    right.set(xlabel="time, ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 1 if an error is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="bytes of text to pack")
    parser.add_argument(
        "--slice", type=int, default=2048, help="tokens for the kernels, interpreted off TPU, and for the recurrence"
    )
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder of the plot")
    options = parser.parse_args(argv)
    started = time.perf_counter()
    console = make_console()
    documents = read_documents(options.tokens)
    lengths = sorted(map(len, documents))
    console.print(
        f"{sum(lengths):,} bytes of Python {sys.version.split()[0]}'s standard library, in {len(lengths)} sequences of "
        f"{lengths[0]} to {lengths[-1]} tokens.\n"
        f"H = {H}, HV = {HV}, K = {K}, V = {V}, chunk {C}, float32; jax {jax.__version__}, {jax.default_backend()}."
    )
    x = embed(documents)
    rows: list[Row] = []
    with make_progress(console) as progress:
        task = progress.add_task("compiling, running, checking", total=9)

        def collect(source: Iterator[Row]) -> None:
            for row in source:
                rows.append(row)
                progress.update(task, advance=1, description=row.stage)

        collect(stages(x))
        size = sum(lengths)
        collect(operators(x, min(options.slice, size), sum(row.flops for row in rows) / size))
    console.print(as_table(rows, console))
    console.print(
        "Time: median of 3 runs, without compilation. GFLOP/s: the flops the stage needs, not those it does. Error: "
        "RMS against float64 over RMS, the worst output of a stage; stages against their definition, operators "
        f"against the token recurrence. Limit {LIMIT:.0e}."
    )
    picture = options.output / "demo.png"
    plot(rows, picture)
    console.print(f"Plot in {picture}. {time.perf_counter() - started:.0f} seconds in all.")
    return int(any(row.error > LIMIT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
