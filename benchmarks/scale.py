"""Operators over devices, compiled for TPU topologies.

A program for a topology is compiled and never runs: its bytes and its memory are read from the program, and its bundles
and its time are the compiler's static estimate for one device, without the time of collectives.
"""

import collections
import dataclasses
import tempfile
import time

from benchmarks import tpu
from benchmarks.turns import turns_of
from chunkwise.command import times
from chunkwise.command.models import Layer
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.tpu import launches, topology_mesh
from tests.compiled import COLLECTIVE, traffic

MIB = 2**20


def _mesh(topology: str, divided: bool):
    """Return a mesh of all devices of a topology along "x", or of one."""
    return topology_mesh(topology, "x", None if divided else 1)


def estimate(case: Layer, implementation: str, topology: str, T: int, backward: bool, divided: bool) -> dict:
    """Compile an operator with T tokens a device for all devices of a topology, or for one.

    Call this in a fresh process only. It returns the compiler's figures for one device.
    """
    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:  # dumps take gigabytes
        start = time.perf_counter()
        traced, mesh = trace(case, implementation, topology, T, backward, divided, tpu.dump_flags(folder))
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
    return tpu.result(code, timeout)


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
    every["to_one_device"] = figures[1] / figures[0] if figures[0] and figures[1] else None
    return [{"devices": D, "tokens_each": T} | x for D, x in ((1, one), (D, every))]
