"""Figures that were measured on a machine: times and memory of a CPU, launches of a GPU, and errors."""

import functools

from benchmarks import production
from benchmarks.cases import CASES
from benchmarks.figures.tables import (
    BLOCKS,
    NONE,
    PASSES,
    TITLES,
    beside,
    block,
    count,
    decimals,
    fixed,
    of,
    only,
    ratio,
    rows_of,
    select,
    table,
    title,
    values,
    way,
    whole,
)
from benchmarks.step import MIXTURES
from chunkwise.command import times
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.call.checks import choose_chunk_size


def _beside_torch(times_of: dict[str, str]) -> str:
    """Both directions on one device and on two, beside torch, by the clock or also by processors together."""
    rows = rows_of("cpu-gdn-16")
    of_peer = lambda x: only(rows, implementation="transformers", devices=x["devices"], way=x["pass"])
    pairs = [{"ours": x, "torch": of_peer(x)} for x in select(rows, implementation="xla")]
    columns = {"pass": of("ours", way), "devices": of("ours", "devices")}
    for key, name in times_of.items():
        time = lambda row, key=key: f"{whole(row[key])} ms"
        columns |= {f'"xla"{name}': of("ours", time), f"torch{name}": of("torch", time)}
        columns |= {f"ratio{name}": ratio("torch", "ours", key, 1)}
    return table(pairs, columns)


BLOCKS["cpu"] = functools.partial(_beside_torch, {"median_ms": ""})
BLOCKS["cpu-both"] = functools.partial(_beside_torch, {"median_ms": "", "cpu_ms": ", processor"})


@block
def first_screen() -> str:
    """Three figures with their conditions, for the first screen of the README."""
    on_cpu = select(rows_of("cpu-gdn-16"), way="forward+backward", devices=1)
    ours, peer = (f"{whole(only(on_cpu, implementation=name)['median_ms'])} ms" for name in ("xla", "transformers"))
    row = only(rows_of("tpu-layers"), case="qwen3-next-80b", chip="v6e", way="forward")
    low, high = times.WORST
    of_gates = [x for x in rows_of("accuracy-gate") if x["form"] in ("xla", "fused")]
    worst = [max(x["error"] for x in select(of_gates, dtype=dtype)) for dtype in ("float32", "bfloat16")]
    lines = [
        (
            "forward and backward on 2 cores of a CPU",
            f"{ours}; transformers in torch: {peer}",
            "gated delta rule, T = 2,048, 16 heads of 128 channels, float32",
        ),
        (
            f"forward on a TPU {row['chip']}, predicted from its compiler's code",
            f"{decimals(row['estimate_ms'])} ms",
            f"Qwen3-Next's layer, T = {whole(row['T'])}, bfloat16; the same formula gives {decimals(low)} to "
            f"{decimals(high)} of the times that others publish",
        ),
        (
            "error against float64, RMS over RMS",
            "at most {:.1e} in float32, {:.1e} in bfloat16".format(*worst).replace("e-0", "e-"),
            "gated delta rule, KDA, GLA, simple GLA; mean gates from -0.01 to -80 nats a token",
        ),
    ]
    columns = ("measurement", "figure", "conditions")
    return table([dict(zip(columns, line, strict=True)) for line in lines], {name: name for name in columns})


@block
def cpu_tokens() -> str:
    """Time and memory against tokens."""
    rows = rows_of("cpu-tokens")
    names = ("xla", "transformers", "scan")
    lines = [{"T": T} | {name: only(rows, T=T, implementation=name) for name in names} for T in values(rows, "T")]
    ms = count("median_ms")
    columns = {"T": count("T"), '"xla", ms': of("xla", ms), '"xla", MiB': of("xla", count("memory_mib"))}
    return table(lines, columns | {"torch, ms": of("transformers", ms), "scan over tokens, ms": of("scan", ms)})


@block
def chunk_sizes() -> str:
    """The sizes that `chunk_size=None` takes, and processor time of plain JAX against the size."""
    rows = rows_of("chunk-sizes-cpu")

    def size(implementation):
        def cell(row):
            entry = OPERATORS[f"chunk_{row['operator']}"]
            # For many tokens, because a sequence that is shorter than a chunk has a smaller chunk.
            kind = {"per_channel": entry.per_channel, "state": 0 if entry.delta else 128 * 128}
            return str(choose_chunk_size(None, implementation, 2048, **kind))

        return cell

    def ms(C):
        found = lambda row: select(rows, operator=row["operator"], chunk_size=C)
        both = lambda x: f"{x['forward_cpu_ms']} / {x['gradient_cpu_ms']}"
        return lambda row: next(map(both, found(row)), NONE)

    columns = {"operator": title, '"fused", "staged"': size("fused"), '"xla"': size("xla")}
    columns |= {f"C = {C}, ms": ms(C) for C in (32, 64, 128)}
    return table([{"operator": name} for name in TITLES], columns)


@block
def first_call() -> str:
    """The time of the first call of an operator, without a cache and with a cache."""
    rows = rows_of("first-call-cpu")
    lines = [
        {"operator": name} | {way: only(rows, operator=name, way=way) for way in PASSES}
        for name in reversed(values(rows, "operator"))
    ]
    forward, both = PASSES
    seconds = lambda way, key: of(way, lambda row: decimals(row[key], 1))
    columns = {
        "first call of": lambda row: f"`{row['operator']}`",
        "forward, s": seconds(forward, "cold_s"),
        "from the cache, s": seconds(forward, "cached_s"),
        "gradient, s": seconds(both, "cold_s"),
        "gradient from the cache, s": seconds(both, "cached_s"),
        "second call, ms": beside(PASSES, count("second_ms")),
    }
    return table(lines, columns)


def errors(name: str, points: tuple[float, ...]) -> str:
    """Return the errors of a sweep at some of its points: a line for every form of an operator, a number for a type."""
    rows = rows_of(name)
    lines = dict.fromkeys((row["operator"], row["form"]) for row in rows)

    def cell(point):
        def text(row):
            found = select(rows, operator=row["operator"], form=row["form"], point=point)
            numbers = {x["dtype"]: "inf" if x["error"] is None else f"{x['error']:.1e}" for x in found}
            return " / ".join(numbers[dtype] for dtype in ("float32", "bfloat16") if dtype in numbers)

        return text

    columns = {"operator, form": lambda row: f"{row['operator']}, {row['form']}"}
    columns |= {str(point): cell(point) for point in points}
    return table([dict(zip(("operator", "form"), line, strict=True)) for line in lines], columns)


@block
def accuracy_worst() -> str:
    """The largest errors of all operators."""
    sweeps = {
        "mean gates from -0.01 to -80 nats a token": rows_of("accuracy-gate"),
        "one key in every token, beta = 1, mean gate -0.01 (delta rules)": select(rows_of("accuracy-keys"), point=1.0),
    }
    ours = lambda rows, dtype: [x["error"] for x in select(rows, dtype=dtype) if x["form"] in ("xla", "fused")]
    cell = lambda dtype: lambda row: f"{max(ours(sweeps[row['inputs']], dtype)):.1e}"
    columns = {"inputs": "inputs", "float32": cell("float32"), "bfloat16": cell("bfloat16")}
    return table([{"inputs": name} for name in sweeps], columns)


BLOCKS["accuracy-gate"] = functools.partial(errors, "accuracy-gate", (0.01, 0.1, 1.0, 1.4, 5.0, 30.0, 80.0))
BLOCKS["accuracy-keys"] = functools.partial(errors, "accuracy-keys", (0.0, 0.25, 0.5, 0.75, 0.9, 1.0))


@block
def long_texts() -> str:
    """Errors of texts of which nothing is forgotten."""
    rows = rows_of("long-texts")
    cell = lambda form: lambda row: f"{row['errors'][form]:.1e}" if form in row["errors"] else NONE
    columns = {"T, K": lambda row: ", ".join([whole(row["T"]), str(row["K"]), *filter(None, [row.get("but")])])}
    return table(rows, columns | {form: cell(form) for form in rows[0]["errors"]})


@block
def worst_gradients() -> str:
    """Gradients of gates that lose more than the others."""
    rows = rows_of("worst-gradients")
    return table(rows, {name: name for name in rows[0]})


@block
def rounding() -> str:
    """The cost of what takes roundings back."""
    more = lambda row: f"{row['percent']} % more{'' if row['done'] else ', so it is not done'}"
    return table(rows_of("rounding"), {"remedy": "remedy", "where": "where", "cycles of the forward": more})


@block
def production_cases() -> str:
    """Inputs on which other libraries failed, and our errors."""
    rows = rows_of("production")

    def both(implementation):
        def cell(row):
            errors = {x["form"]: f"{x['error']:.0e}" for x in select(rows, case=row["case"])}
            return " / ".join(errors[f"{implementation}, {dtype}"] for dtype in production.TYPES)

        return cell

    lines = [
        {"case": name, "input": x.input, "report": f"{x.link}: {x.broke}"} for name, x in production.REPORTS.items()
    ]
    columns = {name: name for name in ("case", "input", "report")}
    return table(lines, columns | {f'"{x}", float32 / bfloat16': both(x) for x in production.IMPLEMENTATIONS})


@block
def gpu() -> str:
    """The launches of programs on an H100, and their temporaries."""

    def program(row):
        tokens = {"decode": "a token of 64 sequences", "serving step": "a serving step of 64 decodes"}
        return tokens.get(row["pass"]) or f"{way(row)}, T = {whole(row['T'])}"

    columns = {
        "operator": lambda row: title(row) + ("" if row["HV"] == 32 else f", {row['HV']} heads"),
        "program": program,
        "launches": count("launches"),
        "temporaries, MiB": count("temporaries_mib"),
    }
    return table(rows_of("gpu-h100"), columns)


def of_layer(row: dict) -> str:
    """Return the name of the operator of a case's layer."""
    return (TITLES | {"gdn2": "GDN-2"})[CASES[row["case"]].operator]


@block
def gpu_times() -> str:
    """Times of calls on an H100, of plain JAX beside kernels of others."""
    rows = rows_of("time-h100")
    columns = {
        "operator": of_layer,
        "value heads": lambda row: whole(CASES[row["case"]].HV),
        "direction": way,
        '"xla", MiB': count("memory_mib"),
    }
    for name in values(rows, "implementation"):
        alike = {(row["case"], row["pass"]): row["median_ms"] for row in select(rows, implementation=name)}
        called = '"xla"' if name == "xla" else name
        columns[f"{called}, ms"] = lambda row, ms=alike: decimals(ms.get((row["case"], row["pass"])))
    return table(select(rows, implementation="xla"), columns)


@block
def gpu_steps() -> str:
    """Times of serving steps on an H100."""
    columns = {
        "operator": of_layer,
        "decodes": lambda row: whole(MIXTURES[row["mixture"]].decodes),
        '"xla", ms': fixed("median_ms"),
    }
    return table(rows_of("step-h100"), columns)
