"""Figures of operators whose tokens lie on several devices."""

import jax.numpy as jnp

from benchmarks.cases import CASES, Layer
from benchmarks.figures import tables
from chunkwise.command import times
from chunkwise.shared.chips import CHIPS

# The addition to the forward that was wanted of 4 and 8 devices.
GOAL = 0.45
# What one of the four ports of a v6e sends in TB/s: Google states 800 GB/s in both directions together for a chip.
LINK_TB_S = 0.1
# Cells of a row of several devices, beside the row of one device.
BUNDLES, MS = (tables.beside(("alone", "divided"), x) for x in (tables.count("bundles"), tables.fixed("estimate_ms")))
HEADS = tables.of("divided", lambda row: str(CASES[row["case"]].HV))
MORE = tables.of("divided", lambda row: tables.percent(row["to_one_device"] - 1))
COLLECTIVES = tables.of("divided", lambda row: f"{row['collectives']}, {tables.mebibytes(row['sent_mib'])}")


def divided(*names: str) -> list[dict]:
    """Return the rows of several devices, beside the rows of one device of the same case."""
    of_both = lambda row, rows: {"divided": row, "alone": tables.only(rows, devices=1, **place(row))}
    place = lambda row: {key: row[key] for key in ("case", "topology", "pass") if key in row}
    return [of_both(row, rows) for rows in map(tables.rows_of, names) for row in rows if row["devices"] > 1]


@tables.block
def scale_v5p() -> str:
    """A million tokens over the devices of a v5p."""
    mib = lambda row: tables.mebibytes(round(row["memory_mib"]))
    tokens = lambda row: f"{row['devices']} x {tables.whole(row['tokens_each'])}"
    columns = {
        "devices x tokens each": tables.of("divided", tokens),
        "pass": tables.of("divided", tables.way),
        "bundles, alone": tables.of("alone", tables.count("bundles")),
        "divided": tables.of("divided", tables.count("bundles")),
        "of these, the map": tables.of("divided", tables.count("summary_bundles")),
        "more": lambda row: tables.percent(row["divided"]["bundles"] / row["alone"]["bundles"] - 1),
        "memory, alone / divided, MiB": lambda row: f"{mib(row['alone'])} / {mib(row['divided'])}",
        "collectives, MiB sent": COLLECTIVES,
    }
    return tables.table(divided("scale-v5p", "scale-v5p-backward"), columns)


@tables.block
def scale_v6e() -> str:
    """Every launch of a divided forward."""
    behind = lambda row: tables.whole(row["bundles"] - row["summary_bundles"])
    columns = {
        "value heads": HEADS,
        "devices": tables.of("divided", "devices"),
        "bundles alone": tables.of("alone", tables.count("bundles")),
        "the map": tables.of("divided", tables.count("summary_bundles")),
        "the operator behind it": tables.of("divided", behind),
        "ms": MS,
        "more": MORE,
    }
    return tables.table(divided("scale-v6e"), columns)


@tables.block
def scale_backward() -> str:
    """Both directions of a divided operator."""
    columns = {
        "value heads": HEADS,
        "devices": tables.of("divided", "devices"),
        "bundles, alone / divided": BUNDLES,
        "ms, alone / divided": MS,
        "more": MORE,
        "collectives, MiB sent": COLLECTIVES,
    }
    return tables.table(divided("scale-v6e-backward"), columns)


@tables.block
def ways() -> str:
    """The ways to divide tokens, for a forward on v6e: times of kernels, and of links where they bind."""
    alone = {CASES[row["case"]].HV: row["estimate_ms"] for row in tables.rows_of("heads-v6e")}

    def wavefront(case: Layer, devices: int, _: str) -> str:
        groups = {case.HV // few: (case.HV // few + devices - 1) * ms for few, ms in alone.items() if few < case.HV}
        best = min(groups, key=lambda n: groups[n])
        return f"{tables.decimals(groups[best])}, {best} groups"

    def heads_for_tokens(case: Layer, devices: int, topology: str) -> str:
        if case.HV // devices not in alone:
            return tables.NONE
        moved = case.cost(8192, jnp.bfloat16, False)[1]
        # Of what half of the devices have, one half goes to the other half, over the links in the middle.
        middle = devices // max(map(int, topology.partition(":")[2].split("x")))
        links = devices / 2 * moved / 2 / middle / LINK_TB_S / 1e9
        sent = tables.mebibytes(round(moved * (devices - 1) / devices / 2**20))
        return f"{tables.decimals(devices * alone[case.HV // devices])} + {tables.decimals(links)}, {sent}"

    maps = lambda row: f"{tables.decimals(row['estimate_ms'])}, {tables.mebibytes(row['sent_mib'])}"
    at = lambda way: tables.of("divided", lambda row: way(CASES[row["case"]], row["devices"], row["topology"]))
    columns = {
        "value heads": HEADS,
        "devices": tables.of("divided", "devices"),
        "alone, ms": tables.of("alone", tables.fixed("estimate_ms")),
        "maps, ms, MiB sent": tables.of("divided", maps),
        "a wavefront, ms": at(wavefront),
        "heads for tokens, ms of kernels + links, MiB sent": at(heads_for_tokens),
    }
    return tables.table(divided("scale-v6e"), columns)


@tables.block
def units() -> str:
    """The work of every unit for a chunk, alone and divided."""
    rows = {row["launch"]: row for row in tables.rows_of("units-v6e")}
    keys = {"bundles": "bundles", "products": "MATMUL", "pushes": "MATPUSH", "vector unit": "VALU", "loads": "VLOAD"}
    keys |= {"stores": "VSTORE", "grid steps": "grid_steps", "MB moved": "mbytes"}
    alone, mapped, behind = (rows[n] for n in ("the operator alone", "the map", "the operator behind it"))
    added = {key: tables.percent((mapped[key] + behind[key]) / alone[key] - 1) for key in keys.values()}
    lines = [{key: tables.whole(row[key]) for key in keys.values()} | {"launch": n} for n, row in rows.items()]
    return tables.table([*lines, added | {"launch": "added by the map"}], {"launch": "launch"} | keys)


@tables.block
def fills() -> str:
    """The shares of the slots of two units that a forward fills, and those that a goal needs."""
    rows = {row["launch"]: row for row in tables.rows_of("units-v6e")}
    alone, both = [rows["the operator alone"]], [rows["the map"], rows["the operator behind it"]]
    total = lambda rows, key: sum(row[key] for row in rows)
    slots = {"MATMUL": 2, "VALU": 4}
    filled = lambda rows, bundles=None: [
        tables.percent(total(rows, key) / n / (bundles or total(rows, "bundles"))) for key, n in slots.items()
    ]
    more = [tables.percent(total(both, key) / total(alone, key) - 1) for key in ("MATMUL", "bundles")]
    (four,) = [x for x in divided("scale-v6e") if x["divided"]["devices"] == 4 and CASES[x["divided"]["case"]].HV == 32]
    # What the formula of times takes besides bundles stays.
    saved = four["divided"]["estimate_ms"] - (1 + GOAL) * four["alone"]["estimate_ms"]
    allowed = 1 - saved * CHIPS["v6e"].clock_ghz * 1e6 / times.FACTOR / four["divided"]["bundles"]
    text = "{} of the slots of the matrix unit and {} of those of the vector unit"
    return (
        f"The operator alone fills {text.format(*filled(alone))},\n"
        f"the map and the operator behind it {text.format(*filled(both))}.\n"
        f"So {more[0]} more products take {more[1]} more bundles. "
        f"For {tables.percent(GOAL)} more time on 4 devices these two would have to fill\n"
        f"{text.format(*filled(both, allowed * total(both, 'bundles')))}."
    )


@tables.block
def limit() -> str:
    """What a forward takes on a unit by itself, for all chunks of 8,192 tokens."""
    row = next(row for row in tables.rows_of("units-v6e") if row["launch"] == "the operator alone")
    alone = lambda key, slots: tables.whole(round(row[key] * 8192 / 64 / slots))
    return (
        f"With two bfloat16 parts the vector unit alone needs {alone('VALU', 4)} bundles for the forward of\n"
        f"Qwen3-Next on v6e, and the matrix unit {alone('MATMUL', 2)}: the limit of this algorithm."
    )


@tables.block
def scale_added() -> str:
    """The cost that dividing tokens over 4 devices adds to the other operators."""
    columns = {
        "operator": tables.of("divided", lambda row: tables.TITLES[CASES[row["case"]].operator]),
        "value heads": HEADS,
        "pass": tables.of("divided", tables.way),
        "bundles, alone / divided": BUNDLES,
        "ms, alone / divided": MS,
        "more": MORE,
        "MiB sent": tables.of("divided", tables.memory("sent_mib")),
    }
    return tables.table(divided("scale-v6e-others"), columns)


@tables.block
def scans() -> str:
    """The ways to bring states to devices."""
    rows = tables.rows_of("scan-v5p")
    attention = {row["devices"]: row for row in tables.rows_of("scale-v5p") if row["devices"] > 1}

    def cell(scan):
        found = lambda row: tables.only(rows, **row, scan=scan)
        both = lambda x: " / ".join(tables.mebibytes(x[key]) for key in ("sent_mib", "temporaries_mib"))
        return lambda row: both(found(row))

    def ring(row):
        if row["devices"] not in attention:
            return tables.NONE
        found = attention[row["devices"]]
        return " / ".join(tables.whole(found[f"ring_attention_{heads}_mib"]) for heads in (32, 2))

    columns = {"devices": "devices"}
    columns |= {f"`{scan}`": cell(scan) for scan in ("all_gather", "all_to_all", "doubling", "ring")}
    lines = [{"devices": devices} for devices in tables.values(rows, "devices")]
    return tables.table(lines, columns | {"ring attention, 32 / 2 heads: sent": ring})


@tables.block
def split_flops() -> str:
    """The flops that dividing tokens adds to the products of plain JAX."""
    columns = {'`"xla"`, million flops': lambda row: f"`chunk_{row['operator']}`"}
    for name, alone, divided in (
        ("forward", "forward_mflop", "forward_divided_mflop"),
        ("both directions", "mflop", "divided_mflop"),
    ):
        both = lambda row, a=alone, d=divided: f"{tables.whole(row[a])} / {tables.whole(row[d])}"
        more = lambda row, a=alone, d=divided: tables.percent(row[d] / row[a] - 1)
        columns |= {f"{name} alone / divided": both, f"{name}, more": more}
    return tables.table(tables.rows_of("split-flops"), columns)
