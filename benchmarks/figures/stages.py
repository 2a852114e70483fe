"""Figures of the stages, the convolution and the norm, for the pages of their packages."""

import functools

from benchmarks.figures import tables
from chunkwise.shared.chips import CHIPS


def stage(package: str) -> str:
    """The cycles of a stage by what a grid step takes."""
    rows = tables.select(tables.rows_of("stages-v6e"), package=package)
    columns = {
        rows[0]["what"]: "launch",
        "kernel, cycles": lambda row: tables.whole(row["kernel_cycles"]),
        "us": lambda row: tables.whole(row["kernel_cycles"] / CHIPS["v6e"].clock_ghz / 1000),
        "around, cycles": lambda row: tables.whole(row.get("around_cycles")),
        "floor, us": lambda row: tables.whole(row.get("floor_us")),
    }
    return tables.table(rows, columns)


tables.BLOCKS |= {
    f"stage-{name}": functools.partial(stage, name) for name in tables.values(tables.rows_of("stages-v6e"), "package")
}


def beside_operators(package: str) -> str:
    """The cycles of a kernel beside an operator, and of XLA, on all generations."""
    rows = [row for row in tables.select(tables.rows_of("beside-operators"), package=package) if "pass" in row]

    def kernel(row):
        return f"{tables.whole(row['bundles'])} bundles" if "bundles" in row else tables.whole(row["kernel_cycles"])

    columns = {"chip": "chip", "pass": "pass", "kernel, cycles": kernel}
    columns |= {"XLA, cycles": lambda row: tables.whole(row.get("xla_cycles"))}
    columns |= {"floor, cycles": lambda row: tables.whole(row["floor_cycles"])}
    both = lambda row: f"{row['temporaries_mib']}, {row['xla_temporaries_mib']}"
    return tables.table(rows, columns | ({"temporaries, XLA's, MiB": both} if "temporaries_mib" in rows[0] else {}))


tables.BLOCKS |= {
    f"beside-{name}": functools.partial(beside_operators, name) for name in ("causal_conv1d", "norm_gated")
}


@tables.block
def norm_sizes() -> str:
    """The cycles of the norm at other sizes."""

    def cell(way):
        both = lambda x: f"{tables.whole(x['kernel_cycles'])}, {tables.whole(x['floor_cycles'])}"
        return lambda row: both(row[way]) if way in row else tables.NONE

    columns = {"D": lambda row: tables.whole(row["D"]), "channels a token": lambda row: tables.whole(row["channels"])}
    columns |= {f"{way}, floor": cell(way) for way in ("forward", "backward")}
    return tables.table([row for row in tables.rows_of("beside-operators") if "D" in row], columns)


@tables.block
def stage_gates() -> str:
    """The error of a chain of stages by its gates."""
    some = "logsigmoid", "100 logsigmoid", "logsigmoid / 100, and -30 on every fourth token"
    rows = [row for row in tables.rows_of("stage-gates") if row["gates"] in some]
    cell = lambda C: lambda row: f"{row['errors'][C]:.1e}"
    return tables.table(rows, {"gates": "gates"} | {f"C = {C}": cell(C) for C in rows[0]["errors"]})
