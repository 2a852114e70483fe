"""Operators over devices, compiled for TPU topologies.

A program for a topology is compiled and never runs: its bytes and its memory are read from the program, and its bundles
or cycles are the compiler's static estimate for one device, without the time of collectives.
"""

import collections
import math
import re
import tempfile
import time
from collections.abc import Iterator
from unittest import mock

from benchmarks import tpu
from chunkwise.command.models import Layer
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
        traced, mesh = _trace(case, implementation, topology, T, backward, divided, tpu.dump_flags(folder, False))
        program = traced.lower().compile()
        compile_s, text = time.perf_counter() - start, program.as_text()
        # Launches before the first collective make the map of a device.
        before = COLLECTIVE.search(text)
        kernels = launches(text)
        summaries = launches(text[: text.rfind("\n", 0, before.start())]) if before else []
        counts = lambda names: (tpu.counts(folder, names) or {}).values()
        bundles = lambda names: sum(n for n, _ in counts(names)) or None
        return {
            "kernels": len(kernels),
            "summary_bundles": bundles(set(summaries)),
            "bundles": bundles(set(kernels)),
            "around_cycles": tpu.operations(text),
            **_sent(text, mesh.size),
            **_memory(program),
            "compile_s": compile_s,
        }


def _trace(case, implementation, topology, T, backward, divided, flags: str):
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


def estimate_launch(case: Layer, implementation: str, topology: str, T: int, divided: bool, index: int) -> dict:
    """Return the estimated cycles of one launch of the forward of `estimate`; call in a fresh process only.

    It is compiled by itself for one device, because the compiler does not profile a divided program as a whole.
    """
    import jax
    from jax.experimental import pallas as pl

    from chunkwise.shared.testing import tpu as compiler

    found, make = [], pl.pallas_call
    # The types without axes of the mesh, which a single launch does not have.
    type_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)

    def recorded(kernel, *, out_shape, interpret=False, **launch):
        own = jax.tree.map(type_of, out_shape)

        def call(*operands):
            if not interpret:
                found.append((launch["name"], make(kernel, out_shape=own, **launch), jax.tree.map(type_of, operands)))
            return make(kernel, out_shape=out_shape, interpret=interpret, **launch)(*operands)

        return call

    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:
        with mock.patch.object(pl, "pallas_call", recorded):
            _trace(case, implementation, topology, T, False, divided, tpu.dump_flags(folder, True))
        name, run, types = found[index]
        given, tree = jax.tree.flatten(types)  # some operands are None
        alone = lambda *x: run(*tree.unflatten(x))
        text = compiler.compile_for(alone, *given, chip=topology.split(":")[0], auto_layout=True).as_text()
        cycles = tpu.profiled(folder)
        return {"launch": name, "cycles": sum(cycles[x] for x in launches(text))}


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
    code = f"from benchmarks.scale import Layer, count, estimate, estimate_launch; {call}"
    return tpu.first_result([code], timeout)


def measure(
    case: Layer, implementation: str, topology: str, T: int, total: bool, backward: bool, profile: bool, timeout: float
) -> list[dict]:
    """Return the rows of one device and of all of them, compiled in processes of their own.

    `T` is the number of tokens of a device, or with `total` of all devices together. With `profile` every launch of a
    forward is also profiled by itself. `to_one_device` is the ratio of a device's cost to the cost of one device alone
    with the same tokens.
    """
    D = _in_process(f"count({topology!r})", timeout).get("devices")
    if D is None:
        return [{"failed": "the compiler has no such topology"}]
    T = T // D if total else T
    arguments = f"{case!r}, {implementation!r}, {topology!r}, {T}"
    one, every = (_in_process(f"estimate({arguments}, {backward}, {divided})", timeout) for divided in (False, True))
    for row, divided in ((one, False), (every, True)) if profile and not backward else ():
        calls = (f"estimate_launch({arguments}, {divided}, {n})" for n in range(row.get("kernels", 0)))
        cycles = [_in_process(call, timeout).get("cycles") for call in calls]
        if cycles and all(cycles):
            row |= {"launch_cycles": " + ".join(f"{n:,}" for n in cycles), "kernel_cycles": sum(cycles)}
    figures = [_figure(x) for x in (one, every)]
    every |= {
        "to_one_device": figures[1] / figures[0] if figures[0] and figures[1] else None,
        # Computed and not compiled: the other scans, and softmax attention with some numbers of key and value heads.
        **{f"{scan}_mib": scan_bytes(case, scan, D) / MIB for scan in SCANS},
        **{f"ring_attention_{n}_mib": ring_attention_bytes(case, D, T, n) / MIB for n in (case.HV, 2)},
    }
    return [{"devices": D, "tokens_each": T} | x for D, x in ((1, one), (D, every))]


def _figure(row: dict) -> int | None:
    """Return the cycles of a row, or its bundles if it has none."""
    if row.get("kernel_cycles"):
        return row["kernel_cycles"] + row["around_cycles"]
    return row.get("bundles")


def parts(rows: list[dict]) -> Iterator[list[dict]]:
    """Yield the rows as tables that fit a page: measured or compiled figures, and figures derived from sizes alone."""
    derived = [key for row in rows for key in row if re.fullmatch(rf"({'|'.join(SCANS)}|ring_attention_\d+)_mib", key)]
    names = ("topology", "devices", "tokens_each")
    empty = {key for row in rows for key in row if all(other.get(key) is None for other in rows)}
    yield [{key: y for key, y in row.items() if key not in empty.union(derived)} for row in rows]
    if derived:
        yield [{key: row.get(key) for key in (*names, *dict.fromkeys(derived))} for row in rows if derived[0] in row]
