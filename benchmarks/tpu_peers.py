"""Other people's TPU kernels, where they are installed, for the compiler's estimate, which needs no TPU."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct


@dataclass(frozen=True)
class Peer:
    """A library with a kernel for some of the cases.

    Attributes:
      module: the module to import.
      build: from a case, its tokens, and whether to include the backward, to a function and its shapes.
      backward: whether it has gradients.
      operators: the operators that it has, without the prefix `chunk_`.
    """

    module: str
    build: Callable[..., tuple]
    backward: bool
    operators: tuple[str, ...] = ("gated_delta_rule", "kda")

    @property
    def installed(self) -> bool:
        """Whether it can be imported."""
        return importlib.util.find_spec(self.module) is not None

    def has(self, case, backward: bool) -> bool:
        """Return whether it takes the case: one sequence, and the sizes that it has."""
        some = case.operator in self.operators and not case.sequences and case.K == case.V == 128
        return some and (self.backward or not backward)


@contextmanager
def on_a_tpu() -> Iterator[None]:
    """Make JAX report a TPU, because some libraries ask for it, and interpret their kernels elsewhere."""
    with mock.patch.object(jax, "default_backend", return_value="tpu"):
        yield


def _tokamax_kda(heads: int, T: int, K: int) -> tuple[Callable, list]:
    """Return tokamax's KDA and its shapes, in tokamax's layout."""
    from tokamax._src.ops.kda import pallas_mosaic_tpu as kda

    op = kda.PallasMosaicTpuKimiDeltaAttention().replace(bypass_device_check=True)
    spec = lambda *shape, dtype=jnp.float32: ShapeDtypeStruct((heads, 1, T, *shape), dtype)
    specs = [*[spec(K, dtype=jnp.bfloat16)] * 3, spec(K), spec()]
    return lambda *x: op(*x, scale=K**-0.5)[0], specs


def _tokamax(case, T: int, backward: bool) -> tuple[Callable, list]:
    """Return tokamax's kernel for the same layer; its gated delta rule is fused with the convolution before it."""
    if case.operator == "kda":
        return _tokamax_kda(case.HV, T, case.K)
    from tokamax._src.ops.causal_conv1d_gated_delta_rule import arg_specs, pallas_mosaic_tpu

    op = pallas_mosaic_tpu.PallasMosaicTpuCausalConv1dGatedDeltaRule()
    spec = arg_specs.make_gdn_spec(
        project="", name="", lengths=[T], n_kq=case.H, n_v=case.HV, d_k=case.K, d_v=case.V, state_dtype=jnp.float32
    )
    sizes = {name: value for name, value in spec.args.items() if isinstance(value, int)}
    names = [name for name in spec.args if name not in sizes]
    specs = [ShapeDtypeStruct(spec.args[name].shape, spec.args[name].dtype) for name in names]
    return lambda *x: op.replace(bypass_device_check=True)(**dict(zip(names, x, strict=True)), **sizes), specs


def _deltanet(case, T: int, backward: bool) -> tuple[Callable, list]:
    """Return deltanet-tpu's kernels for the same layer, with bfloat16 tensors, as for ours."""
    import deltanet_tpu

    fn = getattr(deltanet_tpu, "chunk_gdn" if case.operator == "gated_delta_rule" else f"chunk_{case.operator}")
    spec = lambda *tail, dtype=jnp.bfloat16: ShapeDtypeStruct((1, T, *tail), dtype)
    q, v = spec(case.H, 128), spec(case.HV, 128)
    specs = {
        "gated_delta_rule": [q, q, v, spec(case.HV, dtype=jnp.float32), spec(case.HV)],
        "kda": [q, q, v, spec(case.H, 128, dtype=jnp.float32), spec(case.HV)],
        # The last two are erase and write gates.
        "gdn2": [q, q, v, spec(case.H, 128, dtype=jnp.float32), q, v],
    }[case.operator]
    # The cotangent comes first.
    return (lambda do, *x: jax.vjp(fn, *x)[1](do), [v, *specs]) if backward else (fn, specs)


PEERS = {
    "tokamax": Peer("tokamax", _tokamax, backward=False),
    "deltanet-tpu": Peer("deltanet_tpu", _deltanet, backward=True, operators=("gated_delta_rule", "kda", "gdn2")),
}


def installed() -> list[str]:
    """Return the names of the peers that are installed."""
    return [name for name, peer in PEERS.items() if peer.installed]
