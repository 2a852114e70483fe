"""Figures of the stages, the convolution and the norm, for the pages of their packages."""

import functools

from benchmarks.figures.tables import BLOCKS, NONE, block, rows_of, select, table, values, whole
from chunkwise.shared.chips import CHIPS


def stage(package: str) -> str:
    """The cycles of a stage by what a grid step takes."""
    rows = select(rows_of("stages-v6e"), package=package)
    columns = {
        rows[0]["what"]: "launch",
        "kernel, cycles": lambda row: whole(row["kernel_cycles"]),
        "us": lambda row: whole(row["kernel_cycles"] / CHIPS["v6e"].clock_ghz / 1000),
        "around, cycles": lambda row: whole(row.get("around_cycles")),
        "floor, us": lambda row: whole(row.get("floor_us")),
    }
    return table(rows, columns)


BLOCKS |= {f"stage-{name}": functools.partial(stage, name) for name in values(rows_of("stages-v6e"), "package")}


def beside_operators(package: str) -> str:
    """The cycles of a kernel beside an operator, and of XLA, on all generations."""
    rows = [row for row in select(rows_of("beside-operators"), package=package) if "pass" in row]

    def kernel(row):
        return f"{whole(row['bundles'])} bundles" if "bundles" in row else whole(row["kernel_cycles"])

    columns = {"chip": "chip", "pass": "pass", "kernel, cycles": kernel}
    columns |= {"XLA, cycles": lambda row: whole(row.get("xla_cycles"))}
    columns |= {"floor, cycles": lambda row: whole(row["floor_cycles"])}
    both = lambda row: f"{row['temporaries_mib']}, {row['xla_temporaries_mib']}"
    return table(rows, columns | ({"temporaries, XLA's, MiB": both} if "temporaries_mib" in rows[0] else {}))


BLOCKS |= {f"beside-{name}": functools.partial(beside_operators, name) for name in ("causal_conv1d", "norm_gated")}


@block
def norm_sizes() -> str:
    """The cycles of the norm at other sizes."""

    def cell(way):
        both = lambda x: f"{whole(x['kernel_cycles'])}, {whole(x['floor_cycles'])}"
        return lambda row: both(row[way]) if way in row else NONE

    columns = {"D": lambda row: whole(row["D"]), "channels a token": lambda row: whole(row["channels"])}
    columns |= {f"{way}, floor": cell(way) for way in ("forward", "backward")}
    return table([row for row in rows_of("beside-operators") if "D" in row], columns)


@block
def stage_gates() -> str:
    """The error of a chain of stages by its gates."""
    rows = rows_of("stage-gates")
    cell = lambda C: lambda row: f"{row['errors'][C]:.1e}"
    return table(rows, {"gates": "gates"} | {f"C = {C}": cell(C) for C in rows[0]["errors"]})
