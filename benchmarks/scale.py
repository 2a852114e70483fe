"""Operators over devices, compiled for TPU topologies.

A program for a topology is compiled and never runs: its bytes and its memory are read from the program, and its bundles
and its time are the compiler's static estimate for one device, without the time of collectives.
"""

import collections
import dataclasses

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import tpu
from benchmarks.turns import turns_of
from chunkwise.command.models import Layer
from chunkwise.shared.testing import tpu as compiler
from tests.compiled import COLLECTIVE, traffic

MIB = 2**20


def _mesh(topology: str, divided: bool):
    """Return a mesh of all devices of a topology along "x", or of one."""
    return compiler.topology_mesh(topology, "x", None if divided else 1)


def estimate(case: Layer, implementation: str, topology: str, T: int, backward: bool, divided: bool) -> dict:
    """Compile an operator with T tokens a device for all devices of a topology, or for one.

    Call this in a fresh process only. It returns the compiler's figures for one device.
    """
    trace_it = lambda: trace(case, implementation, topology, T, backward, divided)
    turns = turns_of(dataclasses.replace(case, T=T))
    program, row = tpu.read(trace_it, topology.split(":")[0], turns=turns)
    text, found = program.as_text(), row["launches"]
    # Launches before the first collective make the map of a device. The gradient of what a device keeps may begin
    # before it, too.
    before = COLLECTIVE.search(text)
    earlier = compiler.launches(text[: text.rfind("\n", 0, before.start())]) if before else []
    summaries = [name for name in earlier if "_summary_" in name]
    return {
        "kernels": len(compiler.launches(text)),
        "summary_bundles": (found and sum(found[name].bundles for name in summaries)) or None,
        **{name: row[name] for name in ("bundles", "grid_steps", "around_cycles", "estimate_ms")},
        **_sent(text, _mesh(topology, divided).size),
        **_memory(program),
        **{name: row[name] for name in ("compile_s", "traced")},
    }


def trace(case, implementation, topology, T, backward, divided):
    """Return the traced program of `estimate`."""
    mesh = _mesh(topology, divided)
    tokens = NamedSharding(mesh, PartitionSpec(None, "x"))
    # The output is returned, too, as for a loss: gradients alone may not need it if the map has kept the inverses.
    sharding = tokens if divided else None
    fn, specs = tpu.ours(case, implementation, T * mesh.size, backward, None, sharding, results=True)
    # The layout is left to the compiler, as inside of a larger program.
    places = Format(Layout.AUTO, tokens)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(fn, in_shardings=places, out_shardings=places).trace(*specs)


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
