"""Two results of the same command side by side."""

# The fields that identify a row.
NAMES = ("case", "stage", "T", "pass", "dtype", "implementation", "devices", "chip")
NAMES += ("sweep", "operator", "form", "point", "split", "topology", "scan", "mixture")
# The first of these figures that the base has is compared, and then the memory; smaller is better.
FIGURES = ("median_ms", "cycles", "operations_cycles", "bundles", "sent_mib", "error", "cold_cpu_s")
MEMORY = ("memory_mib", "temporaries_mib")


def name(row: dict) -> tuple:
    """Return the fields that identify a row."""
    return tuple(row.get(key) for key in NAMES)


def merged(rows: list[dict], earlier: list[dict]) -> list[dict]:
    """Return the earlier rows that no new row replaces, and then the new rows."""
    new = {name(row) for row in rows}
    return [row for row in earlier if name(row) not in new] + rows


def figures(row: dict) -> dict[str, float]:
    """Return the figures of a row by name; cycles include the operations around the kernels."""
    found = {key: row.get(key) for key in (*FIGURES, *MEMORY)}
    if row.get("kernel_cycles") is not None:
        found["cycles"] = row["kernel_cycles"] + (row.get("around_cycles") or 0)
    return {key: value for key, value in found.items() if value is not None}


def compare(rows: list[dict], base: list[dict], tolerance: float) -> list[dict]:
    """Return a row for every figure of every row of the base: both values, their ratio, and a verdict.

    The verdict is worse if a figure exceeds the base's by more than the tolerance, if it is missing, or if the base's
    result is correct and the new one is not. Memory below 1 MiB counts as 1 MiB.
    """
    now, lines = {name(row): row for row in rows}, []
    for before in base:
        after = now.get(name(before), {})
        label = {key: before[key] for key in NAMES if before.get(key) is not None}
        wrong = bool(before.get("correct") and not after.get("correct"))
        values, found = figures(before), figures(after)
        for figure in [key for key in FIGURES if key in values][:1] + [key for key in MEMORY if key in values]:
            old, new = values[figure], found.get(figure)
            least = max(old, 1.0) if figure in MEMORY else old
            ratio = new / old if new is not None and old else None
            worse = wrong or new is None or new > least * (1 + tolerance)
            lines.append(label | {"figure": figure, "base": old, "now": new, "ratio": ratio, "worse": worse})
    return lines
