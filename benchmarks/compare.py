"""Two results of the same command side by side."""

# What names a row, and what is compared: the smaller the better.
NAMES = ("case", "stage", "T", "pass", "dtype", "implementation", "chip", "sweep", "operator", "form", "point")
FIGURES = ("median_ms", "kernel_cycles", "error")


def name(row: dict) -> tuple:
    """Return what names a row."""
    return tuple(row.get(key) for key in NAMES)


def compare(rows: list[dict], base: list[dict], tolerance: float) -> list[dict]:
    """Return a row for every row of the base: both figures, their ratio, and a verdict.

    It is worse if the figure grew by more than the tolerance, if there is none any more, or if a result that was
    correct is not.
    """
    now, lines = {name(row): row for row in rows}, []
    for before in base:
        after = now.get(name(before), {})
        figure = next((key for key in FIGURES if before.get(key) is not None), None)
        if figure is None:
            continue
        old, new = before[figure], after.get(figure)
        worse = new is None or new > old * (1 + tolerance) or (before.get("correct") and not after.get("correct"))
        line = {key: before[key] for key in NAMES if before.get(key) is not None}
        ratio = None if new is None else new / old if old else 1.0
        lines.append(line | {"figure": figure, "base": old, "now": new, "ratio": ratio, "worse": bool(worse)})
    return lines
