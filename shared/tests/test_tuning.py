"""Chunk sizes, heads of a grid step, fast memory, and searched orders of products."""

import functools
import json
import types

import pytest

from chunkwise.shared import chips, tuning
from chunkwise.shared.tuning import (
    HeadConfig,
    best_chunk_size,
    choose_heads,
    find_order,
    injected_orders,
    largest_divisor,
    pick_heads,
    piece_chunks,
)


def test_the_best_chunk_size():
    """Few rows for few tokens, and 64 for many; in plain JAX by the work of a chunk."""
    assert [best_chunk_size("fused", T) for T in (1, 16, 17, 33, 64, 5000)] == [16, 16, 32, 64, 64, 64]
    assert [best_chunk_size("fused", T, state=64) for T in (64, 5000)] == [64, 128]
    assert best_chunk_size("fused", 5000, state=64, per_channel=True) == best_chunk_size() == 64
    best = functools.partial(best_chunk_size, "xla", 5000)
    states = [best(state=K * V) for K, V in ((128, 64), (128, 128), (256, 64))]
    assert (best(), best(per_channel=True), best(per_channel=True, state=128**2), *states) == (64, 32, 32, 64, 128, 128)


def test_choose_heads():
    assert choose_heads(4, 8, 1, most=8) == HeadConfig(heads=8)
    assert choose_heads(4, 8, 1, most=8, per_channel=True) == HeadConfig(heads=2)
    # Whole groups of value heads that share a key head, or a part of one group.
    assert choose_heads(2, 12, 1, most=8) == HeadConfig(heads=6)


def test_pick_heads():
    assert pick_heads(32, 16, 1, most=8) == 8
    assert pick_heads(6, 2, 1, most=8) == 6
    # Four heads would hold a group of three and a part of the next.
    assert pick_heads(12, 4, 1, most=5) == 3
    assert pick_heads(32, 16, 10, most=8, budget=25) == 2
    assert pick_heads(32, 16, 100, most=8, budget=25) == 1
    # A key head of 64 channels is whole registers only as the only one.
    assert [pick_heads(64, 1, 1, most=32, K=64, repeated=repeated) for repeated in (False, True)] == [32, 64]
    assert [largest_divisor(12, most) for most in (1, 5, 7, 100)] == [1, 4, 6, 12]


def test_piece_chunks():
    """More chunks for longer sequences; of a serving step, most sequences are decodes."""
    assert [piece_chunks(n, 2, 8) for n in (7, 8, 31, 32)] == [1, 2, 2, 4]
    assert [piece_chunks(n, 34, 8, over_pool=True) for n in (3, 4, 271, 272)] == [1, 2, 2, 4]


@pytest.mark.parametrize("chip", [*chips.ANNOUNCED, "tpu9"])
def test_a_chip_without_a_line(chip, monkeypatch):
    """It takes the orders of a known chip, and no kernel takes more fast memory than it has."""
    package, size = "chunkwise.kda", (16, 64, 128)
    monkeypatch.setattr(chips, "current", lambda: "v6e")
    known = find_order(package, "fwd", size, "none")
    assert known != "none"
    monkeypatch.setattr(chips, "current", lambda: chip)
    assert find_order(package, "fwd", size, "none") == known
    assert chips.ANNOUNCED.get(chip, tuning.VMEM_LIMIT_BYTES) >= tuning.VMEM_LIMIT_BYTES
    assert not chips.ANNOUNCED.keys() & chips.CHIPS.keys()


@pytest.mark.parametrize(("version", "name"), [("8i", "tpu8i"), ("8t", "tpu8t"), ("7x", "tpu7x"), ("v6e", "v6e")])
def test_names_of_chips(version, name, monkeypatch):
    monkeypatch.setattr(chips.pltpu, "get_tpu_info", lambda: types.SimpleNamespace(chip_version=version))
    assert chips.current() == name


def test_searched_orders(tmp_path, monkeypatch):
    """The order of a package for its kernel, size and TPU; the plain one for another size; one that is tried."""
    size = 8, 64, 128
    (tmp_path / "ordered").mkdir()
    (tmp_path / "ordered" / "__init__.py").touch()
    orders = {"fwd": {"heads 8, C 64, K 128": {"v6e": "ppm"}, "heads 16, C 64, K 128": {"v5e": "mmp"}}}
    (tmp_path / "ordered" / "orders.json").write_text(json.dumps(orders))
    monkeypatch.syspath_prepend(tmp_path)
    assert find_order("ordered", "fwd", size, "pm") == "ppm"
    assert find_order("ordered", "bwd", size, "pm") == "pm"
    for other in ((16, 64, 128), (8, 32, 128), (8, 64, 256)):
        assert find_order("ordered", "fwd", other, "pm") == "pm"
    monkeypatch.setattr(chips, "current", lambda: "v5e")
    assert find_order("ordered", "fwd", size, "pm") == "ppm"
    assert find_order("ordered", "fwd", (16, 64, 128), "pm") == "mmp"
    with injected_orders("ordered", fwd="mp"):
        assert find_order("ordered", "fwd", size, "pm") == find_order("ordered", "fwd", (4, 64, 128), "pm") == "mp"
    assert find_order("ordered", "fwd", size, "pm") == "ppm"
