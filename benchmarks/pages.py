"""The figures of the pages, which come from docs/data, so that no figure is typed into a page.

A page has them between a comment of HTML, `<!-- figures: NAME -->`, and the next empty line. NAME is a function of this
module. `python -m benchmarks pages` names the pages that differ from docs/data, and with --write it writes all pages.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import calibrate, decode_mixer, production
from benchmarks import compile_times as compilations
from benchmarks import step as steps
from chunkwise.command import models, report, times
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.call.checks import choose_chunk_size
from chunkwise.shared.chips import CHIPS

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^<!-- figures: ([\w-]+) -->\n(?:.+\n)*", re.MULTILINE)
BLOCKS: dict[str, Callable[[], str]] = {}
NONE = "-"
TITLES = {"gated_delta_rule": "gated delta rule", "kda": "KDA", "gla": "GLA", "simple_gla": "simple GLA"}
MODELS = {
    "qwen3-next-80b": "Qwen3-Next: gated delta rule, H = 16, HV = 32",
    "kimi-linear-48b": "Kimi-Linear: KDA, H = 32",
    "minimax-text-01": "MiniMax: simple GLA, H = 64",
    "gla": "GLA, H = 16",
}
PASSES = {"forward": "forward", "forward+backward": "forward and backward"}
# The counts from which a time is computed.
COUNTS = ("bundles", "grid_steps", "around_cycles")
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


def block(function: Callable[[], str]) -> Callable[[], str]:
    """Register a function as the block with its name."""
    BLOCKS[function.__name__.replace("_", "-")] = function
    return function


def filled(page: str) -> str:
    """Return a page with the figures of docs/data."""

    def fill(match):
        if match[1] not in BLOCKS:
            raise ValueError(f"A page must name figures of {', '.join(BLOCKS)}; got {match[1]!r}.")
        return f"<!-- figures: {match[1]} -->\n{BLOCKS[match[1]]()}\n"

    return BLOCK.sub(fill, page)


def pages() -> list[Path]:
    """Return the pages that may hold figures."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]


def main(write: bool) -> int:
    """Name the pages that differ from docs/data, and return 1 if there are any; or write all pages."""
    stale = {path: text for path in pages() if (text := filled(path.read_text())) != path.read_text()}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'written' if write else 'differs from docs/data'}")
        if write:
            path.write_text(text)
    return int(bool(stale) and not write)


def rows_of(name: str) -> list[dict]:
    """Return the rows of a result in docs/data."""
    return json.loads((ROOT / f"docs/data/{name}.json").read_text())["rows"]


def select(rows: Iterable[dict], **where) -> list[dict]:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in where.items())]


def only(rows: Iterable[dict], **where) -> dict:
    """Return the one row with these values."""
    (row,) = select(rows, **where)
    return row


def values(rows: Iterable[dict], key: str) -> list:
    """Return the values of a key, each once, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown."""
    head = list(head)
    cells = [head, ["---"] * len(head), *map(list, lines)]
    text = ["| " + " | ".join(line) + " |" for line in cells]
    text[1] = text[1].replace(" ", "")
    return "\n".join(text)


def whole(number: float | None) -> str:
    """Return a number without decimals."""
    return NONE if number is None else f"{number:,.0f}"


def decimals(number: float | None, places: int = 2) -> str:
    """Return a number with decimals."""
    return NONE if number is None else f"{number:,.{places}f}"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.0f} %"


def mebibytes(number: float) -> str:
    """Return MiB, with decimals where they matter."""
    return f"{number:,.0f}" if number == round(number) or number >= 20 else f"{number:.2f}".rstrip("0")


def cycles(row: dict) -> int | None:
    """Return the cycles of the kernels of a row and of the operations around them."""
    return None if row.get("kernel_cycles") is None else row["kernel_cycles"] + row["around_cycles"]


def cycles_or_bundles(row: dict) -> str:
    """Return the cycles of a row, or the bundles where the compiler gave no cycles."""
    if cycles(row) is not None:
        return f"{whole(cycles(row))} cycles"
    return NONE if row.get("bundles") is None else f"{whole(row['bundles'])} bundles"


@block
def cpu() -> str:
    """Both directions on one device and on two, beside torch."""
    rows, lines = rows_of("cpu-gdn-16"), []
    for ours in select(rows, implementation="xla"):
        torch = only(rows, implementation="transformers", **{key: ours[key] for key in ("pass", "devices")})
        pair = lambda row: f"{whole(row['median_ms'])} / {whole(row['cpu_ms'])} ms"
        ratios = " / ".join(decimals(torch[key] / ours[key], 1) for key in ("median_ms", "cpu_ms"))
        lines.append([PASSES[ours["pass"]], str(ours["devices"]), pair(ours), pair(torch), ratios])
    return table(["pass", "devices", '"xla"', "torch in the same run", "ratio"], lines)


@block
def first_screen() -> str:
    """Three figures with their conditions, for the first screen of the README."""
    where = {"pass": "forward+backward", "devices": 1}
    cpu = [only(rows_of("cpu-gdn-16"), implementation=name, **where) for name in ("xla", "transformers")]
    ours, peer = (f"{whole(row['median_ms'])} ms" for row in cpu)
    row = only(rows_of("tpu-layers"), case="qwen3-next-80b", chip="v6e", **{"pass": "forward"})
    low, high = times.WORST
    of_gates = [x for x in rows_of("accuracy-gate") if x["form"] in ("xla", "fused")]
    worst = [max(x["error"] for x in select(of_gates, dtype=dtype)) for dtype in ("float32", "bfloat16")]
    lines = [
        [
            "forward and backward on 2 cores of a CPU",
            f"{ours}; transformers in torch: {peer}",
            "gated delta rule, T = 2,048, 16 heads of 128 channels, float32",
        ],
        [
            f"forward on a TPU {row['chip']}, predicted from its compiler's code",
            f"{decimals(row['estimate_ms'])} ms",
            f"Qwen3-Next's layer, T = {whole(row['T'])}, bfloat16; the same formula gives {decimals(low)} to "
            f"{decimals(high)} of the times that others publish",
        ],
        [
            "error against float64, RMS over RMS",
            "at most {:.1e} in float32, {:.1e} in bfloat16".format(*worst).replace("e-0", "e-"),
            "gated delta rule, KDA, GLA, simple GLA; mean gates from -0.01 to -80 nats a token",
        ],
    ]
    return table(["measurement", "figure", "conditions"], lines)


@block
def cpu_tokens() -> str:
    """Time and memory against tokens."""
    rows, lines = rows_of("cpu-tokens"), []
    for T in values(rows, "T"):
        ours, torch, scan = (only(rows, T=T, implementation=name) for name in ("xla", "transformers", "scan"))
        times = [whole(row["median_ms"]) for row in (torch, scan)]
        lines.append([whole(T), whole(ours["median_ms"]), whole(ours["memory_mib"]), *times])
    return table(["T", '"xla", ms', '"xla", MiB', "torch, ms", "scan over tokens, ms"], lines)


@block
def chunk_sizes() -> str:
    """The sizes that `chunk_size=None` takes, and processor time of plain JAX against the size."""
    rows, lines = rows_of("chunk-sizes-cpu"), []
    for name, title in TITLES.items():
        entry = OPERATORS[f"chunk_{name}"]
        kind = {"per_channel": entry.per_channel, "delta": entry.delta}
        # For many tokens, because a sequence that is shorter than a chunk has a smaller chunk.
        sizes = [choose_chunk_size(None, implementation, 2048, **kind) for implementation in ("fused", "xla")]
        found = [select(rows, operator=name, chunk_size=C) for C in (32, 64, 128)]
        times = [" / ".join(f"{row[f'{x}_cpu_ms']}" for row in y for x in ("forward", "gradient")) for y in found]
        lines.append([title, *map(str, sizes), *(time or NONE for time in times)])
    return table(["operator", '"fused", "staged"', '"xla"', "C = 32, ms", "C = 64, ms", "C = 128, ms"], lines)


@block
def first_call() -> str:
    """The time of the first call of an operator, without a cache and with a cache."""
    rows, lines = rows_of("first-call-cpu"), []
    for operator in reversed(values(rows, "operator")):
        ways = [only(rows, operator=operator, **{"pass": way}) for way in PASSES]
        cells = [decimals(row[key], 1) for row in ways for key in ("cold_s", "cached_s")]
        lines.append([f"`{operator}`", *cells, " / ".join(whole(row["second_ms"]) for row in ways)])
    head = ["forward, s", "from the cache, s", "gradient, s", "from the cache, s", "second call, ms"]
    return table(["first call of", *head], lines)


@block
def tpu_kda() -> str:
    """Kimi-Linear's layer by our kernel and by tokamax's, with the same compiler."""
    rows, lines = rows_of("tpu-kda"), []
    for ours in select(rows, implementation="fused"):
        peer = only(rows, implementation="tokamax", T=ours["T"], chip=ours["chip"])
        memory = f"{mebibytes(ours['temporaries_mib'])} / {mebibytes(peer['temporaries_mib'])}"
        counts = [" / ".join(whole(row[key]) for row in (ours, peer)) for key in COUNTS]
        times_ms = [decimals(row["estimate_ms"]) for row in (ours, peer)]
        ratio = decimals(peer["estimate_ms"] / ours["estimate_ms"])
        lines.append([whole(ours["T"]), ours["chip"], *counts, *times_ms, ratio, memory])
    head = ["bundles, ours / tokamax", "grid steps", "cycles of operations", "ours, ms", "tokamax, ms", "ratio"]
    return table(["T", "chip", *head, "temporaries, MiB"], lines)


@block
def tpu_kda_short() -> str:
    """The same for readers of the README."""
    rows, lines = rows_of("tpu-kda"), []
    for ours in select(rows, implementation="fused"):
        peer = only(rows, implementation="tokamax", T=ours["T"], chip=ours["chip"])
        lines.append([whole(ours["T"]), ours["chip"], *(f"{decimals(row['estimate_ms'])} ms" for row in (ours, peer))])
    return table(["T", "chip", "kda", "tokamax"], lines)


@block
def tpu_layers() -> str:
    """The layers of models at 8,192 tokens: forward on all generations, and both directions on a v6e."""
    rows, lines = rows_of("tpu-layers"), []

    def cell(chip: str, way: str, case: str) -> str:
        found = select(rows, case=case, chip=chip, **{"pass": way})
        return " or ".join(decimals(row["estimate_ms"]) for row in found) or NONE

    for case, title in MODELS.items():
        forward = only(rows, case=case, chip="v6e", **{"pass": "forward"})
        both = only(rows, case=case, chip="v6e", **{"pass": "forward+backward"})
        counts = " / ".join(whole(row["bundles"]) for row in (forward, both))
        steps = " / ".join(whole(row["grid_steps"]) for row in (forward, both))
        memory = " / ".join(mebibytes(row["temporaries_mib"]) for row in (forward, both))
        times_ms = [cell(chip, "forward", case) for chip in CHIPS]
        lines.append([title, *times_ms, cell("v6e", "forward+backward", case), counts, steps, memory])
    head = [*(f"{chip}, ms" for chip in CHIPS), "v6e, both directions, ms", "bundles, v6e", "grid steps"]
    return table(["layer", *head, "temporaries, MiB"], lines)


def estimate(row: dict) -> str:
    """Return the time of a forward, predicted from the compiler's estimate, and the least time of its bytes."""
    return f"{decimals(row['estimate_ms'])} ms, where memory alone takes {decimals(row['floor_ms'])} ms"


def counted(case: str) -> str:
    """Return the bundles of a layer in both directions, and their time."""
    ways = [only(rows_of("tpu-layers"), case=case, chip="v6e", **{"pass": way}) for way in PASSES]
    forward, both = (whole(row["bundles"]) for row in ways)
    return f"{forward} bundles forward, and {both} in both directions, which take {decimals(ways[1]['estimate_ms'])} ms"


COST = "**Cost.** The compiler estimates for v6e, in bfloat16 with K = V = 128, that a forward of"


@block
def cost_gdn() -> str:
    """The cost of the gated delta rule."""
    row = only(rows_of("tpu-layers"), case="qwen3-next-80b", chip="v6e", **{"pass": "forward"})
    return f"{COST} T = {whole(row['T'])}, H = 16 and HV = 32\ntakes {estimate(row)}. It counts {counted(row['case'])}."


@block
def cost_kda() -> str:
    """The cost of Kimi delta attention."""
    row = only(rows_of("tpu-layers"), case="kimi-linear-48b", chip="v6e", **{"pass": "forward"})
    return f"{COST} T = {whole(row['T'])} and H = 32\ntakes {estimate(row)}. It counts {counted(row['case'])}."


@block
def cost_two_keys() -> str:
    """The cost of GDN-2 beside Kimi delta attention, and of deltanet-tpu's kernels for both, of one run."""
    rows, lines = rows_of("tpu-two-keys"), []
    for name, case in (("GDN-2", "gdn2"), ("Kimi delta attention", "kimi-linear-48b")):
        for way in ("forward", "forward+backward"):
            ours, theirs = (only(rows, case=case, implementation=x, **{"pass": way}) for x in ("fused", "deltanet-tpu"))
            figures = ours["kernel_cycles"], ours["bundles"], theirs["bundles"]
            lines.append([name, whole(ours["T"]), way, *map(whole, figures)])
    return table(["operator", "T", "pass", "kernel cycles", "bundles", "deltanet-tpu, bundles"], lines)


@block
def cost_gla() -> str:
    """The cost of gated linear attention."""
    rows = select(rows_of("tpu-layers"), chip="v6e", **{"pass": "forward"})
    gla, simple = (only(rows, case=case) for case in ("gla", "minimax-text-01"))
    return (
        f"{COST} T = {whole(gla['T'])} takes, for GLA with\n"
        f"H = 16, {estimate(gla)}, and for simple GLA with H = 64\n{estimate(simple)}."
    )


@block
def tpu_mixers() -> str:
    """Whole mixers: convolutions, gates, operator and norm."""
    rows, lines = rows_of("tpu-mixer") + rows_of("tpu-mixer-8192"), []

    def cell(found: list[dict]) -> str:
        if not found:
            return NONE
        (row,) = found
        counted = f"{whole(row['kernel_cycles'])} + {whole(row['around_cycles'])}" if cycles(row) else "no cycles"
        return f"{counted}; {mebibytes(row['temporaries_mib'])}"

    for case, title in (("mixer-qwen3-next", "Qwen3-Next"), ("mixer-kimi-linear", "Kimi-Linear")):
        for T in values(select(rows, case=case), "T"):
            found = [select(rows, case=case, T=T, implementation=name) for name in ("fused", "mixed", "tokamax")]
            lines.append([title, whole(T), *map(cell, found)])
    return table(["mixer", "T", "our kernels", "our operator, XLA's convolutions and norm", "tokamax"], lines)


@block
def tpu_block() -> str:
    """A whole block of Qwen3.5-9B."""
    kernels, lines = rows_of("tpu-block-kernels"), []
    for row in rows_of("tpu-block") + rows_of("tpu-block-backward"):
        mine = only(kernels, chip=row["chip"], **{"pass": row["pass"]})
        least = "at least " if mine["at_least"] else ""
        total = row["operations_cycles"] + mine["kernel_cycles"]
        time = least + decimals(
            times.device_ms(CHIPS[row["chip"]], mine["kernel_cycles"], row["operations_cycles"], 0), 1
        )
        share, memory = percent(mine["kernel_cycles"] / total), mebibytes(row["temporaries_mib"])
        figures = [whole(row["operations_cycles"]), least + whole(mine["kernel_cycles"]), share, time, memory]
        lines.append([row["chip"], PASSES[row["pass"]], *figures])
    head = ["XLA's operations, cycles", "kernels, cycles", "kernels' share", "together, ms", "temporaries, MiB"]
    return table(["chip", "pass", *head], lines)


@block
def compile_times() -> str:
    """The processor time of the TPU compiler for layers, beside the time for tokamax's."""
    names = MODELS | {"mixer-qwen3-next": "Qwen3-Next's whole mixer", "mixer-kimi-linear": "Kimi-Linear's whole mixer"}
    rows, lines = rows_of("compile-v6e"), []
    seconds = lambda **wanted: "; ".join(whole(row["compile_cpu_s"]) for row in select(rows, **wanted)) or NONE
    for case in compilations.LAYERS:
        lines.append([names[case], *(seconds(case=case, way=way) for way in PASSES)])
    return table(["program, v6e", "forward, s; tokamax's", "both directions, s; tokamax's"], lines)


@block
def compile_steps() -> str:
    """The processor time of the TPU compiler for serving steps."""
    rows, lines = rows_of("compile-v6e"), []
    for way in compilations.STEPS:
        (row,) = select(rows, way=way)
        lines.append([f"operator of Qwen3-Next, {MIXTURES[way]}", whole(row["compile_cpu_s"])])
    for row in select(rows, way="decodes"):
        case = decode_mixer.MIXERS[row["case"]]
        about = f"{TITLES[case.operator]}, {case.H} / {case.HV} heads"
        lines.append([f"whole mixer of decodes or prefills: {about}", whole(row["compile_cpu_s"])])
    return table(["serving step, v6e", "s"], lines)


@block
def remat() -> str:
    """The bytes that a gated DeltaNet layer keeps for its backward, and the work that it repeats."""
    names = {
        "no checkpoint": ("no `jax.checkpoint`", "nothing"),
        "remat_policy": ("`jax.checkpoint` with `remat_policy`", "convolutions and norm"),
        "offload_policy": ("`jax.checkpoint` with `offload_policy()`", "convolutions and norm"),
        "products alone": (
            "`jax.checkpoint` that keeps products with matrices alone",
            "convolutions, norm and the operator's forward",
        ),
        "inputs alone": ("`jax.checkpoint` that keeps inputs alone", "all"),
    }
    counted, lines = rows_of("remat-v6e-cycles"), []
    for row in rows_of("remat-v6e"):
        found = select(counted, policy=row["policy"])
        figures = [whole(x[key]) for x in found for key in ("operations_cycles", "kernel_cycles")] or [NONE] * 2
        columns = ("kept_bytes_a_token", "kept_on_host_bytes_a_token", "grown_bytes_a_token")
        memory = [whole(row.get(key)) for key in columns]
        name, again = names[row["policy"]]
        lines.append([name, *memory, again, *figures])
    kept = ["keeps on the device, bytes a token", "on the host", "grows by, bytes a token"]
    head = [*kept, "repeats", "XLA's operations, cycles", "kernels, cycles"]
    return table(["the layer under", *head], lines)


@block
def scale_v5p() -> str:
    """A million tokens over the devices of a v5p."""
    lines = []
    for name in ("scale-v5p", "scale-v5p-backward"):
        rows = rows_of(name)
        for row in (x for x in rows if x["devices"] > 1):
            alone = only(rows, topology=row["topology"], devices=1)
            size = f"{row['devices']} x {whole(row['tokens_each'])}"
            figures = [alone["bundles"], row["bundles"], row["summary_bundles"]]
            more = percent(row["bundles"] / alone["bundles"] - 1)
            memory = " / ".join(mebibytes(round(x["memory_mib"])) for x in (alone, row))
            sent = f"{row['collectives']}, {mebibytes(row['sent_mib'])}"
            lines.append([size, PASSES[row["pass"]], *map(whole, figures), more, memory, sent])
    head = [
        "bundles, alone",
        "divided",
        "of these, the map",
        "more",
        "memory, alone / divided, MiB",
        "collectives, MiB sent",
    ]
    return table(["devices x tokens each", "pass", *head], lines)


@block
def scale_v6e() -> str:
    """Every launch of a divided forward by itself."""
    names = {
        "qwen3-next-80b-unit": "scaled to unit length in the kernels",
        "qwen3-next-80b": "of unit length as they come in",
    }
    rows, lines = rows_of("scale-v6e"), []
    for row in (x for x in rows if x["devices"] > 1):
        alone = only(rows, case=row["case"], topology=row["topology"], devices=1)
        map_cycles, behind = row["launch_cycles"].split(" + ")
        more = percent((row["kernel_cycles"] + row["around_cycles"]) / cycles(alone) - 1)
        figures = [whole(cycles(alone)), map_cycles, behind, whole(row["around_cycles"]), more]
        lines.append([names[row["case"]], str(row["devices"]), *figures])
    return table(["queries and keys", "devices", "alone", "the map", "the operator behind it", "XLA", "more"], lines)


@block
def scale_added() -> str:
    """The cost that dividing tokens adds to the other operators."""
    added = ", ".join(
        f"{percent(row['forward_added'])} and {percent(row['added'])} for {TITLES[row['operator']]}"
        for row in rows_of("scale-v6e-added")
    )
    alone, divided = select(rows_of("scale-v6e-backward"), case="qwen3-next-80b-unit")
    return (
        f"The addition to the forward, and to both directions together, is {added}.\n"
        f"The gated delta rule of Qwen3-Next takes {whole(divided['bundles'])} bundles in both directions on "
        f"{divided['devices']} devices,\n{percent(divided['bundles'] / alone['bundles'] - 1)} more than on one."
    )


@block
def scans() -> str:
    """The ways to bring states to devices."""
    rows, ways = rows_of("scan-v5p"), ("all_gather", "all_to_all", "doubling", "ring")
    attention = {row["devices"]: row for row in rows_of("scale-v5p") if row["devices"] > 1}
    lines = []
    for devices in values(rows, "devices"):
        found = [only(rows, devices=devices, scan=way) for way in ways]
        cells = [f"{mebibytes(row['sent_mib'])} / {mebibytes(row['temporaries_mib'])}" for row in found]
        ring = [f"ring_attention_{heads}_mib" for heads in (32, 2)]
        cells += [" / ".join(whole(attention[devices][key]) for key in ring) if devices in attention else NONE]
        lines.append([str(devices), *cells])
    return table(["devices", *(f"`{way}`" for way in ways), "ring attention, 32 / 2 heads: sent"], lines)


@block
def split_flops() -> str:
    """The flops that dividing tokens adds to the products of plain JAX."""
    lines = []
    for row in rows_of("split-flops"):
        cells = []
        for alone, divided in (("forward_mflop", "forward_divided_mflop"), ("mflop", "divided_mflop")):
            cells += [f"{whole(row[alone])} / {whole(row[divided])}", percent(row[divided] / row[alone] - 1)]
        lines.append([f"`chunk_{row['operator']}`", *cells])
    head = ["forward alone / divided", "more", "both directions alone / divided", "more"]
    return table(['`"xla"`, million flops', *head], lines)


@block
def packed() -> str:
    """A packed batch with states beside one sequence."""
    rows, lines, ways = rows_of("packed-v6e"), [], ("forward_bundles", "bundles")
    for name, title in TITLES.items():
        many, *others = (only(rows, operator=name, form=x) for x in ("16 sequences", "one packed", "one, not packed"))
        cells = [" / ".join(whole(many[key]) for key in ways)]
        for one in others:
            cells += [
                " / ".join(whole(one[key]) for key in ways),
                " / ".join(decimals(many[key] / one[key]) for key in ways),
            ]
        lines.append([title, *cells])
    return table(["bundles", "16 sequences", "one packed", "ratio", "one, not packed", "ratio"], lines)


@block
def step() -> str:
    """Serving steps of Qwen3-Next's layer."""

    def cell(row: dict) -> str:
        if row.get("cycles"):
            return f"{whole(row['cycles'])}; {decimals(row['to_floor'])}; {decimals(row['estimate_ms'], 3)}"
        return f"kernels {whole(sum(row[key] or 0 for key in ('decode_bundles', 'prefill_bundles')))}"

    results = [select(rows_of(f"step-{chip}"), case="qwen3-next-80b") for chip in CHIPS]
    lines = [[title, *(cell(only(rows, mixture=mixture)) for rows in results)] for mixture, title in MIXTURES.items()]
    return table(["cycles; times the floor; ms", *CHIPS], lines)


@block
def step_of_a_device() -> str:
    """Serving steps of an operator at the heads that one of 8 devices has."""
    rows, lines = rows_of("step-v6e-tp8"), []
    titles = {
        "decode-64": "64 decodes",
        "decode-64-bfloat16": "64 decodes, bfloat16",
        "decode-32-prefill-2x512-bfloat16": "32 decodes and 2 prefills of 512, bfloat16",
    }
    for case in values(rows, "case"):
        layer, cells = models.MODELS[case], []
        for mixture in titles:
            x = only(rows, case=case, mixture=mixture)
            cells.append(f"{whole(x['cycles'])}; {decimals(x['to_floor'])}; {decimals(x['estimate_ms'], 3)}")
        lines.append([f"{TITLES[layer.operator]}, {layer.H} / {layer.HV}", *cells])
    return table(["v6e, key and value heads", *titles.values()], lines)


@block
def decodes() -> str:
    """The whole mixer of 64 decodes, at the heads that one of several devices has."""
    rows, lines = rows_of("decodes"), []
    for case in values(rows, "case"):
        layer = decode_mixer.MIXERS[case]
        for mixture in (x for x in decode_mixer.mixtures(case) if not steps.MIXTURES[x].prefills):
            cells = []
            for chip in CHIPS:
                found = [x for x in select(rows, case=case, mixture=mixture, chip=chip) if x.get("cycles")]
                text = (f"{whole(x['cycles'])}; {decimals(x['cycles'] / x['decode_floor'])}; " for x in found)
                cells.append(next((f"{y}{decimals(found[0]['estimate_ms'], 3)}" for y in text), NONE))
            title, pool = f"{TITLES[layer.operator]}, {layer.H} / {layer.HV}", steps.MIXTURES[mixture]
            kind = f"{pool.pool}, ring of {pool.replay}" if pool.replay else pool.pool
            lines.append([title, kind if pool.W == 1 else f"{kind}, {pool.W} tokens", *cells])
    return table(["operator, key and value heads", "states", *CHIPS], lines)


@block
def decodes_layout() -> str:
    """What a layout of pools costs a step of decodes."""
    rows = select(rows_of("decodes"), case="qwen3-next-80b-tp8", chip="v6e")
    plain, ring = (only(rows, mixture=name) for name in ("decode-64-bfloat16", "decode-64-bfloat16-ring"))
    layouts = lambda row: f"{whole(row['around_cycles'])} and {whole(row['around_in_default_layout'])}"
    return (
        f"For 64 decodes over {whole(steps.SLOTS)} slots, with 2 key and 4 value heads and bfloat16 states, the\n"
        f"compiler for v6e expects all operations around the launch to take {layouts(plain)} cycles in rows and in\n"
        f"the default layout; with a ring of 16 tokens {layouts(ring)}. The copies grow with the number of slots."
    )


@block
def decodes_mixed() -> str:
    """The operations around the kernels of a step of decodes and prefills."""
    counts, rows = [], select(rows_of("decodes"), mixture=decode_mixer.MIXED, chip="v6e")
    for case, layer in decode_mixer.MIXERS.items():
        row = only(rows, case=case)
        counts.append(f"{whole(row['around_cycles'])} for {TITLES[layer.operator]} {layer.H} / {layer.HV}")
    return (
        "In a step of 32 decodes and 2 prefills of 512 the compiler for v6e expects these cycles of all operations\n"
        f"around the kernels of a whole mixer, by key and value heads:\n{', '.join(counts)}."
    )


@block
def pools() -> str:
    """The bytes of a decode over every pool, its cycles on a v6e, and the loss of a model, where they are known."""
    layer, rows, lines = models.MODELS["qwen3-next-80b"], rows_of("step-v6e"), []
    bits = {row["pool"]: row for row in rows_of("pool-bits")}
    for dtype in ("float32", "bfloat16", "int8"):
        for replay in (0, 8, 16, 32):
            mixture = models.Mixture(64, pool=dtype, replay=replay)
            kib = models.moved_bytes(layer, mixture)[0] / 64 / layer.HV / 2**10
            known = next((name for name, x in steps.MIXTURES.items() if x == mixture), None)
            found = [row for row in rows if row["case"] == "qwen3-next-80b" and row["mixture"] == known]
            cycles = whole(found[0]["cycles"]) if found and found[0].get("cycles") else NONE
            row = bits.get(f"{dtype}, ring of {replay}" if replay else dtype)
            more = decimals(100 * row["over_float32"], 4) if row else NONE
            lines.append([dtype, f"{replay} tokens" if replay else "none", decimals(kib, 1), cycles, more])
    head = ["states", "ring", "KiB a token and value head", "cycles of 64 decodes, v6e", "% more bits per byte"]
    return table(head, lines)


@block
def pool_errors() -> str:
    """Errors of decodes over every pool, and over formats that are simulated, by the strength of gates and the keys."""
    rows = rows_of("pool-errors")
    points = [(keys, gate) for gate in values(rows, "gate") for keys in values(rows, "keys")]
    lines = []
    for pool in values(rows, "pool"):
        found = [only(rows, pool=pool, keys=keys, gate=gate)["error"] for keys, gate in points]
        lines.append([pool, *(f"{error:.1e}" for error in found)])
    return table(["pool", *(f"{gate}, {keys}" for keys, gate in points)], lines)


@block
def step_float16() -> str:
    """The cost of a pool of float16."""
    (row,) = rows_of("step-v6e-float16")
    step = only(rows_of("step-v6e"), case=row["case"], mixture=row["mixture"])
    parts = [row[f"{part}_cycles"] for part in ("gather", "convert", "scatter")]
    ratio = (sum(parts) + step["cycles"]) / step["cycles"]
    gather, convert, scatter = map(whole, parts)
    return (
        f"For {MIXTURES[row['mixture']]} over {whole(row['slots'])} slots the compiler for v6e expects the gather to "
        f"take {gather} cycles,\nthe conversion {convert} and the scatter {scatter}. "
        f"With the step of a float32 pool this is {decimals(ratio, 1)} times that step alone."
    )


@block
def step_others() -> str:
    """Prefills of the other operators on a v6e, and steps on a CPU."""
    rows, on_cpu = rows_of("step-v6e"), rows_of("step-cpu")
    texts = []
    for case in ("kimi-linear-48b", "minimax-text-01"):
        one, many = (only(rows, case=case, mixture=f"prefill-8192{kind}")["cycles"] for kind in ("", "-ragged"))
        texts.append(f"{whole(one)} and {whole(many)} cycles for {MODELS[case].partition(':')[0]}")
    steps = [f"{whole(row['median_ms'])} ms for {MIXTURES[row['mixture']]}" for row in on_cpu]
    return (
        f"On v6e the last two rows are {' and '.join(texts)}.\n"
        f"On a CPU of 2 cores, 16 heads in float32 take {steps[0]}, {steps[1]},\nand {steps[2]}."
    )


def errors(name: str, points: tuple[float, ...]) -> str:
    """Return the errors of a sweep at some of its points: a line for every form and type of an operator."""
    rows, lines = rows_of(name), []
    for operator in values(rows, "operator"):
        mine = select(rows, operator=operator)
        # Forms in the order of their results, float32 first.
        kinds = dict.fromkeys(
            (row["dtype"], row["form"]) for row in sorted(mine, key=lambda row: row["dtype"] != "float32")
        )
        for dtype, form in kinds:
            found = [only(mine, form=form, dtype=dtype, point=point)["error"] for point in points]
            cells = ["inf" if error is None else f"{error:.1e}" for error in found]
            lines.append([f"{operator}, {form}, {dtype}", *cells])
    return table(["operator, form, type", *map(str, points)], lines)


@block
def accuracy_gate() -> str:
    """Errors against the strength of gates."""
    return errors("accuracy-gate", (0.01, 0.1, 1.0, 1.4, 5.0, 30.0, 80.0))


@block
def accuracy_keys() -> str:
    """Errors against the share of tokens that have one and the same key."""
    return errors("accuracy-keys", (0.0, 0.25, 0.5, 0.75, 0.9, 1.0))


@block
def report_fields() -> str:
    """The fields of a report, out of its schema."""
    lines = []

    def walk(schema: dict, prefix: str) -> None:
        for name, value in schema["properties"].items():
            kinds = value.get("type", "integer" if "const" in value else "string")
            kind = kinds if isinstance(kinds, str) else " or ".join(kinds)
            if text := value.get("description"):
                lines.append([f"`{prefix}{name}`", kind, text])
            inner = value.get("items", value)
            if "properties" in inner:
                walk(inner, f"{prefix}{name}{'[]' if 'items' in value else ''}.")

    walk(report.read_schema(), "")
    return table(["field", "type", "what it says"], lines)


@block
def hardware_reports() -> str:
    """The reports in docs/data/hardware."""
    lines = []
    for path in sorted((ROOT / "docs/data/hardware").glob("*.json")):
        found = json.loads(path.read_text())
        failed = sum(not row["passed"] for row in found["check"] + found["times"])
        device, versions = found["device"], found["versions"]
        size = "smaller" if found["small"] else "the models'"
        link = f"[{path.name}](data/hardware/{path.name})"
        lines.append([link, device["kind"], versions["jax"], versions["chunkwise"], size, whole(failed)])
    head = ["file", "device", "JAX", "chunkwise", "layers", "failed"]
    return table(head, lines) if lines else "There is none yet: nobody has sent a report of a TPU or a GPU."


@block
def gpu() -> str:
    """The launches of programs on an H100, and their temporaries."""
    lines = []
    for row in rows_of("gpu-h100"):
        tokens = {"decode": "a token of 64 sequences", "serving step": "a serving step of 64 decodes"}.get(row["pass"])
        heads = "" if row["HV"] == 32 else f", {row['HV']} heads"
        what = [TITLES[row["operator"]] + heads, tokens or f"{PASSES[row['pass']]}, T = {whole(row['T'])}"]
        lines.append([*what, whole(row["launches"]), whole(row["temporaries_mib"])])
    return table(["operator", "program", "launches", "temporaries, MiB"], lines)


def points() -> tuple[list[dict], list[dict]]:
    """Return the points of the fit, and the other points."""
    return calibrate.usable(rows_of("calibrate"))


@block
def calibration() -> str:
    """How sure a time is."""
    low, high = times.WORST
    return (
        f"The times are those of the device, by a formula that was fitted to {len(points()[0])} times that other\n"
        f"libraries publish of their kernels on a v6e and a TPU7x. There it is wrong by {percent(times.SPREAD)} on "
        f"average, and\npredicts {decimals(low)} to {decimals(high)} of the time."
    )


@block
def calibration_fit() -> str:
    """The formula, and how far it is from the points."""
    inside, _ = points()
    names = sorted(set(map(calibrate.library, inside)))
    apart = []
    for name in names:
        others = [row for row in inside if calibrate.library(row) != name]
        mine = [row for row in inside if calibrate.library(row) == name]
        if any(row["blocking"] for row in others):
            predicted = calibrate.predicted(calibrate.fit(others), mine)
            ratios = [x / row["published_ms"] for x, row in zip(predicted, mine, strict=True)]
            spread = " to ".join(dict.fromkeys(decimals(x) for x in (min(ratios), max(ratios))))
            apart.append(f"{spread} of the times of {name}")
    low, high = times.WORST
    return (
        f"**time = {times.CALL_MS:.2f} ms for a blocking call + {times.FACTOR} x (bundles + cycles of the operations) "
        f"/ clock + {times.STEP_US} us x grid steps.**\nPredicted times are {decimals(low)} to {decimals(high)} of the "
        f"{len(inside)} published ones, and the root of the mean square error is {100 * times.SPREAD:.1f} %.\n"
        f"A fit without the rows of a library predicts {' and '.join(apart)}."
    )


@block
def calibration_rows() -> str:
    """Published times of peers beside the formula."""
    inside, outside = points()
    lines = []
    for row in [*inside, *outside]:
        chip, call = CHIPS[row["chip"]], times.CALL_MS * row["blocking"]
        ms = call + times.device_ms(chip, row["bundles"], row["around_cycles"], row["grid_steps"])
        name = f"{calibrate.library(row)}, {row['case']}"
        figures = [whole(row[key]) for key in COUNTS]
        ratio = f"{decimals(ms / row['published_ms'])}{'' if row['fitted'] else ', not in the fit'}"
        lines.append(
            [name, row["chip"], PASSES[row["pass"]], *figures, decimals(row["published_ms"]), decimals(ms), ratio]
        )
    head = ["bundles", "grid steps", "cycles of operations", "published, ms", "formula, ms", "formula / published"]
    return table(["kernels, heads, tokens", "chip", "pass", *head], lines)


@block
def calibration_left_out() -> str:
    """Published times that are not compared, with the reason."""
    reasons = ";\n".join(f"{what}, because {why}" for what, why in calibrate.LEFT_OUT.items())
    return f"Other published times are left out: {reasons}."


@block
def hosts_serving() -> str:
    """The answers of whole serving engines with chunkwise, beside the answers with their linear attention."""
    lines = []
    for row in rows_of("hosts"):
        if "requests" in row:
            same = [f"{whole(row['same_' + n])} of {whole(row[n])}" for n in ("requests", "tokens")]
            seconds = [decimals(row["seconds"][who], 1) for who in ("theirs", "ours")]
            lines.append([f"{row['host']} {row['version']}", row["run"], *same, f"{row['logprobs']:.0e}", *seconds])
    head = ["host", "model", "requests alike", "tokens alike", "log-probabilities", "theirs, s", "ours, s"]
    return table(head, lines)


@block
def hosts_training() -> str:
    """The losses of whole trainers with chunkwise, beside the losses with their linear attention."""
    lines = []
    for row in rows_of("hosts"):
        if "losses" in row:
            both = [row["losses"][who] for who in ("theirs", "ours")]
            losses = [decimals(found[step], 4) for step in (0, -1) for found in both]
            name = f"{row['host']} {row['version'].partition('.dev')[0]}"
            moved = f"{row['rounding']:.0e}" if "rounding" in row else "-"
            lines.append([name, row["run"], *losses, f"{row['difference']:.0e}", moved])
    head = ["host", "model", "first loss, theirs", "ours", "last loss, theirs", "ours", "difference", "of a unit"]
    return table(head, lines)


@block
def jaxbench_checks() -> str:
    """The results of JAXBench's check of our files."""
    rows = select(rows_of("jaxbench"), program="check")
    lines = [[row["task"], "yes" if row["correct"] else "no", f"{row['max_diff']:.1g}"] for row in rows]
    return table(["task", "correct", "largest difference"], lines)


@block
def jaxbench() -> str:
    """Tasks of JAXBench, compiled for TPUs: its reference and our programs."""
    rows, lines = rows_of("jaxbench"), []
    for ours in select(rows, program="ours"):
        peer = only(rows, program="reference", task=ours["task"], chip=ours["chip"])
        ms, memory = [], []
        for row in (peer, ours):
            # The reference has no kernels.
            counted = None if "failed" in row else [row[key] or 0 for key in ("bundles", "around_cycles", "grid_steps")]
            ms.append(times.device_ms(CHIPS[row["chip"]], *counted, row["floor_ms"]) if counted else None)
            memory.append(whole(row["temporaries_mib"]) if counted else NONE)
        cells = [whole(ours[key]) for key in COUNTS]
        ratio = decimals(ms[0] / ms[1], 1) if ms[0] else NONE
        lines.append([ours["task"], ours["chip"], *cells, *map(decimals, ms), ratio, " / ".join(memory)])
    head = ["bundles", "grid steps", "cycles of operations", "reference, ms", "ours, ms", "ratio"]
    return table(["task", "chip", *head, "temporaries, reference / ours, MiB"], lines)


@block
def production_cases() -> str:
    """Inputs on which other libraries failed, and our errors."""
    rows, lines = rows_of("production"), []
    for name, one in production.REPORTS.items():
        errors = {row["form"]: f"{row['error']:.0e}" for row in select(rows, case=name)}
        both = [" / ".join(errors[f"{x}, {dtype}"] for dtype in production.TYPES) for x in production.IMPLEMENTATIONS]
        lines.append([name, one.input, f"{one.link}: {one.broke}", *both])
    head = ["case", "input", "report", '"xla", float32 / bfloat16', '"fused", float32 / bfloat16']
    return table(head, lines)


@block
def kda_bench() -> str:
    """KDA at the shapes of a public benchmark, beside its published times."""
    lines = []
    for row in rows_of("kda-bench"):
        counts, ms = [whole(row[key]) for key in COUNTS], (row["call_ms"], row["published_ms"])
        shape = f"{row['sequences']} x {whole(row['T'])}"
        lines.append([shape, *counts, decimals(row["estimate_ms"]), *map(decimals, ms), decimals(ms[1] / ms[0], 1)])
    head = ["bundles", "grid steps", "cycles of operations", "ours, ms", "ours, a call, ms", "published, ms", "ratio"]
    return table(["sequences x tokens", *head], lines)


@block
def suites() -> str:
    """How many tests of other projects pass with our functions in place of theirs."""
    lines = []
    for row in [*select(rows_of("hosts"), run="its tests"), *rows_of("suites")]:
        name = f"{row['host']} {row['version']}"
        lines.append([name, f"{whole(row['passed'])} of {whole(row['tests'])}", row["what"]])
    return table(["project", "pass", "what runs"], lines)
