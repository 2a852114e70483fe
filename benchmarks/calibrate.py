"""A fit of times on a chip to the TPU compiler's estimates, from kernels whose real times are published.

A point of docs/data is a published time and the compiler's figures for the same program and chip: the bundles of its
kernels, the steps of their grids, and the cycles of the operations around them. The fitted formula is a sum of three
parts; `chunkwise.command.times` has it with rounded numbers.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chunkwise.shared.chips import CHIPS

# Points of kernels that no package index has, with the same columns.
COPIED = Path(__file__).parents[1] / "docs/data/calibrate-copied.json"


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
    # A point that was compiled replaces its copy.
    rows = [*json.loads(COPIED.read_text())["rows"], *rows]
    rows = list({tuple(row[k] for k in ("case", "pass", "version")): row for row in rows}.values())
    known = [row for row in rows if "failed" not in row]
    return [row for row in known if row["fitted"]], [row for row in known if not row["fitted"]]
