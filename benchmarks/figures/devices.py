"""Figures of operators whose tokens lie on several devices."""

from benchmarks.figures.tables import (
    NONE,
    TITLES,
    block,
    count,
    cycles,
    mebibytes,
    of,
    only,
    percent,
    rows_of,
    select,
    table,
    values,
    way,
    whole,
)


def divided(*names: str) -> list[dict]:
    """Return the rows of several devices, beside the rows of one device of the same case."""
    of_both = lambda row, rows: {"divided": row, "alone": only(select(rows, devices=1), **place(row))}
    place = lambda row: {key: row[key] for key in ("case", "topology") if key in row}
    return [of_both(row, rows) for rows in map(rows_of, names) for row in rows if row["devices"] > 1]


@block
def scale_v5p() -> str:
    """A million tokens over the devices of a v5p."""
    mib = lambda row: mebibytes(round(row["memory_mib"]))
    columns = {
        "devices x tokens each": of("divided", lambda row: f"{row['devices']} x {whole(row['tokens_each'])}"),
        "pass": of("divided", way),
        "bundles, alone": of("alone", count("bundles")),
        "divided": of("divided", count("bundles")),
        "of these, the map": of("divided", count("summary_bundles")),
        "more": lambda row: percent(row["divided"]["bundles"] / row["alone"]["bundles"] - 1),
        "memory, alone / divided, MiB": lambda row: f"{mib(row['alone'])} / {mib(row['divided'])}",
        "collectives, MiB sent": of("divided", lambda row: f"{row['collectives']}, {mebibytes(row['sent_mib'])}"),
    }
    return table(divided("scale-v5p", "scale-v5p-backward"), columns)


@block
def scale_v6e() -> str:
    """Every launch of a divided forward by itself."""
    names = {
        "qwen3-next-80b-unit": "scaled to unit length in the kernels",
        "qwen3-next-80b": "of unit length as they come in",
    }
    launch = lambda n: of("divided", lambda row: row["launch_cycles"].split(" + ")[n])
    columns = {
        "queries and keys": of("divided", lambda row: names[row["case"]]),
        "devices": of("divided", "devices"),
        "alone": of("alone", lambda row: whole(cycles(row))),
        "the map": launch(0),
        "the operator behind it": launch(1),
        "XLA": of("divided", count("around_cycles")),
        "more": lambda row: percent(cycles(row["divided"]) / cycles(row["alone"]) - 1),
    }
    return table(divided("scale-v6e"), columns)


@block
def scale_added() -> str:
    """The cost that dividing tokens adds to the other operators."""
    added = ", ".join(
        f"{percent(row['forward_added'])} and {percent(row['added'])} for {TITLES[row['operator']]}"
        for row in rows_of("scale-v6e-added")
    )
    alone, divided = select(rows_of("scale-v6e-backward"), case="qwen3-next-80b-unit")
    return (
        f"The addition to the forward, and to both directions together, is {added}.\n"
        f"The gated delta rule of Qwen3-Next takes {whole(divided['bundles'])} bundles in both directions on "
        f"{divided['devices']} devices,\n{percent(divided['bundles'] / alone['bundles'] - 1)} more than on one."
    )


@block
def scans() -> str:
    """The ways to bring states to devices."""
    rows = rows_of("scan-v5p")
    attention = {row["devices"]: row for row in rows_of("scale-v5p") if row["devices"] > 1}

    def cell(scan):
        found = lambda row: only(rows, **row, scan=scan)
        return lambda row: f"{mebibytes(found(row)['sent_mib'])} / {mebibytes(found(row)['temporaries_mib'])}"

    def ring(row):
        found = attention.get(row["devices"])
        return " / ".join(whole(found[f"ring_attention_{heads}_mib"]) for heads in (32, 2)) if found else NONE

    columns = {"devices": "devices"}
    columns |= {f"`{scan}`": cell(scan) for scan in ("all_gather", "all_to_all", "doubling", "ring")}
    lines = [{"devices": devices} for devices in values(rows, "devices")]
    return table(lines, columns | {"ring attention, 32 / 2 heads: sent": ring})


@block
def split_flops() -> str:
    """The flops that dividing tokens adds to the products of plain JAX."""
    columns = {'`"xla"`, million flops': lambda row: f"`chunk_{row['operator']}`"}
    for name, alone, divided in (
        ("forward", "forward_mflop", "forward_divided_mflop"),
        ("both directions", "mflop", "divided_mflop"),
    ):
        both = lambda row, a=alone, d=divided: f"{whole(row[a])} / {whole(row[d])}"
        more = lambda row, a=alone, d=divided: percent(row[d] / row[a] - 1)
        columns |= {f"{name} alone / divided": both, f"{name}, more": more}
    return table(rows_of("split-flops"), columns)
