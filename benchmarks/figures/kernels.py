"""Figures of kernels on TPUs that are not here: what their compiler says, and the times that a formula makes of it."""

import functools

from benchmarks import decode_mixer
from benchmarks.cases import CASES
from benchmarks.figures.serving import MIXTURES
from benchmarks.figures.tables import (
    BLOCKS,
    COUNTS,
    NONE,
    PASSES,
    TITLES,
    beside,
    block,
    count,
    cycles,
    decimals,
    fixed,
    mebibytes,
    memory,
    of,
    only,
    percent,
    ratio,
    rows_of,
    select,
    table,
    title,
    values,
    way,
    whole,
)
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
    rows = rows_of("tpu-kda")
    peer = lambda x: only(rows, implementation="tokamax", T=x["T"], chip=x["chip"])
    return [{"ours": x, "tokamax": peer(x)} for x in select(rows, implementation="fused")]


@block
def tpu_kda() -> str:
    """Kimi-Linear's layer by our kernel and by tokamax's, with the same compiler."""
    both = ("ours", "tokamax")
    counts = {name: beside(both, count(key)) for name, key in COUNTS.items()}
    columns = {
        "T": of("ours", count("T")),
        "chip": of("ours", "chip"),
        "bundles, ours / tokamax": counts.pop("bundles"),
    }
    columns |= counts | {f"{name}, ms": of(name, fixed("estimate_ms")) for name in both}
    columns |= {"ratio": ratio("tokamax", "ours", "estimate_ms")}
    return table(beside_tokamax(), columns | {"temporaries, MiB": beside(both, memory("temporaries_mib"))})


@block
def tpu_kda_short() -> str:
    """The same for readers of the README."""
    ms = lambda row: f"{decimals(row['estimate_ms'])} ms"
    columns = {"T": of("ours", count("T")), "chip": of("ours", "chip")}
    return table(beside_tokamax(), columns | {"kda": of("ours", ms), "tokamax": of("tokamax", ms)})


@block
def tpu_layers() -> str:
    """The layers of models at 8,192 tokens: forward on all generations, and both directions on a v6e."""
    rows = rows_of("tpu-layers")
    lines = [{"case": case} | {x: only(rows, case=case, chip="v6e", way=x) for x in PASSES} for case in MODELS]

    def ms(chip, way):
        found = lambda row: select(rows, case=row["case"], chip=chip, way=way)
        return lambda row: " or ".join(decimals(x["estimate_ms"]) for x in found(row)) or NONE

    columns = {"layer": lambda row: MODELS[row["case"]]} | {f"{chip}, ms": ms(chip, "forward") for chip in CHIPS}
    columns |= {
        "v6e, both directions, ms": ms("v6e", "forward+backward"),
        "bundles, v6e": beside(PASSES, count("bundles")),
        "grid steps": beside(PASSES, count("grid_steps")),
        "temporaries, MiB": beside(PASSES, memory("temporaries_mib")),
    }
    return table(lines, columns)


def layer_of(case: str, way: str = "forward") -> dict:
    """Return the row of a layer on a v6e."""
    return only(rows_of("tpu-layers"), case=case, chip="v6e", way=way)


def estimate(row: dict) -> str:
    """Return the time of a forward, predicted from the compiler's estimate, and the least time of its bytes."""
    return f"{decimals(row['estimate_ms'])} ms, where memory alone takes {decimals(row['floor_ms'])} ms"


def cost(case: str, heads: str) -> str:
    """Return the sentences on the cost of an operator with these heads."""
    row, both = (layer_of(case, way) for way in PASSES)
    counts = [whole(x["bundles"]) for x in (row, both)]
    return (
        f"{COST} T = {whole(row['T'])}{heads}\ntakes {estimate(row)}. It counts {counts[0]} bundles forward, "
        f"and {counts[1]} in both directions, which take {decimals(both['estimate_ms'])} ms."
    )


BLOCKS["cost-gdn"] = functools.partial(cost, "qwen3-next-80b", ", H = 16 and HV = 32")
BLOCKS["cost-kda"] = functools.partial(cost, "kimi-linear-48b", " and H = 32")


@block
def cost_gla() -> str:
    """The cost of gated linear attention."""
    gla, simple = layer_of("gla"), layer_of("minimax-text-01")
    return (
        f"{COST} T = {whole(gla['T'])} takes, for GLA with\n"
        f"H = 16, {estimate(gla)}, and for simple GLA with H = 64\n{estimate(simple)}."
    )


@block
def cost_two_keys() -> str:
    """The cost of GDN-2 beside Kimi delta attention, and of deltanet-tpu's kernels for both, of one run."""
    rows = rows_of("tpu-two-keys")
    names = {"gdn2": "GDN-2", "kimi-linear-48b": "Kimi delta attention"}
    lines = [
        {x: only(rows, case=case, implementation=x, way=way) for x in ("fused", "deltanet-tpu")}
        for case in names
        for way in PASSES
    ]
    columns = {"operator": lambda row: names[row["case"]], "T": count("T"), "pass": "pass", "bundles": count("bundles")}
    columns |= {"grid steps": count("grid_steps"), "ms": fixed("estimate_ms")}
    theirs = {"deltanet-tpu, bundles": count("bundles"), "deltanet-tpu, ms": fixed("estimate_ms", 1)}
    ours = {name: of("fused", cell) for name, cell in columns.items()}
    return table(lines, ours | {name: of("deltanet-tpu", cell) for name, cell in theirs.items()})


@block
def cost_composition() -> str:
    """Operators by composition beside those that they run, at the same number of tokens."""
    rows = rows_of("tpu-composition")
    names = {
        "gdn-32": "gated delta rule", "delta-product-2": "Gated DeltaProduct, n = 2", "kimi-linear-48b": "KDA",
        "dplr": "DPLR", "kda-64x64": "KDA, 64 heads of 64", "rwkv7": "RWKV-7, 64 heads of 64",
        "simple-gla-xlstm-7b": "simple GLA, 8 heads, K = 256, V = 512", "xlstm-7b": "mLSTM, the same, xLSTM-7B",
    }  # fmt: skip
    lines = [only(rows, case=case, implementation="fused", way=way) for way in PASSES for case in names]
    columns = {
        "operator": lambda row: names[row["case"]], "T": count("T"), "pass": "pass",
        "bundles of kernels": count("bundles"), "cycles around them": count("around_cycles"),
        "estimate, ms": fixed("estimate_ms"), "temporaries, MiB": memory("temporaries_mib"),
    }  # fmt: skip
    return table(lines, columns)


@block
def tpu_mixers() -> str:
    """Whole mixers: convolutions, gates, operator and norm."""
    rows = rows_of("tpu-mixer") + rows_of("tpu-mixer-8192")
    names = {"mixer-qwen3-next": "Qwen3-Next", "mixer-kimi-linear": "Kimi-Linear"}
    lines = [{"case": case, "T": T} for case in names for T in values(select(rows, case=case), "T")]

    def counted(row):
        both = f"{whole(row['kernel_cycles'])} + {whole(row['around_cycles'])}" if cycles(row) else "no cycles"
        return f"{both}; {mebibytes(row['temporaries_mib'])}"

    cell = lambda name: lambda row: next(map(counted, select(rows, **row, implementation=name)), NONE)
    columns = {"mixer": lambda row: names[row["case"]], "T": count("T"), "our kernels": cell("fused")}
    columns |= {"our operator, XLA's convolutions and norm": cell("mixed"), "tokamax": cell("tokamax")}
    return table(lines, columns)


@block
def tpu_block() -> str:
    """A whole block of Qwen3.5-9B."""
    counted = rows_of("tpu-block-kernels")
    rows = rows_of("tpu-block") + rows_of("tpu-block-backward")
    lines = [row | only(counted, chip=row["chip"], way=row["pass"]) for row in rows]
    least = lambda cell: lambda row: ("at least " if row["at_least"] else "") + cell(row)
    parts = lambda row: (row["kernel_cycles"], row["operations_cycles"])
    together = lambda row: times.device_ms(CHIPS[row["chip"]], [times.Launch(parts(row)[0], 0)], parts(row)[1])
    columns = {
        "chip": "chip",
        "pass": way,
        "XLA's operations, cycles": count("operations_cycles"),
        "kernels, cycles": least(count("kernel_cycles")),
        "kernels' share": lambda row: percent(row["kernel_cycles"] / sum(parts(row))),
        "together, ms": least(lambda row: decimals(together(row), 1)),
        "temporaries, MiB": memory("temporaries_mib"),
    }
    return table(lines, columns)


@block
def compile_times() -> str:
    """The processor time of the TPU compiler for layers, beside the time for tokamax's."""
    names = MODELS | {"mixer-qwen3-next": "Qwen3-Next's whole mixer", "mixer-kimi-linear": "Kimi-Linear's whole mixer"}
    rows = rows_of("compile-v6e")

    def seconds(way):
        found = lambda case: [x for x in rows if (x["case"], x["way"]) == (case, way)]
        return lambda row: "; ".join(whole(x["compile_cpu_s"]) for x in found(row["case"])) or NONE

    columns = {"program, v6e": lambda row: names[row["case"]], "forward, s; tokamax's": seconds("forward")}
    columns |= {"both directions, s; tokamax's": seconds("forward+backward")}
    return table([{"case": case} for case in dict.fromkeys(x["case"] for x in rows if x["way"] in PASSES)], columns)


@block
def compile_steps() -> str:
    """The processor time of the TPU compiler for serving steps."""
    rows = rows_of("compile-v6e")

    def program(row):
        if row["way"] in MIXTURES:
            return f"operator of Qwen3-Next, {MIXTURES[row['way']]}"
        case = decode_mixer.MIXERS[row["case"]]
        return f"whole mixer of decodes or prefills: {TITLES[case.operator]}, {case.H} / {case.HV} heads"

    lines = [x for x in rows if x["way"] not in PASSES]
    return table(lines, {"serving step, v6e": program, "s": count("compile_cpu_s")})


@block
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
    counted = rows_of("remat-v6e-cycles")
    known = lambda key: lambda row: whole(row.get(key))
    of_cycles = lambda key: lambda row: next((whole(x[key]) for x in select(counted, policy=row["policy"])), NONE)
    columns = {
        "the layer under": lambda row: names[row["policy"]][0],
        "keeps on the device, bytes a token": known("kept_bytes_a_token"),
        "on the host": known("kept_on_host_bytes_a_token"),
        "grows by, bytes a token": known("grown_bytes_a_token"),
        "repeats": lambda row: names[row["policy"]][1],
        "XLA's operations, cycles": of_cycles("operations_cycles"),
        "kernels, cycles": of_cycles("kernel_cycles"),
    }
    return table(rows_of("remat-v6e"), columns)


@block
def recompute() -> str:
    """The gradients of the gated delta rule where the states are made again, and where they are kept."""
    both = {"made again": "", "kept": "-kept"}
    names = ("qwen3-next-80b", "qwen3.5-397b-tp8", "qwen3-next-80b-tp8")
    lines = [{name: layer_of(case + end, "forward+backward") for name, end in both.items()} for case in names]
    heads = {case: f"{x.H} / {x.HV}" for case, x in CASES.items() if case in names}
    columns = {"H / HV": lambda row: heads[row["made again"]["case"]]}
    keys = {"bundles": count("bundles"), "grid steps": count("grid_steps"), "ms": fixed("estimate_ms")}
    return table(lines, columns | {f"{key}, made again / kept": beside(both, show) for key, show in keys.items()})


@block
def packed() -> str:
    """A packed batch with states beside one sequence."""
    rows, ways = rows_of("packed-v6e"), ("forward_bundles", "bundles")
    forms = ("16 sequences", "one packed", "one, not packed")
    lines = [{x: only(rows, operator=name, form=x) for x in forms} for name in TITLES]
    bundles = lambda name: lambda row: " / ".join(whole(row[name][key]) for key in ways)
    over = lambda name: lambda row: " / ".join(ratio(forms[0], name, key)(row) for key in ways)
    columns = {"bundles": of(forms[0], title), forms[0]: bundles(forms[0])}
    for name in forms[1:]:
        columns |= {name: bundles(name), f"16 sequences over {name}": over(name)}
    return table(lines, columns)


@block
def kda_bench() -> str:
    """KDA at the shapes of a public benchmark, beside its published times."""
    columns = {"sequences x tokens": lambda row: f"{row['sequences']} x {whole(row['T'])}"}
    columns |= {name: count(key) for name, key in COUNTS.items()}
    names = {"ours, ms": "estimate_ms", "ours, a call, ms": "call_ms", "published, ms": "published_ms"}
    columns |= {name: fixed(key) for name, key in names.items()}
    over = lambda row: decimals(row["published_ms"] / row["call_ms"], 1)
    return table(rows_of("kda-bench"), columns | {"ratio": over})


@block
def jaxbench() -> str:
    """Tasks of JAXBench, compiled for TPUs: its reference and our programs."""
    rows, lines = rows_of("jaxbench"), []
    for ours in select(rows, program="ours"):
        lines.append({"reference": only(rows, program="reference", task=ours["task"], chip=ours["chip"]), "ours": ours})

    def ms(row):
        if "failed" in row:
            return None
        # The reference has no kernels.
        bundles, around, steps = [row[key] or 0 for key in ("bundles", "around_cycles", "grid_steps")]
        return times.device_ms(CHIPS[row["chip"]], [times.Launch(bundles, steps)], around, row["floor_ms"])

    def faster(row):
        reference, ours = ms(row["reference"]), ms(row["ours"])
        return NONE if reference is None or ours is None else decimals(reference / ours, 1)

    both = ("reference", "ours")
    temporaries = lambda row: NONE if "failed" in row else whole(row["temporaries_mib"])
    columns = {"task": of("ours", "task"), "chip": of("ours", "chip")}
    columns |= {name: of("ours", count(key)) for name, key in COUNTS.items()}
    columns |= {f"{name}, ms": of(name, lambda row: decimals(ms(row))) for name in both}
    return table(lines, columns | {"ratio": faster, "temporaries, reference / ours, MiB": beside(both, temporaries)})


@block
def jaxbench_checks() -> str:
    """The results of JAXBench's check of our files."""
    columns = {
        "task": "task",
        "correct": lambda row: "yes" if row["correct"] else "no",
        "largest difference": lambda row: f"{row['max_diff']:.1g}",
    }
    return table(select(rows_of("jaxbench"), program="check"), columns)
