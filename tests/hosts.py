"""What tests of the integrations share: stand-ins for hosts that are missing, and arrays."""

import sys
import types

import jax.numpy as jnp
import numpy as np

from chunkwise.integrations import levanter, maxtext, sglang_jax


def unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def doubles(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


# What `install` replaces: names of a host's modules.
GDN_BACKEND, KDA_BACKEND, LIGHTNING_BACKEND = (
    f"sgl_jax.srt.layers.attention.linear.{name}_backend" for name in ("gdn", "kda", "lightning")
)
REPLACED = {
    maxtext: {
        "maxtext.models.qwen3": ("jax_chunk_gated_delta_rule", "jax_ar_gated_delta_rule"),
        "maxtext.models.qwen3.Qwen3NextGatedDeltaNet": ("__call__",),
    },
    levanter: {"levanter.layers.gated_deltanet": ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")},
    sglang_jax: {
        GDN_BACKEND: (
            "decode_gated_delta_rule_ref", "chunked_gated_delta_rule_jax", "fused_chunk_parallel_prefill",
            "validate_fused_chunk_parallel_capability",
        ),
        KDA_BACKEND: ("KDAAttnBackend",),
        LIGHTNING_BACKEND: ("LightningAttnBackend",),
        "sgl_jax.srt.entrypoints.engine": ("run_scheduler_process",),
    },
}  # fmt: skip


def stand_in(monkeypatch, name: str, **members):
    """Put a module that has only these members, and the packages that it lies in, where a host is missing."""
    for end in range(1, name.count(".") + 1):
        package = ".".join(name.split(".")[:end])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, types.ModuleType("package"))
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)


def with_functions(monkeypatch, path: str, names, reader: str = "layer") -> dict:
    """Put a module with functions of these names, which another one of its functions reads, and return them."""
    stand_in(monkeypatch, path, __name__=path)
    module = sys.modules[path]
    for name in names:
        exec(f"def {name}(*arguments, **options): ...", vars(module))
    exec(f"def {reader}(x): return lambda: ({', '.join(names)},)", vars(module))
    return {name: getattr(module, name) for name in names}
