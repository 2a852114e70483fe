"""A fit of times on a chip to the TPU compiler's estimates, from kernels whose real times are published.

A point is a published time and the compiler's figures for the same program and chip: the bundles of its kernels, the
steps of their grids, and the cycles of the operations around them. The fitted formula is a sum of three parts;
`chunkwise.command.times` has it with rounded numbers.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import tpu, tpu_peers
from chunkwise.shared.chips import CHIPS

_DELTANET = "its README, 0.3.0: B = 1, float32, wall time of calls in a row"
_TOKAMAX = "its pull request 1103: one TPU7x device, device time, the gate and the unit lengths inside"
_SGLANG = "kda-tpu-bench: 24 heads, a gate bounded by -5, blocking calls; this is its kernel `original`"
# Points of kernels that no package index has, with the same columns.
COPIED = Path(__file__).parents[1] / "docs/data/calibrate-copied.json"


@dataclass(frozen=True)
class Published:
    """A time on a real chip that the authors of a kernel publish, with K = V = 128.

    Attributes:
      peer: a name in `tpu_peers.PEERS`.
      function: the name of the peer's function.
      chip: a name in `chips.CHIPS`.
      H, HV: heads.
      backward: whether forward and backward were measured, or the forward alone.
      ms: the time.
      source: who publishes the time, and how it was measured.
      T: tokens of a sequence.
      sequences: how many packed sequences; 0 for one sequence that is not packed.
      blocking: whether every call waited for its result.
      fitted: whether the point is in the fit. Kernels that wait for the unit of transposes and reductions are slower,
        and are not.
    """

    peer: str
    function: str
    chip: str
    H: int
    HV: int
    backward: bool
    ms: float
    source: str
    T: int = 8192
    sequences: int = 0
    blocking: bool = False
    fitted: bool = True

    def label(self) -> dict:
        """Return the fields that identify the row."""
        way = "forward+backward" if self.backward else "forward"
        shape = f"{self.sequences} x {self.T}" if self.sequences else f"{self.T}"
        case = f"{self.function} {self.H}/{self.HV}, {shape}"
        return {"case": case, "pass": way, "implementation": self.peer, "chip": self.chip}


PUBLISHED = [
    *(
        Published("deltanet-tpu", function, "v6e", H, HV, way, ms, _DELTANET)
        for function, H, HV, *times in (
            ("chunk_gdn", 16, 32, 11.37, 22.52),
            ("chunk_gdn", 16, 16, 5.63, 10.93),
            ("chunk_kda", 32, 32, 11.67, 22.51),
            ("chunk_gdn2", 12, 24, 4.85, 9.34),
        )
        for way, ms in zip((False, True), times, strict=True)
    ),
    Published("tokamax", "kimi_delta_attention", "tpu7x", 32, 32, False, 1.777, _TOKAMAX),
    *(
        Published(
            "sglang-jax", "chunk_kda_fwd", "v6e", 24, 24, False, ms, _SGLANG, T, sequences, blocking=True, fitted=False
        )
        for sequences, T, ms in ((1, 8, 0.9683), (8, 128, 10.5754), (1, 512, 2.9988))
    ),
]

# Published times that are not compared, with the reason.
LEFT_OUT = {
    "tokamax's backward": "its loops turn as often as its boundaries say, which the compiler does not know",
    "tpu-inference": "it publishes times of serving steps, of which the same holds",
    "flywheel-tpu": "the same holds for it, and its own times are in a picture",
}


def peers() -> list[str]:
    """Return the names of all peers."""
    return list(dict.fromkeys(x.peer for x in PUBLISHED))


def build(one: Published, T: int) -> tuple:
    """Return the function and the shapes of a peer."""
    if one.peer == "tokamax":
        return tpu_peers.tokamax_kda(one.HV, T, raw=True)
    if one.peer == "sglang-jax":
        return tpu_peers.sglang_kda(one.HV, T, one.sequences)
    return tpu_peers.deltanet(one.function, one.H, one.HV, T, one.backward)


def estimate(index: int, T: int) -> dict:
    """Compile a peer for the chip of its published time; call in a fresh process only."""
    one = PUBLISHED[index]
    with tpu_peers.on_a_tpu():
        return tpu.figures(lambda: build(one, T), one.chip, 0.0, profile=False)


def measure(index: int, T: int | None, timeout: float) -> list[dict]:
    """Return the point of a published time, compiled in a new process.

    A sequence that is not packed is compiled for T tokens, and the figures are scaled; None for its real length.
    """
    one = PUBLISHED[index]
    T = one.T if one.sequences or T is None else T
    found = tpu.first_result([f"from benchmarks.calibrate import estimate; estimate({index}, {T})"], timeout)
    row = {"version": metadata.version(one.peer), "compiled_T": T, "source": one.source, "published_ms": one.ms}
    row |= {"blocking": one.blocking, "fitted": one.fitted}
    counted = ("bundles", "grid_steps", "around_cycles")
    if "failed" in found or None in (found[name] for name in counted):
        return [row | {"failed": found.get("failed", "a loop turns as often as its data say")}]
    return [row | {name: round(found[name] * one.T / T) for name in counted} | {"compile_s": found["compile_s"]}]


def jobs(peers: list[str], T: int | None, timeout: float) -> Iterator[tuple]:
    """Yield (description of a job, label, function that returns rows) for the published times of peers."""
    for index, one in enumerate(PUBLISHED):
        if one.peer in peers and tpu_peers.is_installed(one.peer):
            name = f"{one.peer}, {one.function}, {one.chip}"
            yield name, one.label(), lambda index=index: measure(index, T, timeout)


def copied() -> list[dict]:
    """Return the points that were copied by hand."""
    return json.loads(COPIED.read_text())["rows"]


class Fit(NamedTuple):
    """The parts of the time of a program.

    Attributes:
      call_ms: the time that a call which waits for its result takes in addition.
      factor: the time of bundles and operations, divided by their time at the peak clock.
      step_us: the time of a grid step in addition to its bundles.
      ratios: predicted over published times of all points.
    """

    call_ms: float
    factor: float
    step_us: float
    ratios: np.ndarray

    @property
    def spread(self) -> float:
        """The root of the mean square of the relative errors."""
        return float(np.sqrt(np.mean((self.ratios - 1) ** 2)))


def _columns(row: dict) -> list[float]:
    """Return the coefficients of the three numbers of a fit."""
    cycles = row["bundles"] + row["around_cycles"]
    return [float(row["blocking"]), cycles / CHIPS[row["chip"]].clock_ghz / 1e6, row["grid_steps"] / 1e3]


def fit(rows: list[dict]) -> Fit:
    """Return the fit to the points by least squares of the relative errors, all with the same weight."""
    columns, times = np.array([_columns(row) for row in rows]), np.array([row["published_ms"] for row in rows])
    found = np.linalg.lstsq(columns / times[:, None], np.ones_like(times), rcond=None)[0]
    return Fit(*map(float, found), columns @ found / times)


def predicted(found: Fit, rows: Iterable[dict]) -> np.ndarray:
    """Return the times of points in ms."""
    return np.array([_columns(row) for row in rows]) @ np.array(found[:3])


def ratios_without(inside: list[dict]) -> dict[str, list[float]]:
    """Return, by library, the predicted over the published times of its points, by a fit to the other points."""
    found = {}
    for name in sorted(set(map(library, inside))):
        others = [row for row in inside if library(row) != name]
        mine = [row for row in inside if library(row) == name]
        if any(row["blocking"] for row in others):
            found[name] = [x / row["published_ms"] for x, row in zip(predicted(fit(others), mine), mine, strict=True)]
    return found


def library(row: dict) -> str:
    """Return the library of a point's kernel."""
    return f"{row['implementation']} {row['version']}"


def usable(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Return the points of the fit, and the other points, from compiled and copied ones together."""
    # A point that was compiled here replaces its copy.
    rows = list({tuple(row[k] for k in ("case", "pass", "version")): row for row in [*copied(), *rows]}.values())
    known = [row for row in rows if "failed" not in row]
    return [row for row in known if row["fitted"]], [row for row in known if not row["fitted"]]


def sentences(rows: list[dict]) -> list[str]:
    """Return sentences that describe the fit to the points of a run and to the copied points."""
    lines = [f"{what} is left out, because {why}." for what, why in LEFT_OUT.items()]
    lines += [f"{peer} is not installed." for peer in peers() if not tpu_peers.is_installed(peer)]
    inside, outside = usable(rows)
    found = fit(inside)
    lines.append(
        f"time = {found.call_ms:.3f} ms of a blocking call + {found.factor:.3f} x (bundles + operations) / clock + "
        f"{found.step_us:.3f} us x grid steps: predicted over published {found.ratios.min():.2f} to "
        f"{found.ratios.max():.2f}, rms {100 * found.spread:.1f} %, {len(inside)} points."
    )
    for name, ratios in ratios_without(inside).items():
        lines.append(f"{name}, predicted from the others: {min(ratios):.2f} to {max(ratios):.2f}.")
    if outside:
        ratios = [row["published_ms"] / x for x, row in zip(predicted(found, outside), outside, strict=True)]
        lines.append(
            f"Bound by the unit of transposes and reductions: {min(ratios):.1f} to {max(ratios):.1f} times the fit."
        )
    return lines
