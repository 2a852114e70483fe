"""The picture of `chunkwise demo`; it needs `chunkwise-command[demo]`."""

from pathlib import Path

from chunkwise.command.demo_records import Recall, Run

LINES = 12
COLOURS = {
    "delta rule": "tab:blue",
    "linear attention": "tab:orange",
    "chunk by chunk": "tab:blue",
    "token by token": "tab:gray",
}
WRONG = "tab:red"
# The most characters of a name; a longer name is cut.
NAME = 24


def draw(recalls: list[Recall], shown: Recall, runs: list[Run], limit: float, path: Path) -> None:
    """Draw the lines that were read back, how many were right, and the speed and the error of the runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(14, 8.8), layout="constrained")
    rows = figure.add_gridspec(2, 1, height_ratios=(1.0, 1.15))
    # Columns are as wide as their number of characters, so that letters have the same distance in all three.
    texts = rows[0].subgridspec(1, 3, width_ratios=(NAME + 35, 34, 34))
    _stored(figure.add_subplot(texts[0]), shown)
    for column, state in enumerate(shown.answers, 1):
        _read_back(figure.add_subplot(texts[column]), shown, state)
    graphs = rows[1].subgridspec(1, 3)
    _curve(figure.add_subplot(graphs[0]), recalls)
    _rates(figure.add_subplot(graphs[1]), runs)
    _errors(figure.add_subplot(graphs[2]), runs, limit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _sheet(axes, title: str, width: float) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set(xlim=(0, width), ylim=(LINES, 0), xticks=[], yticks=[])
    axes.spines[:].set_color("lightgray")


def _write(axes, column: float, row: int, text: str, colour: str, **style) -> None:
    """Write one letter in each column."""
    style |= dict(color=colour, family="monospace", fontsize=9.5, va="center", ha="center")
    for place, letter in enumerate(text):
        axes.text(column + place + 0.5, row + 0.5, letter, **style)


def _stored(axes, shown: Recall) -> None:
    _sheet(axes, f"Stored: {len(shown.facts)} names and lines, each after a wrong line. {LINES} of them:", NAME + 35)
    for row, (name, line) in enumerate(list(shown.facts.items())[:LINES]):
        _write(axes, 1, row, name if len(name) <= NAME else name[: NAME - 2] + "..", "black", weight="bold")
        _write(axes, NAME + 2, row, line, "black")


def _read_back(axes, shown: Recall, state: str) -> None:
    title = {"delta rule": "Delta rule", "linear attention": "Plain linear attention"}[state]
    _sheet(axes, f"{title}: {shown.right_lines(state)} of {len(shown.facts)} lines come back", 34)
    for row, (line, answer) in enumerate(list(zip(shown.facts.values(), shown.answers[state], strict=True))[:LINES]):
        for column, (want, got) in enumerate(zip(line, answer, strict=True)):
            if got != want:
                axes.add_patch(_box(column + 1, row))
            _write(axes, column + 1, row, got, "black" if got == want else WRONG)


def _box(column: float, row: float):
    from matplotlib.patches import Rectangle

    return Rectangle((column, row + 0.08), 1, 0.84, color=WRONG, alpha=0.15, linewidth=0)


def _label(axes, x: float, y: float, text: str, below: bool = False, **style) -> None:
    """Write a label next to a point of its line."""
    offset, side = (-8, "top") if below else (8, "bottom")
    axes.annotate(text, (x, y), xytext=(0, offset), textcoords="offset points", va=side, **({"ha": "center"} | style))


def _curve(axes, recalls: list[Recall]) -> None:
    counts = [len(recall.facts) for recall in recalls]
    axes.set_title("How much comes back", loc="left", fontsize=11)
    for state, place in zip(recalls[0].answers, (-3, -4), strict=True):
        shares = [100 * recall.right_characters(state) for recall in recalls]
        axes.plot(counts, shares, "o-", color=COLOURS[state])
        point = max(place, -len(counts))
        _label(axes, counts[point], shares[point], state, below=place == -4, ha="right", color=COLOURS[state])
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="lines stored in one state", ylabel="characters right, %", ylim=(0, 112))
    axes.grid(alpha=0.3)


def _by_way(runs: list[Run]) -> dict[str, list[Run]]:
    return {way: [run for run in runs if run.way == way] for way in dict.fromkeys(run.way for run in runs)}


def _tokens_axis(axes, runs: list[Run]) -> None:
    tokens = sorted({run.tokens for run in runs})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.set(xlabel="tokens of the sequence")
    axes.grid(alpha=0.3)


def _rates(axes, runs: list[Run]) -> None:
    axes.set_title("How fast the gated delta rule is", loc="left", fontsize=11)
    ways = _by_way(runs)
    places = range(len(next(iter(ways.values()))))
    for shift, (way, some) in zip((-0.2, 0.2), ways.items(), strict=True):
        axes.bar([place + shift for place in places], [run.rate for run in some], 0.4, color=COLOURS[way], label=way)
    chunked, stepwise = ways.values()
    for place, fast, slow in zip(places, chunked, stepwise, strict=True):
        factor = f"{fast.rate / slow.rate:.1f} x"
        _label(axes, place - 0.2, fast.rate, factor, color=COLOURS[fast.way], weight="bold")
    axes.set_xticks(places, [f"{run.tokens:,}" for run in chunked])
    axes.set(xlabel="tokens of the sequence", ylabel="tokens per second")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.25)
    axes.legend(loc="upper left", frameon=False)
    axes.grid(axis="y", alpha=0.3)


def _errors(axes, runs: list[Run], limit: float) -> None:
    axes.set_title("How exact it is, in float32", loc="left", fontsize=11)
    for way, some in _by_way(runs).items():
        axes.plot([run.tokens for run in some], [run.error for run in some], "o-", color=COLOURS[way])
        middle = some[len(some) // 2]
        _label(axes, middle.tokens, middle.error, way, below=way == "chunk by chunk", color=COLOURS[way])
    axes.axhline(limit, color=WRONG, linestyle="--")
    _label(axes, runs[len(runs) // 2].tokens, limit, f"allowed: {limit:.0e}", color=WRONG)
    axes.set_yscale("log")
    axes.set(ylabel="RMS error against float64, over RMS", ylim=(limit / 1000, 3 * limit))
    _tokens_axis(axes, runs)
