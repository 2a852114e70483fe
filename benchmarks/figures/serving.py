"""Figures of serving steps, decodes and pools of states."""

import math

from benchmarks import decode_mixer
from benchmarks import step as steps
from benchmarks.cases import CASES
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
    return f"{tables.TITLES[layer.operator]}, {layer.H} / {layer.HV}"


def against_floor(row: dict, floor: float) -> str:
    """Return cycles, their ratio to the least that the bytes take, and a time."""
    return f"{tables.whole(row['cycles'])}; {tables.decimals(floor)}; {tables.decimals(row['estimate_ms'], 3)}"


@tables.block
def step() -> str:
    """Serving steps of Qwen3-Next's layer."""

    def cell(chip):
        def text(name):
            row = tables.only(step_rows(chip), case="qwen3-next-80b", mixture=name["mixture"])
            if row.get("cycles"):
                return against_floor(row, row["to_floor"])
            return f"kernels {tables.whole(sum(row[key] or 0 for key in ('decode_bundles', 'prefill_bundles')))}"

        return text

    columns = {"cycles; times the floor; ms": lambda row: MIXTURES[row["mixture"]]}
    return tables.table([{"mixture": x} for x in MIXTURES], columns | {chip: cell(chip) for chip in CHIPS})


@tables.block
def step_of_a_device() -> str:
    """Serving steps of an operator at the heads that one of 8 devices has."""
    rows = tables.rows_of("step-v6e-tp8")
    titles = {
        "decode-64": "64 decodes",
        "decode-64-bfloat16": "64 decodes, bfloat16",
        "decode-32-prefill-2x512-bfloat16": "32 decodes and 2 prefills of 512, bfloat16",
    }

    def cell(mixture):
        found = lambda row: tables.only(rows, case=row["case"], mixture=mixture)
        return lambda row: against_floor(found(row), found(row)["to_floor"])

    columns = {"v6e, key and value heads": lambda row: heads(models.MODELS[row["case"]])}
    columns |= {name: cell(mixture) for mixture, name in titles.items()}
    return tables.table([{"case": case} for case in tables.values(rows, "case")], columns)


@tables.block
def decodes() -> str:
    """The whole mixer of 64 decodes, at the heads that one of several devices has."""
    rows = tables.rows_of("decodes")
    lines = [
        {"case": case, "mixture": mixture}
        for case in tables.values(rows, "case")
        for mixture in decode_mixer.mixtures(case)
        if not steps.MIXTURES[mixture].prefills
    ]

    def states(row):
        pool = steps.MIXTURES[row["mixture"]]
        kind = f"{pool.pool}, ring of {pool.replay}" if pool.replay else pool.pool
        return kind if pool.W == 1 else f"{kind}, {pool.W} tokens"

    def cell(chip):
        def text(row):
            found = [x for x in tables.select(rows, **row, chip=chip) if x.get("cycles")]
            return next((against_floor(x, x["cycles"] / x["decode_floor"]) for x in found), tables.NONE)

        return text

    columns = {"operator, key and value heads": lambda row: heads(decode_mixer.MIXERS[row["case"]]), "states": states}
    return tables.table(lines, columns | {chip: cell(chip) for chip in CHIPS})


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
def decodes_mixed() -> str:
    """The operations around the kernels of a step of decodes and prefills."""
    counts, rows = [], tables.select(tables.rows_of("decodes"), mixture=decode_mixer.MIXED, chip="v6e")
    for case, layer in decode_mixer.MIXERS.items():
        if decode_mixer.MIXED not in decode_mixer.mixtures(case):
            continue
        row = tables.only(rows, case=case)
        counts.append(
            f"{tables.whole(row['around_cycles'])} for {tables.TITLES[layer.operator]} {layer.H} / {layer.HV}"
        )
    return (
        "In a step of 32 decodes and 2 prefills of 512 the compiler for v6e expects these cycles of all operations\n"
        f"around the kernels of a whole mixer, by key and value heads:\n{', '.join(counts)}."
    )


@tables.block
def pools() -> str:
    """The bytes of a decode over every pool, its cycles on a v6e, and the loss of a model, where they are known."""
    layer, rows = models.MODELS["qwen3-next-80b"], tables.select(step_rows("v6e"), case="qwen3-next-80b")
    bits = {row["pool"]: row for row in tables.rows_of("pool-bits")}
    mixture = lambda row: models.Mixture(64, pool=row["dtype"], replay=row["replay"])

    def cycles(row):
        known = next((name for name, x in steps.MIXTURES.items() if x == mixture(row)), None)
        return next(
            (tables.whole(x["cycles"]) for x in tables.select(rows, mixture=known) if x.get("cycles")), tables.NONE
        )

    def more(row):
        found = bits.get("{dtype}, ring of {replay}".format(**row) if row["replay"] else row["dtype"])
        return tables.decimals(100 * found["over_float32"], 4) if found else tables.NONE

    columns = {
        "states": "dtype",
        "ring": lambda row: f"{row['replay']} tokens" if row["replay"] else "none",
        "KiB a token and value head": lambda row: tables.decimals(
            models.moved_bytes(layer, mixture(row))[0] / 64 / layer.HV / 2**10, 1
        ),
        "cycles of 64 decodes, v6e": cycles,
        "% more bits per byte": more,
    }
    types = ("float32", "bfloat16", "int8")
    return tables.table([{"dtype": dtype, "replay": L} for dtype in types for L in (0, 8, 16, 32)], columns)


@tables.block
def pool_bits() -> str:
    """The bits per byte of a model over a float32 pool, and how far the other pools are from it."""
    rows = tables.rows_of("pool-bits")
    # In thousandths of a percent, rounded up.
    most = math.ceil(1e5 * max(abs(row["over_float32"]) for row in rows)) / 1000
    bits = tables.only(rows, pool="float32")["bits_per_byte"]
    return (
        f"With a float32 pool the model needs {tables.decimals(bits, 3)} bits for a byte, and every other pool is "
        f"within {tables.decimals(most, 3)} % of this,\nso choose by bytes and slots."
    )


@tables.block
def pool_steps() -> str:
    """Decodes over arrays and over rings of 16 tokens."""
    rows, qwen, kimi = step_rows("v6e"), "qwen3-next-80b", "kimi-linear-48b"
    names = [(qwen, name) for name in ("speculate-64x3", "decode-256-bfloat16", "decode-256-int8")]
    names += [(kimi, name) for name in ("decode-64-bfloat16", "decode-64-int8")]

    def decodes(row):
        mixture = steps.MIXTURES[row["mixture"] + "-ring"]
        speculated = f" of {mixture.W} tokens" if mixture.W > 1 else ""
        return f"{tables.TITLES[CASES[row['case']].operator]}, {mixture.pool}, {mixture.decodes} decodes{speculated}"

    def cell(end):
        found = lambda row: tables.select(rows, case=row["case"], mixture=row["mixture"] + end)
        return lambda row: next((tables.whole(x["cycles"]) for x in found(row)), tables.NONE)

    columns = {"cycles, v6e": decodes, "no ring": cell(""), "ring of 16": cell("-ring")}
    return tables.table([{"case": case, "mixture": name} for case, name in names], columns)


@tables.block
def pool_errors() -> str:
    """Errors of decodes over every pool, and over formats that are simulated, by the strength of gates and the keys."""
    rows = tables.rows_of("pool-errors")
    cell = lambda **point: lambda row: f"{tables.only(rows, pool=row['pool'], **point)['error']:.1e}"
    columns = {"pool": "pool"} | {
        f"{gate}, {keys}": cell(gate=gate, keys=keys)
        for gate in tables.values(rows, "gate")
        for keys in tables.values(rows, "keys")
    }
    return tables.table([{"pool": pool} for pool in tables.values(rows, "pool")], columns)


@tables.block
def step_float16() -> str:
    """The cost of a pool of float16."""
    (row,) = tables.rows_of("step-v6e-float16")
    step = tables.only(step_rows("v6e"), case=row["case"], mixture=row["mixture"])
    parts = [row[f"{part}_cycles"] for part in ("gather", "convert", "scatter")]
    ratio = (sum(parts) + step["cycles"]) / step["cycles"]
    gather, convert, scatter = map(tables.whole, parts)
    return (
        f"For {MIXTURES[row['mixture']]} over {tables.whole(row['slots'])} slots the compiler for v6e expects the "
        f"gather to take {gather} cycles,\nthe conversion {convert} and the scatter {scatter}. "
        f"With the step of a float32 pool this is {tables.decimals(ratio, 1)} times that step alone."
    )


@tables.block
def step_others() -> str:
    """Prefills of the other operators on a v6e, and steps on a CPU."""
    rows, on_cpu = tables.rows_of("step-prefills"), tables.rows_of("step-cpu")
    texts = []
    for case, name in (("kimi-linear-48b", "Kimi-Linear"), ("minimax-text-01", "MiniMax")):
        one, many = (tables.only(rows, case=case, mixture=f"prefill-8192{kind}")["cycles"] for kind in ("", "-ragged"))
        texts.append(f"{tables.whole(one)} and {tables.whole(many)} cycles for {name}")
    on_cpu = [f"{tables.whole(row['median_ms'])} ms for {MIXTURES[row['mixture']]}" for row in on_cpu]
    return (
        f"On v6e the last two rows are {' and '.join(texts)}.\n"
        f"On a CPU of 2 cores, 16 heads in float32 take {on_cpu[0]}, {on_cpu[1]},\nand {on_cpu[2]}."
    )
