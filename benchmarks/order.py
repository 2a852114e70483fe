"""The search for the order of products in a kernel, over the cycles that the TPU compiler estimates.

A kernel interleaves iterators of products, one letter each (`shared.kernels.schedule`). `orders.json` of the package
has the orders that searches have found, by heads, chunk size, channels and chip. This search begins with such an order,
or with the plain alternation, and moves one letter at a time; of `--tries` orders it keeps the fastest. Every order is
compiled in a new process. `--write` stores the order if it is faster by half a percent and gives the same results to
the bit.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import scale, tpu
from benchmarks.cases import CASES
from chunkwise.fused_gdn.operator import OPERATOR as GATED_DELTA_RULE
from chunkwise.kda.operator import OPERATOR as KDA
from chunkwise.shared import tuning
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.implementation import implementations
from chunkwise.shared.testing.inputs import make_inputs

PACKAGES = Path(__file__).parents[1] / "packages"


class Searched(NamedTuple):
    """A kernel whose order is searched.

    Attributes:
      package, kernel, size: arguments of `tuning.find_order`.
      otherwise: the plain alternation.
      case: the layer whose launch is compiled.
      divided: whether the kernel runs only if tokens are split over devices.
      index: which launch of that forward it is.
    """

    package: str
    kernel: str
    size: tuple[int, int, int]
    otherwise: str
    case: str
    divided: bool
    index: int


KERNELS = {
    "kda": Searched("chunkwise.kda", "fwd", (16, 64, 128), "pm" * 8, "kimi-linear-48b", False, 0),
    "kda-map": Searched("chunkwise.kda", "summary", (16, 64, 128), "pm" * 8, "kimi-linear-48b", True, 0),
    "gdn-map": Searched("chunkwise.fused_gdn", "map", (32, 64, 128), "xpm" * 8, "qwen3-next-80b", True, 0),
    "gdn-behind-map": Searched(
        "chunkwise.fused_gdn", "precomputed", (32, 64, 128), "pm" * 8, "qwen3-next-80b", True, 1
    ),
}


def cycles_of(name: str, order: str, chip: str, T: int) -> dict:
    """Return the estimated cycles of a launch with an order; call in a fresh process only."""
    kernel = KERNELS[name]
    with tuning.injected_orders(kernel.package, **{kernel.kernel: order}):
        topology = CHIPS[chip].topology
        return scale.estimate_launch(CASES[kernel.case], "fused", topology, T, kernel.divided, kernel.index)


def measure(name: str, order: str, chip: str, T: int, timeout: float) -> int | None:
    """Return the cycles of an order, None where the compiler gives no estimate."""
    code = f"from benchmarks.order import cycles_of; cycles_of({name!r}, {order!r}, {chip!r}, {T})"
    return tpu.first_result([code], timeout).get("cycles")


def neighbours(order: str) -> set[str]:
    """Return the orders that differ by one letter at another place."""
    moved = set()
    for source in range(len(order)):
        rest = order[:source] + order[source + 1 :]
        moved |= {rest[:target] + order[source] + rest[target:] for target in range(len(order))}
    return moved - {order}


def search(start: str, tries: int, cost: Callable[[str], int | None], seed: int = 0) -> Iterator[tuple[str, int]]:
    """Yield every order that is the fastest so far, with its cycles, from the start on.

    The search ends after `tries` tries, or if all neighbours of the fastest order have been tried.
    """
    best, least, rng, known = start, cost(start), random.Random(seed), {start}
    if least is None:
        raise RuntimeError("The compiler must give an estimate for the order to begin with; got none.")
    yield best, least
    for _ in range(tries):
        if not (untried := sorted(neighbours(best) - known)):
            return
        order = rng.choice(untried)
        known.add(order)
        found = cost(order)
        if found is not None and found < least:
            best, least = order, found
            yield best, least


def same_results(kernel: Searched, order: str) -> bool:
    """Return whether interpreted kernels give the same bits with an order as with the plain alternation."""
    operator, per_channel = (KDA, True) if kernel.package == "chunkwise.kda" else (GATED_DELTA_RULE, False)
    H = 16
    x = make_inputs(1, 130, H, H if per_channel else 2 * H, 8, 8, per_channel=per_channel)
    fused = operator.implementations["fused"]

    def run(x):
        y, options = Arguments(**x), Options(True, chunk_size=64)
        found = implementations.map_states(fused, y, options)
        return found, implementations.run(fused, y, options), implementations.run(fused, y, options, found.precomputed)

    results = []
    for each in (kernel.otherwise, order):
        jax.clear_caches()
        with tuning.injected_orders(kernel.package, **{kernel.kernel: each}):
            results.append(jax.tree.leaves(jax.jit(run)(x)))
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*results, strict=True))


def path_of(kernel: Searched) -> Path:
    """Return the file that holds the orders of a kernel."""
    name = kernel.package.rpartition(".")[2]
    return PACKAGES / name / "src/chunkwise" / name / "orders.json"


def store(path: Path, kernel: Searched, chip: str, order: str) -> None:
    """Write an order to the file of its package."""
    orders = json.loads(path.read_text())
    orders.setdefault(kernel.kernel, {}).setdefault(tuning.order_key(*kernel.size), {})[chip] = order
    path.write_text(json.dumps(orders, indent=2) + "\n")


def rows(name: str, chip: str, T: int, tries: int, timeout: float, write: bool) -> Iterator[dict]:
    """Yield a row for every order that is the fastest so far; store the last one if it is better and `write` is set."""
    kernel = KERNELS[name]
    orders = json.loads(path_of(kernel).read_text()).get(kernel.kernel, {}).get(tuning.order_key(*kernel.size), {})
    start = orders.get(chip, kernel.otherwise)
    found = []
    for order, cycles in search(start, tries, lambda order: measure(name, order, chip, T, timeout)):
        found.append(cycles)
        yield {"kernel": name, "chip": chip, "T": T, "order": order, "cycles": cycles}
    if write and found[-1] < 0.995 * found[0] and same_results(kernel, order):
        store(path_of(kernel), kernel, chip, order)
