"""Figures that were measured on a machine: times and memory of a CPU, launches of a GPU, and errors."""

from benchmarks import production
from benchmarks.cases import CASES
from benchmarks.figures import tables
from benchmarks.step import MIXTURES
from chunkwise.command import times
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.call.checks import choose_chunk_size


@tables.block
def cpu() -> str:
    """Both directions on one device and on two, beside torch."""
    rows = tables.rows_of("cpu-gdn-16")
    of_peer = lambda x: tables.only(rows, implementation="transformers", devices=x["devices"], way=x["pass"])
    pairs = [{"ours": x, "torch": of_peer(x)} for x in tables.select(rows, implementation="xla")]
    time = lambda row: f"{tables.whole(row['median_ms'])} ms"
    columns = {"pass": tables.of("ours", tables.way), "devices": tables.of("ours", "devices")}
    columns |= {'"xla"': tables.of("ours", time), "torch": tables.of("torch", time)}
    return tables.table(pairs, columns | {"ratio": tables.ratio("torch", "ours", "median_ms", 1)})


@tables.block
def first_screen() -> str:
    """Three figures with their conditions, for the first screen of the README."""
    on_cpu = tables.select(tables.rows_of("cpu-gdn-16"), way="forward+backward", devices=1)
    ours, peer = (
        f"{tables.whole(tables.only(on_cpu, implementation=name)['median_ms'])} ms" for name in ("xla", "transformers")
    )
    row = tables.only(tables.rows_of("tpu-layers"), case="qwen3-next-80b", chip="v6e", way="forward")
    low, high = times.WORST
    of_gates = [x for x in tables.rows_of("accuracy-gate") if x["form"] in ("xla", "fused")]
    worst = [max(x["error"] for x in tables.select(of_gates, dtype=dtype)) for dtype in ("float32", "bfloat16")]
    lines = [
        (
            "forward and backward on 2 cores of a CPU",
            f"{ours}; transformers in torch: {peer}",
            "gated delta rule, T = 2,048, 16 heads of 128 channels, float32",
        ),
        (
            f"forward on a TPU {row['chip']}, predicted from its compiler's code",
            f"{tables.decimals(row['estimate_ms'])} ms",
            f"Qwen3-Next's layer, T = {tables.whole(row['T'])}, bfloat16; the same formula gives "
            f"{tables.decimals(low)} to {tables.decimals(high)} of the times that others publish",
        ),
        (
            "error against float64, RMS over RMS",
            "at most {:.1e} in float32, {:.1e} in bfloat16".format(*worst).replace("e-0", "e-"),
            "gated delta rule, KDA, GLA, simple GLA; mean gates from -0.01 to -80 nats a token",
        ),
    ]
    columns = ("measurement", "figure", "conditions")
    return tables.table([dict(zip(columns, line, strict=True)) for line in lines], {name: name for name in columns})


@tables.block
def chunk_sizes() -> str:
    """The sizes that `chunk_size=None` takes, and processor time of plain JAX against the size."""
    rows = tables.rows_of("chunk-sizes-cpu")

    def size(implementation):
        def cell(row):
            entry = OPERATORS[f"chunk_{row['operator']}"]
            # For many tokens, because a sequence that is shorter than a chunk has a smaller chunk.
            kind = {"per_channel": entry.per_channel, "state": 0 if entry.delta else 128 * 128}
            return str(choose_chunk_size(None, implementation, 2048, **kind))

        return cell

    def ms(C):
        found = lambda row: tables.select(rows, operator=row["operator"], chunk_size=C)
        both = lambda x: f"{x['forward_cpu_ms']} / {x['gradient_cpu_ms']}"
        return lambda row: next(map(both, found(row)), tables.NONE)

    columns = {"operator": tables.title, '"fused", "staged"': size("fused"), '"xla"': size("xla")}
    columns |= {f"C = {C}, ms": ms(C) for C in (32, 64, 128)}
    return tables.table([{"operator": name} for name in tables.TITLES], columns)


@tables.block
def first_call() -> str:
    """The time of the first call of an operator, without a cache and with a cache."""
    rows = tables.rows_of("first-call-cpu")
    lines = [
        {"operator": name} | {way: tables.only(rows, operator=name, way=way) for way in tables.PASSES}
        for name in reversed(tables.values(rows, "operator"))
    ]
    forward, both = tables.PASSES
    seconds = lambda way, key: tables.of(way, lambda row: tables.decimals(row[key], 1))
    columns = {
        "first call of": lambda row: f"`{row['operator']}`",
        "forward, s": seconds(forward, "cold_s"),
        "from the cache, s": seconds(forward, "cached_s"),
        "gradient, s": seconds(both, "cold_s"),
        "gradient from the cache, s": seconds(both, "cached_s"),
        "second call, ms": lambda row: " / ".join(tables.whole(row[way]["second_ms"]) for way in tables.PASSES),
    }
    return tables.table(lines, columns)


@tables.block
def accuracy_worst() -> str:
    """The largest errors of all operators."""
    sweeps = {
        "mean gates from -0.01 to -80 nats a token": tables.rows_of("accuracy-gate"),
        "one key in every token, beta = 1, mean gate -0.01 (delta rules)": tables.select(
            tables.rows_of("accuracy-keys"), point=1.0
        ),
    }
    ours = lambda rows, dtype: [x["error"] for x in tables.select(rows, dtype=dtype) if x["form"] in ("xla", "fused")]
    cell = lambda dtype: lambda row: f"{max(ours(sweeps[row['inputs']], dtype)):.1e}"
    columns = {"inputs": "inputs", "float32": cell("float32"), "bfloat16": cell("bfloat16")}
    return tables.table([{"inputs": name} for name in sweeps], columns)


@tables.block
def stage_gates() -> str:
    """The error of a chain of stages by its gates."""
    some = "logsigmoid", "100 logsigmoid", "logsigmoid / 100, and -30 on every fourth token"
    rows = [row for row in tables.rows_of("stage-gates") if row["gates"] in some]
    cell = lambda C: lambda row: f"{row['errors'][C]:.1e}"
    return tables.table(rows, {"gates": "gates"} | {f"C = {C}": cell(C) for C in rows[0]["errors"]})


@tables.block
def long_texts() -> str:
    """Errors of texts of which nothing is forgotten."""
    rows = [row for row in tables.rows_of("long-texts") if "but" not in row]
    columns = {"T, K": lambda row: f"{tables.whole(row['T'])}, {row['K']}"}
    columns |= {form: lambda row, form=form: f"{row['errors'][form]:.1e}" for form in rows[0]["errors"]}
    return tables.table(rows, columns)


@tables.block
def production_cases() -> str:
    """Inputs on which other libraries failed, and our worst errors."""
    rows = tables.rows_of("production")

    def worst(dtype):
        errors = lambda row: [
            x["error"] for x in tables.select(rows, case=row["case"]) if x["form"].endswith(f", {dtype}")
        ]
        return lambda row: f"{max(errors(row)):.0e}"

    lines = [{"case": name, "report": x.link} for name, x in production.REPORTS.items()]
    columns = {name: name for name in ("case", "report")}
    return tables.table(lines, columns | {dtype: worst(dtype) for dtype in production.TYPES})


@tables.block
def gpu() -> str:
    """The launches of programs on an H100."""
    rows = tables.rows_of("gpu-h100")
    ways = [*tables.PASSES, "decode", "serving step"]
    titles = ("forward", "forward and backward", "a token of 64 sequences", "a serving step of 64 decodes")

    def launches(way):
        T = 8192 if way in tables.PASSES else 64
        found = lambda row: tables.select(rows, operator=row["operator"], HV=32, way=way, T=T)
        return lambda row: next((tables.whole(x["launches"]) for x in found(row)), tables.NONE)

    columns = {"launches, T = 8,192, 32 value heads": tables.title}
    columns |= {title: launches(way) for way, title in zip(ways, titles, strict=True)}
    return tables.table([{"operator": name} for name in tables.values(rows, "operator")], columns)


def of_layer(row: dict) -> str:
    """Return the name of the operator of a case's layer."""
    return (tables.TITLES | {"gdn2": "GDN-2"})[CASES[row["case"]].operator]


@tables.block
def gpu_steps() -> str:
    """Times of serving steps on an H100."""
    steps = [
        f"{tables.decimals(row['median_ms'])} ms for {of_layer(row)} with {MIXTURES[row['mixture']].decodes} decodes"
        for row in tables.rows_of("step-h100")
    ]
    return f"A serving step over a float32 pool that is donated takes {' and '.join(steps)}."
