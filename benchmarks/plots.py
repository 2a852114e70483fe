"""Pictures of saved results."""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.scale import SCANS


def _groups(rows: Iterable[dict], *keys: str) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[key]) for key in keys if row.get(key)), []).append(row)
    return groups


def _lines(axes, rows, keys, x, y):
    # A group without points keeps its colour, so that all pictures of a row have the same colours.
    for index, (label, group) in enumerate(_groups(rows, *keys).items()):
        points = sorted((row[x], row[y]) for row in group if row.get(y) is not None)
        if points:
            style = {"color": f"C{index}", "marker": "osv^D<>*phX"[index % 11]}
            axes.plot(*zip(*points, strict=True), markersize=4, label=label, **style)
    axes.grid(alpha=0.3)


def _time(rows, plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    keys = ("case", "pass", "dtype", "implementation")
    varying = [key for key in keys if len({row.get(key) for row in rows}) > 1] or ["implementation"]
    rows = [row for row in rows if row["correct"]]
    _lines(left, rows, varying, "T", "median_ms")
    _lines(right, rows, varying, "T", "memory_mib")
    left.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel="time, ms")
    right.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel="memory, MiB")
    left.legend(fontsize=7)
    return figure


def _accuracy(rows, plt):
    operators = list(dict.fromkeys(row["operator"] for row in rows))
    width = 2.6 * len(operators) + 1
    figure, row_of_axes = plt.subplots(
        1, len(operators), figsize=(width, 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, operator in zip(row_of_axes[0], operators, strict=True):
        _lines(axes, [row for row in rows if row["operator"] == operator], ("form", "dtype"), "point", "error")
        strengths = rows[0]["sweep"] == "gate strength"
        axes.set(yscale="log", title=operator, xlabel="mean gate, nats a token" if strengths else "share of equal keys")
        if strengths:
            axes.set_xscale("log")
    row_of_axes[0][0].set_ylabel("RMS error over RMS")
    row_of_axes[0][0].legend(fontsize=7)
    return figure


def _tpu(rows, plt):
    rows = [row for row in rows if row.get("kernel_cycles") or row.get("bundles")]
    groups, chips = _groups(rows, "case", "pass", "implementation"), list(dict.fromkeys(row["chip"] for row in rows))
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for index, (label, group) in enumerate(groups.items()):
        color = f"C{index}"
        for row in group:
            place = chips.index(row["chip"]) + 0.8 * (index / len(groups) - 0.5)
            cycles = row["kernel_cycles"] and row["kernel_cycles"] + row["around_cycles"]
            # If the compiler gave no cycles, an outline shows the bundles, which are a lower bound.
            style = {"color": color} if cycles else {"edgecolor": color, "fill": False}
            axes.bar(place, (cycles or row["bundles"]) / 1e6, 0.75 / len(groups), align="edge", **style)
        axes.bar(0, 0, color=color, label=label)
    axes.set(ylabel="million cycles, estimated\n(outlines: bundles)")
    axes.margins(y=0.25)
    axes.set_xticks(range(len(chips)), chips)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def _scale(rows, plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    divided = [row for row in rows if row["devices"] > 1]
    names = {"sent_mib": "this operator, compiled"}
    names |= {f"{scan}_mib": scan for scan in SCANS if f"{scan}_mib" in divided[0]}
    names |= {key: key.removesuffix("_mib").replace("_", " ") for key in divided[0] if "attention" in key}
    lines = [
        {"way": text if text.startswith("this") else f"{text}, derived", "devices": row["devices"], "mib": row[key]}
        for key, text in names.items()
        for row in divided
    ]
    _lines(left, lines, ("way",), "devices", "mib")
    for place, row in enumerate(divided):
        alone = next(x for x in rows if x["devices"] == 1 and x["topology"] == row["topology"])
        summary, whole = ((row.get(key) or 0) / 1e6 for key in ("summary_bundles", "bundles"))
        right.bar(place - 0.2, (alone.get("bundles") or 0) / 1e6, 0.36, color="C0")
        right.bar(place + 0.2, summary, 0.36, color="C1")
        right.bar(place + 0.2, whole - summary, 0.36, summary, color="C2")
    for index, label in enumerate(("one device alone", "map of a device", "the operator behind it")):
        right.bar(0, 0, color=f"C{index}", label=label)
    right.set_xticks(range(len(divided)), [f"{x['devices']} x {x['tokens_each']}" for x in divided])
    right.set(xlabel="devices x tokens each", ylabel="million bundles of a device")
    right.legend(fontsize=7)
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel="sent by a device, MiB")
    left.legend(fontsize=6, ncols=2, loc="center", bbox_to_anchor=(0.5, 0.77))
    return figure


KINDS = {"time": _time, "accuracy": _accuracy, "tpu": _tpu, "scale": _scale}


def draw(kind: str, rows: list[dict], path: Path) -> None:
    """Draw the rows of a result of a command: `kind` is its name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = KINDS[kind](rows, plt)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)
