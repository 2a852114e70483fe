"""Figures of kernels on TPUs that are not here: what their compiler says, and the times that a formula makes of it."""

from benchmarks.cases import CASES
from benchmarks.figures import tables
from chunkwise.command import times
from chunkwise.pipeline.operators import COMPOSITIONS
from chunkwise.shared.chips import CHIPS

MODELS = {
    "qwen3-next-80b": "Qwen3-Next",
    "qwen3-next-80b-tp8": "Qwen3-Next, of 8 devices",
    "qwen3.5-397b-tp8": "Qwen3.5-397B, of 8 devices",
    "kimi-linear-48b": "Kimi-Linear",
    "kimi-linear-48b-tp8": "Kimi-Linear, of 8 devices",
    "minimax-text-01": "MiniMax",
    "gla": "GLA, 16 heads",
}


@tables.block
def tpu_layers() -> str:
    """The layers of models at 8,192 tokens in both directions on a v6e; a picture has the forwards."""
    lines = [layer_of(case, "forward+backward") for case in MODELS]
    columns = {"both directions, v6e": lambda row: MODELS[row["case"]], "ms": tables.fixed("estimate_ms")}
    columns |= {"its bytes, ms": tables.fixed("floor_ms"), "temporaries, MiB": tables.memory("temporaries_mib")}
    return tables.table(lines, columns)


def layer_of(case: str, way: str = "forward") -> dict:
    """Return the row of a layer on a v6e."""
    return tables.only(tables.rows_of("tpu-layers"), case=case, chip="v6e", way=way)


@tables.block
def long_prompt() -> str:
    """A long prompt over eight devices, each with the heads that one of eight has."""
    rows, texts = tables.rows_of("scale-prompt"), []
    for case in tables.values(rows, "case"):
        one, every = (tables.only(rows, case=case, devices=n) for n in (1, 8))
        layer, times = CASES[case], every["devices"] * one["estimate_ms"] / every["estimate_ms"]
        texts.append(
            f"{tables.TITLES[layer.operator]} with {layer.H} / {layer.HV} heads takes "
            f"{tables.decimals(every['estimate_ms'])} ms, {tables.decimals(times, 1)} times as fast as one, and sends "
            f"{tables.mebibytes(every['sent_mib'])} MiB"
        )
    return (
        f"By the compiler for v6e, eight devices read {tables.whole(rows[0]['T'])} tokens so, without the time of what "
        f"they send:\n" + ";\n".join(texts) + "."
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
    columns = {"operator, T = 8,192": lambda row: names[row["fused"]["case"]], "pass": tables.of("fused", tables.way)}
    columns |= {"ms": tables.of("fused", tables.fixed("estimate_ms"))}
    columns |= {"deltanet-tpu, ms": tables.of("deltanet-tpu", tables.fixed("estimate_ms", 1))}
    return tables.table(lines, columns)


@tables.block
def compositions() -> str:
    """The operators that run another one."""
    columns = {"operator": lambda x: f"`{x.chunk.__name__}`", "runs": lambda x: f"`chunk_{x.runs}`"}
    return tables.table(COMPOSITIONS, columns | {"tokens of it for a token": lambda x: str(x.tokens)})


@tables.block
def cost_composition() -> str:
    """Operators by composition beside those that they run, at the same number of tokens."""
    rows = tables.rows_of("tpu-composition")
    names = {
        "gdn-32": "gated delta rule", "delta-product-2": "Gated DeltaProduct, n = 2", "kimi-linear-48b": "KDA",
        "dplr": "DPLR", "kda-64x64": "KDA of the same sizes", "rwkv7": "RWKV-7, 64 heads of 64",
        "simple-gla-xlstm-7b": "simple GLA of the same sizes", "xlstm-7b": "mLSTM, 8 heads, K = 256, V = 512",
    }  # fmt: skip
    row = lambda case, way: tables.only(rows, case=case, implementation="fused", way=way)

    def cell(way):
        both = lambda line: [row(case, way)["estimate_ms"] for case in reversed(line)]
        return lambda line: " / ".join(tables.decimals(ms) for ms in both(line))

    # Every second one runs the kernels of the one before it.
    lines = [*zip(list(names)[::2], list(names)[1::2], strict=True)]
    columns = {"operator, and what it runs": lambda line: f"{names[line[1]]}; {names[line[0]]}"}
    return tables.table(lines, columns | {f"{title}, ms": cell(way) for way, title in tables.PASSES.items()})


@tables.block
def tpu_whole_mixers() -> str:
    """The shares of a model's mixer with its projections: products, kernels, and operations that only move numbers."""
    names = {
        "mixer-qwen3.5-9b": "Qwen3.5-9B", "mixer-kimi-linear": "Kimi-Linear", "mixer-minimax": "MiniMax",
        "mixer-olmo-hybrid": "OLMo-hybrid", "mixer-nemotron-h": "Nemotron-H", "mixer-granite-4": "Granite-4",
        "mixer-falcon-h1": "Falcon-H1", "mixer-ling-2.5": "Ling 2.5", "mixer-delta-product": "Gated DeltaProduct",
        "mixer-rwkv7": "RWKV-7",
    }  # fmt: skip
    rows = tables.rows_of("tpu-whole-mixers")

    def parts(row):
        found = row["operations"]
        return found["products"], row["least_kernel_cycles"], found["copies"], found["others"]

    shares = lambda row: "/".join(f"{100 * cycles / sum(parts(row)):.0f}" for cycles in parts(row))
    kinds = {"cycles": lambda row: tables.whole(sum(parts(row))), "%": shares, "MiB": tables.memory("temporaries_mib")}
    of = lambda title, way: lambda name: kinds[title](tables.only(rows, case=name, way=way))
    short = {"forward": "forward", "forward+backward": "both"}
    columns = {f"{short[way]}: {title}": of(title, way) for way in tables.PASSES for title in kinds}
    return tables.table(list(names), {"mixer": names.get} | columns)


@tables.block
def compile_times() -> str:
    """The processor time of the TPU compiler for layers and for serving steps."""
    rows = tables.select(tables.rows_of("compile-v6e"), implementation="fused")
    seconds = lambda found: " to ".join(tables.whole(at(x["compile_cpu_s"] for x in found)) for at in (min, max))
    forward, both = ([x for x in rows if x["way"] == way] for way in tables.PASSES)
    return (
        f"For v6e it takes {seconds(forward)} s of a processor forward, {seconds(both)} s in both directions, and\n"
        f"{seconds([x for x in rows if x['way'] not in tables.PASSES])} s for a step with both branches."
    )


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
    known = lambda key: lambda row: tables.whole(row.get(key))
    columns = {
        "the layer under": lambda row: names[row["policy"]][0],
        "keeps, bytes a token": known("kept_bytes_a_token"),
        "on the host": known("kept_on_host_bytes_a_token"),
        "grows by": known("grown_bytes_a_token"),
        "repeats": lambda row: names[row["policy"]][1],
    }
    return tables.table(tables.rows_of("remat-v6e"), columns)


@tables.block
def recompute() -> str:
    """The time of gradients of the gated delta rule where the states are made again, and where they are kept."""
    names, forms = ("qwen3-next-80b", "qwen3.5-397b-tp8", "qwen3-next-80b-tp8"), {"made again": "", "kept": "-kept"}
    columns = {"H / HV": lambda row: f"{CASES[row['case']].H} / {CASES[row['case']].HV}"}
    for form, end in forms.items():
        ms = lambda row, end=end: tables.decimals(layer_of(row["case"] + end, "forward+backward")["estimate_ms"])
        columns |= {f"{form}, ms": ms}
    return tables.table([{"case": case} for case in names], columns)


@tables.block
def packed() -> str:
    """A packed batch of 16 sequences with states beside one sequence."""
    rows, ways = tables.rows_of("packed-v6e"), {"forward": "forward_bundles", "both directions": "bundles"}
    many, one = "16 sequences", "one, not packed"
    lines = [{x: tables.only(rows, operator=name, form=x) for x in (many, one)} for name in tables.TITLES]
    columns = {"bundles of 16 sequences over those of one, v6e": tables.of(many, tables.title)}
    return tables.table(lines, columns | {way: tables.ratio(many, one, key) for way, key in ways.items()})


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

    columns = {"task": tables.of("ours", "task"), "chip": tables.of("ours", "chip")}
    columns |= {f"{name}, ms": tables.of(name, lambda row: tables.decimals(ms(row))) for name in ("reference", "ours")}
    return tables.table(lines, columns | {"ratio": faster})
