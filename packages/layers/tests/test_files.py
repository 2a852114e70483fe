"""Files of a checkpoint: what is damaged is refused with the name of the file, and the index is obeyed."""

import json
import os
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.layers import open_checkpoint

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
# "a" is 1 to 4, "b" is 5 to 8.
DATA = np.arange(1, 9, dtype=np.float32).tobytes()
GOOD = {name: dict(dtype="F32", shape=[4], data_offsets=at) for name, at in dict(a=[0, 16], b=[16, 32]).items()}


def write(file, header, data=DATA):
    """Write a file of the format safetensors, as its description has it; a header may be bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def changed(name, **more):
    entry = {key: x for key, x in (GOOD[name] | more).items() if x != "-"}
    return GOOD | {name: entry}


def test_arrays(tmp_path):
    write(tmp_path / ONE, GOOD | {"__metadata__": {"format": "pt"}})
    named = open_checkpoint(tmp_path)
    assert {name: np.asarray(named[name]).tolist() for name in named} == {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}


# Bytes, and the numbers that they stand for.
TYPES = {
    "BF16": ("bfloat16", [0, 63, 128, 191], [0.5, -1.0]),
    "F16": ("float16", [0, 60], [1.0]),
    "F64": ("float64", [0, 0, 0, 0, 0, 0, 240, 63], [1.0]),
    "U16": ("uint16", [1, 2], [513]),
    "BOOL": ("bool", [1, 0], [True, False]),
}
# The same with a scale of 2.
SCALED = {
    "I8": ([1, 255], [2.0, -2.0]),
    "F8_E4M3": ([56, 184], [2.0, -2.0]),
    "F8_E5M2": ([60, 188], [2.0, -2.0]),
    # Two numbers in a byte, the lower half first.
    "F4": ([0x42, 0xA7], [2.0, 4.0, 12.0, -2.0]),
}


def test_types_of_arrays(tmp_path):
    """An array of the type of interest lies between others, so its place counts."""
    header, data = {}, b""
    for kind, (_, read, numbers) in TYPES.items():
        header[kind] = dict(dtype=kind, shape=[len(numbers)], data_offsets=[len(data), len(data) + len(read)])
        data += bytes(read)
    for kind, (read, numbers) in SCALED.items():
        header[kind] = dict(dtype=kind, shape=[len(numbers)], data_offsets=[len(data), len(data) + len(read)])
        data += bytes(read)
        header[f"{kind}_scale"] = dict(dtype="F32", shape=[], data_offsets=[len(data), len(data) + 4])
        data += np.float32(2).tobytes()
    write(tmp_path / ONE, header, data)
    named = open_checkpoint(tmp_path)
    for kind, (name, _, numbers) in TYPES.items():
        assert named[kind].dtype == jnp.dtype(name)
        assert named[kind].tolist() == numbers, kind
    for kind, (_, numbers) in SCALED.items():
        assert named[kind].tolist() == numbers, kind


def test_types_that_no_array_has(tmp_path):
    write(tmp_path / ONE, {"a": dict(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3])}, bytes(3))
    with pytest.raises(ValueError, match=r"`directory` must have 'a' of one of .*; got 'F6_E2M3' in model.safetensors"):
        open_checkpoint(tmp_path)["a"]


HEADERS = {
    "not JSON": b"{", "a list": [1], "null": None, "an entry is null": {"w": None}, "no type": changed("a", dtype="-"),
    "no offsets": changed("a", data_offsets="-"), "one offset": changed("a", data_offsets=[0]),
    "offsets of text": changed("a", data_offsets=["0", "16"]), "a terabyte": changed("b", data_offsets=[16, 2**40]),
    "2^70 bytes": changed("b", data_offsets=[16, 2**70]), "a shape of text": changed("a", shape=["4"]),
    "another shape": changed("a", shape=[5]), "a negative dimension": changed("b", shape=[-1]),
    "a type that is a list": changed("a", dtype=["F32"]), "another type": changed("a", dtype="F31"),
    "nested": b"[" * 10**5, "shifted by an entry": changed("b", data_offsets=[12, 28]),
    "bytes of two arrays": changed("b", data_offsets=[0, 16]), "below 0": changed("b", data_offsets=[-16, 0]),
    "a hole": changed("a", shape=[3], data_offsets=[0, 12]),
    "a name twice": json.dumps(GOOD).encode()[:-1] + b', "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
}  # fmt: skip


@pytest.mark.parametrize("label", HEADERS)
def test_damaged_headers(tmp_path, label):
    write(tmp_path / ONE, HEADERS[label])
    with pytest.raises(ValueError, match=r"model.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>not found</html>", struct.pack("<Q", 2**31) + b"{}", struct.pack("<Q", 2**63) + b"{}"],
    ids=["empty", "a page", "a header of 2 GiB", "a header of 2^63 bytes"],
)
def test_files_of_something_else(tmp_path, content):
    (tmp_path / ONE).write_bytes(content)
    with pytest.raises(ValueError, match=r"`directory` must have files of the format safetensors; got .*model"):
        open_checkpoint(tmp_path)


def test_cut_and_changed_files(tmp_path):
    """A file that ends too early or too late is refused; so is an array of a file that was replaced."""
    file = tmp_path / ONE
    for data in (DATA[:-1], DATA + b"more"):
        write(file, GOOD, data)
        with pytest.raises(ValueError, match=r"`directory` must have files of the format safetensors; got .*model"):
            open_checkpoint(tmp_path)
    bfloat16 = {"c": dict(dtype="BF16", shape=[8], data_offsets=[0, 16])}
    for header, name in ((changed("a", shape=[2, 2]), "a"), (bfloat16 | {"b": GOOD["b"]}, "c")):
        write(file, header)
        named = open_checkpoint(tmp_path)
        file.write_bytes(file.read_bytes()[:-30])
        with pytest.raises(ValueError, match=rf"`directory` must have '{name}' whole in model.safetensors"):
            named[name]


@pytest.mark.parametrize("name", [ONE, INDEX, "config.json"])
def test_pipes(tmp_path, name):
    """Nobody writes into this pipe, so a program that reads it waits without an end."""
    if name == "config.json":
        write(tmp_path / ONE, GOOD)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"what they name; .* lacks \['{name}'\]"):
        open_checkpoint(tmp_path)


def shard(directory, **files):
    """Write files with arrays of GOOD, and return what an index should say."""
    for file, names in files.items():
        header = {x: GOOD[x] | dict(data_offsets=[16 * i, 16 * i + 16]) for i, x in enumerate(names)}
        write(directory / f"{file}.safetensors", header, DATA[: 16 * len(names)])
    return {name: f"{file}.safetensors" for file, names in files.items() for name in names}


def index(directory, content):
    (directory / INDEX).write_text(content if isinstance(content, str) else json.dumps(dict(weight_map=content)))


def test_indices(tmp_path):
    places = shard(tmp_path, one="a", two="b")
    index(tmp_path, places)
    named = open_checkpoint(tmp_path)
    assert [named[name].tolist() for name in sorted(named)] == [[1, 2, 3, 4]] * 2
    # An array that the index does not name is no array of the checkpoint.
    shard(tmp_path, one="ab")
    index(tmp_path, {"a": "one.safetensors"})
    assert list(open_checkpoint(tmp_path)) == ["a"]


WRONG = {
    "an array that the file lacks": (dict(c="two.safetensors"), r"index.json names; two.safetensors lacks \['c'\]"),
    "an array of the other file": (dict(a="two.safetensors"), r"index.json names; two.safetensors lacks \['a'\]"),
    "no file": (dict(a="three.safetensors"), r"index.json, and what they name; .* lacks \['three.safetensors'\]"),
    "a folder": (dict(a="folder"), r"index.json, and what they name; .* lacks \['folder'\]"),
    "outside": (dict(a="../one.safetensors"), r"index.json with files inside of it; got '../one.safetensors' for 'a'"),
    "absolute": (dict(a="/one.safetensors"), r"index.json with files inside of it; got '/one.safetensors' for 'a'"),
    "a number": (dict(a=5), "index.json with files inside of it; got 5 for 'a'"),
    "an empty name": (dict(a=""), "index.json with files inside of it; got '' for 'a'"),
    "a zero in the name": (dict(a="one\0"), "index.json with files inside of it; got "),
    "a name twice": ('{"weight_map": {"a": "one", "a": "two"}}', r"every name once; got \['a'\]"),
    "a list": ("[1]", "index.json with a table; got list"),
    "a list of names": ('{"weight_map": ["a"]}', "index.json with a `weight_map` of names"),
    "nothing": ({}, "index.json with a `weight_map` of names"),
    "no map": ("{}", "index.json with a `weight_map` of names"),
    "cut": ('{"weight_map": {', "index.json of JSON"),
    "nested": ("[" * 10**5, "index.json of JSON"),
    "other bytes": ("\ud800", "index.json of JSON"),
}  # fmt: skip


@pytest.mark.parametrize("label", WRONG)
def test_wrong_indices(tmp_path, label):
    content, message = WRONG[label]
    places = shard(tmp_path, one="a", two="b")
    (tmp_path / "folder").mkdir()
    if label == "other bytes":
        (tmp_path / INDEX).write_bytes(b"\xff\xfe{")
    else:
        index(tmp_path, places | content if isinstance(content, dict) and content else content)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)


def test_an_array_in_two_files(tmp_path):
    shard(tmp_path, one="ab", two="b")
    index(tmp_path, dict(a="one.safetensors", b="two.safetensors"))
    with pytest.raises(ValueError, match=r"every array in one file; two.safetensors has again those of {'b': 'one.sa"):
        open_checkpoint(tmp_path)


def test_links(tmp_path):
    """The cache of a hub has links to files of another folder."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    places = shard(tmp_path / "blobs", one="a")
    (tmp_path / "snapshot" / "one.safetensors").symlink_to(tmp_path / "blobs" / "one.safetensors")
    index(tmp_path / "snapshot", places)
    assert open_checkpoint(tmp_path / "snapshot")["a"].tolist() == [1, 2, 3, 4]
    (tmp_path / "snapshot" / "one.safetensors").unlink()
    (tmp_path / "snapshot" / "one.safetensors").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"what they name; .* lacks \['one.safetensors'\]"):
        open_checkpoint(tmp_path / "snapshot")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[", "config.json of JSON"),
        ("[1]", "config.json with a table; got list"),
        ('{"quantization_config": 5}', "config.json with a table `quantization_config`; got 5"),
        ('{"quantization_config": {"weight_block_size": [128, "x"]}}', "with two whole numbers as `weight_block_size`"),
        ('{"quantization_config": {"weight_block_size": 128}}', "two whole numbers as `weight_block_size`; got 128"),
        ('{"text_config": {"quantization_config": {"weight_block_size": 1}}}', "`weight_block_size`; got 1"),
    ],
)
def test_wrong_configs(tmp_path, config, message):
    write(tmp_path / ONE, GOOD)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)
