"""Operators over devices, compiled for TPU topologies.

A program for a topology is compiled and never runs: its bytes and its memory are read from the program, and its bundles
and its time are the compiler's static estimate for one device, without the time of collectives.
"""

import collections
import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Iterator

from benchmarks import tpu
from benchmarks.turns import turns_of
from chunkwise.command import times
from chunkwise.command.models import Layer
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.tpu import launches, topology_mesh
from tests.compiled import COLLECTIVE, traffic

MIB = 2**20
# The ways to scan maps over devices: the library has the second and the third one.
SCANS = ("all_gather", "all_to_all", "doubling", "ring")


def map_bytes(case: Layer) -> tuple[int, int]:
    """Return the bytes of both parts of a device's map, M and N, in float32."""
    decay = case.K if case.table.per_channel else 1
    return 4 * case.HV * (case.K**2 if case.table.delta else decay), 4 * case.HV * case.K * case.V


def scan_bytes(case: Layer, scan: str, devices: int) -> int:
    """Return the bytes that a device sends in a scan of affine maps, by its form."""
    M, N = map_bytes(case)
    if scan == "all_gather":
        return (devices - 1) * (M + N)
    if scan == "all_to_all":
        # Every device takes the same number of heads, of which the last ones may be zeros.
        return (devices - 1) * math.ceil(case.HV / devices) * (M + 2 * N) // case.HV
    # Every device takes part in every step of a ring, although only one of the states is right in each step.
    return (math.ceil(math.log2(devices)) * (M + N) + N) if scan == "doubling" else (devices - 1) * N


def ring_attention_bytes(case: Layer, devices: int, T: int, kv_heads: int) -> int:
    """Return the bytes that a device sends if softmax attention passes bfloat16 keys and values around, forward.

    `T` is the number of tokens of a device; heads are as wide as the heads of the case.
    """
    return (devices - 1) * T * kv_heads * (case.K + case.V) * 2


def _mesh(topology: str, divided: bool):
    """Return a mesh of all devices of a topology along "x", or of one."""
    return topology_mesh(topology, "x", None if divided else 1)


def estimate(case: Layer, implementation: str, topology: str, T: int, backward: bool, divided: bool) -> dict:
    """Compile an operator with T tokens a device for all devices of a topology, or for one.

    Call this in a fresh process only. It returns the compiler's figures for one device.
    """
    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:  # dumps take gigabytes
        start = time.perf_counter()
        traced, mesh = trace(case, implementation, topology, T, backward, divided, tpu.dump_flags(folder, False))
        program = traced.lower().compile()
        compile_s, text = time.perf_counter() - start, program.as_text()
        # Launches before the first collective make the map of a device.
        before, chip = COLLECTIVE.search(text), CHIPS[topology.split(":")[0]]
        earlier = launches(text[: text.rfind("\n", 0, before.start())]) if before else []
        # The gradient of what a device keeps may begin before the first collective, too.
        summaries = [name for name in earlier if "_summary_" in name]
        moved, around = tpu.launch_bytes(text), tpu.operations(text)
        counted = tpu.counts(folder, set(moved), turns_of(dataclasses.replace(case, T=T)))
        found = tpu.timed(counted, moved, lambda n: n / chip.bandwidth_tb_s / 1e9)
        return {
            "kernels": len(moved),
            "summary_bundles": (found and sum(found[name].bundles for name in summaries)) or None,
            "bundles": found and sum(x.bundles for x in found.values()),
            "grid_steps": found and sum(x.grid_steps for x in found.values()),
            "around_cycles": around,
            "estimate_ms": found and times.device_ms(chip, found.values(), around),
            **_sent(text, mesh.size),
            **_memory(program),
            "compile_s": compile_s,
            "traced": tpu.digest(traced),
        }


def trace(case, implementation, topology, T, backward, divided, flags: str = ""):
    """Return the traced program of `estimate`, and its mesh."""
    from chunkwise.shared.testing import tpu as compiler

    compiler.setup(flags)
    import jax
    from jax.experimental.layout import Format, Layout
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = _mesh(topology, divided)
    tokens = NamedSharding(mesh, PartitionSpec(None, "x"))
    # The output is returned, too, as for a loss: gradients alone may not need it if the map has kept the inverses.
    sharding = tokens if divided else None
    fn, specs = tpu.ours(case, implementation, T * mesh.size, backward, None, sharding, results=True)
    # The layout is left to the compiler, as inside of a larger program.
    places = Format(Layout.AUTO, tokens)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(fn, in_shardings=places, out_shardings=places).trace(*specs), mesh


def _sent(text: str, devices: int) -> dict:
    """Return the collectives of a program by kind, and the bytes that a device sends in all of them."""
    found = traffic(text, devices)
    counts = collections.Counter(kind for kind, _ in found)
    return {
        "collectives": ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or None,
        "sent_mib": sum(sent for _, sent in found) / MIB,
    }


def _memory(program) -> dict:
    """Return the memory that a program needs on a device."""
    m = program.memory_analysis()
    whole = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return {
        "arguments_mib": m.argument_size_in_bytes / MIB,
        "temporaries_mib": m.temp_size_in_bytes / MIB,
        "memory_mib": whole / MIB,
    }


def count(topology: str) -> dict:
    """Return how many devices a topology has; call in a fresh process only."""
    from chunkwise.shared.testing import tpu as compiler

    compiler.setup()
    return {"devices": _mesh(topology, True).size}


def _in_process(call: str, timeout: float) -> dict:
    code = f"from benchmarks.scale import Layer, count, estimate; {call}"
    return tpu.first_result([code], timeout)


def measure(
    case: Layer, implementation: str, topology: str, T: int, total: bool, backward: bool, timeout: float
) -> list[dict]:
    """Return the rows of one device and of all of them, compiled in processes of their own.

    `T` is the number of tokens of a device, or with `total` of all devices together. `to_one_device` is the ratio of a
    device's time to the time of one device alone with the same tokens.
    """
    D = _in_process(f"count({topology!r})", timeout).get("devices")
    if D is None:
        return [{"failed": "the compiler has no such topology"}]
    T = T // D if total else T
    arguments = f"{case!r}, {implementation!r}, {topology!r}, {T}"
    one, every = (_in_process(f"estimate({arguments}, {backward}, {divided})", timeout) for divided in (False, True))
    figures = [x.get("estimate_ms") for x in (one, every)]
    every |= {
        "to_one_device": figures[1] / figures[0] if figures[0] and figures[1] else None,
        # Computed and not compiled: the other scans, and softmax attention with some numbers of key and value heads.
        **{f"{scan}_mib": scan_bytes(case, scan, D) / MIB for scan in SCANS},
        **{f"ring_attention_{n}_mib": ring_attention_bytes(case, D, T, n) / MIB for n in (case.HV, 2)},
    }
    return [{"devices": D, "tokens_each": T} | x for D, x in ((1, one), (D, every))]


def parts(rows: list[dict]) -> Iterator[list[dict]]:
    """Yield the rows as tables that fit a page: measured or compiled figures, and figures derived from sizes alone."""
    derived = [key for row in rows for key in row if re.fullmatch(rf"({'|'.join(SCANS)}|ring_attention_\d+)_mib", key)]
    names = ("topology", "devices", "tokens_each")
    empty = {key for row in rows for key in row if all(other.get(key) is None for other in rows)}
    yield [{key: y for key, y in row.items() if key not in empty.union(derived)} for row in rows]
    if derived:
        yield [{key: row.get(key) for key in (*names, *dict.fromkeys(derived))} for row in rows if derived[0] in row]
