"""Linear attention for SGLang-JAX: the functions that its backends call for prefills and decodes, over its pools."""

from chunkwise.integrations.replacing import Place, PutBack, replace
from chunkwise.integrations.sglang_jax.operators import (
    decode_gated_delta_rule,
    kda,
    lightning,
    prefill_gated_delta_rule,
)

__all__ = ["decode_gated_delta_rule", "install", "kda", "lightning", "prefill_gated_delta_rule"]


def install() -> PutBack:
    """Make SGLang-JAX's engine compute linear attention by chunkwise; return a function that undoes this.

    Engines that are made afterwards have the gated delta rule, Kimi delta attention and lightning attention of
    chunkwise, whether schedulers are threads or processes, and whatever `--gdn-prefill-impl` says. Convolutions stay
    SGLang-JAX's. SGLang-JAX has no setting for this, so names in `gdn_backend`, `kda_backend`, `lightning_backend` and
    `engine` are replaced.
    """
    from sgl_jax.srt.entrypoints import engine
    from sgl_jax.srt.layers.attention.linear import gdn_backend, kda_backend, lightning_backend

    from chunkwise.integrations.sglang_jax import backends

    return replace(
        Place(gdn_backend, "decode_gated_delta_rule_ref", decode_gated_delta_rule),
        Place(gdn_backend, "chunked_gated_delta_rule_jax", prefill_gated_delta_rule),
        # The default prefill is replaced by the other one, which has the same arguments and calls the function above.
        Place(gdn_backend, "fused_chunk_parallel_prefill", gdn_backend.GDNAttnBackend._forward_extend_chunked_jax),
        Place(gdn_backend, "validate_fused_chunk_parallel_capability", backends.any_sizes),
        Place(kda_backend, "KDAAttnBackend", backends.ChunkwiseKDA, imported=True),
        Place(lightning_backend, "LightningAttnBackend", backends.ChunkwiseLightning, imported=True),
        Place(engine, "run_scheduler_process", run_scheduler_process),
    )


def run_scheduler_process(*arguments) -> None:
    """Run a scheduler of SGLang-JAX in a new process, in which no name is replaced yet."""
    from sgl_jax.srt.managers import scheduler

    install()
    scheduler.run_scheduler_process(*arguments)
