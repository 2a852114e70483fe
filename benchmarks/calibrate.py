"""How far estimates are from real chips: peers whose real times are published, as the TPU compiler estimates them.

A ratio is the published time over the estimate of the same kernels for the same shapes and chip. It says what to expect
of a kernel that has an estimate and no time, if it is like these kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from benchmarks import tpu, tpu_peers
from benchmarks.cases import CASES
from chunkwise.command.models import Layer
from chunkwise.shared.chips import CHIPS

_DELTANET = "its README, 0.3.0: B = 1, float32, wall time"
_TOKAMAX = "its pull request 1103: one TPU7x device, device time, the gate and the unit lengths inside"


@dataclass(frozen=True)
class Published:
    """A time on a real chip that the authors of a kernel publish, for one sequence of T tokens, K = V = 128.

    Attributes:
      peer: a name in `tpu_peers.PEERS`.
      function: of the peer.
      chip: a name in `chips.CHIPS`.
      H, HV: heads.
      backward: whether forward and backward were measured, or the forward alone.
      ms: the time.
      source: who says so, and how it was measured.
      case: the case of the same operator and heads, for our own estimate; None where we have no such operator.
    """

    peer: str
    function: str
    chip: str
    H: int
    HV: int
    backward: bool
    ms: float
    source: str
    case: str | None = None
    T: int = 8192


PUBLISHED = [
    *(
        Published("deltanet-tpu", function, "v6e", H, HV, way, ms, _DELTANET, case)
        for function, H, HV, case, *times in (
            ("chunk_gdn", 16, 32, "qwen3-next-80b", 11.37, 22.52),
            ("chunk_gdn", 16, 16, "gdn-16", 5.63, 10.93),
            ("chunk_kda", 32, 32, "kimi-linear-48b", 11.67, 22.51),
            ("chunk_gdn2", 12, 24, None, 4.85, 9.34),
        )
        for way, ms in zip((False, True), times, strict=True)
    ),
    Published("tokamax", "kimi_delta_attention", "tpu7x", 32, 32, False, 1.777, _TOKAMAX, "kimi-linear-48b"),
    Published("tokamax", "kimi_delta_attention", "tpu7x", 32, 32, True, 4.593, _TOKAMAX, "kimi-linear-48b"),
]

# Published times that are not compared, and why.
LEFT_OUT = {
    "sglang-jax": "the package index has a release that is older than its KDA kernel",
    "tpu-inference": "it publishes times of serving steps, whose loops depend on boundaries that the compiler does not "
    "know",
    "flywheel-tpu": "the same holds for it, and its own times are in a picture",
}


def label(one: Published, implementation: str) -> dict:
    """Return what names the row of a published time, or of our estimate for the same operator."""
    way = "forward+backward" if one.backward else "forward"
    case = one.case if implementation == "fused" else f"{one.function} {one.H}/{one.HV}"
    return {"case": case, "T": one.T, "pass": way, "implementation": implementation, "chip": one.chip}


def build(one: Published, T: int) -> tuple:
    """Return the function and the shapes of a peer."""
    if one.peer == "tokamax":
        return tpu_peers.tokamax_kda(one.HV, T, one.backward, raw=True)
    return tpu_peers.deltanet(one.function, one.H, one.HV, T, one.backward)


def estimate(index: int, T: int, profile: bool) -> dict:
    """Compile a peer for the chip of its published time; call in a fresh process only."""
    one = PUBLISHED[index]
    # Of what every implementation must move, in the type of the published inputs.
    operator = "kda" if one.function != "chunk_gdn" else "gated_delta_rule"
    dtype = "bfloat16" if one.peer == "tokamax" else "float32"
    moved = Layer(operator, one.H, one.HV).cost(T, dtype, one.backward)[1]
    with tpu_peers.on_a_tpu():
        return tpu.figures(lambda: build(one, T), one.chip, moved / CHIPS[one.chip].bandwidth_tb_s / 1e9, profile)


def measure(index: int, T: int, profile: bool, timeout: float) -> list[dict]:
    """Return the row of a published time, estimated in a process of its own for T tokens and scaled to its own."""
    one = PUBLISHED[index]
    codes = [f"from benchmarks.calibrate import estimate; estimate({index}, {T}, {profile})"]
    found = tpu.first_result(codes, timeout)
    row = {"version": metadata.version(one.peer), "compiled_T": T, "published_ms": one.ms, "source": one.source}
    return [row | found if "failed" in found else row | scaled(one, found, one.T / T, one.ms)]


def measure_ours(index: int, profile: bool, timeout: float) -> list[dict]:
    """Return the row of our own estimate for the operator, the heads and the chip of a published time."""
    one = PUBLISHED[index]
    arguments = f"{CASES[one.case]!r}, 'fused', {one.chip!r}, {one.T}, {one.backward}, {profile}"
    found = tpu.first_result([f"from benchmarks.tpu import Layer, estimate; estimate({arguments})"], timeout)
    return [found if "failed" in found else scaled(one, found)]


def scaled(one: Published, found: dict, factor: float = 1.0, ms: float | None = None) -> dict:
    """Return the figures of a compilation for `factor` times as many tokens, and the ratios of a real time to them.

    `bundles_ms` is what the kernels would take at the peak clock if nothing in them waited, `cycles_ms` what the
    compiler simulated, if it was asked to: both without the operations around the kernels, which a real time has.
    `ratio_with_around` counts those too.
    """
    row = {name: found[name] and round(found[name] * factor) for name in ("kernel_cycles", "around_cycles", "bundles")}
    if one.peer == "tokamax" and ms is not None:
        # They are those of a layout that no user has; see `tpu_peers.tokamax_kda`.
        row["around_cycles"] = None
    clock = CHIPS[one.chip].clock_ghz
    at_peak = lambda cycles: cycles / clock / 1e6 if cycles else None
    row |= {"bundles_ms": at_peak(row["bundles"]), "cycles_ms": at_peak(row["kernel_cycles"])}
    if ms is not None:
        around = None if None in (row["bundles"], row["around_cycles"]) else row["bundles"] + row["around_cycles"]
        times = {"ratio": row["bundles_ms"], "ratio_cycles": row["cycles_ms"], "ratio_with_around": at_peak(around)}
        row |= {name: ms / time if time else None for name, time in times.items()}
    return row | {"compile_s": found["compile_s"]}


def jobs(peers: list[str], T: int, profile: bool, timeout: float) -> Iterator[tuple]:
    """Yield (what it does, label, function that returns rows): the published times of peers, and ours beside them."""
    some = [
        (index, one) for index, one in enumerate(PUBLISHED) if one.peer in peers and one.peer in tpu_peers.installed()
    ]
    for index, one in some:
        name = f"{one.peer}, {one.function}, {one.chip}"
        yield name, label(one, one.peer), lambda index=index: measure(index, T, profile, timeout)
    for index, one in some:
        if one.case:
            name = f"{one.case}, fused, {one.chip}"
            yield name, label(one, "fused"), lambda index=index: measure_ours(index, profile, timeout)


def band(rows: list[dict], ratio: str = "ratio") -> tuple[float, float] | None:
    """Return the least and the largest ratio of rows; None where no row has one."""
    ratios = [row[ratio] for row in rows if row.get(ratio)]
    return (min(ratios), max(ratios)) if ratios else None


def sentences(rows: list[dict]) -> list[str]:
    """Return what the rows say, in sentences."""
    lines = [f"{peer} is left out, because {why}." for peer, why in LEFT_OUT.items()]
    missing = dict.fromkeys(one.peer for one in PUBLISHED if one.peer not in tpu_peers.installed())
    lines += [f"{peer} is not installed." for peer in missing]
    for ratio, figure, what in (("ratio", "bundles_ms", "bundles"), ("ratio_cycles", "cycles_ms", "simulated cycles")):
        if not (found := band(rows, ratio)):
            continue
        low, high = found
        peers = sorted({row["implementation"] for row in rows if row.get(ratio)})
        lines.append(f"{' and '.join(peers)} took {low:.2f} to {high:.2f} times what the compiler estimates by {what}.")
        for row in rows:
            if row["implementation"] == "fused" and row.get(figure):
                ms, name = row[figure], f"{row['case']}, {row['pass']}, {row['chip']}"
                lines.append(f"Ours, {name}: {ms:.2f} ms by {what}, so {low * ms:.2f} to {high * ms:.2f} ms expected.")
    return lines
