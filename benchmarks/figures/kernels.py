"""Figures of kernels on TPUs that are not here: what their compiler says, and the times that a formula makes of it."""

import functools

from benchmarks import decode_mixer
from benchmarks.cases import CASES
from benchmarks.figures import tables
from benchmarks.figures.serving import MIXTURES
from chunkwise.command import times
from chunkwise.shared.chips import CHIPS

MODELS = {
    "qwen3-next-80b": "Qwen3-Next: gated delta rule, H = 16, HV = 32",
    "qwen3-next-80b-tp8": "the same on one of eight devices, H = 2, HV = 4",
    "qwen3.5-397b-tp8": "Qwen3.5 on one of eight devices, H = 2, HV = 8",
    "kimi-linear-48b": "Kimi-Linear: KDA, H = 32",
    "kimi-linear-48b-tp8": "the same on one of eight devices, H = 4",
    "minimax-text-01": "MiniMax: simple GLA, H = 64",
    "gla": "GLA, H = 16",
}
COST = "**Cost.** The compiler estimates for v6e, in bfloat16 with K = V = 128, that a forward of"


def beside_tokamax() -> list[dict]:
    """Return the rows of KDA, ours and tokamax's of the same sizes."""
    rows = tables.rows_of("tpu-kda")
    peer = lambda x: tables.only(rows, implementation="tokamax", T=x["T"], chip=x["chip"])
    return [{"ours": x, "tokamax": peer(x)} for x in tables.select(rows, implementation="fused")]


@tables.block
def tpu_kda() -> str:
    """Kimi-Linear's layer by our kernel and by tokamax's, with the same compiler."""
    both = ("ours", "tokamax")
    counts = {name: tables.beside(both, tables.count(key)) for name, key in tables.COUNTS.items()}
    columns = {
        "T": tables.of("ours", tables.count("T")),
        "chip": tables.of("ours", "chip"),
        "bundles, ours / tokamax": counts.pop("bundles"),
    }
    columns |= counts | {f"{name}, ms": tables.of(name, tables.fixed("estimate_ms")) for name in both}
    columns |= {"ratio": tables.ratio("tokamax", "ours", "estimate_ms")}
    return tables.table(
        beside_tokamax(), columns | {"temporaries, MiB": tables.beside(both, tables.memory("temporaries_mib"))}
    )


@tables.block
def tpu_kda_short() -> str:
    """The same for readers of the README."""
    ms = lambda row: f"{tables.decimals(row['estimate_ms'])} ms"
    columns = {"T": tables.of("ours", tables.count("T")), "chip": tables.of("ours", "chip")}
    return tables.table(beside_tokamax(), columns | {"kda": tables.of("ours", ms), "tokamax": tables.of("tokamax", ms)})


@tables.block
def tpu_layers() -> str:
    """The layers of models at 8,192 tokens: forward on all generations, and both directions on a v6e."""
    rows = tables.rows_of("tpu-layers")
    lines = [
        {"case": case} | {x: tables.only(rows, case=case, chip="v6e", way=x) for x in tables.PASSES} for case in MODELS
    ]

    def ms(chip, way):
        found = lambda row: tables.select(rows, case=row["case"], chip=chip, way=way)
        return lambda row: " or ".join(tables.decimals(x["estimate_ms"]) for x in found(row)) or tables.NONE

    columns = {"layer": lambda row: MODELS[row["case"]]} | {f"{chip}, ms": ms(chip, "forward") for chip in CHIPS}
    columns |= {
        "v6e, both directions, ms": ms("v6e", "forward+backward"),
        "bundles, v6e": tables.beside(tables.PASSES, tables.count("bundles")),
        "grid steps": tables.beside(tables.PASSES, tables.count("grid_steps")),
        "temporaries, MiB": tables.beside(tables.PASSES, tables.memory("temporaries_mib")),
    }
    return tables.table(lines, columns)


def layer_of(case: str, way: str = "forward") -> dict:
    """Return the row of a layer on a v6e."""
    return tables.only(tables.rows_of("tpu-layers"), case=case, chip="v6e", way=way)


def estimate(row: dict) -> str:
    """Return the time of a forward, predicted from the compiler's estimate, and the least time of its bytes."""
    return f"{tables.decimals(row['estimate_ms'])} ms, where memory alone takes {tables.decimals(row['floor_ms'])} ms"


def cost(case: str, heads: str) -> str:
    """Return the sentences on the cost of an operator with these heads."""
    row, both = (layer_of(case, way) for way in tables.PASSES)
    counts = [tables.whole(x["bundles"]) for x in (row, both)]
    return (
        f"{COST} T = {tables.whole(row['T'])}{heads}\ntakes {estimate(row)}. It counts {counts[0]} bundles forward, "
        f"and {counts[1]} in both directions, which take {tables.decimals(both['estimate_ms'])} ms."
    )


tables.BLOCKS["cost-gdn"] = functools.partial(cost, "qwen3-next-80b", ", H = 16 and HV = 32")
tables.BLOCKS["cost-kda"] = functools.partial(cost, "kimi-linear-48b", " and H = 32")


@tables.block
def cost_gla() -> str:
    """The cost of gated linear attention."""
    gla, simple = layer_of("gla"), layer_of("minimax-text-01")
    return (
        f"{COST} T = {tables.whole(gla['T'])} takes, for GLA with\n"
        f"H = 16, {estimate(gla)}, and for simple GLA with H = 64\n{estimate(simple)}."
    )


@tables.block
def cost_two_keys() -> str:
    """The cost of GDN-2 beside Kimi delta attention, and of deltanet-tpu's kernels for both, of one run."""
    rows = tables.rows_of("tpu-two-keys")
    names = {"gdn2": "GDN-2", "kimi-linear-48b": "Kimi delta attention"}
    lines = [
        {x: tables.only(rows, case=case, implementation=x, way=way) for x in ("fused", "deltanet-tpu")}
        for case in names
        for way in tables.PASSES
    ]
    columns = {
        "operator": lambda row: names[row["case"]],
        "T": tables.count("T"),
        "pass": "pass",
        "bundles": tables.count("bundles"),
    }
    columns |= {"grid steps": tables.count("grid_steps"), "ms": tables.fixed("estimate_ms")}
    theirs = {"deltanet-tpu, bundles": tables.count("bundles"), "deltanet-tpu, ms": tables.fixed("estimate_ms", 1)}
    ours = {name: tables.of("fused", cell) for name, cell in columns.items()}
    return tables.table(lines, ours | {name: tables.of("deltanet-tpu", cell) for name, cell in theirs.items()})


@tables.block
def cost_composition() -> str:
    """Operators by composition beside those that they run, at the same number of tokens."""
    rows = tables.rows_of("tpu-composition")
    names = {
        "gdn-32": "gated delta rule", "delta-product-2": "Gated DeltaProduct, n = 2", "kimi-linear-48b": "KDA",
        "dplr": "DPLR", "kda-64x64": "KDA, 64 heads of 64", "rwkv7": "RWKV-7, 64 heads of 64",
        "simple-gla-xlstm-7b": "simple GLA, 8 heads, K = 256, V = 512", "xlstm-7b": "mLSTM, the same, xLSTM-7B",
    }  # fmt: skip
    lines = [tables.only(rows, case=case, implementation="fused", way=way) for way in tables.PASSES for case in names]
    # Every second one runs the kernels of the one above it.
    for above, row in zip(lines[::2], lines[1::2], strict=True):
        row["times"] = row["estimate_ms"] / above["estimate_ms"]
    columns = {
        "operator": lambda row: names[row["case"]], "T": tables.count("T"), "pass": "pass",
        "bundles of kernels": tables.count("bundles"), "cycles around them": tables.count("around_cycles"),
        "estimate, ms": tables.fixed("estimate_ms"),
        "times the row above": lambda row: tables.decimals(row.get("times")),
        "temporaries, MiB": tables.memory("temporaries_mib"),
    }  # fmt: skip
    return tables.table(lines, columns)


@tables.block
def tpu_mixers() -> str:
    """Whole mixers: convolutions, gates, operator and norm."""
    rows = tables.rows_of("tpu-mixer") + tables.rows_of("tpu-mixer-8192")
    names = {"mixer-qwen3-next": "Qwen3-Next", "mixer-kimi-linear": "Kimi-Linear"}
    lines = [{"case": case, "T": T} for case in names for T in tables.values(tables.select(rows, case=case), "T")]

    def counted(row):
        both = (
            f"{tables.whole(row['kernel_cycles'])} + {tables.whole(row['around_cycles'])}"
            if tables.cycles(row)
            else "no cycles"
        )
        return f"{both}; {tables.mebibytes(row['temporaries_mib'])}"

    cell = lambda name: lambda row: next(map(counted, tables.select(rows, **row, implementation=name)), tables.NONE)
    columns = {"mixer": lambda row: names[row["case"]], "T": tables.count("T"), "our kernels": cell("fused")}
    columns |= {"our operator, XLA's convolutions and norm": cell("mixed"), "tokamax": cell("tokamax")}
    return tables.table(lines, columns)


@tables.block
def tpu_whole_mixers() -> str:
    """The shares of a model's mixer with its projections: products, kernels, and operations that only move numbers."""
    names = {
        "mixer-olmo-hybrid": "OLMo-hybrid", "mixer-nemotron-h": "Nemotron-H", "mixer-granite-4": "Granite-4",
        "mixer-rwkv7": "RWKV-7",
    }  # fmt: skip
    rows = tables.rows_of("tpu-whole-mixers")
    lines = [row for case in names for row in tables.select(rows, case=case)]

    def part(cycles):
        total = lambda row: row["least_kernel_cycles"] + sum(row["operations"].values())
        return lambda row: f"{tables.whole(cycles(row))}, {tables.percent(cycles(row) / total(row))}"

    kind = lambda name: part(lambda row: row["operations"][name])
    columns = {
        "mixer": lambda row: names[row["case"]], "pass": tables.way, "products, cycles": kind("products"),
        "kernels, at least": part(lambda row: row["least_kernel_cycles"]), "copies": kind("copies"),
        "other operations": kind("others"), "temporaries, MiB": tables.memory("temporaries_mib"),
    }  # fmt: skip
    return tables.table(lines, columns)


@tables.block
def tpu_block() -> str:
    """A whole block of Qwen3.5-9B."""
    counted = tables.rows_of("tpu-block-kernels")
    rows = tables.rows_of("tpu-block") + tables.rows_of("tpu-block-backward")
    lines = [row | tables.only(counted, chip=row["chip"], way=row["pass"]) for row in rows]
    least = lambda cell: lambda row: ("at least " if row["at_least"] else "") + cell(row)
    parts = lambda row: (row["kernel_cycles"], row["operations_cycles"])
    together = lambda row: times.device_ms(CHIPS[row["chip"]], [times.Launch(parts(row)[0], 0)], parts(row)[1])
    columns = {
        "chip": "chip",
        "pass": tables.way,
        "XLA's operations, cycles": tables.count("operations_cycles"),
        "kernels, cycles": least(tables.count("kernel_cycles")),
        "kernels' share": lambda row: tables.percent(row["kernel_cycles"] / sum(parts(row))),
        "together, ms": least(lambda row: tables.decimals(together(row), 1)),
        "temporaries, MiB": tables.memory("temporaries_mib"),
    }
    return tables.table(lines, columns)


@tables.block
def compile_times() -> str:
    """The processor time of the TPU compiler for layers, beside the time for tokamax's."""
    names = MODELS | {"mixer-qwen3-next": "Qwen3-Next's whole mixer", "mixer-kimi-linear": "Kimi-Linear's whole mixer"}
    rows = tables.rows_of("compile-v6e")

    def seconds(way):
        found = lambda case: [x for x in rows if (x["case"], x["way"]) == (case, way)]
        return lambda row: "; ".join(tables.whole(x["compile_cpu_s"]) for x in found(row["case"])) or tables.NONE

    columns = {"program, v6e": lambda row: names[row["case"]], "forward, s; tokamax's": seconds("forward")}
    columns |= {"both directions, s; tokamax's": seconds("forward+backward")}
    return tables.table(
        [{"case": case} for case in dict.fromkeys(x["case"] for x in rows if x["way"] in tables.PASSES)], columns
    )


@tables.block
def compile_steps() -> str:
    """The processor time of the TPU compiler for serving steps."""
    rows = tables.rows_of("compile-v6e")

    def program(row):
        if row["way"] in MIXTURES:
            return f"operator of Qwen3-Next, {MIXTURES[row['way']]}"
        case = decode_mixer.MIXERS[row["case"]]
        return f"whole mixer of decodes or prefills: {tables.TITLES[case.operator]}, {case.H} / {case.HV} heads"

    lines = [x for x in rows if x["way"] not in tables.PASSES]
    return tables.table(lines, {"serving step, v6e": program, "s": tables.count("compile_cpu_s")})


@tables.block
def remat() -> str:
    """The bytes that a gated DeltaNet layer keeps for its backward, and the work that it repeats."""
    names = {
        "no checkpoint": ("no `jax.checkpoint`", "the operator's states"),
        "no checkpoint, disable_recompute": ("no `jax.checkpoint`, with `disable_recompute=True`", "nothing"),
        "remat_policy": ("`jax.checkpoint` with `remat_policy`", "convolutions and norm"),
        "offload_policy": ("`jax.checkpoint` with `offload_policy()`", "convolutions and norm"),
        "products alone": (
            "`jax.checkpoint` that keeps products with matrices alone",
            "convolutions, norm and the operator's forward",
        ),
        "inputs alone": ("`jax.checkpoint` that keeps inputs alone", "all"),
    }
    counted = tables.rows_of("remat-v6e-cycles")
    known = lambda key: lambda row: tables.whole(row.get(key))
    of_cycles = lambda key: (
        lambda row: next((tables.whole(x[key]) for x in tables.select(counted, policy=row["policy"])), tables.NONE)
    )
    columns = {
        "the layer under": lambda row: names[row["policy"]][0],
        "keeps on the device, bytes a token": known("kept_bytes_a_token"),
        "on the host": known("kept_on_host_bytes_a_token"),
        "grows by, bytes a token": known("grown_bytes_a_token"),
        "repeats": lambda row: names[row["policy"]][1],
        "XLA's operations, cycles": of_cycles("operations_cycles"),
        "kernels, cycles": of_cycles("kernel_cycles"),
    }
    return tables.table(tables.rows_of("remat-v6e"), columns)


@tables.block
def recompute() -> str:
    """The gradients of the gated delta rule where the states are made again, and where they are kept."""
    both = {"made again": "", "kept": "-kept"}
    names = ("qwen3-next-80b", "qwen3.5-397b-tp8", "qwen3-next-80b-tp8")
    lines = [{name: layer_of(case + end, "forward+backward") for name, end in both.items()} for case in names]
    heads = {case: f"{x.H} / {x.HV}" for case, x in CASES.items() if case in names}
    columns = {"H / HV": lambda row: heads[row["made again"]["case"]]}
    keys = {
        "bundles": tables.count("bundles"),
        "grid steps": tables.count("grid_steps"),
        "ms": tables.fixed("estimate_ms"),
    }
    return tables.table(
        lines, columns | {f"{key}, made again / kept": tables.beside(both, show) for key, show in keys.items()}
    )


@tables.block
def packed() -> str:
    """A packed batch with states beside one sequence."""
    rows, ways = tables.rows_of("packed-v6e"), ("forward_bundles", "bundles")
    forms = ("16 sequences", "one packed", "one, not packed")
    lines = [{x: tables.only(rows, operator=name, form=x) for x in forms} for name in tables.TITLES]
    bundles = lambda name: lambda row: " / ".join(tables.whole(row[name][key]) for key in ways)
    over = lambda name: lambda row: " / ".join(tables.ratio(forms[0], name, key)(row) for key in ways)
    columns = {"bundles": tables.of(forms[0], tables.title), forms[0]: bundles(forms[0])}
    for name in forms[1:]:
        columns |= {name: bundles(name), f"16 sequences over {name}": over(name)}
    return tables.table(lines, columns)


@tables.block
def kda_bench() -> str:
    """KDA at the shapes of a public benchmark, beside its published times."""
    columns = {"sequences x tokens": lambda row: f"{row['sequences']} x {tables.whole(row['T'])}"}
    columns |= {name: tables.count(key) for name, key in tables.COUNTS.items()}
    names = {"ours, ms": "estimate_ms", "ours, a call, ms": "call_ms", "published, ms": "published_ms"}
    columns |= {name: tables.fixed(key) for name, key in names.items()}
    over = lambda row: tables.decimals(row["published_ms"] / row["call_ms"], 1)
    return tables.table(tables.rows_of("kda-bench"), columns | {"ratio": over})


@tables.block
def jaxbench() -> str:
    """Tasks of JAXBench, compiled for TPUs: its reference and our programs."""
    rows, lines = tables.rows_of("jaxbench"), []
    for ours in tables.select(rows, program="ours"):
        lines.append(
            {"reference": tables.only(rows, program="reference", task=ours["task"], chip=ours["chip"]), "ours": ours}
        )

    def ms(row):
        if "failed" in row:
            return None
        # The reference has no kernels.
        bundles, around, steps = [row[key] or 0 for key in ("bundles", "around_cycles", "grid_steps")]
        return times.device_ms(CHIPS[row["chip"]], [times.Launch(bundles, steps)], around, row["floor_ms"])

    def faster(row):
        reference, ours = ms(row["reference"]), ms(row["ours"])
        return tables.NONE if reference is None or ours is None else tables.decimals(reference / ours, 1)

    both = ("reference", "ours")
    temporaries = lambda row: tables.NONE if "failed" in row else tables.whole(row["temporaries_mib"])
    columns = {"task": tables.of("ours", "task"), "chip": tables.of("ours", "chip")}
    columns |= {name: tables.of("ours", tables.count(key)) for name, key in tables.COUNTS.items()}
    columns |= {f"{name}, ms": tables.of(name, lambda row: tables.decimals(ms(row))) for name in both}
    return tables.table(
        lines, columns | {"ratio": faster, "temporaries, reference / ours, MiB": tables.beside(both, temporaries)}
    )


@tables.block
def jaxbench_checks() -> str:
    """The results of JAXBench's check of our files."""
    columns = {
        "task": "task",
        "correct": lambda row: "yes" if row["correct"] else "no",
        "largest difference": lambda row: f"{row['max_diff']:.1g}",
    }
    return tables.table(tables.select(tables.rows_of("jaxbench"), program="check"), columns)
