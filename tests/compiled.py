"""What is read from the text of a compiled program: flops, launches, and bytes from device to device."""

import base64
import functools
import math
import re

import jax
from jax.extend.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise.shared import chips
from chunkwise.shared.testing.tpu import launches, topology_mesh

_NAME = r"%?([\w.\-]+)"
_RESULT = re.compile(rf"^\s*(?:ROOT )?{_NAME} = \w+\[([\d,]*)\]", re.MULTILINE)
_COMPUTATION = re.compile(rf"^(ENTRY )?{_NAME} \(.*?^}}", re.MULTILINE | re.DOTALL)
_PRODUCT = re.compile(
    rf"^\s*(?:ROOT )?{_NAME} = .* dot\((?:\S+ )?{_NAME},.*lhs_contracting_dims={{([\d,]*)}}", re.MULTILINE
)
_LOOP = re.compile(rf'^.* while\(.*body={_NAME}.*"known_trip_count":{{"n":"(\d+)"', re.MULTILINE)
_CALL = re.compile(rf"(?:calls|to_apply)={_NAME}")
COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?P<start>-start)?\((?P<rest>.*)"
)
_SHAPE = re.compile(r"\b([a-z]+)(\d+)(?:e\w+)?\[([\d,]*)\]")


def _sizes(dimensions: str) -> list[int]:
    return [int(size) for size in dimensions.split(",") if size]


def product_flops(text: str) -> int:
    """Return the flops of all matrix products of a program compiled for a CPU; a loop counts once for every iteration.

    `compiled.cost_analysis()` counts a loop once.

    Args:
      text: the result of `compiled.as_text()`.
    """
    computations = {match[2]: match[0] for match in _COMPUTATION.finditer(text)}
    (entry,) = (match[2] for match in _COMPUTATION.finditer(text) if match[1])
    shapes = {match[1]: _sizes(match[2]) for match in _RESULT.finditer(text)}

    @functools.cache
    def count(name: str) -> int:
        lines = computations[name]
        outside = sum(
            2 * math.prod(shapes[result]) * math.prod(shapes[left][i] for i in _sizes(contracted))
            for result, left, contracted in _PRODUCT.findall(lines)
        )
        loops = sum(int(turns) * count(body) for body, turns in _LOOP.findall(lines))
        return outside + loops + sum(count(called) for called in _CALL.findall(lines))

    return count(entry)


def _bytes(shapes: str) -> list[int]:
    """Return the bytes of the arrays that the text of a type lists."""
    # No operator sends elements that are smaller than a byte.
    return [int(bits) // 8 * math.prod(_sizes(dims)) for _, bits, dims in _SHAPE.findall(shapes)]


def _group(rest: str, devices: int) -> int:
    """Return how many devices take part in a collective, from its text: `{{0,1},{2,3}}` or `[2,2]<=[4]`."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    return int(counted[1]) if counted else devices


def traffic(text: str, devices: int) -> list[tuple[str, int]]:
    """Return the kind of every collective in a compiled program's text, and the bytes that one device sends in it.

    The bytes are the fewest that this kind of collective needs; a ring of the g devices in a group needs no more. With
    a result of n bytes, an all-gather and an all-to-all send n (g - 1) / g, an all-reduce sends twice as much, a
    reduce-scatter n (g - 1), and a permutation n. A collective in the body of a loop counts once; the operators have
    none there.
    """
    found = []
    for line in text.splitlines():
        if not (match := COLLECTIVE.search(line)):
            continue
        kind, sizes = match["kind"], _bytes(match["result"])
        if match["start"] and kind in ("all-gather", "collective-permute"):
            # The operation that starts a collective returns the operands, the results, and scalars that track it.
            arrays = [n for n in sizes if n > 4]
            sizes = arrays[len(arrays) // 2 :]
        n, g = sum(sizes), _group(match["rest"], devices)
        sent = {
            "all-gather": n * (g - 1) // g,
            "all-reduce": 2 * n * (g - 1) // g,
            "all-to-all": n * (g - 1) // g,
            "reduce-scatter": n * (g - 1),
            "collective-permute": n,
        }[kind]
        found.append((kind, sent))
    return found


def compile_over_tokens(fn, tokens, others, chip: str) -> list[str]:
    """Compile fn(tokens, others) for four chips, with the second axis of `tokens` split over a mesh axis "tokens".

    Args:
      fn: called with both, under the mesh; it divides itself over `PartitionSpec(None, "tokens")`.
      tokens, others: trees of ShapeDtypeStruct; all chips have all of `others`.
      chip: one of CHIPS.

    Returns:
      The names of the kernels that the compiled program launches.
    """
    mesh = topology_mesh(chips.CHIPS[chip].topology, "tokens", 4)

    def place(tree, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(fn).trace(place(tokens, None, "tokens"), place(others)).lower().compile()
    # XLA appends a number to names that occur more than once.
    return sorted(name.partition(".")[0] for name in launches(program.as_text() or ""))


def kernel_products(text: str) -> list[list[tuple[str, str, str]]]:
    """Return the matrix products of every Pallas kernel in a lowered or compiled program's text, in order.

    A product is (type of the left operand, of the right one, precision), such as ("f32", "f32", "fp32") with float32
    accuracy, or ("bf16", "bf16", "") with one pass; ("f32", "f32", "") may be one bfloat16 pass, too.
    """
    # Pallas has no public reader of its kernels.
    from jax._src.lib import tpu as dialect

    kernels = []
    for body in re.findall(r'body(?:\\22|"): ?(?:\\22|")([\w+/=]+)', text):
        context = ir.Context()
        dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        with context:
            lines = str(ir.Module.parse(base64.b64decode(body))).splitlines()
        precision = [m[1] if (m := re.search(r"contract_precision<(\w+)>", line)) else "" for line in lines]
        operands = [re.search(r"matmul.*: \(vector<[\dx]+x(\w+)>, vector<[\dx]+x(\w+)>", line) for line in lines]
        kernels.append([(m[1], m[2], p) for m, p in zip(operands, precision, strict=True) if m])
    return kernels
