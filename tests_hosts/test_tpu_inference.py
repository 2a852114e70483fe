"""tpu-inference's own tests of its kernel, out of its wheel, with ours in its place: `nox -s host-tpu-inference`."""

import sys
import types
import unittest
from importlib import metadata
from typing import ClassVar

from chunkwise.integrations import tpu_inference
from host import module_of, path_of, put

_FILE = path_of("tpu-inference", "tests/kernels/gdn_attention_v3_test.py")
_THEIRS = module_of(_FILE, "gdn_attention_v3_test", {"tpu_inference.kernels.gdn.v3.wrapper": tpu_inference})

for _name, _value in vars(_THEIRS).items():
    if isinstance(_value, type) and issubclass(_value, unittest.TestCase):
        globals()[_name] = _value


class Backends:
    """The registry of vLLM, which brings torch and kernels for other accelerators: what tpu-inference uses of it."""

    __members__: ClassVar[dict] = {}

    @classmethod
    def register(cls, name: str, path: str) -> None:
        cls.__members__[name] = types.SimpleNamespace(name=name, get_path=lambda: path)


def test_the_backend_is_registered():
    """The entry point as vLLM calls it, more than once, with tpu-inference's own registration."""
    envs, lazy, registry = types.ModuleType("envs"), types.ModuleType("lazy_utils"), types.ModuleType("registry")
    lazy.is_in_ray_actor, registry.AttentionBackendEnum = lambda: False, Backends
    path = "tpu_inference.layers.common.attention_backend"
    replaced = {
        "vllm.envs": envs, "vllm.ray.lazy_utils": lazy, "vllm.v1.attention.backends.registry": registry,
        "tpu_inference.envs": envs,
    }  # fmt: skip
    host = module_of(path_of("tpu-inference", path.replace(".", "/") + ".py"), path, replaced)
    put({path: host})
    sys.modules["tpu_inference"].__spec__ = types.SimpleNamespace(name="tpu_inference")
    (plugin,) = (x for x in metadata.entry_points(group="vllm.general_plugins") if x.name == "chunkwise")
    for _ in range(2):
        plugin.load()()
    assert host.is_registered_attention_backend(Backends.__members__["CHUNKWISE"])
    backend = host.create_linear_attention_backend("chunkwise")
    assert isinstance(backend, host.LinearAttentionBackend)
    assert backend.conv1d_gdn_kernel() is tpu_inference.fused_conv1d_gdn
    assert isinstance(host.create_attention_backend("chunkwise"), host.RPAAttentionBackend)
    assert isinstance(host.create_linear_attention_backend("rpa"), host.GDNLinearAttentionBackend)
