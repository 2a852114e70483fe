"""Linear attention for tpu-inference, which is vLLM on TPUs: a function with its kernel's signature, and a backend."""

import importlib.util
from collections.abc import Callable
from typing import Any

from chunkwise.integrations.replacing import Place, PutBack, replace
from chunkwise.integrations.tpu_inference.fused_conv1d import (
    Updated,
    fused_conv1d_gdn,
    fused_conv1d_kda,
    fused_conv1d_mamba2,
)

__all__ = [
    "ChunkwiseLinearAttention",
    "fused_conv1d_gdn",
    "fused_conv1d_kda",
    "fused_conv1d_mamba2",
    "install",
    "register",
]
NAME = "chunkwise"


class ChunkwiseLinearAttention:
    """A linear attention backend of tpu-inference: `register` makes it one of its `LinearAttentionBackend`s."""

    def conv1d_gdn_kernel(self) -> Callable[..., Updated]:
        """Return the function that tpu-inference maps over its mesh."""
        return fused_conv1d_gdn


def install() -> PutBack:
    """Make chunkwise tpu-inference's default linear attention in this process; return a function that undoes this.

    The backend that `register` adds needs no such call, but only models of vLLM ask for it by its name. MaxText's
    models under vLLM always take the default one.
    """
    from tpu_inference.layers.common import attention_backend as host
    from tpu_inference.layers.common import gdn_attention  # noqa: F401 (it asks the backend)

    kernel = ChunkwiseLinearAttention.conv1d_gdn_kernel
    return replace(Place(host.GDNLinearAttentionBackend, "conv1d_gdn_kernel", kernel))


def register() -> None:
    """Make `--attention-backend chunkwise` of vLLM run the gated delta rule by chunkwise, and all else as it is.

    vLLM calls this in every process, by the entry point of the group `vllm.general_plugins`. Without tpu-inference, as
    on a GPU, it does nothing.
    """
    if importlib.util.find_spec("tpu_inference") is None:
        return
    from tpu_inference.layers.common import attention_backend as host

    host.LinearAttentionBackend.register(ChunkwiseLinearAttention)
    host.register_attention_backend(
        NAME, attention=host.RPAAttentionBackend, vllm_backend=f"{__name__}.ChunkwiseAttentionBackend",
        linear_attention=ChunkwiseLinearAttention,
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    """Make the class that vLLM looks up by its name: a backend class of tpu-inference with this name."""
    if name != "ChunkwiseAttentionBackend":
        raise AttributeError(name)
    from tpu_inference.layers.vllm.backends import flash_attn as host

    impl = type("ChunkwiseAttentionImpl", (host.PallasAttentionBackendImpl,), {"attention_backend": NAME})
    members = {"get_name": staticmethod(NAME.upper), "get_impl_cls": staticmethod(lambda: impl)}
    globals()[name] = backend = type(name, (host.PallasAttentionBackend,), members | {"__module__": __name__})
    return backend
