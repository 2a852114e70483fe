"""Figures that say what the others are worth: the fit of the formula, other people's hosts and tests."""

from benchmarks import calibrate
from benchmarks.figures import tables
from chunkwise.command import times

# The columns of docs/models.md: what tests showed of a model.
SHOWN = ("config load save", "cache decode", "packed serving devices", "fine-tuned")


def points() -> tuple[list[dict], list[dict]]:
    """Return the points of the fit, and the other points."""
    return calibrate.usable(tables.rows_of("calibrate"))


@tables.block
def calibration_fit() -> str:
    """The formula, and how far it is from the points."""
    inside, _ = points()
    apart = []
    for name, ratios in calibrate.ratios_without(inside).items():
        spread = " to ".join(dict.fromkeys(tables.decimals(x) for x in (min(ratios), max(ratios))))
        apart.append(f"{spread} of the times of {name}")
    low, high = times.WORST
    return (
        f"**time = {times.CALL_MS:.2f} ms for a blocking call + {times.FACTOR} x (bundles + cycles of the operations) "
        f"/ clock + {times.STEP_US} us x grid steps.**\n"
        f"Predicted times are {tables.decimals(low)} to {tables.decimals(high)} of the {len(inside)} published ones, "
        f"and the root of the mean square error is {100 * times.SPREAD:.1f} %.\n"
        f"A fit without the rows of a library predicts {' and '.join(apart)}."
    )


@tables.block
def hosts_serving() -> str:
    """The answers of whole serving engines with chunkwise, beside the answers with their linear attention."""
    columns = {
        "SGLang-JAX serves": "run",
        "the same tokens": lambda row: f"{tables.whole(row['same_tokens'])} of {tables.whole(row['tokens'])}",
        "log-probabilities": lambda row: f"{row['logprobs']:.0e}",
    }
    return tables.table((row for row in tables.rows_of("hosts") if "requests" in row), columns)


@tables.block
def hosts_training() -> str:
    """The losses of whole trainers with chunkwise, beside the losses with their linear attention."""
    columns = {
        "trainer, model": lambda row: f"{row['host']}, {row['run']}",
        "largest difference": lambda row: f"{row['difference']:.0e}",
        "of a unit": lambda row: f"{row['rounding']:.0e}" if "rounding" in row else tables.NONE,
    }
    return tables.table(
        (row for row in tables.rows_of("hosts") if "losses" in row and "two devices" not in row["run"]), columns
    )


@tables.block
def hosts_bundles() -> str:
    """The bundles of a decode of tpu-inference's kernel, and of ours."""
    rows = [row for row in tables.rows_of("hosts") if "bundles" in row]
    (jax,) = {row["jax"] for row in rows}
    counts = lambda who: " and ".join(tables.whole(row["bundles"][who]) for row in rows)
    names = " and ".join(row["run"].removeprefix("a decode, ").removesuffix(" heads, v6e") for row in rows)
    return (
        f"One compiler (JAX {jax}, for v6e) gives its kernel {counts('theirs')} bundles a sequence with {names} "
        f"heads,\nwithout loops whose turns depend on tables, and chunkwise's {counts('ours')}, with the gated norm "
        "(`nox -s host-tpu-inference`)."
    )


@tables.block
def suites() -> str:
    """How many tests of other projects pass with our functions in place of theirs."""
    columns = {
        "project": lambda row: f"{row['host']} {row['version']}",
        "pass": lambda row: f"{tables.whole(row['passed'])} of {tables.whole(row['tests'])}",
    }
    return tables.table([*tables.select(tables.rows_of("hosts"), run="its tests"), *tables.rows_of("suites")], columns)


@tables.block
def models() -> str:
    """What tests showed of every model: beside transformers (T), of its names and files (M), or of its layer (L)."""
    rows = tables.rows_of("models")
    shown = lambda column, **where: [x for x in tables.select(rows, **where) if column in x["shows"].split()]

    def cell(column, **case):
        own = shown(column, **case)
        beside = any("transformers" in x["with"] for x in own)
        return "T" if beside else "M" if own else "L" if shown(column, **case | {"model": None}) else tables.NONE

    groups, cases = {}, sorted({(x["model"], x["layer"]) for x in rows if x["model"]})
    for model, layer in cases:
        cells = tuple("".join(cell(x, model=model, layer=layer) for x in columns.split()) for columns in SHOWN)
        several = sum(x == model for x, _ in cases) > 1
        groups.setdefault(cells, []).append(f"`{model}`" + several * f" (`{layer}`)")
    columns = {"models": lambda x: ", ".join(groups[x])}
    columns |= {title.replace(" ", ", "): lambda x, i=i: x[i] for i, title in enumerate(SHOWN)}
    return tables.table(groups, columns)


@tables.block
def models_versions() -> str:
    """The versions under which the tests of `models` ran."""
    return f"They ran under {'; '.join(sorted({x['with'] for x in tables.rows_of('models')}, key=len))}."
