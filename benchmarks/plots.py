"""Pictures of the errors that `accuracy` saves."""

from pathlib import Path


def draw(rows: list[dict], path: Path) -> None:
    """Draw the errors of every operator against the points of a sweep."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    operators = list(dict.fromkeys(row["operator"] for row in rows))
    width = 2.6 * len(operators) + 1
    figure, row_of_axes = plt.subplots(
        1, len(operators), figsize=(width, 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, operator in zip(row_of_axes[0], operators, strict=True):
        mine = [row for row in rows if row["operator"] == operator]
        # A line without points keeps its colour, so that all pictures of a row have the same colours.
        for index, line in enumerate(dict.fromkeys((row["form"], row["dtype"]) for row in mine)):
            found = [row for row in mine if (row["form"], row["dtype"]) == line and row["error"] is not None]
            if points := sorted((row["point"], row["error"]) for row in found):
                style = {"color": f"C{index}", "marker": "osv^D<>*phX"[index % 11], "markersize": 4}
                axes.plot(*zip(*points, strict=True), label=", ".join(line), **style)
        axes.grid(alpha=0.3)
        strengths = rows[0]["sweep"] == "gate strength"
        axes.set(yscale="log", title=operator, xlabel="mean gate, nats a token" if strengths else "share of equal keys")
        if strengths:
            axes.set_xscale("log")
    row_of_axes[0][0].set_ylabel("RMS error over RMS")
    row_of_axes[0][0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)
