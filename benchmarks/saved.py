"""The rows of a saved result."""

# The fields that identify a row.
NAMES = ("case", "stage", "T", "pass", "dtype", "implementation", "devices", "chip")
NAMES += ("sweep", "operator", "form", "point", "split", "topology", "scan", "mixture")


def name(row: dict) -> tuple:
    """Return the fields that identify a row."""
    return tuple(row.get(key) for key in NAMES)


def merged(rows: list[dict], earlier: list[dict]) -> list[dict]:
    """Return the earlier rows that no new row replaces, and then the new rows."""
    new = {name(row) for row in rows}
    return [row for row in earlier if name(row) not in new] + rows
