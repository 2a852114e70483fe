"""Figures of operators whose tokens lie on several devices."""

from benchmarks.cases import CASES
from benchmarks.figures import tables


def divided() -> list[dict]:
    """Return the rows of operators over several devices of a v6e."""
    names = ("scale-v6e", "scale-v6e-backward", "scale-v6e-others")
    return [row for name in names for row in tables.rows_of(name) if row["devices"] > 1]


@tables.block
def over_devices() -> str:
    """The time of an operator whose tokens lie on several devices, and how much more than on one device it is."""
    rows = divided()

    def cell(way):
        found = lambda row: tables.select(rows, **row, way=way)
        both = lambda x: f"{tables.decimals(x['estimate_ms'])} ms, {tables.percent(x['to_one_device'] - 1)} more"
        return lambda row: next(map(both, found(row)), tables.NONE)

    def operator(row):
        layer = CASES[row["case"]]
        return f"{tables.TITLES[layer.operator]}, {layer.HV} value heads"

    lines = dict.fromkeys((row["case"], row["devices"]) for row in rows)
    columns = {"operator": operator, "devices": lambda row: str(row["devices"])}
    columns |= {title: cell(way) for way, title in tables.PASSES.items()}
    return tables.table([{"case": case, "devices": devices} for case, devices in lines], columns)
