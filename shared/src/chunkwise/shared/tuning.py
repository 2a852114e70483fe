"""The sizes that kernels are cut to, and the order of their products: chunks, heads of a grid step, and fast memory.

Here, too, is how TPUs differ: in the fast memory that each of them has, and in the orders that a search found for it.
"""

import contextlib
import contextvars
import functools
import importlib.resources
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from chunkwise.shared import chips

# Lanes of a vector register.
LANES = 128

CHUNK_SIZES = (16, 32, 64, 128)
CHUNK_SIZE = 64
# The chunk size where states after blocks of tokens are stored: users choose the block, which holds whole chunks.
BLOCK_CHUNK_SIZE = 64

# The scoped VMEM that a kernel may use on any chip: the VMEM of the smallest one, less a part for the compiler.
VMEM_LIMIT_BYTES = 15 * min(chip.vmem_bytes for chip in chips.CHIPS.values()) // 16
# The scalar memory that the tables of a kernel may take on any chip, in the same way.
SMEM_LIMIT_BYTES = 15 * min(chip.smem_bytes for chip in chips.CHIPS.values()) // 16

# Orders by (package, kernel) in place of the orders in the package.
_injected: contextvars.ContextVar[Mapping] = contextvars.ContextVar("injected_orders", default=MappingProxyType({}))
# The generation whose orders serve every generation without orders.
_SEARCHED = "v6e"


def best_chunk_size(implementation: str = "", T: int = CHUNK_SIZE, *, per_channel=False, state=0) -> int:
    """Return the chunk size to use where none was asked for.

    Stages ask without arguments, because the stages of a chain must agree.

    Args:
      implementation: the name of an implementation. The best size for kernels is 64, and for those of "fused" without
        a delta rule and gates per channel 128: their scores fill the lanes, and half as many states are kept for the
        backward. For plain JAX, "xla" has the best sizes on a CPU, which docs/performance.md shows, and "gpu" the best
        size on a GPU.
      T: tokens; the rows of a chunk that are past the last token cost as much as others.
      per_channel: whether gates are per channel: their scores cost more in a large chunk.
      state: the size K V of a head's state, of an operator without a delta rule: a large state takes most of the time
        in small chunks.
    """
    best = CHUNK_SIZE
    if implementation == "fused":
        best = 128 if state and not per_channel else best
    elif implementation == "xla":
        best = 32 if per_channel else 128 if state >= 128 * 128 else best
    # `jax.export` may leave the number of tokens open.
    return min(size for size in CHUNK_SIZES if size >= (min(T, best) if isinstance(T, int) else best))


@dataclass(frozen=True)
class HeadConfig:
    """How a launch over chunks and heads is cut.

    Attributes:
      heads: value heads of a grid step. Heads run in lock-step, so more of them hide the latency of one another.
    """

    heads: int


def smem_bytes(*shape: int) -> int:
    """Return the bytes of an array of 32-bit numbers [n] or [rows, n] in scalar memory, as the compiler lays it out.

    Rows are padded to 1, 2, 4 or a multiple of 8, and numbers of a row to a multiple of 128.
    """
    *rows, n = shape
    padded = next((some for some in (1, 2, 4) if math.prod(rows) <= some), -(-math.prod(rows) // 8) * 8)
    return 4 * padded * -(-n // 128) * 128


def choose_heads(H: int, HV: int, bytes_per_head: int, most: int, per_channel: bool = False) -> HeadConfig:
    """Return how many of HV value heads, on H key heads, a grid step takes.

    Args:
      H, HV: key heads and value heads.
      bytes_per_head: VMEM that one value head takes.
      most: the largest number of heads for gates per head. With gates per channel a head is six times the work, so a
        step takes at most two heads.
      per_channel: whether gates are per channel of the key.
    """
    return HeadConfig(heads=pick_heads(HV, H, bytes_per_head, most=2 if per_channel else most))


def pick_heads(
    HV: int, H: int, bytes_per_head: int, most: int, budget: int = 2 * VMEM_LIMIT_BYTES // 5, K: int = LANES,
    V: int = LANES, repeated: bool = False,
) -> int:  # fmt: skip
    """Return how many value heads one grid step takes.

    It is the largest number that is at most `most`, fits the budget of bytes, and of which `divides_groups` is true;
    or the smallest one of which this is true. With `repeated`, every block of a group has a key head of its own.
    """
    sizes = [n for n in range(1, HV + 1) if divides_groups(n, H, HV, K, V)]
    if repeated:
        sizes = [n for n in sizes if divides_groups(n, max(H, HV // n), HV, K, V)]
    return max((n for n in sizes if n <= most and n * bytes_per_head <= budget), default=sizes[0])


def piece_chunks(chunks: int, sequences: int, most: int, over_pool: bool = False) -> int:
    """Return the chunks of a piece of a packed sequence with a state.

    A sequence pays for all chunks of its first and its last piece, so pieces are small where it may be short.

    Args:
      chunks: of all tokens.
      sequences: how many share these tokens; some may have none.
      most: the most chunks of a grid step.
      over_pool: whether the sequences are of a serving step: most of them are decodes, which have no pieces.
    """
    two = 4 if over_pool else max(4, 4 * sequences)
    return min(most, 4 if chunks >= max(32, 8 * sequences) else 2 if chunks >= two else 1)


def divides_groups(heads: int, H: int, HV: int, K: int = LANES, V: int = LANES) -> bool:
    """Return whether blocks of `heads` value heads hold whole groups that share a key head, or lie inside a group.

    A block of a flat tensor is whole registers, or all heads of it. Heads of K channels must fit, as keys and as gates
    of value heads, and heads of V channels.
    """
    group, keys = HV // H, max(heads * H // HV, 1)
    whole = heads >= 1 and HV % heads == 0 and (heads % group == 0 or group % heads == 0)
    registers = heads == HV or (heads * K % LANES == 0 and heads * V % LANES == 0)
    return whole and registers and (keys == H or keys * K % LANES == 0)


def largest_divisor(size: int, most: int) -> int:
    """Return the largest divisor of `size` that is at most `most`."""
    return max(n for n in range(1, max(1, min(size, most)) + 1) if size % n == 0)


@functools.cache
def _orders(package: str) -> dict:
    return json.loads(importlib.resources.files(package).joinpath("orders.json").read_text())


def order_key(heads: int, C: int, K: int) -> str:
    """Return the key in `orders.json` of a size of `find_order`."""
    return f"heads {heads}, C {C}, K {K}"


def find_order(package: str, kernel: str, size: tuple[int, int, int], otherwise: str) -> str:
    """Return the order of a kernel's iterators for `schedule.interleave`, as a search found it.

    The file `orders.json` of the package holds orders by kernel, size and TPU generation. An order that is good for one
    size may be bad for another, so sizes that were not searched take `otherwise`.

    Args:
      package: the name of the package, as it is imported.
      kernel: which of its kernels.
      size: value heads of a grid step, rows of a chunk, and channels of a key.
      otherwise: the order where none was searched.
    """
    if (package, kernel) in _injected.get():
        return _injected.get()[package, kernel]
    found = _orders(package).get(kernel, {}).get(order_key(*size), {})
    return found.get(chips.current(), found.get(_SEARCHED, otherwise))


@contextlib.contextmanager
def injected_orders(package: str, **orders: str) -> Iterator[None]:
    """Trace kernels with these orders, by the names of the kernels; for the search of orders.

    JAX remembers traces, so a search clears its caches, or traces a new function.
    """
    token = _injected.set({**_injected.get()} | {(package, kernel): order for kernel, order in orders.items()})
    try:
        yield
    finally:
        _injected.reset(token)
