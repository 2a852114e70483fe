"""Figures of serving steps, decodes and pools of states."""

import math

from benchmarks import step as steps
from benchmarks.figures import tables
from chunkwise.command import models
from chunkwise.shared.chips import CHIPS

MIXTURES = {
    "decode-32": "32 decodes",
    "decode-64": "64 decodes",
    "decode-64-bfloat16": "64 decodes, bfloat16 pool",
    "decode-256": "256 decodes",
    "decode-256-bfloat16": "256 decodes, bfloat16 pool",
    "speculate-64x3": "64 decodes of 3 speculated tokens",
    "prefill-4096": "a prefill of 4,096",
    "decode-32-prefill-4096": "32 decodes and a prefill of 4,096",
    "prefill-8192": "a prefill of 8,192",
    "prefill-8192-ragged": "16 ragged prefills, 8,192 in all",
}


def step_rows(chip: str) -> list[dict]:
    """Return the rows of serving steps on a chip, decodes alone and those with prefills."""
    return [*tables.rows_of(f"step-{chip}"), *tables.select(tables.rows_of("step-prefills"), chip=chip)]


def heads(layer: models.Layer) -> str:
    """Return an operator with its key and value heads."""
    return f"{tables.TITLES[layer.operator]}, {layer.H}/{layer.HV}"


@tables.block
def step() -> str:
    """Serving steps of Qwen3-Next's layer."""

    def cell(chip):
        def text(name):
            row = tables.only(step_rows(chip), case="qwen3-next-80b", mixture=name["mixture"])
            return tables.decimals(row["estimate_ms"], 3) if row.get("cycles") else tables.NONE

        return text

    columns = {"ms": lambda row: MIXTURES[row["mixture"]]}
    return tables.table([{"mixture": x} for x in MIXTURES], columns | {chip: cell(chip) for chip in CHIPS})


@tables.block
def decodes_layout() -> str:
    """What a layout of pools costs a step of decodes."""
    rows = tables.select(tables.rows_of("decodes"), case="qwen3-next-80b-tp8", chip="v6e")
    plain, ring = (tables.only(rows, mixture=name) for name in ("decode-64-bfloat16", "decode-64-bfloat16-ring"))
    layouts = lambda row: f"{tables.whole(row['around_cycles'])} and {tables.whole(row['around_in_default_layout'])}"
    return (
        f"For 64 decodes over {tables.whole(steps.SLOTS)} slots, with 2 key and 4 value heads and bfloat16 states, "
        f"the\ncompiler for v6e expects all operations around the launch to take {layouts(plain)} cycles in rows and "
        f"in\nthe default layout; with a ring of 16 tokens {layouts(ring)}. The copies grow with the number of slots."
    )


@tables.block
def pools() -> str:
    """The bytes of a decode over every pool, its cycles on a v6e where they are known, and its error."""
    layer, rows = models.MODELS["qwen3-next-80b"], tables.select(step_rows("v6e"), case="qwen3-next-80b")
    errors = tables.select(tables.rows_of("pool-errors"), keys="64 keys")
    mixture = lambda row: models.Mixture(64, pool=row["dtype"], replay=row["replay"])
    name = lambda row: "{dtype}, ring of {replay}".format(**row) if row["replay"] else row["dtype"]

    def cycles(row):
        known = next((name for name, x in steps.MIXTURES.items() if x == mixture(row)), None)
        return next(
            (tables.whole(x["cycles"]) for x in tables.select(rows, mixture=known) if x.get("cycles")), tables.NONE
        )

    error = lambda gate: lambda row: f"{tables.only(errors, pool=name(row), gate=gate)['error']:.1e}"
    columns = {
        "pool": name,
        "KiB a token and value head": lambda row: tables.decimals(
            models.moved_bytes(layer, mixture(row))[0] / 64 / layer.HV / 2**10, 1
        ),
        "cycles of 64 decodes, v6e": cycles,
    }
    columns |= {f"error, gate -{gate}": error(gate) for gate in (0.05, 0.005)}
    types = ("float32", "bfloat16", "float16", "int8")
    return tables.table([{"dtype": dtype, "replay": L} for dtype in types for L in (0, 16)], columns)


@tables.block
def pool_bits() -> str:
    """The bits per byte of a model over a float32 pool, and how far the other pools are from it."""
    rows = tables.rows_of("pool-bits")
    # In thousandths of a percent, rounded up.
    most = math.ceil(1e5 * max(abs(row["over_float32"]) for row in rows)) / 1000
    bits = tables.only(rows, pool="float32")["bits_per_byte"]
    return (
        f"The model of the page on training needs {tables.decimals(bits, 3)} bits for a byte with a float32 pool. "
        f"Every other pool\nchanges this by at most {tables.decimals(most, 3)} %, so choose by bytes and slots."
    )


@tables.block
def step_others() -> str:
    """Prefills of the other operators on a v6e, and steps on a CPU."""
    rows, on_cpu = tables.rows_of("step-prefills"), tables.rows_of("step-cpu")
    texts = []
    for case, name in (("kimi-linear-48b", "Kimi-Linear"), ("minimax-text-01", "MiniMax")):
        ms = [tables.only(rows, case=case, mixture=f"prefill-8192{x}")["estimate_ms"] for x in ("", "-ragged")]
        texts.append(f"{' and '.join(tables.decimals(x, 3) for x in ms)} ms for {name}")
    on_cpu = [f"{tables.whole(row['median_ms'])} ms for {MIXTURES[row['mixture']]}" for row in on_cpu]
    return (
        f"On v6e the last two rows are {' and '.join(texts)}.\n"
        f"On a CPU of 2 cores, 16 heads in float32 take {on_cpu[0]}, {on_cpu[1]},\nand {on_cpu[2]}."
    )
