"""Caches of requests as bytes, which cross between machines."""

import dataclasses
import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.layers import caches, config
from chunkwise.shared.call import checks

# The first bytes, with the version of the format; then the length of the header, the header, the arrays, the checksum.
_MAGIC, _VERSION = b"chunkwise cache", 1
_START = len(_MAGIC) + 1 + 4
_SUM = hashlib.sha256().digest_size


def _described(config: config.LayerConfig) -> dict[str, str]:
    """Return the class of a config and its sizes, as words."""
    return {"layer": type(config).__name__} | {name: repr(x) for name, x in dataclasses.asdict(config).items()}


def cache_to_bytes(cache: caches.Cache, config: config.LayerConfig) -> bytes:
    """Return the cache of n sequences as bytes: a header with the sizes and types, the arrays, and a checksum.

    The call is::

        data = cache_to_bytes(read_cache(pool, slots), config)

    Args:
      cache: from `read_cache` or from the layer; its arrays may be numpy's.
      config: sizes of the layer.

    Raises:
      ValueError: the cache is not that of a layer of these sizes.
    """
    leaves = [np.asarray(x) for x in jax.tree.leaves(_checked("cache", cache, config))]
    arrays = [dict(dtype=x.dtype.name, shape=x.shape) for x in leaves]
    header = json.dumps(dict(config=_described(config), arrays=arrays)).encode()
    start = _MAGIC + bytes([_VERSION]) + len(header).to_bytes(4, "little")
    whole = b"".join([start, header, *(np.ascontiguousarray(x).tobytes() for x in leaves)])
    return whole + hashlib.sha256(whole).digest()


def cache_from_bytes(data: bytes, config: config.LayerConfig) -> caches.Cache:
    """Return the cache of n sequences that `cache_to_bytes` has made bytes of, with arrays of numpy.

    The call is::

        pool = write_cache(pool, slots, cache_from_bytes(data, config))

    Args:
      data: the bytes.
      config: sizes of the layer, which must be those of the machine that made the bytes.

    Raises:
      ValueError: the bytes are not those of a cache, are of another version of the format, were changed on their way,
        or come from a layer of other sizes.
    """
    binary = isinstance(data, bytes | bytearray | memoryview)
    checks.check(binary, f"`data` must be bytes; got {type(data).__name__}.")
    data = bytes(data)
    begins = data.startswith(_MAGIC) and len(data) >= _START + _SUM
    checks.check(begins, f"`data` must be what `cache_to_bytes` returned; got {len(data)} other bytes.")
    version = data[len(_MAGIC)]
    checks.check(version == _VERSION, f"`data` must be of version {_VERSION} of the format; got version {version}.")
    whole, checksum = data[:-_SUM], data[-_SUM:]
    same = hashlib.sha256(whole).digest() == checksum
    checks.check(same, "`data` must be as `cache_to_bytes` made it; got bytes with another checksum.")
    end = _START + int.from_bytes(whole[_START - 4 : _START], "little")
    header = json.loads(whole[_START:end])
    wanted, have = _described(config), header["config"]
    other = {name: (x, have.get(name)) for name, x in wanted.items() if have.get(name) != x}
    checks.check(wanted == have, f"`config` must be that of the machine that made the bytes; they differ in {other}.")
    arrays: list[Any] = []
    for entry in header["arrays"]:
        kind, shape = jnp.dtype(entry["dtype"]), tuple(entry["shape"])
        size = math.prod(shape) * kind.itemsize
        arrays.append(np.frombuffer(whole[end : end + size], kind).reshape(shape))
        end += size
    structure = jax.tree.structure(jax.eval_shape(lambda: caches.empty_cache(config, 1)))
    fits = len(arrays) == structure.num_leaves
    checks.check(fits, f"`data` must have {structure.num_leaves} arrays; got {len(arrays)}.")
    return _checked("data", structure.unflatten(arrays), config)


def _checked(name: str, cache: object, config: config.LayerConfig) -> caches.Cache:
    """Return a cache, whose arrays must have the sizes of a config and as many sequences."""
    cache = caches.check_is_cache(name, cache)
    n = config.check_state(f"{name}.state", cache.state)
    caches.check_conv(f"{name}.conv", cache.conv, [(n, config.W - 1, channels) for channels in config.channels])
    return caches.Cache(tuple(cache.conv), cache.state)
